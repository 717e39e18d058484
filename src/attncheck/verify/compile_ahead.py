"""Compiling ahead: processes that call attncheck's own kernels on zeros, to fill compilers' caches.

What Triton and torch.compile make of a kernel they keep in folders that all processes of a user
share. While one cell is judged, other processes make what the next cells will ask for; they compare
nothing, and what becomes of them is no matter of a measurement's. Somebody's own kernel is never
called so: it would run where nobody watches it.

They import what compilers need while this process imports torch too (``start_compilers``), and the
driver makes its context. What each process has to load for itself, a thread of this one loads, or
this one while a GPU is at work.
"""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import cycle
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
_MEMORY = 4 << 30  # bytes of a GPU that one of them may need
_SECONDS = 5.0  # to take a request, and to end
_LONGEST = 600.0  # seconds that one may be at work
# Each compiles by itself: pools of theirs would be more processes than there are cores. Nor does
# this process start a pool beside them, which takes a second.
_POOLS = "TORCHINDUCTOR_COMPILE_THREADS"
_ALONE = {_POOLS: "1"}
# What compiling a Triton kernel on a GPU needs. Torch's compiler, by which most masks are traced,
# takes two seconds more: the first kernels, whose mask hides nothing, would wait for it.
_MODULES = (
    "triton.compiler",
    "attncheck.kernels.flash3_forward",
    "attncheck.subjects.triton_flash",
)
_BY_TRITON = ("triton", "torch")  # compilers whose kernels Triton compiles
_OF_TORCH = 4  # one process in as many compiles what torch does, and nothing else


class Compiler:
    """The inside of such a process: it calls kernels, once each, whatever comes of it."""

    def answer(self, request: Frame) -> Frame:
        """Call a kernel of ours on zeros of a Problem; say what became of it.

        A request of kind ``load`` imports what compilers on a GPU need, and calls nothing.
        """
        if request.kind == "load":
            try:
                prepare("cuda")
                with no_garbage_collection():
                    for module in _MODULES:
                        import_module(module)
                _hash_triton()
            except Exception as error:  # noqa: BLE001  # who compiles says so again
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
        except Exception as error:  # noqa: BLE001  # it says so again where somebody asks it
            return Frame(kind="failed", words={"reason": type(error).__name__})
        if device == "cuda":
            torch.cuda.empty_cache()  # the memory is that of who measures
        return Frame(kind="done", words={})

    def close(self) -> None:
        """There is nothing to end."""


def start_compilers(kernels: Collection[str], device: str | None) -> list[Worker]:
    """Start processes for ``compiling_ahead``, if kernels of ours may be compiled for a GPU.

    To be called before this process imports torch, which would know whether there is a GPU: they
    start where its driver can be loaded. None has memory of a GPU before it is asked to compile.

    Args:
        kernels: As typed; none for all of ours.
        device: The same; ``cpu``, ``cuda``, or None for a GPU where there is one.
    """
    ours = BUILTIN.keys() & (kernels or BUILTIN)
    if device == "cpu" or not any(BUILTIN[name].compiler for name in ours):
        return []
    workers: list[Worker] = []
    # There may be no driver, and then nothing is compiled; or no thread or process to be had.
    with suppress(HostError, OSError, RuntimeError):
        driver = ctypes.CDLL(_DRIVER)
        threading.Thread(target=_make_context, args=(driver,), daemon=True).start()
        for _ in range(_places_on_cores()):
            workers.append(_new_compiler())
            workers[-1].send(Frame(kind="load", words={}), seconds=_SECONDS)
    return workers


def _make_context(driver: ctypes.CDLL) -> None:
    """Have the driver make this process's context on the first GPU, while torch is imported.

    Torch takes it as its own, and would wait for it: a quarter of a second. Of code it loads what
    is called, as torch would have it.
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    with suppress(AttributeError):  # it is no driver
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _new_compiler() -> Worker:
    return Worker(SERVER, environment=_ALONE, grace=_LONGEST)


@contextmanager
def compiling_ahead(
    cells: Iterable[tuple[Problem, Sequence[Subject]]],
    device: str,
    started: Sequence[Worker] = (),
) -> Iterator[list[Worker]]:
    """Compile in other processes what is asked within; on a GPU, where there is room for them.

    Args:
        cells: Problems in their order, each with the kernels that it concerns.
        device: ``cpu`` or ``cuda``.
        started: Of ``start_compilers``; those for which there is no room or no work end.

    Yields:
        The processes, which end with it.
    """
    workers: list[Worker] = []
    pools = os.environ.get(_POOLS)
    # Seeds and distributions compile to the same.
    calls: dict[tuple[str, Problem], CompilerName] = {
        (subject.name, problem.replace(seed=0, distribution="normal")): subject.compiler
        for problem, subjects in cells
        for subject in subjects
        if subject.compiler and subject.name in BUILTIN
    }
    try:
        count = min(free_places(device), len(calls) - 1)  # one alone is no quicker elsewhere
        for worker in started:
            # One may have died by now, of want of memory.
            if worker.ended is None and len(workers) < count:
                workers.append(worker)
            else:
                worker.kill(_SECONDS)
        workers.extend(_new_compiler() for _ in range(count - len(workers)))
        # With processes enough no other kernel waits until torch's compiler is imported.
        few = len(workers) // _OF_TORCH if {*calls.values()} > {"torch"} else 0
        others = cycle(workers[few:])
        of_torch = cycle(workers[:few]) if few else others
        for (kernel, problem), compiler in calls.items() if workers else ():
            words = {"kernel": kernel, "problem": problem.to_json(), "device": device}
            # Answers are left in the pipe, where there is room for thousands.
            request = Frame(kind="compile", words=words)
            with suppress(HostError):  # what is not compiled there is compiled here
                worker = next(of_torch if compiler == "torch" else others)
                worker.send(request, seconds=_SECONDS)
    except (HostError, OSError):
        pass  # no more of them are to be had
    for worker in workers:
        worker.stop()  # when it has done all it ends, and frees its memory
    try:
        if workers:
            os.environ.setdefault(_POOLS, _ALONE[_POOLS])
        yield workers
    finally:
        if workers and pools is None:
            os.environ.pop(_POOLS, None)
        for worker in workers:
            worker.kill(_SECONDS)


def load_ahead(
    problems: Collection[Problem], kernels: Collection[str], device: str
) -> threading.Thread | None:
    """Load in a thread what ``problems`` and ``kernels`` of ours will need here; on a GPU.

    The oracle's kernel, cuDNN and Triton's hash of itself: half a second each and more, outside
    Python's lock. No modules, for which whoever launches kernels would wait. What fails here is
    loaded by who needs it.

    Returns:
        The thread; None on a CPU.
    """
    if device != "cuda":
        return None
    # Here, because two threads that import packages beside each other may wait for one another.
    import torch

    with suppress(ImportError):  # there may be none: its kernels are absent then
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

    Triton keeps it in the process, where the first kernel would wait for it.
    """
    from triton.runtime.cache import triton_key

    triton_key()


def load_compilers(subjects: Iterable[Subject], device: str) -> None:
    """Import here what the first calls of ``subjects`` on a GPU wait for: torch's compiler.

    It takes two seconds of this process alone: to be called while the GPU is at work, and other
    processes compile.
    """
    if device == "cuda" and any(
        each.compiler == "torch" and each.name in BUILTIN for each in subjects
    ):
        with suppress(Exception), no_garbage_collection():  # who compiles says so again
            import_module("torch._inductor.compile_fx")


def free_places(device: str) -> int:
    """Return how many processes there are cores and memory for beside this one, on a GPU."""
    if device == "cpu":
        return 0
    import torch

    free, _ = torch.cuda.mem_get_info()
    return min(_places_on_cores(), free // _MEMORY // 2)


def _places_on_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return min(_MOST_WORKERS, cores // 2)
