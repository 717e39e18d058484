"""Work in several processes that may be killed at any time: what is done is on disk soon after.

Process i sees GPU i modulo their number alone, so that ``cuda`` is another one in each.
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

_AHEAD = 2  # tasks a process, one running and one waiting
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def write_json(path: str | Path, data: object) -> None:
    """Replace the file as a whole: whoever is killed meanwhile leaves the old one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(data, separators=(",", ":"), allow_nan=True) + "\n")
    os.replace(new, path)  # noqa: PTH105  # Path.replace says the same


def finished(
    work: Callable[[Any], Any], tasks: Sequence[Any], *, processes: int, seconds: float
) -> Iterator[Any]:
    """What ``work`` gives for each task, as it is done, in no order.

    Args:
        work: A function of a module; every process imports it anew.
        tasks: Its arguments, in the order in which they are begun.
        processes: How many; with one, this very process works.
        seconds: No task is begun after that long.
    """
    begun, waiting = time.monotonic(), iter(tasks)
    if processes <= 1:
        for task in waiting:
            if time.monotonic() - begun > seconds:
                return
            yield work(task)
        return
    # A process for each core, which starts no threads and no others: what it inherits says so.
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
    """GPUs that this process sees, by the names that CUDA takes."""
    import torch

    visible = [name for name in os.environ.get(_VISIBLE, "").split(",") if name]
    return visible or [str(number) for number in range(torch.cuda.device_count())]


def _choose_gpu(begun: Synchronized[int], gpus: list[str]) -> None:
    """In a process that has not used CUDA yet: it reads the variable when it is first used."""
    with begun.get_lock():
        number, begun.value = begun.value, begun.value + 1
    if len(gpus) > 1:
        os.environ[_VISIBLE] = gpus[number % len(gpus)]
