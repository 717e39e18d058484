"""Stage probes: inputs whose right answer is known beforehand, on layouts that cover."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.gate.planning import moved
from attncheck.runner.quick import questions
from attncheck.verify.question_fit import COMPARE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.gate.planning import Planning
    from attncheck.records.run_reports import Stage
    from attncheck.runner.quick import Question
    from attncheck.workers.units import Unit

__all__ = ["probing"]

_STAGE: Stage = "probes"


def probing(planning: Planning) -> Iterator[Unit]:
    """Each probe of ``attncheck check``: in one of the dtypes in turn, or in every one.

    Moved to the nearest layout that the kernel takes, as far as the probe may be asked there.
    """
    dtypes, asked = planning.dtypes, set()
    every = planning.choices.tier.each_dtype
    for turn, dtype in enumerate(dtypes):
        for number, question in enumerate(_probes(dtype)):
            if not every and number % len(dtypes) != turn:
                continue
            unit = _unit(planning, question)
            if unit is not None and unit.id not in asked:
                asked.add(unit.id)
                yield unit


def _probes(dtype: str) -> list[Question]:
    return [one for one in questions(dtype) if one.case.question != COMPARE]


def _unit(planning: Planning, question: Question) -> Unit | None:
    case = question.case
    for problem in planning.concerned(case.problem):
        (found,) = planning.fitting(case.question, [problem]) or (None,)
        if found is not None:
            return planning.ask(_STAGE, moved(case, found), question.name)
    planning.drop(_STAGE, case, question.name, planning.reason)
    return None
