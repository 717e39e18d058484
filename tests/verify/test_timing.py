"""Stopwatch, medians and kept calls: how kernels are timed; CUDA is simulated by stand-ins."""

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
    """The log of a simulated GPU whose events are a millisecond apart."""
    log, now = [], itertools.count()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")
            self.at = next(now)

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, other):
            return float(other.at - self.at)

    flushed = SimpleNamespace(sum=lambda: log.append("flush"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(timing, "_flushed", lambda _: flushed)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return log


def test_cuda_call_is_timed_between_events_after_a_cache_flush(cuda):
    watch = Stopwatch(lambda: cuda.append("call"), GPU)
    assert watch.seconds() == 1e-3
    assert cuda == ["flush", "record", "call", "record", "wait"]
    assert watch.clock == "events"


@pytest.mark.usefixtures("cuda")
def test_graph_keeps_the_tensors_of_its_call_alive(monkeypatch):
    """A replayed graph reads their memory, which would be reused if they were freed."""
    monkeypatch.setattr(timing, "_captured", lambda _: lambda: None)
    tensor = torch.zeros(1)
    alive = weakref.ref(tensor)
    watch = Stopwatch(partial(torch.neg, tensor), GPU, graph=True)
    del tensor
    assert watch.clock == "graph"
    assert alive() is not None


def test_graph_timing_falls_back_to_events_if_capture_fails(cuda, monkeypatch):
    def fail():
        raise RuntimeError("no stream")

    monkeypatch.setattr(torch.cuda, "Stream", fail)
    watch = Stopwatch(lambda: None, GPU, graph=True)
    assert watch.clock == "events"
    monkeypatch.setattr(timing, "_captured", lambda call: lambda: cuda.append("replay"))
    watch = Stopwatch(lambda: None, GPU, graph=True)
    watch.seconds()
    assert watch.clock == "graph"
    assert "replay" in cuda


@pytest.mark.parametrize(
    ("durations", "count", "median"),
    [
        ([1] * 9, 5, 1),
        ([8, 1, 1, 1, 1, 1], 5, 1),  # the largest is outside the middle half
        ([8, 8, 1, 1, 1, 1, 1, 1, 1], 9, 1),
        ([1, 1.25] * 20, 20, 1.125),  # never equal, so as many as possible
        ([32] * 9, 2, 32),  # the time limit is reached
    ],
)
def test_median_repeats_calls_until_stable_or_out_of_time(durations, count, median, monkeypatch):
    remaining = iter(durations)
    # In units of 1/1024 s, in which the mean of two durations is exact.
    monkeypatch.setattr(Stopwatch, "seconds", lambda _: next(remaining) / 1024)
    assert Stopwatch(lambda: None, torch.device("cpu")).median() == median / 1024
    assert len(list(remaining)) == len(durations) - count


def test_medians_alternates_between_the_calls(monkeypatch):
    order, ticks = [], itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    seconds = medians({name: lambda name=name: order.append(name) for name in "ab"}, "cpu", 2)
    assert order == ["a", "b"] * 3
    assert seconds == {"a": 1.0, "b": 1.0}


def test_kept_call_can_be_timed_until_it_is_forgotten():
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


def test_kept_call_in_an_isolated_process_can_be_timed_until_the_process_ends():
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
        host.kill()  # the kept call is lost with its process
        assert isinstance(host.executor.time(problem), Failure)
