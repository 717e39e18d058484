"""Blind spots: how small a fault the problems of a report would have shown, in words."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attncheck.records.problem_summary import problem_of
from attncheck.reporting.number_text import percent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from attncheck.core.judgement import BlindSpot
    from attncheck.records.record import Record

_SCALE = 0.01  # the class of fault "a scale 1 % off"


def visible_faults(records: Iterable[Record]) -> str:
    """Describe what the problems of ``records`` would have shown, the easiest first.

    ``would have shown: the scale off by 0.12–0.43 %, half, zeros; not: …``; empty where nothing
    was judged.
    """
    by_record = list(_spots(records))
    if not by_record:
        return ""
    spots = [spot for _, spot in by_record]
    scaled = [spot for record, spot in by_record if problem_of(record).operation != "softmax"]
    facts = [
        _least("the scale off by", [spot.scale for spot in scaled]),
        _least("one key's weight off by", [spot.weight for spot in spots]),
        _dropped([s.dropped_keys for s in spots if s.dropped_keys is not None]),
        _bits([spot.accumulator_bits for spot in scaled]),
        _always("half the output", [spot.half for spot in spots]),
        _always("zeros", [spot.zeros for spot in spots]),
    ]
    shown = [fact for fact, seen in facts if fact and seen]
    hidden = [fact for fact, seen in facts if fact and not seen]
    parts = [f"would have shown: {', '.join(shown)}"] if shown else []
    parts += (
        [f"{'not' if shown else 'would not have shown'}: {', '.join(hidden)}"] if hidden else []
    )
    return "; ".join(parts)


def missed_faults(records: Sequence[Record]) -> tuple[str, ...]:
    """Return the classes of fault that no problem of ``records`` would have shown."""
    by_record = list(_spots(records))
    if not by_record:
        return ()
    spots = [spot for _, spot in by_record]
    # With one key there is none to drop.
    several = [spot for spot in spots if spot.dropped_keys is not None]
    scaled = [spot for record, spot in by_record if problem_of(record).operation != "softmax"]
    classes = {
        "a dropped key": several and not any(spot.dropped_keys for spot in several),
        "a scale 1 % off": scaled and not any(spot.scale <= _SCALE for spot in scaled),
        "half the output": not any(spot.half for spot in spots),
        "an output of zeros": not any(spot.zeros for spot in spots),
    }
    return tuple(name for name, missed in classes.items() if missed)


def _spots(records: Iterable[Record]) -> Iterator[tuple[Record, BlindSpot]]:
    for record in records:
        if record.judgement and record.judgement.blind_spot:
            yield record, record.judgement.blind_spot


_Fact = tuple[str, bool]
"""A fault's name, and whether it would have shown; nothing where nobody could ask."""
_NOTHING: _Fact = ("", False)


def _least(fault: str, sizes: list[float]) -> _Fact:
    """A fault of a size: the least that shows, in the best problem and in the worst."""
    if not sizes:
        return _NOTHING
    # The best problem decides what a suite sees; the worst how far to trust one of it.
    best, worst = min(sizes), max(sizes)
    if math.isinf(best):
        return f"{fault.removesuffix(' off by')} of any size", False
    if math.isinf(worst):
        return f"{fault} {percent(best)} % (in {_count(map(math.isfinite, sizes))})", True
    return f"{fault} {_range(percent(best), percent(worst))} %", True


def _dropped(shares: list[float]) -> _Fact:
    if not shares:
        return _NOTHING
    if not any(shares):
        return "a dropped key", False
    return f"{_range(percent(min(shares)), percent(max(shares)))} % of single dropped keys", True


def _bits(bits: list[int]) -> _Fact:
    if not bits:
        return _NOTHING
    if not any(bits):
        return "short accumulators", False
    return f"sums of {_range(str(min(bits)), str(max(bits)))} bits", True


def _always(fault: str, seen: list[bool]) -> _Fact:
    some = any(seen) and not all(seen)
    return f"{fault} (in {_count(seen)})" if some else fault, any(seen)


def _count(seen: Iterable[bool]) -> str:
    answers = list(seen)
    return f"{sum(answers)} of {len(answers)}"


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low}–{high}"
