"""Which answers can be held against a baseline, and what is better of what is said of a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.core.errors import AttncheckError
from attncheck.inputs.distributions import distribution_named
from attncheck.records.baseline_entries import baseline_entries

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from attncheck.records.baseline_entries import Entry, Key
    from attncheck.records.record import Environment, Record, Status
    from attncheck.records.run_reports import Answer, Stage

__all__ = ["KEPT", "KINDS", "STAGES", "comparable", "measurements"]

KINDS: dict[Status, int] = {
    "pass": 0,
    "warn": 1,
    "inconclusive": 1,
    "flaky": 2,
    "unsupported": 3,
    "fail": 4,
    "error": 5,
    "oom": 6,
    "timeout": 7,
    "crash": 8,
}
"""What is said of a kernel, from the best to the worst."""


KEPT: frozenset[Status] = frozenset({"pass", "warn", "inconclusive", "unsupported"})
"""What a baseline may keep: a wrong answer is wrong whatever was before."""

STAGES: frozenset[Stage] = frozenset({"baseline"})
"""Parts of a gate that ask the same Cases every time, and measure errors beside ideal kernels'.

The bounds, which ask most, say only whether an error is one of rounding.
"""

_JUDGED = frozenset({"pass", "warn", "inconclusive"})


def measurements(answers: Iterable[Answer]) -> Iterator[Record]:
    """Records of the answers that may be held against a baseline."""
    # What is smaller than a Case of the plan is another Case each time that something fails.
    return (a.record for a in answers if a.stage in STAGES and not a.smallest_of)


def comparable(
    records: Iterable[Record], environments: Mapping[str, Environment]
) -> dict[Key, tuple[Entry, bool]]:
    """What can be held against a baseline: the entry, and whether roundings are independent in it.

    Left out are questions other than ``compare``, verdicts on numbers without an ``accuracy``, and
    Cases of which the exact result is in doubt. Of what was asked twice the worse answer counts.
    """
    found: dict[Key, tuple[Entry, bool]] = {}
    for record in records:
        if record.status not in KINDS or (record.status in _JUDGED and not _measured(record)):
            continue
        for entry in baseline_entries([record], environments):
            other = found.get(entry.key)
            if other is None or KINDS[other[0].status] < KINDS[entry.status]:
                found[entry.key] = entry, _independent(record)
    return found


def _measured(record: Record) -> bool:
    return isinstance(record.accuracy, dict)


def _independent(record: Record) -> bool:
    """Whether its inputs are drawn without structure: else one rounding may decide all rows."""
    name = record.case.get("problem", {}).get("distribution", "normal")
    try:
        return distribution_named(name).generic
    except AttncheckError:  # of another version
        return False
