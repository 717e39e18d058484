"""How a number looks: three significant digits, one notation for each kind."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attncheck.record import Place

__all__ = ["NOTHING", "duration", "place", "quotient", "ratio", "scientific", "superscript"]

NOTHING = "—"
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_UNITS = (("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3), ("s ", 1.0))


def scientific(number: float, *, signed: bool = False) -> str:
    """``1.53e-03``; ``0``, ``nan``, ``inf`` and ``-inf`` as such."""
    if number == 0:
        return "0"
    if not math.isfinite(number):
        return str(number)
    return f"{number:+.2e}" if signed else f"{number:.2e}"


def quotient(error: float, reference: float) -> float | None:
    """``error / reference``; None where the reference is 0 or itself not a number."""
    return error / reference if reference != 0 and math.isfinite(reference) else None


def ratio(error: float, reference: float) -> str:
    """``1.02×``; ``exact`` where both are 0, a dash where only the reference is."""
    value = quotient(error, reference)
    if value is None:
        return "exact" if error == 0 and reference == 0 else NOTHING
    return f"{_three_digits(value)}×" if math.isfinite(value) else str(value)


def duration(seconds: float | None) -> str:
    """``12.3 ms``; the unit takes two columns, so that numbers end in line."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    for unit, size in _UNITS:
        digits = _three_digits(seconds / size)
        if float(digits) < 1000:
            return f"{digits} {unit}"
    return f"{seconds:.0f} s "


def place(at: Place | None) -> str:
    """``b,h,q,d``, or ``b,h,q`` of an LSE row."""
    if at is None:
        return NOTHING
    indices = (at.batch, at.head, at.query) + ((at.dim,) if at.dim >= 0 else ())
    return ",".join(map(str, indices))


def superscript(number: int) -> str:
    """A footnote's number."""
    return str(number).translate(_SUPERSCRIPTS)


def _three_digits(number: float) -> str:
    return f"{number:#.3g}".rstrip(".")
