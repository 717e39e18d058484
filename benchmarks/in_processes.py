"""Run tasks in several processes, each on a GPU of its own, and write results safely.

Process i sees only GPU i modulo their number, so that ``cuda`` means another GPU in each.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.sharedctypes import Synchronized

__all__ = ["finished", "write_json"]

_AHEAD = 2  # tasks per process: one is running and one is waiting
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def write_json(path: str | Path, data: object) -> None:
    """Replace the file as a whole, so that a killed process leaves the old one intact."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(data, separators=(",", ":"), allow_nan=True) + "\n")
    os.replace(new, path)  # noqa: PTH105  # as Path.replace


def finished(
    work: Callable[[Any], Any], tasks: Sequence[Any], *, processes: int, seconds: float
) -> Iterator[Any]:
    """Yield the result of ``work`` for each task as soon as it is done, in any order.

    Args:
        work: A module's function; every process imports it anew.
        tasks: Its arguments, in the order in which they are begun.
        processes: Number of processes; with 1, the work is done in this process.
        seconds: No task is begun after this time.
    """
    begun, waiting = time.monotonic(), iter(tasks)
    if processes <= 1:
        for task in waiting:
            if time.monotonic() - begun > seconds:
                return
            yield work(task)
        return
    # Processes inherit these: each uses one core, without further threads or compile processes.
    os.environ.update(OMP_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1")
    context = multiprocessing.get_context("spawn")
    gpus = _gpus()
    begin = (context.Value("i", 0), gpus)
    with ProcessPoolExecutor(processes, context, initializer=_choose_gpu, initargs=begin) as pool:
        running: set[Future[Any]] = set()
        while True:
            while len(running) < _AHEAD * processes and time.monotonic() - begun <= seconds:
                task = next(waiting, None)
                if task is None:
                    break
                running.add(pool.submit(work, task))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                try:
                    yield future.result()
                except BrokenProcessPool:
                    print("\na process died, with what it was at", file=sys.stderr)
                    return


def _gpus() -> list[str]:
    """Return the GPUs that this process sees, by the names that CUDA takes."""
    import torch

    visible = [name for name in os.environ.get(_VISIBLE, "").split(",") if name]
    return visible or [str(number) for number in range(torch.cuda.device_count())]


def _choose_gpu(begun: Synchronized[int], gpus: list[str]) -> None:
    """Choose the GPU of a new process; CUDA reads the variable at its first use."""
    with begun.get_lock():
        number, begun.value = begun.value, begun.value + 1
    if len(gpus) > 1:
        os.environ[_VISIBLE] = gpus[number % len(gpus)]
