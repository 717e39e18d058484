"""Readings of products, sums and weights: how many bits each has."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from attncheck.core.formats import FORMATS, Format, dtype_named
from attncheck.surveys.fingerprint_scenes import (
    DIM,
    GROUP,
    KEYS,
    ROWS,
    STEPS,
    Grid,
    SceneRunner,
    blank_inputs,
    coarsest,
    make_scene,
    repeat_elements,
)

_GONE = -256.0  # log2 of a weight that no format has


def read_query_product(runner: SceneRunner) -> Grid | None:
    """Bits of q: of which x the operand 1 + x · 2^-b keeps a trace.

    Key b has the score 2^b − 2^b (1 + x · 2^-b) = −x in the rows of b.

    Raises Unanswered where there are no outputs.
    """
    places, steps = _exponents(runner.dtype)
    q, k, v = blank_inputs()
    for turn, b in enumerate(places):
        k[0, 1 + turn, :2] = k.new_tensor((-(2.0**b), 2.0**b))
        v[0, 1 + turn, turn] = 1.0
    q[..., 1] = 1.0
    for row in range(q.shape[1]):
        b = places[row // steps % len(places)]
        q[0, row, 0] = 1.0 + row % steps * 2.0**-b
    # A scale of 1: where its square root is multiplied into q and k, nothing is rounded.
    out = runner.run_finite(make_scene(runner.dtype, q, k, v, scale=1.0)).out[0]
    return coarsest(
        (b, out[turn * steps : (turn + 1) * steps, turn].tolist()) for turn, b in enumerate(places)
    )


def read_value_product(runner: SceneRunner) -> Grid | None:
    """Bits of v: one key has all the weight, and what comes out of 1 + x · 2^-b is looked at.

    Raises Unanswered where there are no outputs.
    """
    places, steps = _exponents(runner.dtype)
    each = DIM // STEPS
    heads = -(-len(places) // each)
    q, k, v = blank_inputs(heads)
    q[..., 0], k[:, 1:, 0] = 1.0, _GONE
    for turn, b in enumerate(places):
        for x in range(steps):
            v[turn // each, 0, turn % each * STEPS + x] = 1.0 + x * 2.0**-b
    out = runner.run_finite(make_scene(runner.dtype, q, k, v)).out
    return coarsest(
        (b, out[turn // each, 0, turn % each * STEPS :][:steps].tolist())
        for turn, b in enumerate(places)
    )


def _exponents(dtype: str) -> tuple[list[int], int]:
    """Return each b for which 1 + x · 2^-b is stored, to the last bit; and how many x there are.

    Of 3 bits 1 + x/4 for four x, of others eight.
    """
    bits = dtype_named(dtype).storage.significand
    if bits < STEPS.bit_length():
        return [bits - 1], 2 ** (bits - 1)
    return list(range(3 + bits % 2, bits, 2)), STEPS


_SPLIT = 13  # q holds 2^b up to here, beyond it a column of k brings 2^13: e4m3 has both
_SCORES = range(3, 28, 2)
# Columns of q and k that hold 2^b, small and large, and x: beside each other, far apart, and the
# other way about.
_PLACES = ((0, 2, 1), (0, 2, DIM - 1), (DIM - 1, DIM - 3, 0))


def read_score_accumulator(runner: SceneRunner) -> Grid | None:
    """Bits of q·k: row by row, of which x = 0 … 7 the sum 2^b + x keeps a trace.

    Key x of each group has the score 2^b + x in the row of b. What is held as the same number has
    the same weight.

    Raises Unanswered where there are no outputs.
    """
    q, k, v = blank_inputs(len(_PLACES))
    for head, (low, high, small) in enumerate(_PLACES):
        k[head, :, low], k[head, :, high], q[head, :, small] = 1.0, 2.0**_SPLIT, 1.0
        for row in range(q.shape[1]):
            b = _SCORES[row % len(_SCORES)]
            column, less = (low, 0) if b <= _SPLIT else (high, _SPLIT)
            q[head, row, column] = 2.0 ** (b - less)
        for key in range(k.shape[1]):
            k[head, key, small] = key % GROUP % STEPS
        for x in range(STEPS):
            v[head, x, x] = 1.0
    result = runner.run(make_scene(runner.dtype, q, k, v))
    return coarsest(
        (b, result.out[head, row, :STEPS].tolist())
        for head in range(len(_PLACES))
        for row, b in enumerate(_SCORES)
    )


_HALF = GROUP // 2  # keys of a group that have weight 1; the others have 2^-6, which e4m3 holds
_LIGHT, _VANISHES = -6.0, -32.0
_SHARES = 2 * _HALF  # keys that hold a share of 1.5 · 2^b each: those of two groups
# The first group of those that hold +, that of x, and the first of those that hold −: + and x meet
# before + and − do, from whichever end.
_ORDERS = ((0, 4, 6), (1, 0, 6))
_UNUSED = 3 * GROUP + _HALF - 1  # makes of a row sum of 65 one of 64: dividing by it is exact
_LOW, _HIGH = range(3, 10, 2), range(11, 26, 2)


def read_value_accumulator(runner: SceneRunner) -> Grid | None:
    """Bits of P·V: of which x the sum 1.5 · 2^b + x − 1.5 · 2^b keeps a trace.

    Sixteen keys of weight 1 hold 1.5 · 2^b together, and sixteen others take it off again; one of
    weight 2^-6 holds 64 x. Each (b, x) has a column, up to a power of two.

    Raises Unanswered where there are no outputs.
    """
    ladders = [(order, ladder) for order in _ORDERS for ladder in (_LOW, _HIGH)]
    q, k, v = blank_inputs(len(ladders))
    q[..., 0] = 1.0
    for offset in range(_HALF, GROUP):
        k[:, repeat_elements(offset), 0] = _LIGHT
    k[:, _UNUSED, 0] = _VANISHES
    for head, ((plus, light, minus), ladder) in enumerate(ladders):
        # Of the small ones what is stored is larger: they share a scale with x.
        unit = 2.0 ** (2 if ladder is _LOW else -8)
        for turn, b in enumerate(ladder):
            columns = slice(turn * STEPS, (turn + 1) * STEPS)
            part = 1.5 * 2.0**b * unit * 2.0**_LIGHT / _SHARES
            for first, sign in ((plus, 1), (minus, -1)):
                for start in (first * GROUP, (first + 1) * GROUP):
                    v[head, start : start + _HALF, columns] = sign * part
            v[head, light * GROUP + _HALF, columns] = v.new_tensor(range(STEPS)) * unit
    out = runner.run(make_scene(runner.dtype, q, k, v)).out
    return coarsest(
        (b, out[head, 0, turn * STEPS : (turn + 1) * STEPS].tolist())
        for head, (_, ladder) in enumerate(ladders)
        for turn, b in enumerate(ladder)
    )


_UNNOTICED = -32.0  # log2: less than an fp32 sum of 64 notices


def sums_rounded_weights(runner: SceneRunner, held: Grid) -> bool | None:
    """Read whether the row sum takes the rounded P: rows that differ by less have one sum.

    In each group a key of weight 1 and 14 of (1 + δ)/2, which P of ``held`` bits holds as 1/2:
    δ = 0 in even rows and just below 2^-bits in odd ones. The sums are 64 and 64 (1 + 7δ/8).

    Raises Unanswered where there are no outputs.
    """
    q, k, v = blank_inputs()
    q[..., 0] = 1.0
    q[:, 1::2, 1] = 1.25 * 2.0**-held.bits
    for offset in range(1, GROUP - 1):
        k[0, repeat_elements(offset), 0], k[0, repeat_elements(offset), 1] = -1.0, 1.0
    k[0, repeat_elements(GROUP - 1), 0] = _UNNOTICED
    v[0, repeat_elements(0), 0] = 1.0
    result = runner.run_finite(make_scene(runner.dtype, q, k, v))
    if result.out[0, 0, 0] != result.out[0, 1, 0]:
        return False
    if result.lse is not None:
        return bool(result.lse[0, 0] == result.lse[0, 1])
    # 1/8 and 1/8 · (1 − 7δ/8): more than half of the distance between neighbours of so many bits.
    return True if held.bits <= dtype_named(runner.dtype).output.significand else None


_FULL_BITS = FORMATS["fp32"].significand
_RISES = 26  # rows of the staircase: 2^-1 … 2^-26
_TURN = 12  # from here on a second column of q and k makes a rise, so that fp16 holds both
_HALVES, _QUARTERS = (1, 2, 3, 4), range(8, GROUP)


def read_weight_significand(runner: SceneRunner) -> Grid | None:
    """Bits of P, and how they are rounded; 24 where it stays in fp32; None on no grid.

    Row k has one weight A = (1 + δ)/2, where δ is about 1.4 · 2^-k, beside C = D = 1/2 exactly.
    The first column is A − C, column c is A − C − 2^-c · D: 0 exactly where A was held as C, or
    as (1 + 2^-c)/2.

    Raises Unanswered where there are no outputs.
    """
    q, k, v = blank_inputs()
    q[..., 0] = 1.0
    for offset in _HALVES:
        k[0, repeat_elements(offset), 0] = -1.0
    for offset in _QUARTERS:
        k[0, repeat_elements(offset), 0] = -2.0
    a, c, d = _HALVES[:3]
    k[0, a, 1], k[0, a, 2] = 1.0, 2.0**-_TURN
    for row in range(ROWS):
        rise = row % _RISES + 1
        column, less = (1, 0) if rise <= _TURN else (2, _TURN)
        q[0, row, column] = 2.0 ** (1 + less - rise)
    narrow = dtype_named(runner.dtype).scaled
    most, unit = (14, 1.0) if narrow else (_RISES, 2.0**12)
    v[0, a, : most + 1], v[0, c, : most + 1] = unit, -unit
    for column in range(1, most + 1):
        v[0, d, column] = -unit * 2.0**-column
    zero = runner.run_finite(make_scene(runner.dtype, q, k, v)).out[0] == 0
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
class SmallestWeight:
    """The smallest power of two that a weight may be."""

    exponent: int  # 2^-exponent came out, and no smaller one
    # Whether a weight between half of it and it is rounded to it, as where the smallest number is
    # subnormal; False where it is 0.
    rounded_to: bool
    hidden: bool  # whether smaller ones would not show: then ``exponent`` is what is seen at least


_LADDER_KEYS = 7  # ladder keys of a group
_STEPS = _LADDER_KEYS * (KEYS // GROUP)  # of a head
_HEADS = 3
_LOW_VALUE = 2.0**15


def read_smallest_weight(runner: SceneRunner, *, tall: bool = True) -> SmallestWeight:
    """The smallest weight, by a ladder 2^-1 … 2^-168, one key and one column each.

    Every group of keys has its maximum. Row 1 has all weights smaller by √½.

    Args:
        tall: Whether values are large enough for the smallest weights of fp32 to show; otherwise
            2^15, which fp16 holds too.

    Raises Unanswered where there are no outputs.
    """
    q, k, v = blank_inputs(_HEADS)
    q[:, :, 0], q[:, :, 1], q[:, :, 2] = 64.0, 8.0, 1.0
    q[:, 1::2, 3] = 0.5
    dtype = dtype_named(runner.dtype)
    for head in range(_HEADS):
        for step in range(_STEPS):
            key = step // _LADDER_KEYS * GROUP + 1 + step % _LADDER_KEYS
            exponent = head * _STEPS + step + 1
            digits = (exponent // 64, exponent // 8 % 8, exponent % 8, 1)
            k[head, key, :4] = -torch.tensor(digits, dtype=torch.float64)
            v[head, key, step] = _tall_value(dtype.storage, head) if tall else _LOW_VALUE
    result = runner.run_finite(make_scene(runner.dtype, q, k, v))
    visible = (result.out[:, :2, :_STEPS] != 0).transpose(0, 1).reshape(2, -1)
    least, lesser = (int(row.nonzero().max()) + 1 if bool(row.any()) else 0 for row in visible)
    return SmallestWeight(
        exponent=least,
        rounded_to=lesser == least,
        hidden=least >= (_visible(dtype.output) if tall else _DEEPEST),
    )


def _tall_value(storage: Format, head: int) -> float:
    """Values by which small weights show."""
    return _LOW_VALUE if storage.name == "fp16" else 2.0 ** min(120, _STEPS * (head + 1))


def _visible(output: Format) -> int:
    """The exponent from which on weights would not show in fp16; beyond the ladder elsewhere."""
    if output.name != "fp16":
        return _HEADS * _STEPS
    # p · 2^15 ÷ 72 is at least half of fp16's smallest number, 2^-25.
    return 33


def weight_format(held: Grid, least: SmallestWeight | None) -> tuple[Format, int] | None:
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


def kept_weights(least: SmallestWeight) -> bool | None:
    """Return whether subnormal weights are kept, and not 0; None where none would show."""
    if least.hidden:
        return None
    if least.exponent > _DEEPEST:
        return least.exponent > -FORMATS["fp32"].min_exponent
    return least.rounded_to


def _deepest(fmt: Format) -> int:
    """Binary places below 1 of the smallest weight in ``fmt``, P multiplied by its largest."""
    return math.floor(math.log2(fmt.max)) - math.floor(math.log2(fmt.subnormal_spacing))


_DEEPEST = max(_deepest(FORMATS[name]) for name in ("fp16", "e4m3", "e5m2"))
