"""Compiles attncheck's own kernels ahead, in processes that call them on zeros to fill caches.

Triton and torch.compile cache compiled kernels in folders that all processes of a user share. While
one cell is judged, other processes compile for the next cells; they judge nothing, and may fail
without affecting measurements. A user's kernel is never called so: it would not be isolated.

The processes import compilers while this process imports torch (``start_compilers``) and a thread
has the driver make its context. Modules and libraries that every process needs are loaded here by a
thread, or while the GPU works.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import Counter
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING

from attncheck.core.errors import HostError
from attncheck.core.own_process import no_garbage_collection
from attncheck.subjects.capabilities.named_kernels import BUILTIN, subject_named
from attncheck.verify.environment import prepare
from attncheck.workers.process import Worker
from attncheck.workers.transport import Frame

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from attncheck.inputs.problem import Problem
    from attncheck.subjects.capabilities.subject import CompilerName, Subject

SERVER = "attncheck.verify.compile_ahead:Compiler"

_DRIVER = "libcuda.so.1"
_MOST_WORKERS = 8
_MEMORY = 4 << 30  # Bytes of GPU memory that a process may need.
_SECONDS = 5.0  # Time limit for a process to take a request, and to end.
_LONGEST = 600.0  # Seconds that a process may go on after its last request.
# Each process compiles by itself: pools of their own would be more processes than cores. This
# process starts no pool either, which takes a second.
_POOLS = "TORCHINDUCTOR_COMPILE_THREADS"
_NO_POOL = {_POOLS: "1"}
# Modules that compiling a Triton kernel needs. Torch's compiler, which traces most masks, takes two
# seconds more, and is left out: the first kernels, whose mask hides nothing, would wait for it.
_MODULES = (
    "triton.compiler",
    "attncheck.kernels.flash3_forward",
    "attncheck.subjects.triton_flash",
)
_BY_TRITON = ("triton", "torch")  # Compilers whose kernels Triton compiles in the end.
_TORCH_SHARE = 4  # One process in this many is only for kernels of torch.compile.


class Compiler:
    """The server in a compiling process, which calls each kernel once."""

    def answer(self, request: Frame) -> Frame:
        """Call one of attncheck's kernels on zeros of a Problem, and return whether that worked.

        A request of kind ``load`` only imports the modules that compiling for a GPU needs.
        """
        if request.kind == "load":
            try:
                prepare("cuda")
                with no_garbage_collection():
                    for module in _MODULES:
                        import_module(module)
                _hash_triton()
            except Exception as error:  # noqa: BLE001  # Compiling will raise it again.
                return Frame(kind="failed", words={"reason": type(error).__name__})
            return Frame(kind="done", words={})
        import torch

        from attncheck.inputs.input_tensors import zero_inputs
        from attncheck.inputs.problem import Problem

        kernel, problem, device = (request.words[name] for name in ("kernel", "problem", "device"))
        try:
            prepare(device)
            subject, problem = subject_named(kernel), Problem.from_json(problem)
            refused = subject.absent(device) or subject.unsupported(problem, device)
            if refused:
                return Frame(kind="refused", words={"reason": refused})
            subject.run(zero_inputs(problem, device))
        except Exception as error:  # noqa: BLE001  # The judged call will raise it again.
            return Frame(kind="failed", words={"reason": type(error).__name__})
        if device == "cuda":
            torch.cuda.empty_cache()  # Measurements need the memory.
        return Frame(kind="done", words={})

    def close(self) -> None:
        """Do nothing: there is nothing to end."""


def start_compilers(kernels: Collection[str], device: str | None) -> list[Worker]:
    """Start processes for ``compiling_ahead``, if attncheck's kernels may be compiled for a GPU.

    It is called before this process imports torch, so it is not yet known whether there is a GPU:
    they start if the driver can be loaded. They use no GPU memory until they are asked to compile.

    Args:
        kernels: Names as the user typed them; empty for all of attncheck's.
        device: ``cpu`` or ``cuda`` as the user typed it; None for a GPU if there is one.
    """
    ours = BUILTIN.keys() & (kernels or BUILTIN)
    if device == "cpu" or not any(BUILTIN[name].compiler for name in ours):
        return []
    workers: list[Worker] = []
    # Without a driver nothing is compiled; nor if no thread or process can be started.
    with suppress(HostError, OSError, RuntimeError):
        driver = ctypes.CDLL(_DRIVER)
        threading.Thread(target=_make_context, args=(driver,), daemon=True).start()
        for _ in range(_places_on_cores()):
            workers.append(_new_compiler())
            workers[-1].send(Frame(kind="load", words={}), seconds=_SECONDS)
    return workers


def _make_context(driver: ctypes.CDLL) -> None:
    """Have the driver make this process's context on the first GPU, while torch is imported.

    Torch uses this context, and would otherwise wait a quarter of a second for its own. Code is
    loaded lazily, as torch sets it.
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    with suppress(AttributeError):  # The library is not a driver.
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _new_compiler() -> Worker:
    return Worker(SERVER, environment=_NO_POOL, grace=_LONGEST)


@contextmanager
def compiling_ahead(
    cells: Iterable[tuple[Problem, Sequence[Subject]]],
    device: str,
    started: Sequence[Worker] = (),
) -> Iterator[list[Worker]]:
    """Compile in other processes for the cells run in this context, if the GPU has room for them.

    Args:
        cells: Problems in their order, each with the kernels that it concerns.
        device: ``cpu`` or ``cuda``.
        started: Processes of ``start_compilers``; those without room or work are ended.

    Yields:
        The processes, which end with the context.
    """
    workers: list[Worker] = []
    pools = os.environ.get(_POOLS)
    # Compiled code does not depend on seed and distribution.
    calls: dict[tuple[str, Problem], CompilerName] = {
        (subject.name, problem.replace(seed=0, distribution="normal")): subject.compiler
        for problem, subjects in cells
        for subject in subjects
        if subject.compiler and subject.name in BUILTIN
    }
    try:
        count = min(free_places(device), len(calls) - 1)  # A single call is not quicker elsewhere.
        for worker in started:
            # It may have died by now, for lack of memory.
            if worker.ended is None and len(workers) < count:
                workers.append(worker)
            else:
                worker.kill(_SECONDS)
        workers.extend(_new_compiler() for _ in range(count - len(workers)))
        # With enough processes, only some import torch's compiler, and other kernels need not wait.
        torch_count = len(workers) // _TORCH_SHARE if {*calls.values()} > {"torch"} else 0
        loads = {worker: Counter[str]() for worker in workers}
        for (kernel, problem), compiler in calls.items() if workers else ():
            words = {"kernel": kernel, "problem": problem.to_json(), "device": device}
            # Answers are not read: the pipe has room for thousands.
            request = Frame(kind="compile", words=words)
            with suppress(HostError):  # If it is not compiled there, it is compiled here.
                of_torch = compiler == "torch" and torch_count > 0
                # Dealt out in turn, all calls of the slowest kernel could get the same process.
                worker = min(
                    workers[:torch_count] if of_torch else workers[torch_count:],
                    key=lambda each: (loads[each][kernel], loads[each].total()),
                )
                loads[worker][kernel] += 1
                worker.send(request, seconds=_SECONDS)
    except (HostError, OSError):
        pass  # No further process can be started.
    for worker in workers:
        worker.stop()  # It ends after its last request, and frees its memory.
    try:
        if workers:
            os.environ.setdefault(_POOLS, _NO_POOL[_POOLS])
        yield workers
    finally:
        if workers and pools is None:
            os.environ.pop(_POOLS, None)
        for worker in workers:
            worker.kill(_SECONDS)


def load_ahead(
    problems: Collection[Problem], kernels: Collection[str], device: str
) -> threading.Thread | None:
    """Load in a thread what ``problems`` and attncheck's ``kernels`` will need here on a GPU.

    That is the oracle's kernel, cuDNN and Triton's hash of itself, which take half a second or more
    each without holding Python's lock. Modules are not loaded, since kernel launches would wait for
    them. If loading fails, the first use repeats it.

    Returns:
        The thread; None on a CPU.
    """
    if device != "cuda":
        return None
    # Imported in this thread, because two threads that import packages may deadlock.
    import torch

    with suppress(ImportError):  # Without Triton its kernels are absent.
        import_module("triton.runtime")
    from attncheck.oracles.fused_tiles import takes
    from attncheck.subjects.torch_kernels import load_cudnn

    def load() -> None:
        with suppress(Exception):
            place = torch.device(device, torch.cuda.current_device())
            for problem in problems:
                for backward in {False, problem.backward}:
                    takes(problem, place, backward=backward)
            if "sdpa-cudnn" in kernels:
                load_cudnn(place)
            if any(BUILTIN[each].compiler in _BY_TRITON for each in BUILTIN.keys() & kernels):
                _hash_triton()

    thread = threading.Thread(target=load)
    thread.start()
    return thread


def _hash_triton() -> None:
    """Compute the part of every key of Triton's cache that is a hash of its 400 MB library.

    Triton caches it per process; otherwise the first kernel would wait for it.
    """
    from triton.runtime.cache import triton_key

    triton_key()


def load_compilers(subjects: Iterable[Subject], device: str) -> None:
    """Import torch's compiler, if the first calls of ``subjects`` on a GPU need it.

    It takes this process two seconds: call it while the GPU works and other processes compile.
    """
    if device == "cuda" and any(
        each.compiler == "torch" and each.name in BUILTIN for each in subjects
    ):
        with suppress(Exception), no_garbage_collection():  # Compiling will raise it again.
            import_module("torch._inductor.compile_fx")


def free_places(device: str) -> int:
    """Return for how many further processes there are cores and GPU memory; 0 on a CPU."""
    if device == "cpu":
        return 0
    import torch

    free, _ = torch.cuda.mem_get_info()
    return min(_places_on_cores(), free // _MEMORY // 2)


def _places_on_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return min(_MOST_WORKERS, cores // 2)
