"""What a kernel's process dies of beside its Cases, and a judge that has no memory for one."""

import pytest
import torch
from tests.gate.driven import choices, named

from attncheck import oracles
from attncheck.core.mod_spec import Spec
from attncheck.gate.gate_worker import GateWorker
from attncheck.gate.property_stage import KnownFailures
from attncheck.inputs import input_tensors
from attncheck.inputs.problem import Case, Problem
from attncheck.verify.remote_kernel import Deadlines
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


def did(kernel, kind):
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
def test_a_death_while_loading_is_confirmed_alone(deaths, kind, status, tmp_path):
    """Shards that each describe a kernel say the same of it: nothing of what was flaky."""
    file = tmp_path / "mine.py"
    file.write_text(DIES.format(deaths=deaths))
    done = did(f"{file}::Mine", kind)
    assert (tmp_path / "times").read_text() == "xx"
    assert not done.harness
    assert {answer.record.status for answer in done.answers} == ({status} if status else set())
    assert bool(done.units) == (deaths == 1 and kind == "describe")


def test_a_process_that_does_not_start_is_no_verdict_on_a_kernel(monkeypatch):
    monkeypatch.setattr("attncheck.gate.gate_worker.Deadlines.of", lambda _: NO_TIME)
    done = did("ideal", "describe")
    assert done.answers == ()
    assert "it did not answer whether it had started in 0.001 s" in done.harness


@pytest.mark.parametrize(
    ("kernel", "stage", "question", "lacks", "status"),
    [
        ("right", "bounds", "compare", 1, "pass"),
        ("right", "bounds", "compare", 99, "unsupported"),
        ("sees_the_next_key", "bounds", "compare", 2, "fail"),
        ("right", "baseline", "compare", 1, "pass"),
        ("right", "memory", "strides_gapped", 1, "pass"),
        ("right", "memory", "strides_gapped", 99, "unsupported"),
    ],
)
def test_a_judge_without_memory_asks_again_and_blames_no_kernel(
    kernel, stage, question, lacks, status, monkeypatch
):
    calls, waited, exact, draw = [], [], oracles.truth, input_tensors.draw_inputs

    def lacking(function):
        def call(*of):
            calls.append(1)
            if len(calls) <= lacks:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return function(*of)

        return call

    problem = Problem(query=4, kv=8, mask=Spec.of("causal"), dtype="fp32")
    case = Case(problem=problem, question=question)
    unit = Unit(kind="ask", stage=stage, kernel=named(kernel), device="cpu", case=case.to_json())
    gate = GateWorker(choices(), KnownFailures(()))
    gate.load(unit)
    if question == "compare":
        monkeypatch.setattr(oracles, "truth", lacking(exact))
    else:
        monkeypatch.setattr(input_tensors, "draw_inputs", lacking(draw))
    monkeypatch.setattr("attncheck.gate.gate_worker.time.sleep", waited.append)
    (answer,) = gate.do(unit).answers
    gate.close()
    assert answer.record.status == status, answer.record
    assert waited == [0.5, 2.0, 8.0, 0][: min(lacks, 4)]
    if status == "unsupported":
        assert "too small for it: out of memory for the" in answer.record.reason


@pytest.mark.parametrize(("query", "places"), [(64, {"cpu"}), (512, {"", "cpu"}), (8192, {""})])
def test_what_a_gpu_has_no_memory_to_judge_a_cpu_judges_last(query, places, monkeypatch):
    asked = []

    def lacking(subject, case, *, place, **_):
        asked.append(place)
        reason = "out of memory for the exact result"
        return blank_record(case, kernel=subject.name, reason=reason)

    monkeypatch.setattr("attncheck.gate.gate_worker.run_case", lacking)
    monkeypatch.setattr("attncheck.gate.gate_worker.time.sleep", lambda _: None)
    case = Case(problem=Problem(query=query, kv=query, dtype="fp32"))
    unit = Unit(kind="ask", stage="probes", kernel="ideal", device="cpu", case=case.to_json())
    gate = GateWorker(choices(isolated=True), KnownFailures(()))
    (answer,) = gate.do(unit).answers
    gate.close()
    assert answer.record.status == "unsupported"
    assert (len(asked), set(asked)) == (5, places)
    assert asked[-1] == max(places)
