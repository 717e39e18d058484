"""Known failures in a gate: asked anew every time, counted, and no reason to fail."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from msgspec.structs import replace

from attncheck.suite.catalogue import folder
from attncheck.suite.known_failures import FILE, KnownFailure, read

if TYPE_CHECKING:
    from attncheck.inputs.problem import Case
    from attncheck.records.record import Record
    from attncheck.workers.units import Unit

__all__ = ["KNOWN", "Known"]

KNOWN = "known failure"
"""How the reason of one begins."""
_EXCUSED = frozenset({"fail", "error"})
"""What may be known; a process that is lost, or hangs, never is."""
_LOST = frozenset({"crash", "timeout", "oom"})


class Known:
    """The entries beside the properties.

    Attributes:
        entries: In order; the first that is about a question counts.
    """

    def __init__(self, entries: tuple[KnownFailure, ...] | None = None) -> None:
        if entries is None:
            path = folder() / FILE
            entries = read(path) if path.exists() else ()
        self.entries = entries

    def of_draw(self, unit: Unit) -> KnownFailure | None:
        """The entry about a property's part, which is asked in place of what is drawn."""
        return next(
            (
                each
                for each in self.entries
                if _is_about(each, unit, unit.dtype)
                and fnmatchcase(unit.test, each.test)
                and (not each.families or unit.family in each.families)
            ),
            None,
        )

    def settled(self, record: Record, unit: Unit, case: Case) -> Record:
        """``record``, or what is to be made of it where it is known to be wrong.

        A known failure is a warning; so is one that holds where its very Case was asked.
        """
        entry = next((each for each in self.entries if _about(each, unit, case)), None)
        if entry is None:
            return record
        if record.status in _EXCUSED:
            return _warning(record, f"{KNOWN}: {entry.reason}")
        holds = record.status not in {*_LOST, "unsupported"}
        if _is_its_case(entry, case) and unit.test and not entry.depends_on and holds:
            return _warning(record, f"{KNOWN} that no longer fails: remove {entry.where}.")
        return record


def _is_about(entry: KnownFailure, unit: Unit, dtype: str) -> bool:
    return (
        entry.is_of(unit.kernel)
        and entry.device in {"", unit.device}
        and (not entry.dtypes or dtype in entry.dtypes)
    )


def _about(entry: KnownFailure, unit: Unit, case: Case) -> bool:
    """Whether ``entry`` is about a question: of its property, or of no property the same one.

    To compare is what all stages ask: of that, elsewhere, an entry is about its very Case alone.
    """
    if not _is_about(entry, unit, case.problem.dtype):
        return False
    if unit.test:
        names = {unit.variant, case.problem.mask.name}
        mine = fnmatchcase(unit.test, entry.test)
    elif _is_its_case(entry, case):
        return True
    else:
        names = {case.problem.mask.name}
        mine = entry.case.question == case.question != "compare"
    return mine and (not entry.families or bool(names & set(entry.families)))


def _is_its_case(entry: KnownFailure, case: Case) -> bool:
    return entry.case_in(case.problem.dtype).id == case.id


def _warning(record: Record, reason: str) -> Record:
    judgement = record.judgement
    if judgement is not None:
        judgement = replace(judgement, status="warn", reason=reason)
    return replace(record, status="warn", reason=reason, judgement=judgement)
