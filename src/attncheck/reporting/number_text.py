"""Numbers as text: three significant digits, one notation for each kind."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attncheck.core.judgement import Place, Worst
    from attncheck.core.tensor_names import TensorName

NOTHING = "—"
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_TENFOLD = 10.0  # relative error above which its size does not matter
_UNITS = (("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3), ("s ", 1.0))


def scientific(number: float, *, signed: bool = False) -> str:
    """Return ``1.53e-03``; ``0``, ``nan``, ``inf`` and ``-inf`` as such."""
    if number == 0:
        return "0"
    if not math.isfinite(number):
        return str(number)
    return f"{number:+.2e}" if signed else f"{number:.2e}"


def quotient(error: float, reference: float) -> float | None:
    """Return ``error / reference``; None if the reference is 0 or not finite."""
    return error / reference if reference != 0 and math.isfinite(reference) else None


def ratio(error: float, reference: float) -> str:
    """Return ``1.02×``; ``exact`` if both are 0, a dash for other references of 0 or not finite."""
    value = quotient(error, reference)
    # 0 ÷ 0 is a kernel without error; any other error ÷ 0 has no ratio.
    if value is None:
        return "exact" if error == 0 and reference == 0 else NOTHING
    return f"{_three_digits(value)}×" if math.isfinite(value) else str(value)


def percent(number: float) -> str:
    """Return ``0.31`` for 0.0031, without %: two digits, ">99" for almost 1, ">999" from 10 on."""
    if number == 0 or not math.isfinite(number):
        return "0" if number == 0 else str(number)
    if number >= _TENFOLD:
        return ">999"
    text = f"{100 * number:.2g}"
    # Rounding less than 1 up to 100 would claim all.
    return f"{float(text):g}" if float(text) != 100 or number >= 1 else ">99"


def duration(seconds: float | None) -> str:
    """Return ``12.3 ms``; the unit takes two columns, so that numbers are aligned."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    for unit, size in _UNITS:
        digits = _three_digits(seconds / size)
        # Compare after rounding, since 999.9 µs would be shown as 1.00e+03.
        if float(digits) < 1000:
            return f"{digits} {unit}"
    return f"{seconds:.0f} s "


def place(at: Place | None, tensor: TensorName = "out") -> str:
    """Return the index of an element in ``tensor``, without spaces: ``0,1,127,63``."""
    return NOTHING if at is None else ",".join(map(str, at.index(tensor)))


def element(worst: Worst) -> str:
    """Return the index of the worst element in its tensor: ``b, h, q, d``, or its other axes."""
    return ", ".join(map(str, worst.at.index(worst.tensor)))


def plural(count: int, word: str) -> str:
    """Return ``1 row``, ``2 rows``."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def superscript(number: int) -> str:
    """Return the number of a footnote in superscript digits."""
    return str(number).translate(_SUPERSCRIPTS)


def _three_digits(number: float) -> str:
    return f"{number:#.3g}".rstrip(".")
