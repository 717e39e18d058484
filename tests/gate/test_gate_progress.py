"""The line that says how far a gate is: no estimate from nothing, and then stage by stage."""

from types import SimpleNamespace

import pytest

from attncheck.cli.gate import GateProgress
from attncheck.reporting.gate_document import _pace
from attncheck.workers.pool import RunEvent
from attncheck.workers.units import Unit, UnitResult


def unit(stage, number, kind="ask", commit=""):
    return Unit(
        kind=kind, stage=stage, kernel="k", variant=str(number), device="cpu", commit=commit
    )


FIRST = unit("contract", 0, "describe")
CONTRACT = [unit("contract", n) for n in range(12)]
BOUNDS = [unit("bounds", n) for n in range(88)]


def event(one, finished, *, seconds=1.0, units=(), kind="done", running=1):
    done = UnitResult(unit=one.id, seconds=seconds, units=tuple(units)) if kind != "begun" else None
    return RunEvent(
        kind=kind,
        unit=one,
        done=done,
        finished=finished,
        known=101,
        running=running,
        seconds_left=1e6,
    )


def test_nothing_is_estimated_from_what_a_kernel_is():
    count = GateProgress()
    first = event(FIRST, 1, seconds=90.0, units=(*CONTRACT, *BOUNDS))
    count.hear(first)
    assert count.line(first) == "starting 1/101"
    for number, one in enumerate(CONTRACT[:9], 2):
        count.hear(event(one, number))
    assert count.seconds_left(event(CONTRACT[8], 10)) is None


def test_each_stage_takes_as_long_as_it_has_taken():
    count = GateProgress()
    count.hear(event(FIRST, 1, seconds=90.0, units=(*CONTRACT, *BOUNDS)))
    for number, one in enumerate(CONTRACT, 2):
        count.hear(event(one, number, seconds=1.0))
    assert count.seconds_left(event(CONTRACT[-1], 13)) == pytest.approx(
        88
    )  # of bounds nothing is known
    for number, one in enumerate(BOUNDS[:8], 14):
        count.hear(event(one, number, seconds=5.0, running=2))
    last = event(BOUNDS[7], 21, running=2)
    assert count.seconds_left(last) == pytest.approx(80 * 5 / 2)
    assert count.line(last).endswith("about 3 min left")


def test_nothing_is_estimated_before_it_is_known_how_many_questions_the_bounds_have():
    count, draw = GateProgress(), unit("bounds", 0, "draw")
    count.hear(event(FIRST, 1, units=(*CONTRACT, draw)))
    for number, one in enumerate(CONTRACT, 2):
        count.hear(event(one, number))
    assert count.seconds_left(event(CONTRACT[-1], 13)) is None
    count.hear(event(draw, 14, units=BOUNDS))
    assert count.seconds_left(event(draw, 14)) is not None


def test_what_the_journal_had_and_what_was_before_count_for_nothing():
    count = GateProgress()
    for number, one in enumerate(CONTRACT, 1):
        count.hear(event(one, number, kind="recalled"))
    assert count.seconds_left(event(CONTRACT[-1], 12)) is None
    assert count.hear(event(unit("baseline", 0, commit="0" * 40), 13)) == []


def test_the_head_of_a_report_says_the_pace_and_what_compilers_took():
    def answer(status, seconds, compiling):
        record = SimpleNamespace(status=status)
        return SimpleNamespace(record=record, seconds=seconds, compiling=compiling, smallest_of="")

    said = [answer("pass", 3.0, 2.0), answer("fail", 1.0, 0.0), answer("unsupported", 0.0, 0.0)]
    pace = list(_pace(SimpleNamespace(answers=said, seconds=4.0)))
    assert pace == ["0.5 questions a second", "50 % of the work in compilers"]
    interpreted = list(_pace(SimpleNamespace(answers=said[1:], seconds=4.0)))
    assert interpreted == ["0.25 questions a second"]
    assert list(_pace(SimpleNamespace(answers=said[2:], seconds=4.0))) == []
