"""Processes that compile kernels ahead of the run: they call each kernel once to fill the compile
caches, and their failures must not affect the run."""

import ctypes
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from attncheck.inputs import input_tensors
from attncheck.inputs.input_tensors import draw_inputs, zero_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.oracles import fused_tiles
from attncheck.subjects import torch_kernels
from attncheck.subjects.capabilities.named_kernels import BUILTIN, subject_named
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal
from attncheck.verify import compile_ahead, evidence_builder, verify
from attncheck.verify.compile_ahead import (
    Compiler,
    compiling_ahead,
    load_ahead,
    load_compilers,
    start_compilers,
)
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.workers.transport import Frame

SMALL = Problem(query=16, head_dim=16)


def compile_kernel(kernel: str, problem: Problem) -> Frame:
    words = {"kernel": kernel, "problem": problem.to_json(), "device": "cpu"}
    return Compiler().answer(Frame(kind="compile", words=words))


@pytest.mark.parametrize("kernel", ["triton-flash2", "flex"])
def test_compiler_calls_the_kernel_once(kernel, monkeypatch):
    results = []
    run = type(subject_named(kernel)).run
    monkeypatch.setattr(
        type(subject_named(kernel)), "run", lambda *args: results.append(run(*args)) or results[-1]
    )
    assert compile_kernel(kernel, SMALL).kind == "done"
    (outputs,) = results
    assert outputs.out.shape == (1, 1, 16, 16)


def test_compiler_answers_refusals_and_exceptions(monkeypatch):
    assert compile_kernel("triton-decode", SMALL.replace(query=129)).kind == "refused"

    def broken(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(input_tensors, "zero_inputs", broken)
    assert compile_kernel("triton-flash2", SMALL).words == {"reason": "RuntimeError"}


def test_no_process_is_started_on_a_cpu_or_for_kernels_without_a_compiler(monkeypatch):
    flash = subject_named("triton-flash2")
    with compiling_ahead([(SMALL, [flash]), (SMALL.replace(query=32), [flash])], "cpu") as workers:
        assert not workers
    monkeypatch.setattr(compile_ahead, "free_places", lambda device: 2)
    ideal = subject_named("ideal")
    with compiling_ahead([(SMALL, [ideal]), (SMALL.replace(query=32), [ideal])], "cpu") as workers:
        assert not workers


def test_workers_compile_each_problem_once_and_end(monkeypatch):
    monkeypatch.setattr(compile_ahead, "free_places", lambda device: 1)
    flash, other = subject_named("triton-flash2"), SMALL.replace(query=32)
    # Another seed needs no other compiled kernel.
    cells = [(SMALL, [flash]), (SMALL.replace(seed=3), [flash]), (other, [flash])]
    monkeypatch.delenv(compile_ahead._POOLS, raising=False)
    with compiling_ahead(cells, "cpu") as (worker,):
        assert os.environ[compile_ahead._POOLS] == "1"
        answers = [worker.receive(seconds=60.0, most=0).kind for _ in range(2)]
        assert answers == ["done", "done"]
        assert worker.await_end(60.0) == 0
    with compiling_ahead(cells, "cpu") as (worker,):
        assert worker.ended is None
    assert worker.ended is not None  # even with work left
    assert compile_ahead._POOLS not in os.environ
    monkeypatch.setenv(compile_ahead._POOLS, "3")
    with compiling_ahead(cells, "cpu"):
        assert os.environ[compile_ahead._POOLS] == "3"  # the user's value is kept


@pytest.fixture
def _driver(monkeypatch):
    """Simulate a GPU driver, and cores for two compilers."""
    monkeypatch.setattr(compile_ahead, "_DRIVER", None)  # this program itself
    monkeypatch.setattr(compile_ahead, "_places_on_cores", lambda: 2)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.usefixtures("_driver")
def test_compilers_load_their_modules_before_the_device_is_known():
    workers = start_compilers([], None)
    try:
        assert [worker.receive(seconds=120.0, most=0).kind for worker in workers] == ["done"] * 2
    finally:
        for worker in workers:
            worker.kill(5.0)


def test_compiler_reports_a_module_that_fails_to_load(monkeypatch):
    monkeypatch.setattr(compile_ahead, "prepare", lambda device: None)
    monkeypatch.setattr(compile_ahead, "_MODULES", ("no_such_module",))
    answer = Compiler().answer(Frame(kind="load", words={}))
    assert (answer.kind, answer.words) == ("failed", {"reason": "ModuleNotFoundError"})


def run_python(program: str) -> str:
    """Run ``program`` in a fresh Python process and return its output."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout


def test_triton_compilers_do_not_import_torch_dynamo():
    program = (
        "import sys; from importlib import import_module; "
        "from attncheck.verify import compile_ahead; compile_ahead.prepare('cpu'); "
        "[import_module(name) for name in compile_ahead._MODULES]; "
        "print('triton' in sys.modules, 'torch._dynamo' in sys.modules)"
    )
    assert run_python(program) == "True False\n"


def test_importing_compile_ahead_does_not_import_torch():
    program = "import sys; import attncheck.verify.compile_ahead; print('torch' in sys.modules)"
    assert run_python(program) == "False\n"


@pytest.mark.parametrize(("fails", "count"), [(None, 3), ("cuInit", 1), ("cuDeviceGet", 2)])
def test_make_context_retains_first_gpu_and_stops_at_first_error(fails, count, monkeypatch):
    calls = []

    def function(name):
        return lambda *values: calls.append((name, *values)) or int(name == fails)

    monkeypatch.setenv("CUDA_MODULE_LOADING", "")  # so that monkeypatch restores it at the end
    monkeypatch.delenv("CUDA_MODULE_LOADING")
    names = ("cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain")
    compile_ahead._make_context(SimpleNamespace(**{name: function(name) for name in names}))
    assert [name for name, *_ in calls] == [*names[:count]]
    assert calls[0][1:] == (0,)
    for _, target, number in calls[1:2]:  # where to write it, and which GPU
        assert (type(target._obj), number) == (ctypes.c_int, 0)
    for _, target, device in calls[2:]:
        assert (type(target._obj), device) == (ctypes.c_void_p, calls[1][1]._obj)
    assert os.environ["CUDA_MODULE_LOADING"] == "LAZY"
    compile_ahead._make_context(ctypes.CDLL(None))  # no driver


@pytest.mark.usefixtures("_driver")
def test_surplus_compilers_are_ended(monkeypatch):
    monkeypatch.setattr(compile_ahead, "free_places", lambda device: 1)
    flash = subject_named("triton-flash2")
    workers = start_compilers(["triton-flash2", "mine.py::kernel"], "cuda")
    cells = [(SMALL, [flash]), (SMALL.replace(query=32), [flash])]
    with compiling_ahead(cells, "cpu", workers) as used:
        assert used == workers[:1]
        assert workers[0].ended is None
        assert workers[1].ended is not None
    assert workers[0].ended is not None


@pytest.mark.usefixtures("_driver")
def test_dead_compiler_is_not_given_work(monkeypatch):
    monkeypatch.setattr(compile_ahead, "free_places", lambda device: 2)
    flash = subject_named("triton-flash2")
    workers = start_compilers([], None)
    workers[0].kill(5.0)
    cells = [(SMALL.replace(query=query), [flash]) for query in (16, 32, 48)]
    with compiling_ahead(cells, "cpu", workers) as used:
        assert used[0] is workers[1]
        assert [worker.await_end(120.0) for worker in used] == [0, 0]


@pytest.mark.parametrize(
    ("count", "kernels", "expected"),
    [
        (8, ["triton-flash2", "flex", "sdpa-cudnn"], [2, 0, 3, 4, 1, 5]),
        (4, ["triton-flash2", "flex", "sdpa-cudnn"], [1, 0, 2, 3, 0, 1]),
        (3, ["triton-flash2", "flex", "sdpa-cudnn"], [0, 1, 2, 1, 0, 0]),
        (8, ["flex"], [0]),
        (8, ["triton-flash2", "sdpa-cudnn"], [0, 1, 2]),
    ],
)
def test_work_is_assigned_so_that_triton_does_not_wait_for_torch_compile(
    count, kernels, expected, monkeypatch
):
    """With processes to spare, kernels that need torch's compiler get one of their own.

    The calls of each kernel are spread over the processes, as one may take longest for all.
    """
    sent = []

    class Process:
        ended = None

        def __init__(self, number):
            self.number = number

        def send(self, request, seconds):
            sent.append((self.number, request.words["kernel"], request.words["problem"]["query"]))

        def stop(self):
            pass

        def kill(self, seconds):
            pass

    monkeypatch.setattr(compile_ahead, "free_places", lambda device: count)
    subjects = [subject_named(name) for name in kernels]
    queries = (16, 32, 48, 64, 80, 96)
    cells = [(SMALL.replace(query=query), subjects) for query in queries]
    with compiling_ahead(cells, "cuda", [Process(number) for number in range(count)]) as used:
        assert len(used) == min(count, len(queries) * len(kernels) - 1)
    every = [(name, query) for query in queries for name in kernels]
    assert [(name, query) for _, name, query in sent] == every
    assert [number for number, *_ in sent][: len(expected)] == expected
    for kernel in kernels:
        numbers = [number for number, name, _ in sent if name == kernel]
        places = {number for number, name, _ in sent if (name == "flex") == (kernel == "flex")}
        assert max(numbers.count(number) for number in places) == -(-len(queries) // len(places))


def test_builtin_table_names_the_compiler_of_each_kernel():
    """The table is read before the kernel's module is imported, so it states this a second time."""
    assert {name: kernel.compiler for name, kernel in BUILTIN.items()} == {
        name: subject_named(name).compiler for name in BUILTIN
    }


def test_start_compilers_makes_the_context_in_a_daemon_thread(monkeypatch):
    """A slow driver must delay neither the start nor the end of the program; on a CPU no context
    is made."""
    drivers, release = [], threading.Event()
    monkeypatch.setattr(compile_ahead, "_DRIVER", None)
    monkeypatch.setattr(compile_ahead, "_places_on_cores", lambda: 0)
    monkeypatch.setattr(
        compile_ahead, "_make_context", lambda driver: (drivers.append(driver), release.wait())
    )
    assert start_compilers([], None) == []
    try:
        assert [type(driver) for driver in drivers] == [ctypes.CDLL]
        assert all(each.daemon for each in threading.enumerate() if each.name != "MainThread")
    finally:
        release.set()
    assert start_compilers([], "cpu") == []
    assert len(drivers) == 1


@pytest.mark.usefixtures("_driver")
def test_no_compilers_start_on_a_cpu_or_for_user_kernels():
    assert start_compilers([], "cpu") == []
    assert start_compilers(["mine.py::kernel"], None) == []
    assert start_compilers(["mine.py::kernel", "ideal"], None) == []


def test_no_compilers_start_without_a_driver(monkeypatch):
    monkeypatch.setattr(compile_ahead, "_DRIVER", "no-such-driver.so")
    assert start_compilers([], None) == []


@pytest.mark.parametrize("kernels", [["triton-flash2"], ["ideal", "sdpa-cudnn"]])
def test_load_ahead_loads_the_libraries_that_the_kernels_need_on_a_gpu(kernels, monkeypatch):
    loaded = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    takes = lambda *arguments, backward: loaded.append((*arguments, backward))  # noqa: E731
    monkeypatch.setattr(fused_tiles, "takes", takes)
    monkeypatch.setattr(torch_kernels, "load_cudnn", loaded.append)
    monkeypatch.setattr(compile_ahead, "_hash_triton", lambda: loaded.append("triton"))
    assert load_ahead([SMALL], kernels, "cpu") is None
    both = SMALL.replace(backward=True)
    load_ahead([SMALL, both], kernels, "cuda").join()
    place = torch.device("cuda:1")
    hashed = ["triton"] * ("triton-flash2" in kernels)
    first = [(SMALL, place, False), (both, place, False), (both, place, True)]
    assert loaded == [*first, *[place] * ("sdpa-cudnn" in kernels), *hashed]


@pytest.mark.parametrize(
    ("kernels", "device", "imports"),
    [
        (["triton-flash2", "flex"], "cuda", ["torch._inductor.compile_fx"]),
        (["triton-flash2", "flex"], "cpu", []),
        (["triton-flash2", "sdpa-math"], "cuda", []),
    ],
)
def test_load_compilers_imports_torch_inductor_only_for_flex_on_a_gpu(
    kernels, device, imports, monkeypatch
):
    modules = []
    monkeypatch.setattr(compile_ahead, "import_module", modules.append)
    load_compilers([subject_named(name) for name in kernels], device)
    assert modules == imports


def test_compilers_are_loaded_before_the_first_kernel_runs(monkeypatch):
    order = []

    class LogsCalls(Ideal):
        def prepare(self, inputs):
            order.append("kernel")
            return super().prepare(inputs)

    monkeypatch.setattr(
        verify, "load_compilers", lambda subjects, device: order.append((len(subjects), device))
    )
    cases = [("", Case(problem=SMALL))]
    assert len(list(verify.iter_records([LogsCalls(), LogsCalls()], cases, device="cpu"))) == 2
    assert order[:2] == [(2, "cpu"), "kernel"]


def test_compilers_are_loaded_after_the_ideal_kernels_are_launched(monkeypatch):
    order = []

    class LogsCalls(Ideal):
        def prepare(self, inputs):
            order.append(f"ideal {self.tiling(inputs.problem, 'cpu').block_kv}")
            return super().prepare(inputs)

    monkeypatch.setattr(evidence_builder, "Ideal", LogsCalls)
    arithmetic = Ideal().arithmetic(SMALL, "cpu")
    allowances = evidence_builder.allowances

    def logged_allowances(*arguments):
        order.append("allowances")
        return allowances(*arguments)

    monkeypatch.setattr(evidence_builder, "allowances", logged_allowances)
    evidence = EvidenceBuilder(
        Case(problem=SMALL),
        "cuda",
        expected=[arithmetic],
        tilings=[Tiling(block_query=16, block_kv=n) for n in (16, 32)],
        place="cpu",
        meanwhile=lambda: order.append("compilers"),
    )
    evidence.establish()
    assert order == ["ideal 16", "ideal 32", "allowances", "compilers"]
    evidence.allowance(arithmetic)  # cached by establish()
    assert order.count("allowances") == 1


def test_load_ahead_ignores_failures(monkeypatch, recwarn):
    def broken(*_):
        raise RuntimeError("no such GPU")

    monkeypatch.setattr(torch.cuda, "current_device", broken)
    load_ahead([SMALL], ["sdpa-cudnn"], "cuda").join()
    assert not recwarn  # pytest warns of what a thread raises


@pytest.mark.parametrize(
    "problem",
    [
        SMALL.replace(dtype="e4m3"),
        SMALL.replace(backward=True, dlse=True),
        SMALL.replace(sink=True, batch=2, heads=4, kv_heads=2, kv=24, value_dim=32),
        Problem(operation="softmax", query=4, kv=8),
    ],
    ids=str,
)
def test_zero_inputs_have_the_layout_of_drawn_inputs(problem):
    zeros, drawn = zero_inputs(problem, "cpu").tensors(), draw_inputs(problem).tensors()
    assert {n: (x.shape, x.stride(), x.dtype) for n, x in zeros.items()} == {
        n: (x.shape, x.stride(), x.dtype) for n, x in drawn.items()
    }
    assert not any(x.any() for n, x in zeros.items() if not n.endswith("_descale"))
