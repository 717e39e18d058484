"""What a call may leave changed, or hold, in the process it runs in."""

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
"""What each part of a process is, by a name a message can say; equal values are equal states."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Something that belongs to the process."""

    read: Callable[[], Any]  # what it is now
    write: Callable[[Any], object] | None = None  # makes it what it was; None where nothing can


def _flag(owner: Any, name: str) -> _Part:
    """One of torch's flags, an attribute of the module they are in."""
    return _Part(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _generator(read: Callable[[], Any], write: Callable[[Any], object]) -> _Part:
    """One of torch's generators of random numbers, its state as bytes."""

    def restored(value: bytes) -> object:
        return write(torch.frombuffer(bytearray(value), dtype=torch.uint8))

    return _Part(lambda: bytes(read().numpy().tobytes()), restored)


def _numpy_state() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()  # noqa: NPY002  # the one that a kernel may draw from
    return (name, np.asarray(keys).tobytes(), *rest)


def _numpy_restored(value: tuple[Any, ...]) -> None:
    name, keys, *rest = value
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))  # noqa: NPY002  # as above


def _environment_restored(value: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(value)


def _signals() -> dict[int, Any]:
    return {int(number): signal.getsignal(number) for number in signal.valid_signals()}


def _signals_restored(value: dict[int, Any]) -> None:
    for number, handler in value.items():
        # None is a handler that was not set from Python, and cannot be.
        if handler is not None and signal.getsignal(number) != handler:
            with contextlib.suppress(ValueError, OSError):  # in another thread than the first
                signal.signal(number, handler)


def _denormals() -> bool:
    """Return whether the smallest numbers are numbers; if not, every float near 0 is 0."""
    return bool(torch.tensor(5e-324, dtype=torch.float64, device="cpu") * 1.0 != 0.0)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


_ONE, _TINY = 1.0, 1e-30  # no constants of one expression, which is worked out once for ever


def _deterministic_restored(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


_BACKENDS = {
    f"torch.backends.{of}.{name}": _flag(owner, name)
    for of, owner, names in (
        (
            "cuda.matmul",
            torch.backends.cuda.matmul,
            (
                "allow_tf32",
                "allow_fp16_reduced_precision_reduction",
                "allow_bf16_reduced_precision_reduction",
            ),
        ),
        (
            "cudnn",
            torch.backends.cudnn,
            ("enabled", "benchmark", "deterministic", "allow_tf32"),
        ),
    )
    for name in names
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
    "numpy's random generator": _Part(_numpy_state, _numpy_restored),
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
        _deterministic_restored,
    ),
    "grad mode": _Part(torch.is_grad_enabled, torch.set_grad_enabled),
    # This and autocast can only be left by who entered them: they are told, not restored.
    "inference mode": _Part(torch.is_inference_mode_enabled),
    "autocast": _Part(
        lambda: (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"))
    ),
    "the number of torch's threads": _Part(torch.get_num_threads, torch.set_num_threads),
    "whether denormals are flushed to 0": _Part(
        _denormals, lambda exist: torch.set_flush_denormal(not exist)
    ),
    "the working directory": _Part(os.getcwd, os.chdir),
    "environment variables": _Part(lambda: dict(os.environ), _environment_restored),
    "signal handlers": _Part(_signals, _signals_restored),
    "sys.path": _Part(
        lambda: list(sys.path), lambda value: sys.path.__setitem__(slice(None), value)
    ),
    "sys.stdout and sys.stderr": _Part(lambda: (id(sys.stdout), id(sys.stderr))),
    "the recursion limit": _Part(sys.getrecursionlimit, sys.setrecursionlimit),
    "how often threads take turns": _Part(sys.getswitchinterval, sys.setswitchinterval),
    "garbage collection": _Part(gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    "the mask of new files": _Part(_umask, os.umask),
    "its priority": _Part(lambda: os.nice(0)),  # nobody may raise it again
    "a timer": _Part(lambda: signal.getitimer(signal.ITIMER_REAL) != (0.0, 0.0)),
    "how floating-point numbers are rounded": _Part(lambda: (_ONE + _TINY, _ONE - _TINY)),
}


def _parts(device: torch.device) -> dict[str, _Part]:
    if device.type != "cuda":
        return _ANYWHERE
    return _ANYWHERE | {
        "the CUDA random generator": _generator(torch.cuda.get_rng_state, torch.cuda.set_rng_state),
        "the current CUDA device": _Part(torch.cuda.current_device, torch.cuda.set_device),
        "the current CUDA stream": _Part(
            lambda: torch.cuda.current_stream().cuda_stream,
        ),
    }


def process_state(device: torch.device) -> State:
    """Return what this process is now, as far as a kernel on ``device`` may change it."""
    state = {}
    for name, part in _parts(device).items():
        try:
            state[name] = part.read()
        except (RuntimeError, OSError) as error:  # torch's two ways to say TF32 exclude each other
            state[name] = str(error)
    return state


def changed_parts(before: State, after: State) -> list[str]:
    """Names of what is other than it was."""
    return [name for name, value in before.items() if after[name] != value]


def restore_process(before: State, device: torch.device, *, generators: bool = True) -> list[str]:
    """Make all that has changed what it was, as far as that is possible; return its names.

    Args:
        generators: Whether also generators of random numbers.
    """
    changed = changed_parts(before, process_state(device))
    for name in changed:
        write = _parts(device)[name].write
        if write is not None and (generators or "random generator" not in name):
            write(before[name])
    return changed


def _c_allocator() -> tuple[Callable[[int], int | None], Callable[[int | None], None]] | None:
    """C's malloc and free, where they can be called."""
    try:
        library = ctypes.CDLL(None)
        library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
        library.free.argtypes, library.free.restype = [ctypes.c_void_p], None
    except (OSError, AttributeError, TypeError):
        return None
    return library.malloc, library.free


_ALLOCATOR = _c_allocator()  # bound here, before any kernel's module is imported
# Bytes: two blocks of each size of which glibc keeps a list, and one for which it joins free ones.
_SMALL = (*range(8, 1024, 8), 1 << 16)


def stir_heap() -> None:
    """Ask for C memory of every small size and give it back: a broken heap ends the process.

    The C library looks at a block as it hands it out, takes it back or joins it to the next. What
    a call breaks would else be noticed in a later one, or where nobody waits any more.
    """
    if _ALLOCATOR is not None:
        allocate, free = _ALLOCATOR
        for block in [allocate(size) for size in _SMALL]:
            free(block)


WINDOWS = 3  # windows of calls in each of which what leaks is more than before

_WARM = 2  # calls before the first window: caches fill, and what is made once is made


def resource_counts(device: torch.device) -> dict[str, int]:
    """Count what is held of each now, garbage collected; leave out what cannot be counted.

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


def resource_leaks(call: Call, calls: int, device: torch.device) -> tuple[str, str]:
    """Return what ``call`` holds more of in every window, and what could not be counted.

    An exact rule, and no threshold: in each of ``WINDOWS`` windows of ``calls`` calls, one after
    the other, there is more of it than in the window before. A cache that fills stops.

    Args:
        call: Is called, and what it gives dropped.
        calls: In one window.
    """
    _times(call, _WARM)
    with _frozen():
        counts = [resource_counts(device)]
        for _ in range(WINDOWS):
            _times(call, calls)
            counts.append(resource_counts(device))
    growing = [
        f"{name} ({', '.join(str(each[name]) for each in counts)})"
        for name in counts[0]
        if all(after[name] > before[name] for before, after in itertools.pairwise(counts))
    ]
    missing = {"file descriptors", "threads", "child processes"} - set(counts[0])
    return ", ".join(growing), ", ".join(sorted(missing))


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """Neither collect nor count what there is so far: only what comes to it matters."""
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
        # Not isinstance, which asks a proxy for its class and so runs code of its own.
        if issubclass(type(each), torch.Tensor) and each.layout == torch.strided:
            try:
                storage = each.untyped_storage()
                memory[storage.data_ptr()] = storage.nbytes()
            except (RuntimeError, NotImplementedError):  # a fake one has no memory
                continue
    return sum(memory.values())
