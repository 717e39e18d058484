"""What a kernel's process dies of beside its Cases: as it starts, and as the kernel is loaded."""

import pytest
from tests.gate.driven import choices

from attncheck.gate.gate_worker import GateWorker
from attncheck.gate.property_stage import KnownFailures
from attncheck.inputs.problem import Case, Problem
from attncheck.verify.remote_kernel import Deadlines
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
