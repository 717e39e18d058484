"""How far exp2, and the argument that it gets, is off."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.errors import ProblemError
from attncheck.examine.fingerprint.scene import GROUP, KEYS, ROWS, blank, scene
from attncheck.formats import FORMATS, dtype_named

if TYPE_CHECKING:
    from attncheck.examine.fingerprint.asker import Asker
    from attncheck.examine.fingerprint.grids import Grid

__all__ = ["Exponential", "exponential"]

_BITS = FORMATS["fp32"].significand
_ULP = 2.0**-_BITS
"""Of fp32 numbers from 1/2 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponential:
    """What was seen of exp2.

    Attributes:
        ulps: Largest error that was shown, in ulps of fp32.
        places: Arguments at which it was looked for.
    """

    ulps: float
    places: int


def exponential(asker: Asker, held: Grid, *, rounded: bool) -> Exponential | None:
    """The largest error of a weight in [1/2, 1) that shows; None where none would.

    Args:
        asker: The kernel.
        held: How P is held.
        rounded: Whether that is a format to which P is rounded, and not all that exp2 gives.

    Raises:
        Unanswered: where there are no outputs.
    """
    fp32 = dtype_named(asker.dtype).output.significand == _BITS
    try:
        if fp32 and not rounded:
            return _measured(asker)
        if held.bits >= _BITS:
            return None
        return _by_turns(asker, held)
    except ProblemError:  # the grid of P is none of V's
        return None


_EACH = 4
_POINTS = _EACH * (KEYS // GROUP)
_STEP = 2.0**-13


def _measured(asker: Asker) -> Exponential:
    """In fp32: weights less the next multiple of 1/128, which leaves no rounding but exp2's.

    A key of weight 1/2 in the same group takes off what is near: the difference of two such numbers
    is exact (Sterbenz), and dividing it by the row sum costs 2^-23 of the little that is left.
    """
    q, k, v = blank()
    q[0, :, 0] = 1.0
    for row in range(ROWS):
        q[0, row, 1] = row * _STEP
    k[0, :, 0] = -1.0
    k[0, ::GROUP, 0] = 0.0
    logits = torch.full((ROWS, KEYS), -1.0, dtype=torch.float64)
    logits[:, ::GROUP] = 0.0
    taken = []
    for point in range(_POINTS):
        key = point // _EACH * GROUP + 1 + point % _EACH
        k[0, key, :2] = torch.tensor((point / (_POINTS + 1) - 1.0, 1.0), dtype=torch.float64)
        k[0, key, 0] = round(float(k[0, key, 0]) * 64) / 64
        logits[:, key] = k[0, key, 0] + q[0, :, 1]
        near = round(2.0 ** float(logits[ROWS // 2, key]) * 128) / 64
        v[0, key, point], v[0, key // GROUP * GROUP + GROUP // 2, point] = 1.0, -near
        taken.append((key, near))
    out = asker.finite(scene(asker.dtype, q, k, v)).out[0]
    weights = torch.exp2(logits)
    total = weights.sum(-1)
    keys = [key for key, _ in taken]
    anchors = torch.tensor([near for _, near in taken], dtype=torch.float64)
    right = weights[:, keys] - anchors / 2
    wrong = (out[:, :_POINTS] * total[:, None] - right).abs().max() / _ULP
    return Exponential(ulps=float(wrong), places=_POINTS * ROWS)


_HEADS = 8
_DIGITS = _BITS // 3


def _by_turns(asker: Asker, held: Grid) -> Exponential | None:
    """Where P is rounded: on which side of the turn from one number to the next weights fall.

    Arguments lie around the logarithm of a turn, as close as fp32 has them (2^-24, a third of an
    ulp of the weight) and ever further. A weight on the wrong side is off by its distance at least.
    """
    q, k, v = blank(_HEADS)
    numbers, turns = [], []
    for digit in range(_DIGITS):
        low = 3 * digit - _BITS
        k[:, 1, digit] = -(2.0 ** math.floor(low / 2))
    q[..., _DIGITS] = 1.0
    k[:, :, _DIGITS] = -1.0
    k[:, ::GROUP, _DIGITS] = 0.0
    k[:, 1, _DIGITS] = 0.0
    for head in range(_HEADS):
        lower = head * 2 ** (held.bits - 1) // _HEADS
        # A turn lies half-way to the next number, or there, where numbers are truncated.
        part = 2 * lower + (1 if held.rounding == "nearest" else 2)
        turn = 0.5 * (1.0 + part * 2.0**-held.bits)
        at = round(-math.log2(turn) * 2**_BITS)
        arguments = [at + step for step in _steps() if 0 < at + step < 2**_BITS]
        arguments += [at] * (ROWS - len(arguments))
        for row, number in enumerate(arguments):
            for digit in range(_DIGITS):
                high = math.ceil((3 * digit - _BITS) / 2)
                q[head, row, digit] = (number >> 3 * digit & 7) * 2.0**high
        v[head, 1, 0], v[head, 2, 0] = 1.0, -(1.0 + 2 * lower * 2.0**-held.bits)
        numbers.append(arguments)
        turns.append(turn)
    out = asker.finite(scene(asker.dtype, q, k, v)).out[..., 0]
    right = torch.exp2(-torch.tensor(numbers, dtype=torch.float64) * _ULP)
    beyond = right - torch.tensor(turns, dtype=torch.float64)[:, None]
    wrong = (out > 0) != (beyond > 0)
    return Exponential(
        ulps=float((beyond.abs() / _ULP)[wrong].max()) if bool(wrong.any()) else 0.0,
        places=out.numel(),
    )


def _steps() -> list[int]:
    """Distances from a turn, in 2^-24 of the argument: close ones all, then four to a doubling."""
    near = list(range(21))
    far = [round(20 * 2.0 ** (i / 4)) for i in range(1, 41)]
    return [0, *(sign * step for step in near[1:] + far for sign in (1, -1))]
