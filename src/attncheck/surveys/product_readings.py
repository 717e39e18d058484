"""Measure how many bits a kernel's operands, sums and weights have."""

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

_NO_WEIGHT = -256.0  # Log2 of a weight that is 0 in every format.


def read_query_product(runner: SceneRunner) -> Grid | None:
    """Return the bits of q: find the x that change the operand 1 + x · 2^-b.

    Key b has the score 2^b − 2^b (1 + x · 2^-b) = −x in the rows of b.

    Raises Unanswered if there are no outputs.
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
    # A scale of 1, so that multiplying its square root into q and k is exact.
    out = runner.run_finite(make_scene(runner.dtype, q, k, v, scale=1.0)).out[0]
    return coarsest(
        (b, out[turn * steps : (turn + 1) * steps, turn].tolist()) for turn, b in enumerate(places)
    )


def read_value_product(runner: SceneRunner) -> Grid | None:
    """Return the bits of v: one key has all the weight and the value 1 + x · 2^-b.

    Raises Unanswered if there are no outputs.
    """
    places, steps = _exponents(runner.dtype)
    each = DIM // STEPS
    heads = -(-len(places) // each)
    q, k, v = blank_inputs(heads)
    q[..., 0], k[:, 1:, 0] = 1.0, _NO_WEIGHT
    for turn, b in enumerate(places):
        for x in range(steps):
            v[turn // each, 0, turn % each * STEPS + x] = 1.0 + x * 2.0**-b
    out = runner.run_finite(make_scene(runner.dtype, q, k, v)).out
    return coarsest(
        (b, out[turn // each, 0, turn % each * STEPS :][:steps].tolist())
        for turn, b in enumerate(places)
    )


def _exponents(dtype: str) -> tuple[list[int], int]:
    """Return the exponents b for which 1 + x · 2^-b is stored exactly, and the number of x.

    There are eight x, but four (1 + x/4) for a format of 3 bits.
    """
    bits = dtype_named(dtype).storage.significand
    if bits < STEPS.bit_length():
        return [bits - 1], 2 ** (bits - 1)
    return list(range(3 + bits % 2, bits, 2)), STEPS


_SPLIT = 13  # Up to it q holds 2^b; beyond it k holds 2^13 and q the rest: e4m3 has both.
_SCORE_EXPONENTS = range(3, 28, 2)
# Columns of q and k that hold 2^b up to and beyond the split, and x: close to each other, far
# apart, and in reverse order.
_PLACES = ((0, 2, 1), (0, 2, DIM - 1), (DIM - 1, DIM - 3, 0))


def read_score_accumulator(runner: SceneRunner) -> Grid | None:
    """Return the bits of q·k: find in each row which x = 0 … 7 change the sum 2^b + x.

    Key x of each group has the score 2^b + x in the row of b. Scores that are held as the same
    number have the same weight.

    Raises Unanswered if there are no outputs.
    """
    q, k, v = blank_inputs(len(_PLACES))
    for head, (low, high, small) in enumerate(_PLACES):
        k[head, :, low], k[head, :, high], q[head, :, small] = 1.0, 2.0**_SPLIT, 1.0
        for row in range(q.shape[1]):
            b = _SCORE_EXPONENTS[row % len(_SCORE_EXPONENTS)]
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
        for row, b in enumerate(_SCORE_EXPONENTS)
    )


_HALF = GROUP // 2  # Keys per group with weight 1; the others have 2^-6, which e4m3 holds.
_LIGHT, _VANISHES = -6.0, -32.0
_SHARES = 2 * _HALF  # Keys that hold an equal share of 1.5 · 2^b: those of weight 1 in two groups.
# The first group of the positive values, the group of x, and the first group of the negative ones:
# x is added before the positive and negative values cancel, from either end.
_ORDERS = ((0, 4, 6), (1, 0, 6))
_UNUSED = 3 * GROUP + _HALF - 1  # Without this key the row sum is 64, not 65: division is exact.
_LOW_EXPONENTS, _HIGH_EXPONENTS = range(3, 10, 2), range(11, 26, 2)


def read_value_accumulator(runner: SceneRunner) -> Grid | None:
    """Return the bits of P·V: find the x that change the sum 1.5 · 2^b + x − 1.5 · 2^b.

    Sixteen keys of weight 1 together hold 1.5 · 2^b, and sixteen others subtract it again; one of
    weight 2^-6 holds 64 x. Each (b, x) has a column, up to a power of two.

    Raises Unanswered if there are no outputs.
    """
    ladders = [(order, ladder) for order in _ORDERS for ladder in (_LOW_EXPONENTS, _HIGH_EXPONENTS)]
    q, k, v = blank_inputs(len(ladders))
    q[..., 0] = 1.0
    for offset in range(_HALF, GROUP):
        k[:, repeat_elements(offset), 0] = _LIGHT
    k[:, _UNUSED, 0] = _VANISHES
    for head, ((plus, light, minus), ladder) in enumerate(ladders):
        # Small b have a larger unit, so that the stored values share a scale with x.
        unit = 2.0 ** (2 if ladder is _LOW_EXPONENTS else -8)
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


_LOST_IN_SUM = -32.0  # Log2 of a weight that does not change an fp32 sum of 64.


def sums_rounded_weights(runner: SceneRunner, held: Grid) -> bool | None:
    """Return whether row sums add the rounded P; None if it is not visible.

    Each group has a key of weight 1 and 14 of weight (1 + δ)/2, which P of ``held`` bits rounds to
    1/2: δ = 0 in even rows and just below 2^-bits in odd ones. Unrounded sums: 64, 64 (1 + 7δ/8).

    Raises Unanswered if there are no outputs.
    """
    q, k, v = blank_inputs()
    q[..., 0] = 1.0
    q[:, 1::2, 1] = 1.25 * 2.0**-held.bits
    for offset in range(1, GROUP - 1):
        k[0, repeat_elements(offset), 0], k[0, repeat_elements(offset), 1] = -1.0, 1.0
    k[0, repeat_elements(GROUP - 1), 0] = _LOST_IN_SUM
    v[0, repeat_elements(0), 0] = 1.0
    result = runner.run_finite(make_scene(runner.dtype, q, k, v))
    if result.out[0, 0, 0] != result.out[0, 1, 0]:
        return False
    if result.lse is not None:
        return bool(result.lse[0, 0] == result.lse[0, 1])
    # 1/8 and 1/8 · (1 − 7δ/8) differ by over half the spacing of numbers with ``held.bits`` bits.
    return True if held.bits <= dtype_named(runner.dtype).output.significand else None


_FULL_BITS = FORMATS["fp32"].significand
_RISES = 26  # Rows with δ of about 2^-1 … 2^-26.
_TURN = 12  # Beyond this row a second column of q and k is used, so that fp16 holds both.
_HALVES, _QUARTERS = (1, 2, 3, 4), range(8, GROUP)


def read_weight_significand(runner: SceneRunner) -> Grid | None:
    """Return the bits of P and its rounding; 24 if P stays in fp32; None if it is on no grid.

    Row k has one weight A = (1 + δ)/2, where δ is about 1.4 · 2^-k, next to C = D = 1/2 exactly.
    The first column is A − C, column c is A − C − 2^-c · D: exactly 0 if A is held as C, or as
    (1 + 2^-c)/2.

    Raises Unanswered if there are no outputs.
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
    return _grid_of_zeros(zero, most)


def _grid_of_zeros(zero: torch.Tensor, most: int) -> Grid | None:
    """Return the grid that follows from the zeros of rows (by rise, from 0) and columns."""
    last = max((rise for rise in range(1, _RISES + 1) if not zero[rise - 1, 0]), default=0)
    if last == 0:
        return None
    if last >= _FULL_BITS - 1:
        return Grid(_FULL_BITS)
    # To nearest, δ beyond half a unit 2^-last becomes a unit; truncated, only from a unit on.
    if 2 <= last <= most + 1 and zero[last - 1, last - 1]:
        return Grid(last, "nearest")
    if last <= most and zero[last - 1, last]:
        return Grid(last + 1, "truncated")
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallestWeight:
    """The smallest power of two that a weight can be."""

    exponent: int  # 2^-exponent is the smallest weight that is not 0
    # Whether weights between half of it and it are rounded up to it, as the smallest subnormal
    # number is; False if they become 0.
    rounded_to: bool
    hidden: bool  # whether smaller weights would not be visible, so that ``exponent`` is a bound


_LADDER_KEYS = 7  # Ladder keys per group.
_STEPS = _LADDER_KEYS * (KEYS // GROUP)  # Ladder keys per head.
_HEADS = 3
_LOW_VALUE = 2.0**15


def read_smallest_weight(runner: SceneRunner, *, tall: bool = True) -> SmallestWeight:
    """Return the smallest weight, from a ladder 2^-1 … 2^-168 with one key and column each.

    Every group of keys has the maximum. In row 1 all weights of the ladder are smaller by √½.

    Args:
        tall: Whether values are large enough to make the smallest weights of fp32 visible;
            otherwise 2^15, which fp16 holds too.

    Raises Unanswered if there are no outputs.
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
        hidden=least >= (_hidden_exponent(dtype.output) if tall else _DEEPEST),
    )


def _tall_value(storage: Format, head: int) -> float:
    """Return a value so large that the small weights of a head are visible."""
    return _LOW_VALUE if storage.name == "fp16" else 2.0 ** min(120, _STEPS * (head + 1))


def _hidden_exponent(output: Format) -> int:
    """Return from which exponent on weights are invisible: 33 in fp16, else the ladder's end."""
    if output.name != "fp16":
        return _HEADS * _STEPS
    # Visible means that p · 2^15 ÷ 72 is at least half of fp16's smallest number, 2^-25.
    return 33


def weight_format(held: Grid, least: SmallestWeight | None) -> tuple[Format, int] | None:
    """Return the format of P, and log2 of the factor applied before rounding; None if unknown.

    If smaller weights are rounded up to the smallest one, it is subnormal, else normal.
    """
    for fmt in FORMATS.values():
        if fmt.significand != held.bits:
            continue
        if fmt.min_exponent == FORMATS["fp32"].min_exponent:
            has_wide_range = least is not None and (least.hidden or least.exponent > _DEEPEST)
            if has_wide_range or (least is None and held.bits != FORMATS["fp16"].significand):
                return fmt, 0
        elif least is not None and not least.hidden:
            bottom = fmt.min_exponent
            if least.rounded_to:
                bottom -= fmt.significand - 1
            if least.exponent + bottom >= 0:
                return fmt, least.exponent + bottom
    return None


def kept_weights(least: SmallestWeight) -> bool | None:
    """Return whether subnormal weights are kept instead of flushed to 0; None if invisible."""
    if least.hidden:
        return None
    if least.exponent > _DEEPEST:
        return least.exponent > -FORMATS["fp32"].min_exponent
    return least.rounded_to


def _deepest(fmt: Format) -> int:
    """Return −log2 of the smallest weight in ``fmt`` if P is scaled up to its largest number."""
    return math.floor(math.log2(fmt.max)) - math.floor(math.log2(fmt.subnormal_spacing))


_DEEPEST = max(_deepest(FORMATS[name]) for name in ("fp16", "e4m3", "e5m2"))
