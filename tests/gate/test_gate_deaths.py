"""Deaths of a kernel's process outside its Cases, and a judge that runs out of memory."""

import msgspec
import pytest
import torch
from tests.gate.gate_driver import choices, planted

from attncheck import oracles
from attncheck.core.mod_spec import Spec
from attncheck.gate import gate_worker
from attncheck.gate.gate_worker import GateWorker
from attncheck.gate.property_stage import KnownFailures
from attncheck.inputs import input_tensors
from attncheck.inputs.problem import Case, Problem
from attncheck.verify.isolated import Deadlines
from attncheck.verify.run_case import blank_record
from attncheck.workers.units import Unit

pytestmark = pytest.mark.usefixtures("forked_workers")

CASE = Case(problem=Problem(query=2, head_dim=8, dtype="fp32"))
NO_TIME = Deadlines(start=0.001)
DIES = """
import os, pathlib, signal
from attncheck.subjects.ideal import Ideal
times = pathlib.Path(__file__).with_name("times")
times.write_text(times.read_text() + "x" if times.exists() else "x")
if len(times.read_text()) <= {deaths}:
    os.kill(os.getpid(), signal.SIGKILL)
class Mine(Ideal):
    name = "mine"
"""


def run_unit(kernel, kind):
    case = CASE.to_json() if kind == "ask" else {}
    unit = Unit(kind=kind, stage="contract", kernel=kernel, device="cpu", tier="smoke", case=case)
    gate = GateWorker(choices(isolated=True), KnownFailures(()))
    try:
        return gate.do(unit)
    finally:
        gate.close()


@pytest.mark.parametrize(
    ("deaths", "kind", "status"),
    [(1, "describe", None), (2, "describe", "crash"), (1, "ask", "flaky")],
)
def test_death_while_loading_is_confirmed_by_loading_again(deaths, kind, status, tmp_path):
    """Shards that each describe a kernel must agree on it, so none of them reports a flaky load."""
    file = tmp_path / "mine.py"
    file.write_text(DIES.format(deaths=deaths))
    done = run_unit(f"{file}::Mine", kind)
    assert (tmp_path / "times").read_text() == "xx"
    assert not done.harness
    assert {answer.record.status for answer in done.answers} == ({status} if status else set())
    assert bool(done.units) == (deaths == 1 and kind == "describe")


def test_process_that_does_not_start_is_a_harness_error(monkeypatch):
    monkeypatch.setattr("attncheck.gate.gate_worker.Deadlines.of", lambda _: NO_TIME)
    done = run_unit("ideal", "describe")
    assert done.answers == ()
    assert "it did not answer whether it had started in 0.001 s" in done.harness


@pytest.mark.parametrize(
    ("kernel", "stage", "question", "shortages", "status"),
    [
        ("right", "bounds", "compare", 1, "pass"),
        ("right", "bounds", "compare", 99, "unsupported"),
        ("sees_the_next_key", "bounds", "compare", 2, "fail"),
        ("right", "baseline", "compare", 1, "pass"),
        ("right", "memory", "strides_gapped", 1, "pass"),
        ("right", "memory", "strides_gapped", 99, "unsupported"),
    ],
)
def test_judge_out_of_memory_retries_and_does_not_blame_the_kernel(
    kernel, stage, question, shortages, status, monkeypatch
):
    calls, waits, exact, draw = [], [], oracles.truth, input_tensors.draw_inputs

    def failing_first(function):
        def call(*arguments):
            calls.append(1)
            if len(calls) <= shortages:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return function(*arguments)

        return call

    problem = Problem(query=4, kv=8, mask=Spec.of("causal"), dtype="fp32")
    case = Case(problem=problem, question=question)
    unit = Unit(kind="ask", stage=stage, kernel=planted(kernel), device="cpu", case=case.to_json())
    gate = GateWorker(choices(), KnownFailures(()))
    gate.load(unit)
    if question == "compare":
        monkeypatch.setattr(oracles, "truth", failing_first(exact))
    else:
        monkeypatch.setattr(input_tensors, "draw_inputs", failing_first(draw))
    monkeypatch.setattr("attncheck.gate.gate_worker.time.sleep", waits.append)
    (answer,) = gate.do(unit).answers
    gate.close()
    assert answer.record.status == status, answer.record
    assert waits == [0.5, 2.0, 8.0][:shortages]
    if status == "unsupported":
        assert "too small for it: out of memory for the" in answer.record.reason


@pytest.mark.parametrize(
    ("others", "shortages", "asks"), [(True, 2, 3), (False, 2, 1), (True, 99, 4)]
)
def test_question_that_needs_much_memory_waits_while_others_hold_it(
    others, shortages, asks, monkeypatch
):
    tried, run_case = [], gate_worker.run_case

    def short_of_memory(subject, case, **options):
        tried.append(1)
        record = run_case(subject, case, **options)
        if len(tried) > shortages:
            return record
        reason = "this machine is too small for it: 37 GiB are needed, and 31 are free."
        return msgspec.structs.replace(record, status="unsupported", reason=reason)

    monkeypatch.setattr(gate_worker, "run_case", short_of_memory)
    monkeypatch.setattr(gate_worker, "others_hold_memory", lambda _: others)
    monkeypatch.setattr(gate_worker.time, "sleep", lambda _: None)
    case = Case(
        problem=Problem(query=4, kv=8, dtype="fp32"),
        question="strides_far",
        parameters={"tensor": 0},
    )
    unit = Unit(kind="ask", stage="properties", kernel="ideal", device="cpu", case=case.to_json())
    gate = GateWorker(choices(), KnownFailures(()))
    gate.load(unit)
    (answer,) = gate.do(unit).answers
    gate.close()
    assert len(tried) == asks
    assert answer.record.status == ("pass" if asks > shortages else "unsupported")


@pytest.mark.parametrize(("query", "places"), [(64, {"cpu"}), (512, {"", "cpu"}), (8192, {""})])
def test_judge_out_of_gpu_memory_tries_the_cpu_last(query, places, monkeypatch):
    tried = []

    def out_of_memory(subject, case, *, place, **_):
        tried.append(place)
        reason = "out of memory for the exact result"
        return blank_record(case, kernel=subject.name, reason=reason)

    monkeypatch.setattr("attncheck.gate.gate_worker.run_case", out_of_memory)
    monkeypatch.setattr("attncheck.gate.gate_worker.time.sleep", lambda _: None)
    case = Case(problem=Problem(query=query, kv=query, dtype="fp32"))
    unit = Unit(kind="ask", stage="probes", kernel="ideal", device="cpu", case=case.to_json())
    gate = GateWorker(choices(isolated=True), KnownFailures(()))
    (answer,) = gate.do(unit).answers
    gate.close()
    assert answer.record.status == "unsupported"
    assert (len(tried), set(tried)) == (3 + len(places), places)
    assert tried[-1] == max(places)
