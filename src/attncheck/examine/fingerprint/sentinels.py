"""What score a hidden key has: −∞, or a finite number that a low score falls below."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.errors import ProblemError
from attncheck.examine.fingerprint.asker import Unanswered
from attncheck.examine.fingerprint.scene import DIM, ROWS, blank, scene
from attncheck.formats import FORMATS, dtype_named
from attncheck.mods.spec import Spec

if TYPE_CHECKING:
    from attncheck.examine.fingerprint.asker import Asker
    from attncheck.formats import Format

__all__ = ["LOWEST", "Sentinel", "sentinel"]

LOWEST = 126
"""Scores go down to −2^126: log2 e times that is still a number of fp32."""

_FIRST = 4
_DIGITS, _BASE = 4, 8
_CLOSEST = 2.0**24
"""Beyond, rounding a score that is no power of two, times log2 e, makes more than 2 of a weight."""

_CAUSAL, _DEAD = Spec.of("causal"), Spec.of("causal_bottom_right")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentinel:
    """What hidden keys weigh.

    Attributes:
        above: Natural score that the sentinel is not below; None where hidden keys never weighed.
        below: The same from the other side.
        empty: What a row gives that sees nothing: ``0``, ``NaN``, ``a mean``; empty: not asked.
    """

    above: float | None = None
    below: float | None = None
    empty: str = ""


def sentinel(asker: Asker) -> Sentinel:
    """Under a causal mask rows have ever lower scores, and hidden keys 0: when do these win?

    Row 2m sees scores of −L_m alone; column m is what the keys weigh that it does not see.

    Raises:
        Unanswered: where there are no outputs.
    """
    storage = dtype_named(asker.dtype).storage
    span = _span(storage)
    for first in range(_FIRST, LOWEST + 1, span):
        powers = [2.0**e for e in range(first, min(first + span, LOWEST + 1))]
        # A sentinel in units of q·k as it is stored shows where that is the score: at first.
        wide = storage.min_exponent == FORMATS["fp32"].min_exponent
        scale = 1.0 if wide else 2.0 ** (first - _FIRST)
        wins = _hidden_win(asker, [[low] for low in powers], scale)
        if any(wins):
            return _within(asker, powers[wins.index(True)] / 2, scale)
    return Sentinel(empty=_empty_row(asker))


def _span(storage: Format) -> int:
    """Powers of two that q holds at a time."""
    if storage.min_exponent == FORMATS["fp32"].min_exponent:
        return DIM - 4
    return 2 * _top(storage) - _FIRST + 1


def _top(storage: Format) -> int:
    return math.floor(math.log2(storage.max))


def _within(asker: Asker, low: float, scale: float) -> Sentinel:
    """The same ever closer: ``low`` is not enough for hidden keys to win, twice that is."""
    known, high = [low], 2 * low
    if low > _CLOSEST:
        return Sentinel(above=-high, below=-low, empty=_empty_row(asker))
    for place in range(1, _DIGITS + 1):
        step = low * float(_BASE) ** -place
        tried = [[*known, digit * step] for digit in range(1, _BASE)]
        wins = _hidden_win(asker, tried, scale)
        last = wins.index(True) if any(wins) else len(wins)
        if last:
            known.append(last * step)
        high = sum(known) + step
    # Keys that win are up to 128 times fewer than those that lose.
    slack = math.log(float(ROWS))
    return Sentinel(above=-(high + slack), below=-(sum(known) - slack), empty=_empty_row(asker))


def _hidden_win(asker: Asker, lows: list[list[float]], scale: float) -> list[bool]:
    """Whether hidden keys have half of the weight, of each of these sums of low scores.

    Args:
        asker: The kernel.
        lows: Sums, each in parts.
        scale: Of q·k as it is stored: fp16's is the Problem's, fp8's that of its descales.
    """
    storage = dtype_named(asker.dtype).storage
    large = 2.0**15 if storage.name == "fp16" else 2.0**60
    q, k, v = blank()
    factor = scale if storage.name == "fp16" else 1.0
    if storage.saturates:  # the largest number, which meets zeros, makes the descale
        q[..., DIM - 1] = scale * 2.0 ** (2 * _top(storage)) / large
    column = 0
    for m, parts in enumerate(lows):
        row = 2 * m
        for part in parts:
            q[0, row, column], k[0, : row + 1, column] = part / large / factor, -large
            column += 1
        v[0, row + 1 :, m] = 1.0
    v[..., DIM - 1] = 1.0
    out = asker.ask(scene(asker.dtype, q, k, v, mask=_CAUSAL, scale=factor)).out[0]
    # With weights that overflow or vanish together, a row is its hidden keys' prey as well.
    return [not bool((out[2 * m, m] < 0.5) & (out[2 * m, DIM - 1] > 0.5)) for m in range(len(lows))]


def _empty_row(asker: Asker) -> str:
    """What a row gives that sees no key."""
    q, k, v = blank(1, ROWS // 2)
    v[...] = 1.0
    try:
        out = asker.ask(scene(asker.dtype, q, k, v, mask=_DEAD)).out[0, 0]
    except (Unanswered, ProblemError):
        return ""
    if bool(torch.isnan(out).any()):
        return "NaN"
    return "0" if not bool(out.any()) else "a mean"
