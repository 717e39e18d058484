"""State of the process that a call may change, and resources that it may leak."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attncheck.subjects.capabilities.subject import Call

State = Mapping[str, Any]
"""Value of each part of a process's state, by a name for messages; equal values, equal states."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the process's state."""

    read: Callable[[], Any]  # returns its value
    write: Callable[[Any], object] | None = None  # restores a value; None if nothing can


def _flag(owner: Any, name: str) -> _Part:
    return _Part(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _generator(read: Callable[[], Any], write: Callable[[Any], object]) -> _Part:
    """Return the part for a torch random generator; its value is the state as bytes."""

    def restore(value: bytes) -> object:
        return write(torch.frombuffer(bytearray(value), dtype=torch.uint8))

    return _Part(lambda: bytes(read().numpy().tobytes()), restore)


def _numpy_state() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()  # noqa: NPY002  # the one that a kernel may draw from
    return (name, np.asarray(keys).tobytes(), *rest)


def _restore_numpy(value: tuple[Any, ...]) -> None:
    name, keys, *rest = value
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))  # noqa: NPY002  # as above


def _restore_environment(value: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(value)


def _signals() -> dict[int, Any]:
    return {int(number): signal.getsignal(number) for number in signal.valid_signals()}


def _restore_signals(value: dict[int, Any]) -> None:
    for number, handler in value.items():
        # None stands for a handler that was not set from Python, and cannot be set from it.
        if handler is not None and signal.getsignal(number) != handler:
            with contextlib.suppress(ValueError, OSError):  # Outside the main thread.
                signal.signal(number, handler)


def _denormals() -> bool:
    """Return whether denormal numbers exist; if not, they are flushed to 0."""
    return bool(torch.tensor(5e-324, dtype=torch.float64, device="cpu") * 1.0 != 0.0)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


_ONE, _TINY = 1.0, 1e-30  # Names, because Python folds an expression of literals only once.


_MATMUL, _CUDNN = torch.backends.cuda.matmul, torch.backends.cudnn
_BACKENDS = {
    f"torch.backends.{of}.{name}": _flag(owner, name)
    for of, owner, name in (
        ("cuda.matmul", _MATMUL, "allow_tf32"),
        ("cuda.matmul", _MATMUL, "allow_fp16_reduced_precision_reduction"),
        ("cuda.matmul", _MATMUL, "allow_bf16_reduced_precision_reduction"),
        ("cudnn", _CUDNN, "enabled"),
        ("cudnn", _CUDNN, "benchmark"),
        ("cudnn", _CUDNN, "deterministic"),
        ("cudnn", _CUDNN, "allow_tf32"),
    )
}
_SDP = {
    f"torch.backends.cuda.{name}_sdp": _Part(
        getattr(torch.backends.cuda, f"{name}_sdp_enabled"),
        getattr(torch.backends.cuda, f"enable_{name}_sdp"),
    )
    for name in ("flash", "mem_efficient", "math", "cudnn")
}
_ANYWHERE = {
    "torch's random generator": _generator(torch.get_rng_state, torch.set_rng_state),
    "Python's random generator": _Part(random.getstate, random.setstate),
    "numpy's random generator": _Part(_numpy_state, _restore_numpy),
    "the default dtype": _Part(torch.get_default_dtype, torch.set_default_dtype),
    "the default device": _Part(lambda: str(torch.get_default_device()), torch.set_default_device),
    "the float32 matmul precision": _Part(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    **_BACKENDS,
    **_SDP,
    "the deterministic algorithms flag": _Part(
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "grad mode": _Part(torch.is_grad_enabled, torch.set_grad_enabled),
    # Inference mode and autocast can only be left by who entered them: reported, not restored.
    "inference mode": _Part(torch.is_inference_mode_enabled),
    "autocast": _Part(
        lambda: (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"))
    ),
    "the number of torch's threads": _Part(torch.get_num_threads, torch.set_num_threads),
    "whether denormals are flushed to 0": _Part(
        _denormals, lambda exist: torch.set_flush_denormal(not exist)
    ),
    "the working directory": _Part(os.getcwd, os.chdir),
    "environment variables": _Part(lambda: dict(os.environ), _restore_environment),
    "signal handlers": _Part(_signals, _restore_signals),
    "sys.path": _Part(
        lambda: list(sys.path), lambda value: sys.path.__setitem__(slice(None), value)
    ),
    "sys.stdout and sys.stderr": _Part(lambda: (id(sys.stdout), id(sys.stderr))),
    "the recursion limit": _Part(sys.getrecursionlimit, sys.setrecursionlimit),
    "how often threads take turns": _Part(sys.getswitchinterval, sys.setswitchinterval),
    "garbage collection": _Part(gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    "the mask of new files": _Part(_umask, os.umask),
    "its priority": _Part(lambda: os.nice(0)),  # It cannot be raised again.
    "a timer": _Part(lambda: signal.getitimer(signal.ITIMER_REAL) != (0.0, 0.0)),
    "how floating-point numbers are rounded": _Part(lambda: (_ONE + _TINY, _ONE - _TINY)),
}


def _parts(device: torch.device) -> dict[str, _Part]:
    if device.type != "cuda":
        return _ANYWHERE
    return _ANYWHERE | {
        "the CUDA random generator": _generator(torch.cuda.get_rng_state, torch.cuda.set_rng_state),
        "the current CUDA device": _Part(torch.cuda.current_device, torch.cuda.set_device),
        "the current CUDA stream": _Part(lambda: torch.cuda.current_stream().cuda_stream),
    }


def process_state(device: torch.device) -> State:
    """Return the present state of this process that a kernel on ``device`` may change."""
    state = {}
    for name, part in _parts(device).items():
        try:
            state[name] = part.read()
        except (RuntimeError, OSError) as error:  # torch's two TF32 settings exclude each other.
            state[name] = str(error)
    return state


def changed_parts(before: State, after: State) -> list[str]:
    """Return the names of the parts that differ."""
    return [name for name, value in before.items() if after[name] != value]


def restore_process(before: State, device: torch.device, *, generators: bool = True) -> list[str]:
    """Restore the parts that have changed, as far as possible; return their names.

    Args:
        generators: Whether to restore random generators too.
    """
    changed = changed_parts(before, process_state(device))
    for name in changed:
        write = _parts(device)[name].write
        if write is not None and (generators or "random generator" not in name):
            write(before[name])
    return changed


def _c_allocator() -> tuple[Callable[[int], int | None], Callable[[int | None], None]] | None:
    """Return C's malloc and free; None if they cannot be called."""
    try:
        library = ctypes.CDLL(None)
        library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
        library.free.argtypes, library.free.restype = [ctypes.c_void_p], None
    except (OSError, AttributeError, TypeError):
        return None
    return library.malloc, library.free


_ALLOCATOR = _c_allocator()  # Bound before any kernel's module is imported.
# Bytes: two sizes for each of glibc's lists of free small blocks, and one that makes it merge them.
_BLOCK_SIZES = (*range(8, 1024, 8), 1 << 16)


def stir_heap() -> None:
    """Allocate and free C memory of every small size, which ends a process with a broken heap.

    The C library checks blocks as it allocates, frees and merges them. Otherwise a corrupted heap
    would be noticed only in a later call, or after the last answer.
    """
    if _ALLOCATOR is not None:
        allocate, free = _ALLOCATOR
        for block in [allocate(size) for size in _BLOCK_SIZES]:
            free(block)


WINDOWS = 3  # Windows of calls; a resource leaks if it grows in each of them.

_WARM = 2  # Calls before the first window, which fill caches and create what is created once.


def resource_counts(device: torch.device) -> dict[str, int]:
    """Return the counts of held resources after garbage collection, without uncountable ones.

    Only tensors created after ``gc.freeze`` are counted.
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


def resource_leaks(call: Call, calls: int, device: torch.device) -> tuple[str, str]:
    """Return the resources that ``call`` leaks, and those that could not be counted.

    The rule has no threshold: a resource leaks if its count grows in each of ``WINDOWS``
    consecutive windows of ``calls`` calls. A cache stops growing once it is full.

    Args:
        call: The call; its results are dropped.
        calls: Number of calls in a window.
    """
    _repeat(call, _WARM)
    with _freeze_garbage():
        counts = [resource_counts(device)]
        for _ in range(WINDOWS):
            _repeat(call, calls)
            counts.append(resource_counts(device))
    growing = [
        f"{name} ({', '.join(str(each[name]) for each in counts)})"
        for name in counts[0]
        if all(after[name] > before[name] for before, after in itertools.pairwise(counts))
    ]
    missing = {"file descriptors", "threads", "child processes"} - set(counts[0])
    return ", ".join(growing), ", ".join(sorted(missing))


@contextlib.contextmanager
def _freeze_garbage() -> Iterator[None]:
    """Exclude all present objects from garbage collection and counts, within the context."""
    before = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not before:  # Otherwise objects that others froze would be unfrozen too.
            gc.unfreeze()


def _repeat(call: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        call()


def _entries(folder: str) -> int | None:
    try:
        return sum(1 for _ in Path(folder).iterdir())
    except OSError:  # Not on Linux.
        return None


def _children() -> int | None:
    """Return the number of child processes not yet waited for; None if it cannot be counted."""
    try:
        threads = list(Path("/proc/self/task").iterdir())
        return sum(len((thread / "children").read_text().split()) for thread in threads)
    except OSError:  # Not on Linux, or its kernel was built without this file.
        return None


def _tensor_bytes() -> int:
    """Return the bytes of all tensors tracked by Python, each storage counted once."""
    memory = {}
    for each in gc.get_objects():
        # isinstance would ask a proxy object for its class, which runs its code.
        if issubclass(type(each), torch.Tensor) and each.layout == torch.strided:
            try:
                storage = each.untyped_storage()
                memory[storage.data_ptr()] = storage.nbytes()
            except (RuntimeError, NotImplementedError):  # A fake tensor has no memory.
                continue
    return sum(memory.values())
