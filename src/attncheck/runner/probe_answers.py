"""What a probe makes of an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from attncheck.records.record import FAILED_STATUSES

if TYPE_CHECKING:
    from attncheck.inputs.problem import Problem
    from attncheck.records.record import Record, Status
    from attncheck.verify.executor import Failure

__all__ = ["Tried", "Verdict", "as_tried", "of_failure", "verdict_of"]

Verdict = Literal["takes", "refuses", "raises", "wrong"]
"""``refuses``: said so, beforehand or by a clean exception. ``raises``: any other exception, or it
broke its contract. ``wrong``: an answer that is no rounding."""

_OF_STATUS: dict[Status, Verdict] = {
    **dict.fromkeys(FAILED_STATUSES, "raises"),
    "unsupported": "refuses",
    "fail": "wrong",
}
_OF_THE_CALL = {"contract", "alias", "mutation"}  # rules


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was tried.

    Attributes:
        aspect: The field of the table that it is for; ``lengths``, ``batch`` and ``strides`` have
            none.
        what: What was tried of it.
        verdict: See ``Verdict``; of a promise, whether it was kept.
        reason: Why not, in one line; empty where it takes it.
        problem: What was asked, in one line.
    """

    aspect: str
    what: str
    verdict: Verdict
    reason: str = ""
    problem: str = ""


def verdict_of(record: Record) -> Verdict:
    """What the kernel did with what was asked."""
    found = record.judgement
    if found is not None and found.rule in _OF_THE_CALL:
        return "raises"
    return _OF_STATUS.get(record.status, "takes")


def as_tried(aspect: str, what: str, record: Record, problem: Problem | str) -> Tried:
    """The answer of ``record`` to ``what``, which was asked as ``problem``."""
    said, judgement = verdict_of(record), record.judgement
    reason = record.reason
    if judgement is not None:
        told = judgement.rule not in _OF_THE_CALL | {"relation"}  # the question's name says that
        reason = f"{judgement.rule}: {judgement.reason}" if told else judgement.reason
    return Tried(
        aspect=aspect,
        what=what,
        verdict=said,
        reason="" if said == "takes" else reason,
        problem=str(problem),
    )


def of_failure(aspect: str, what: str, said: str | Failure, problem: Problem) -> Tried:
    """The answer of a kernel that gave none: it refused, or raised."""
    refuses = isinstance(said, str) or said.kind == "refused"
    return Tried(
        aspect=aspect,
        what=what,
        verdict="refuses" if refuses else "raises",
        reason=said if isinstance(said, str) else said.message,
        problem=str(problem),
    )
