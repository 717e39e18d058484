"""What is said of a finding: one line that the author of a kernel understands."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attncheck.judge.shares import Share
    from attncheck.judgement import Place
    from attncheck.tensor_names import TensorName

__all__ = ["beyond", "element", "number", "tile", "times"]

_DIGITS = 17  # a float64 is told apart by no more


def element(tensor: TensorName, place: Place) -> str:
    """An element as it is indexed: ``out[0, 3, 17, 5]``, ``lse[0, 3, 17]``."""
    return f"{tensor}{list(place.index(tensor))}"


def number(value: float, within: float) -> str:
    """``value`` with the digits that matter where ``within`` is allowed: two of it."""
    if not math.isfinite(value) or value == 0:
        return f"{value + 0.0:g}"  # −0 is 0
    if not (math.isfinite(within) and within > 0):
        return f"{value:.{_DIGITS}g}"
    digits = math.floor(math.log10(abs(value))) - math.floor(math.log10(within)) + 2
    return f"{value:#.{max(2, min(digits, _DIGITS))}g}".rstrip(".")


def times(size: float) -> str:
    """A ratio for reading: ``4.6``, ``159``, ``1.2e+05``."""
    return f"{size:.3g}" if size >= 100 else f"{size:.2g}"


def beyond(found: Share, of: str, whose: str) -> str:
    """What is beyond an allowance.

    Args:
        found: The largest share.
        of: What the allowance is called: ``the bound``.
        whose: What was compared: ``elements``.
    """
    allowed = found.allowance
    are = "is" if found.beyond == 1 else "are"
    said = f"({times(found.size)} × {of})" if math.isfinite(found.size) else "(no bound is met)"
    return (
        f"{element(found.tensor, found.place)} = {number(found.got, allowed)}, but should be "
        f"{number(found.exact, allowed)} ± {number(allowed, allowed)} {said}; "
        f"{found.beyond} of {found.elements} {whose} {are} beyond it"
    )


def tile(place: Place, tiles: tuple[int, int] | None, queries: int) -> str:
    """The query tile that an element lies in: ``query tile 3, rows 192–255``; empty without."""
    if tiles is None:
        return ""
    block = tiles[0]
    first = place.query // block * block
    return f"query tile {place.query // block}, rows {first}–{min(first + block, queries) - 1}"
