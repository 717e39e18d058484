"""``--sanitizer`` in a gate: what is asked, what is said without the tool, and what is found."""

from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from tests.gate.driven import choices

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


def planning(device="cuda", **options):
    unit = Unit(kind="describe", stage="contract", kernel="ideal", device=device, tier="smoke")
    found = Planning(unit, load_subject("ideal"), InProcess(), choices(**options), _WHERE)
    found._dtypes = ("bf16",)
    return found


def test_nobody_asks_for_it():
    assert list(sanitizer_units(planning())) == []


@pytest.mark.parametrize(
    ("device", "said"), [("cpu", "nothing of a CPU"), ("cuda", sanitizer.ABSENT)]
)
def test_without_a_tool_one_line_says_so_and_nothing_fails(monkeypatch, device, said):
    monkeypatch.setattr(sanitizer, "sanitizer", lambda: None)
    found = planning(device, sanitizer=True)
    assert list(sanitizer_units(found)) == []
    (answer,) = found.refused
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
    assert [line for line in not_covered(report) if said in line] == [
        f"ideal does not support 1 question: {answer.record.reason}"
    ]


def test_with_one_each_tool_is_a_unit_and_what_it_finds_fails_the_kernel(monkeypatch):
    monkeypatch.setattr(sanitizer, "sanitizer", lambda: "/planted")
    found = planning(sanitizer=True)
    units = list(sanitizer_units(found))
    assert [unit.variant.split()[-1] for unit in units] == ["memcheck", "racecheck", "synccheck"]
    assert {unit.stage for unit in units} == {"memory"}

    def planted(kernel, cases, tool, *, convention, device):
        assert (kernel, tool, convention, device) == ("ideal", "memcheck", "", "cuda")
        said = Judgement(status="fail", rule="memory", reason="memcheck: planted")
        first, *rest = (
            new_record(load_subject("ideal"), case, device="cuda", variant="", environment="")
            for case in cases
        )
        return (replace(first, status="fail", judgement=said), *rest)

    monkeypatch.setattr(sanitizer, "run_sanitizer", planted)
    done = sanitize_kernel(units[0], found)
    assert len(done.answers) == 3
    assert not done.units  # a smaller one would be asked without the tool
    first = done.answers[0].record
    assert first.status in FAILED_STATUSES
    assert (first.kernel, first.environment, first.variant) == ("ideal", _WHERE, units[0].variant)
