"""The progress line of a gate and its estimate by stage; the pace in a report's head."""

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


def event(done_unit, finished, *, seconds=1.0, units=(), kind="done", running=1):
    done = (
        UnitResult(unit=done_unit.id, seconds=seconds, units=tuple(units))
        if kind != "begun"
        else None
    )
    return RunEvent(
        kind=kind,
        unit=done_unit,
        done=done,
        finished=finished,
        known=101,
        running=running,
        seconds_left=1e6,
    )


def test_describing_a_kernel_gives_no_estimate():
    progress = GateProgress()
    first = event(FIRST, 1, seconds=90.0, units=(*CONTRACT, *BOUNDS))
    progress.hear(first)
    assert progress.line(first) == "starting 1/101"
    for number, done_unit in enumerate(CONTRACT[:9], 2):
        progress.hear(event(done_unit, number))
    assert progress.seconds_left(event(CONTRACT[8], 10)) is None


def test_estimate_extrapolates_each_stage_from_its_own_speed():
    progress = GateProgress()
    progress.hear(event(FIRST, 1, seconds=90.0, units=(*CONTRACT, *BOUNDS)))
    for number, done_unit in enumerate(CONTRACT, 2):
        progress.hear(event(done_unit, number, seconds=1.0))
    # No bounds are measured yet.
    assert progress.seconds_left(event(CONTRACT[-1], 13)) == pytest.approx(88)
    for number, done_unit in enumerate(BOUNDS[:8], 14):
        progress.hear(event(done_unit, number, seconds=5.0, running=2))
    last = event(BOUNDS[7], 21, running=2)
    assert progress.seconds_left(last) == pytest.approx(80 * 5 / 2)
    assert progress.line(last).endswith("about 3 min left")


def test_no_estimate_before_the_bounds_are_drawn():
    progress, draw = GateProgress(), unit("bounds", 0, "draw")
    progress.hear(event(FIRST, 1, units=(*CONTRACT, draw)))
    for number, done_unit in enumerate(CONTRACT, 2):
        progress.hear(event(done_unit, number))
    assert progress.seconds_left(event(CONTRACT[-1], 13)) is None
    progress.hear(event(draw, 14, units=BOUNDS))
    assert progress.seconds_left(event(draw, 14)) is not None


def test_recalled_results_and_other_commits_do_not_count():
    progress = GateProgress()
    for number, done_unit in enumerate(CONTRACT, 1):
        progress.hear(event(done_unit, number, kind="recalled"))
    assert progress.seconds_left(event(CONTRACT[-1], 12)) is None
    assert progress.hear(event(unit("baseline", 0, commit="0" * 40), 13)) == []


def test_report_head_shows_the_pace_and_the_share_of_compilation():
    def answer(status, seconds, compiling):
        record = SimpleNamespace(status=status)
        return SimpleNamespace(record=record, seconds=seconds, compiling=compiling, smallest_of="")

    answers = [answer("pass", 3.0, 2.0), answer("fail", 1.0, 0.0), answer("unsupported", 0.0, 0.0)]
    pace = list(_pace(SimpleNamespace(answers=answers, seconds=4.0)))
    assert pace == ["0.5 questions a second", "50 % of the work in compilers"]
    interpreted = list(_pace(SimpleNamespace(answers=answers[1:], seconds=4.0)))
    assert interpreted == ["0.25 questions a second"]
    assert list(_pace(SimpleNamespace(answers=answers[2:], seconds=4.0))) == []
