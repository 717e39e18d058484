"""One clock for every measurement; what CUDA does is played by stand-ins."""

import itertools
import time
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.subjects.torch_kernels import Sdpa
from attncheck.verify import timing
from attncheck.verify.executor import Execution, Failure, InProcess, Turn
from attncheck.verify.isolated import IsolatedKernel
from attncheck.verify.timing import Stopwatch, medians

GPU = SimpleNamespace(type="cuda")


@pytest.fixture
def cuda(monkeypatch):
    """A GPU that counts what it is told, and whose events are a millisecond apart each."""
    told, now = [], itertools.count()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            told.append("record")
            self.at = next(now)

        def synchronize(self):
            told.append("wait")

        def elapsed_time(self, other):
            return float(other.at - self.at)

    flushed = SimpleNamespace(sum=lambda: told.append("flush"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(timing, "_flushed", lambda _: flushed)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return told


def test_a_call_is_timed_between_events_after_the_cache_is_flushed(cuda):
    watch = Stopwatch(lambda: cuda.append("call"), GPU)
    assert watch.seconds() == 1e-3
    assert cuda == ["flush", "record", "call", "record", "wait"]
    assert watch.clock == "events"


@pytest.mark.usefixtures("cuda")
def test_a_graph_keeps_the_tensors_of_its_call(monkeypatch):
    """It reads their memory, which is another's when they are gone."""
    monkeypatch.setattr(timing, "_captured", lambda _: lambda: None)
    tensor = torch.zeros(1)
    alive = weakref.ref(tensor)
    watch = Stopwatch(partial(torch.neg, tensor), GPU, graph=True)
    del tensor
    assert watch.clock == "graph"
    assert alive() is not None


def test_what_cannot_be_captured_is_timed_by_events(cuda, monkeypatch):
    def refuses():
        raise RuntimeError("no stream")

    monkeypatch.setattr(torch.cuda, "Stream", refuses)
    watch = Stopwatch(lambda: None, GPU, graph=True)
    assert watch.clock == "events"
    monkeypatch.setattr(timing, "_captured", lambda call: lambda: cuda.append("replay"))
    watch = Stopwatch(lambda: None, GPU, graph=True)
    watch.seconds()
    assert watch.clock == "graph"
    assert "replay" in cuda


@pytest.mark.parametrize(
    ("taken", "count", "median"),
    [
        ([1] * 9, 5, 1),
        ([8, 1, 1, 1, 1, 1], 5, 1),  # the largest is not of the middle half
        ([8, 8, 1, 1, 1, 1, 1, 1, 1], 9, 1),
        ([1, 1.25] * 20, 20, 1.125),  # never alike
        ([32] * 9, 2, 32),  # no longer than they may take
    ],
)
def test_a_median_is_of_as_many_calls_as_it_needs(taken, count, median, monkeypatch):
    left = iter(taken)
    # In units in which means of two are exact.
    monkeypatch.setattr(Stopwatch, "seconds", lambda _: next(left) / 1024)
    assert Stopwatch(lambda: None, torch.device("cpu")).median() == median / 1024
    assert len(list(left)) == len(taken) - count


def test_calls_take_turns(monkeypatch):
    order, ticks = [], itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    taken = medians({name: lambda name=name: order.append(name) for name in "ab"}, "cpu", 2)
    assert order == ["a", "b"] * 3
    assert taken == {"a": 1.0, "b": 1.0}


def test_a_call_that_is_kept_takes_turns_until_it_is_forgotten():
    problem = Problem(query=8, head_dim=8, dtype="fp32")
    executor, inputs = InProcess(), draw_inputs(problem)
    kept = executor.keep(Sdpa("math"), inputs, graph=False)
    assert isinstance(kept, Execution)
    turn = executor.time(problem)
    assert isinstance(turn, Turn)
    assert turn.clock == "cpu"
    assert turn.seconds > 0
    executor.forget()
    assert isinstance(executor.time(problem), Failure)


def test_one_in_a_process_of_its_own_takes_turns_too():
    problem = Problem(query=8, head_dim=8, dtype="fp32")
    inputs = draw_inputs(problem)
    with IsolatedKernel("sdpa-math") as host:
        kept = host.executor.keep(host.subject, inputs, graph=False)
        assert isinstance(kept, Execution)
        assert torch.equal(kept.outputs.out, Sdpa("math").run(inputs).out)
        assert isinstance(host.executor.time(problem), Turn)
        host.executor.forget()
        assert isinstance(host.executor.time(problem), Failure)
        host.executor.keep(host.subject, inputs, graph=False)
        host.kill()  # what it kept is gone with it
        assert isinstance(host.executor.time(problem), Failure)
