"""The format of P: how many bits, and how small a weight may be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.examine.fingerprint.grids import Grid
from attncheck.examine.fingerprint.scene import GROUP, KEYS, ROWS, blank, every, scene
from attncheck.formats import FORMATS, dtype_named

if TYPE_CHECKING:
    from attncheck.examine.fingerprint.asker import Asker
    from attncheck.formats import Format

__all__ = ["Smallest", "format_of", "kept", "significand", "smallest"]

_FULL_BITS = FORMATS["fp32"].significand
_RISES = 26  # rows of the staircase: 2^-1 … 2^-26
_TURN = 12  # from here on a second column of q and k makes a rise, so that fp16 holds both
_HALVES, _QUARTERS = (1, 2, 3, 4), range(8, GROUP)


def significand(asker: Asker) -> Grid | None:
    """Bits of P, and how they are rounded; 24 where it stays in fp32; None on no grid.

    Row k has one weight A = (1 + δ)/2, where δ is about 1.4 · 2^-k, beside C = D = 1/2 exactly.
    The first column is A − C, column c is A − C − 2^-c · D: 0 exactly where A was held as C, or
    as (1 + 2^-c)/2.

    Raises:
        Unanswered: where there are no outputs.
    """
    q, k, v = blank()
    q[..., 0] = 1.0
    for offset in _HALVES:
        k[0, every(offset), 0] = -1.0
    for offset in _QUARTERS:
        k[0, every(offset), 0] = -2.0
    a, c, d = _HALVES[:3]
    k[0, a, 1], k[0, a, 2] = 1.0, 2.0**-_TURN
    for row in range(ROWS):
        rise = row % _RISES + 1
        column, less = (1, 0) if rise <= _TURN else (2, _TURN)
        q[0, row, column] = 2.0 ** (1 + less - rise)
    narrow = dtype_named(asker.dtype).scaled
    most, unit = (14, 1.0) if narrow else (_RISES, 2.0**12)
    v[0, a, : most + 1], v[0, c, : most + 1] = unit, -unit
    for column in range(1, most + 1):
        v[0, d, column] = -unit * 2.0**-column
    zero = asker.finite(scene(asker.dtype, q, k, v)).out[0] == 0
    return _read(zero, most)


def _read(zero: torch.Tensor, most: int) -> Grid | None:
    """The grid that the zeros of rows (by rise, from 0) and columns tell."""
    last = max((rise for rise in range(1, _RISES + 1) if not zero[rise - 1, 0]), default=0)
    if last == 0:
        return None
    if last >= _FULL_BITS - 1:
        return Grid(_FULL_BITS)
    # To nearest, δ beyond half a unit 2^-last becomes one; truncated, δ beyond a unit stays one.
    if 2 <= last <= most + 1 and zero[last - 1, last - 1]:
        return Grid(last, "nearest")
    if last <= most and zero[last - 1, last]:
        return Grid(last + 1, "truncated")
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Smallest:
    """The smallest power of two that a weight may be.

    Attributes:
        exponent: 2^-exponent came out, and no smaller one.
        rounded_to: Whether a weight between half of it and it is rounded to it, as where the
            smallest number is subnormal; False where it is 0.
        hidden: Whether smaller ones would not show: then ``exponent`` is what is seen at least.
    """

    exponent: int
    rounded_to: bool
    hidden: bool


_EACH = 7  # ladder keys of a group
_STEPS = _EACH * (KEYS // GROUP)  # of a head
_HEADS = 3
_LOW = 2.0**15


def smallest(asker: Asker, *, tall: bool = True) -> Smallest:
    """How small a weight may be, by a ladder 2^-1 … 2^-168, one key and one column each.

    Every group of keys has its maximum. Row 1 has all weights smaller by √½.

    Args:
        asker: The kernel.
        tall: Whether values are large enough for the smallest weights of fp32 to show; otherwise
            2^15, which fp16 holds too.

    Raises:
        Unanswered: where there are no outputs.
    """
    q, k, v = blank(_HEADS)
    q[:, :, 0], q[:, :, 1], q[:, :, 2] = 64.0, 8.0, 1.0
    q[:, 1::2, 3] = 0.5
    dtype = dtype_named(asker.dtype)
    for head in range(_HEADS):
        for step in range(_STEPS):
            key = step // _EACH * GROUP + 1 + step % _EACH
            exponent = head * _STEPS + step + 1
            digits = (exponent // 64, exponent // 8 % 8, exponent % 8, 1)
            k[head, key, :4] = -torch.tensor(digits, dtype=torch.float64)
            v[head, key, step] = _height(dtype.storage, head) if tall else _LOW
    told = asker.finite(scene(asker.dtype, q, k, v))
    there = (told.out[:, :2, :_STEPS] != 0).transpose(0, 1).reshape(2, -1)
    least, lesser = (int(row.nonzero().max()) + 1 if bool(row.any()) else 0 for row in there)
    return Smallest(
        exponent=least,
        rounded_to=lesser == least,
        hidden=least >= (_visible(dtype.output) if tall else _DEEPEST),
    )


def _height(storage: Format, head: int) -> float:
    """What values are, so that small weights show."""
    return _LOW if storage.name == "fp16" else 2.0 ** min(120, _STEPS * (head + 1))


def _visible(output: Format) -> int:
    """The exponent from which on weights would not show in fp16; beyond the ladder elsewhere."""
    if output.name != "fp16":
        return _HEADS * _STEPS
    # p · 2^15 ÷ 72 is at least half of fp16's smallest number, 2^-25.
    return 33


def format_of(held: Grid, least: Smallest | None) -> tuple[Format, int] | None:
    """The format that these are of, and log2 of what P is multiplied by before; None for none.

    A smallest weight that others are rounded to is subnormal, another one normal.
    """
    for fmt in FORMATS.values():
        if fmt.significand != held.bits:
            continue
        if fmt.min_exponent == FORMATS["fp32"].min_exponent:
            known = least is not None and (least.hidden or least.exponent > _DEEPEST)
            if known or (least is None and held.bits != FORMATS["fp16"].significand):
                return fmt, 0
        elif least is not None and not least.hidden:
            bottom = fmt.min_exponent
            if least.rounded_to:
                bottom -= fmt.significand - 1
            if least.exponent + bottom >= 0:
                return fmt, least.exponent + bottom
    return None


def kept(least: Smallest) -> bool | None:
    """Whether subnormal weights are what they should be, and not 0; None where none would show."""
    if least.hidden:
        return None
    if least.exponent > _DEEPEST:
        return least.exponent > -FORMATS["fp32"].min_exponent
    return least.rounded_to


def _deepest(fmt: Format) -> int:
    """Binary places below 1 of the smallest weight in ``fmt``, P multiplied by its largest."""
    return math.floor(math.log2(fmt.max)) - math.floor(math.log2(fmt.subnormal_spacing))


_DEEPEST = max(_deepest(FORMATS[name]) for name in ("fp16", "e4m3", "e5m2"))
