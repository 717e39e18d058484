"""``gate --sanitizer``: its units, the one line without the tool, and failing findings."""

from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from tests.gate.gate_driver import choices

from attncheck.core.judgement import Judgement
from attncheck.gate.planning import Planning
from attncheck.gate.stages import sanitize_kernel, sanitizer_units
from attncheck.records.record import FAILED_STATUSES
from attncheck.reporting.gate_document import not_covered
from attncheck.subjects.load import load_subject
from attncheck.verify import sanitizer
from attncheck.verify.executor import InProcess
from attncheck.verify.run_case import new_record
from attncheck.workers.units import Unit

_WHERE = "00000000"


def planning_for(device="cuda", **options):
    unit = Unit(kind="describe", stage="contract", kernel="ideal", device=device, tier="smoke")
    result = Planning(unit, load_subject("ideal"), InProcess(), choices(**options), _WHERE)
    result._dtypes = ("bf16",)
    return result


def test_sanitizer_is_off_by_default():
    assert list(sanitizer_units(planning_for())) == []


@pytest.mark.parametrize(
    ("device", "reason"), [("cpu", "nothing of a CPU"), ("cuda", sanitizer.ABSENT)]
)
def test_without_the_tool_one_line_reports_it_and_nothing_fails(monkeypatch, device, reason):
    monkeypatch.setattr(sanitizer, "sanitizer", lambda: None)
    planning = planning_for(device, sanitizer=True)
    assert list(sanitizer_units(planning)) == []
    (answer,) = planning.refused
    assert answer.record.status == "unsupported"
    report = SimpleNamespace(
        harness=(),
        unfinished=0,
        unfinished_because="",
        kernels={"ideal": ""},
        absent={},
        stages=("memory",),
        shard="",
        answers=(answer,),
    )
    assert [line for line in not_covered(report) if reason in line] == [
        f"ideal does not support 1 question: {answer.record.reason}"
    ]


def test_each_sanitizer_tool_is_a_unit_and_its_finding_fails_the_kernel(monkeypatch):
    monkeypatch.setattr(sanitizer, "sanitizer", lambda: "/planted")
    planning = planning_for(sanitizer=True)
    units = list(sanitizer_units(planning))
    assert [unit.variant.split()[-1] for unit in units] == ["memcheck", "racecheck", "synccheck"]
    assert {unit.stage for unit in units} == {"memory"}

    def planted_run(kernel, cases, tool, *, convention, device):
        assert (kernel, tool, convention, device) == ("ideal", "memcheck", "", "cuda")
        finding = Judgement(status="fail", rule="memory", reason="memcheck: planted")
        first, *rest = (
            new_record(load_subject("ideal"), case, device="cuda", variant="", environment="")
            for case in cases
        )
        return (replace(first, status="fail", judgement=finding), *rest)

    monkeypatch.setattr(sanitizer, "run_sanitizer", planted_run)
    done = sanitize_kernel(units[0], planning)
    assert len(done.answers) == 3
    assert not done.units  # shrinking would run without the tool
    first = done.answers[0].record
    assert first.status in FAILED_STATUSES
    assert (first.kernel, first.environment, first.variant) == ("ideal", _WHERE, units[0].variant)
