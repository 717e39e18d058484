"""How cases stand beside what was before: the order in which that is told, and beside several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from attncheck.records.run_reports import BaselineStanding, Change

__all__ = ["joined", "ordered"]

_ORDER: tuple[BaselineStanding, ...] = (
    "worse",
    "better",
    "gone",
    "new",
    "within rounding",
    "identical",
)
# Of a case beside several: what fails first, and what was compared before what was not.
_TELLING: tuple[BaselineStanding, ...] = (
    *("worse", "better", "within rounding", "identical"),
    *("gone", "new"),
)


def ordered(changes: Iterable[Change]) -> tuple[Change, ...]:
    """The worst first, then by kernel and case."""
    return tuple(sorted(changes, key=lambda c: (_ORDER.index(c.standing), c.kernel, c.case_id)))


def joined(names: Sequence[str], of: Sequence[Iterable[Change]]) -> tuple[Change, ...]:
    """Changes beside several things as those beside one: of each case what tells most.

    Args:
        names: What each is beside: where there are several, reasons begin with it.
        of: Changes beside each.
    """
    found: dict[tuple[str, str], Change] = {}
    for name, group in zip(names, of, strict=True):
        for one in group:
            reason = f"{name}: {one.reason}" if one.reason and len(names) > 1 else one.reason
            key = (one.kernel, one.case_id)
            other = found.get(key)
            if other is None or _TELLING.index(one.standing) < _TELLING.index(other.standing):
                found[key] = replace(one, reason=reason)
    return ordered(found.values())
