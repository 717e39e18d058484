"""What a failure says by itself of what may be wrong, where no fault model explains it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.errors import AttncheckError
from attncheck.examine.answer import answered
from attncheck.hypotheses.signs import MOST_PLACES, SIGNS
from attncheck.probes import PROBES
from attncheck.problem import Case
from attncheck.record import Diagnosis, Explanation
from attncheck.relations import RELATIONS

if TYPE_CHECKING:
    from attncheck.examine.executor import Executor
    from attncheck.problem import Problem
    from attncheck.record import Record
    from attncheck.subjects.contract import Subject

__all__ = ["by_signs"]

_OF_REPEATING = ("repeat", "repeats")
_OF_BATCHES = ("alone_in_batch", "batch_permutation", "neighbours")
_AGAIN = 2  # times that a question is asked again


def by_signs(
    record: Record, subject: Subject, *, device: str, executor: Executor
) -> Diagnosis | None:
    """What the failure says; None where that is nothing.

    Args:
        record: Of status ``fail``, of numbers that were wrong.
        subject: The kernel, which is asked again.
        device: ``cpu`` or ``cuda``.
        executor: How to call it.
    """
    if record.status != "fail" or record.judgement is None:
        return None
    try:
        name = _sign(Case.from_json(record.case), subject, device, executor)
    except AttncheckError:  # asked of nothing that can be asked again
        return None
    if name is None:
        return None
    told = Explanation(model=name, sentence=SIGNS[name], share=1.0, explains_all=True)
    return Diagnosis(ranked=(told,), tied=1, tried=0)


def _sign(case: Case, subject: Subject, device: str, executor: Executor) -> str | None:
    def passes(question: Case) -> bool:
        found = answered(subject, question, device=device, executor=executor, brief=True)
        return found.status == "pass"

    asked = case.question
    if asked in _OF_REPEATING:
        return "not-the-same-again"
    if asked in _OF_BATCHES and passes(Case(problem=case.problem)):
        return None if passes(case) else "depends-on-the-batch"
    if (asked in RELATIONS or asked in PROBES or asked == "compare") and any(
        passes(case) for _ in range(_AGAIN)
    ):
        return "not-the-same-again"
    if asked in RELATIONS and (fewer := _that_fit(case.problem)) is not None:
        smaller = Case(problem=fewer, question=asked, parameters=case.parameters)
        return "grid-axis-exceeded" if passes(smaller) else None
    return None


def _that_fit(problem: Problem) -> Problem | None:
    """As many sequences as an axis of a grid has room for; None where all have."""
    if problem.batch * problem.heads <= MOST_PLACES or problem.heads > MOST_PLACES:
        return None
    return problem.replace(batch=MOST_PLACES // problem.heads)
