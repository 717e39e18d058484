"""What a process holds: descriptors, threads, children, tensors."""

from __future__ import annotations

import contextlib
import gc
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from attncheck.subjects.contract import Call

__all__ = ["WINDOWS", "growing", "held"]

WINDOWS = 3
"""Windows of calls in each of which what leaks is more than before."""

_WARM = 2  # calls before the first window: caches fill, and what is made once is made


def held(device: torch.device) -> dict[str, int]:
    """How much of each is held now, garbage collected; what cannot be counted here is left out.

    Of tensors those that came after ``gc.freeze``.
    """
    gc.collect()
    counts = {
        "file descriptors": _entries("/proc/self/fd"),
        "threads": _entries("/proc/self/task"),
        "child processes": _children(),
        "bytes of tensors": _tensor_bytes(),
    }
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        counts["bytes of the GPU"] = torch.cuda.memory_allocated(device)
    return {name: count for name, count in counts.items() if count is not None}


def growing(call: Call, calls: int, device: torch.device) -> tuple[str, str]:
    """What ``call`` holds more of in every window, and what could not be counted.

    An exact rule, and no threshold: in each of ``WINDOWS`` windows of ``calls`` calls, one after
    the other, there is more of it than in the window before. A cache that fills stops.

    Args:
        call: Is called, and what it gives dropped.
        calls: In one window.
        device: Where it runs.
    """
    _times(call, _WARM)
    with _frozen():
        counts = [held(device)]
        for _ in range(WINDOWS):
            _times(call, calls)
            counts.append(held(device))
    said = [
        f"{name} ({', '.join(str(each[name]) for each in counts)})"
        for name in counts[0]
        if _grows([each[name] for each in counts])
    ]
    missing = {"file descriptors", "threads", "child processes"} - set(counts[0])
    return ", ".join(said), ", ".join(sorted(missing))


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """What there is so far is not collected or counted: all that is asked is what comes to it."""
    before = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not before:  # somebody else's would thaw too
            gc.unfreeze()


def _times(call: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        call()


def _grows(counts: Sequence[int]) -> bool:
    return all(after > before for before, after in itertools.pairwise(counts))


def _entries(folder: str) -> int | None:
    try:
        return sum(1 for _ in Path(folder).iterdir())
    except OSError:  # no Linux
        return None


def _children() -> int | None:
    """Processes that this one has started and not waited for."""
    try:
        threads = list(Path("/proc/self/task").iterdir())
        return sum(len((thread / "children").read_text().split()) for thread in threads)
    except OSError:  # no Linux, or a kernel built without it
        return None


def _tensor_bytes() -> int:
    """Bytes of all tensors that Python knows of, each memory once."""
    memory = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and each.layout == torch.strided:
            try:
                storage = each.untyped_storage()
                memory[storage.data_ptr()] = storage.nbytes()
            except (RuntimeError, NotImplementedError):  # a fake one has no memory
                continue
    return sum(memory.values())
