"""Measure exp2, the steps over the keys, and the treatment of hidden and subnormal numbers."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal

import torch

from attncheck.core.errors import ProblemError
from attncheck.core.formats import FORMATS, Format, dtype_named
from attncheck.core.mod_spec import Spec
from attncheck.surveys.fingerprint_scenes import (
    DIM,
    GROUP,
    KEYS,
    LN2,
    ROWS,
    Grid,
    SceneResult,
    SceneRunner,
    blank_inputs,
    make_scene,
    repeat_elements,
)
from attncheck.verify.call_checks import Unanswered

_BITS = FORMATS["fp32"].significand
_ULP = 2.0**-_BITS  # One ulp of fp32 numbers from 1/2 to 1.


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponential:
    """A lower bound on the largest error of exp2."""

    ulps: float  # largest error that was found, in ulps of fp32
    places: int  # number of arguments that were tested


def read_exponential(runner: SceneRunner, held: Grid, *, rounded: bool) -> Exponential | None:
    """Return the largest error found of a weight in [1/2, 1); None if none could be seen.

    Args:
        rounded: Whether P is rounded to the grid ``held``, so that it lacks some bits of exp2.

    Raises Unanswered if there are no outputs.
    """
    fp32 = dtype_named(runner.dtype).output.significand == _BITS
    try:
        if fp32 and not rounded:
            return _exponential_by_values(runner)
        if held.bits >= _BITS:
            return None
        return _exponential_by_turns(runner, held)
    except ProblemError:  # V's format does not hold the numbers of P's grid
        return None


_POINTS_PER_GROUP = 4  # Points per group of keys.
_POINTS = _POINTS_PER_GROUP * (KEYS // GROUP)
_STEP = 2.0**-13


def _exponential_by_values(runner: SceneRunner) -> Exponential:
    """Measure in fp32: subtract the nearest multiple of 1/128 from weights to leave exp2's error.

    A key of weight 1/2 in the same group subtracts it: the difference of two close numbers is exact
    (Sterbenz), and dividing it by the row sum costs 2^-23 of the small difference.
    """
    q, k, v = blank_inputs()
    q[0, :, 0] = 1.0
    for row in range(ROWS):
        q[0, row, 1] = row * _STEP
    k[0, :, 0] = -1.0
    k[0, ::GROUP, 0] = 0.0
    logits = torch.full((ROWS, KEYS), -1.0, dtype=torch.float64)
    logits[:, ::GROUP] = 0.0
    anchor_keys = []
    for point in range(_POINTS):
        key = point // _POINTS_PER_GROUP * GROUP + 1 + point % _POINTS_PER_GROUP
        k[0, key, :2] = torch.tensor((point / (_POINTS + 1) - 1.0, 1.0), dtype=torch.float64)
        # Few bits, so that adding the row's multiple of 2^-13 is exact.
        k[0, key, 0] = round(float(k[0, key, 0]) * 64) / 64
        logits[:, key] = k[0, key, 0] + q[0, :, 1]
        near = round(2.0 ** float(logits[ROWS // 2, key]) * 128) / 64
        v[0, key, point], v[0, key // GROUP * GROUP + GROUP // 2, point] = 1.0, -near
        anchor_keys.append((key, near))
    out = runner.run_finite(make_scene(runner.dtype, q, k, v)).out[0]
    weights = torch.exp2(logits)
    total = weights.sum(-1)
    keys = [key for key, _ in anchor_keys]
    anchors = torch.tensor([near for _, near in anchor_keys], dtype=torch.float64)
    right = weights[:, keys] - anchors / 2
    largest_error = (out[:, :_POINTS] * total[:, None] - right).abs().max() / _ULP
    return Exponential(ulps=float(largest_error), places=_POINTS * ROWS)


_HEADS = 8
_DIGITS = _BITS // 3


def _exponential_by_turns(runner: SceneRunner, held: Grid) -> Exponential | None:
    """Measure where P is rounded: find weights that fall on the wrong side of a rounding boundary.

    Arguments lie around the logarithm of a boundary ("turn"), from as close as fp32 allows (2^-24,
    a third of an ulp of the weight) outward. A weight on the wrong side is off by its distance.
    """
    q, k, v = blank_inputs(_HEADS)
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
        # The turn is half-way to the next number, or at that number if numbers are truncated.
        part = 2 * lower + (1 if held.rounding == "nearest" else 2)
        turn = 0.5 * (1.0 + part * 2.0**-held.bits)
        at = round(-math.log2(turn) * 2**_BITS)
        arguments = [at + step for step in _distances_from_turn() if 0 < at + step < 2**_BITS]
        arguments += [at] * (ROWS - len(arguments))
        for row, number in enumerate(arguments):
            for digit in range(_DIGITS):
                high = math.ceil((3 * digit - _BITS) / 2)
                q[head, row, digit] = (number >> 3 * digit & 7) * 2.0**high
        v[head, 1, 0], v[head, 2, 0] = 1.0, -(1.0 + 2 * lower * 2.0**-held.bits)
        numbers.append(arguments)
        turns.append(turn)
    out = runner.run_finite(make_scene(runner.dtype, q, k, v)).out[..., 0]
    right = torch.exp2(-torch.tensor(numbers, dtype=torch.float64) * _ULP)
    beyond = right - torch.tensor(turns, dtype=torch.float64)[:, None]
    wrong = (out > 0) != (beyond > 0)
    return Exponential(
        ulps=float((beyond.abs() / _ULP)[wrong].max()) if bool(wrong.any()) else 0.0,
        places=out.numel(),
    )


def _distances_from_turn() -> list[int]:
    """Return distances from a turn in units of 2^-24: all up to 20, then four per factor of two."""
    near = list(range(21))
    far = [round(20 * 2.0 ** (i / 4)) for i in range(1, 41)]
    return [0, *(sign * step for step in near[1:] + far for sign in (1, -1))]


_MAXIMUM, _RISING = 5, 8
"""Offsets in a group of the key with its maximum, and of the key that may exceed it."""

_PEAKS = 16  # Keys that exceed the maximum ("peaks"), each in rows of its own.
# Log2 distances: of a plain key below the maximum, and of a plain key below the peak, in two parts
# so that each number has three bits. A lazy maximum is raised by the large peaks.
_FALLS = (
    (0.625, 0.875, 0.0),
    (0.875, 1.25, 0.0),
    (1.25, 1.75, 0.0),
    (1.75, 3.5, 0.0),
    (0.375, 10.0, 0.875),
    (0.625, 10.0, 0.375),
    (0.875, 12.0, 0.625),
    (1.25, 14.0, 0.875),
)
_VALUE_SIZE = 2.0**15  # |v|, so that differences of small weights are visible in fp16.


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """A kernel's steps over the keys."""

    keys: int  # number of keys in the measurement
    # The first key of each step but the first; empty if no step is visible.
    starts: tuple[int, ...]
    order: Literal["forward", "reverse", ""]  # which end comes first; empty if not visible

    @property
    def size(self) -> int | None:
        """Number of keys of a step; None if there is no boundary or steps differ in size."""
        edges = (0, *self.starts, self.keys)
        sizes = {b - a for a, b in itertools.pairwise(edges)}
        return sizes.pop() if self.starts and len(sizes) == 1 else None


def read_tiles(
    runner: SceneRunner, keys: int, known: Parts | None, rows: int = ROWS
) -> tuple[Tiles, SceneResult]:
    """Return the steps over ``keys`` keys, and the result with what the kernel declares of them.

    Neighbouring keys have equal scores, and opposite values in one column: it is exactly 0 if both
    weights were computed and rounded in the same step. One key exceeds the maximum: weights of
    earlier steps were rounded before they are scaled down, those of its own step are rounded after.

    Args:
        keys: A multiple of 256.
        known: Parts that are merged: their boundaries do not show the order.
        rows: Number of rows; the first 128 are evaluated.

    Raises Unanswered if there are no outputs.
    """
    pairs = _pairs(keys)
    columns = min(DIM, -(-len(pairs) // 4)) if len(pairs) > DIM else len(pairs)
    heads = -(-len(pairs) // columns)
    q, k, v = blank_inputs(heads, keys, rows)
    peaks = [_RISING + peak * (keys // _PEAKS) for peak in range(_PEAKS)]
    k[:, :, _PEAKS] = 1.0
    k[:, repeat_elements(_MAXIMUM, keys), _PEAKS] = 0.0
    for peak, key in enumerate(peaks):
        k[:, key, peak] = k[:, key, _PEAKS + 1 + peak] = 1.0
    for row in range(ROWS):
        fall, most, rest = _FALLS[row // _PEAKS]
        q[:, row, row % _PEAKS], q[:, row, _PEAKS] = most, -fall
        q[:, row, _PEAKS + 1 + row % _PEAKS] = rest
    for place, (left, right) in enumerate(pairs):
        head, column = divmod(place, columns)
        v[head, left, column], v[head, right, column] = _VALUE_SIZE, -_VALUE_SIZE
    result = runner.run_finite(make_scene(runner.dtype, q, k, v))
    differs = (result.out[:, :ROWS, :columns] != 0).view(heads, len(_FALLS), _PEAKS, columns).any(1)
    by_peak = differs.transpose(0, 1).reshape(_PEAKS, -1)[:, : len(pairs)]
    starts = [_boundary(*pairs[place]) for place in by_peak.any(0).nonzero().flatten().tolist()]
    merged = set(known.starts) if known is not None and known.keys == keys else set()
    sides = {
        "reverse" if _boundary(*pairs[place]) > peaks[peak] else "forward"
        for peak, place in by_peak.nonzero().tolist()
        if _boundary(*pairs[place]) not in merged
    }
    order = sides.pop() if len(sides) == 1 else ""
    return Tiles(keys=keys, starts=tuple(starts), order=order), result  # type: ignore[arg-type]  # of sides


def _pairs(keys: int) -> list[tuple[int, int]]:
    """Return the neighbours to compare: all, or with many keys those around multiples of a step."""
    special = {_MAXIMUM, _RISING}
    if keys <= 2 * GROUP * 8:
        plain = [key for key in range(keys) if key % GROUP not in special]
        return list(itertools.pairwise(plain))
    step = max(GROUP, keys // DIM)
    return [(key - 1, key) for key in range(step, keys, step)]


def _boundary(left: int, right: int) -> int:
    """Return the key in (left, right] with most factors of two, where a step likely begins."""
    return max(range(left + 1, right + 1), key=lambda key: key & -key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of the keys that are computed separately and merged."""

    keys: int  # number of keys in the measurement
    starts: tuple[int, ...]  # the first key of each part but the first
    declared: int  # the number of parts that the kernel declares
    each_step: bool  # whether the kernel declares that it divides O after each step

    @property
    def count(self) -> int:
        """The number of parts."""
        return len(self.starts) + 1


def read_parts(runner: SceneRunner, keys: int, batch: int = 1, rows: int = ROWS) -> Parts:
    """Return the parts of ``keys`` keys that are divided by their own sums before they are added.

    As in ``read_tiles``, but the maximum never rises, so that all steps round alike. Each group has
    another sum, so that parts have different divisors and merge weights, which round differently.

    Raises Unanswered if there are no outputs.
    """
    pairs = [(key - 1, key) for key in range(GROUP, keys, max(GROUP, keys // DIM))]
    q, k, v = blank_inputs(1, keys, rows)
    k[0, :, 0] = 1.0
    k[0, repeat_elements(_MAXIMUM, keys), 0] = 0.0
    groups = keys // GROUP
    for group in range(groups):
        key = group * GROUP + _RISING
        k[0, key, :2] = torch.tensor((0.0, 1.0 + group * 5 % 7), dtype=torch.float64)
    for row in range(ROWS):
        q[0, row, 0] = -(4 + row % 4) * 2.0 ** -(row // 4 % 4)
        q[0, row, 1] = -(4 + row // 16 % 4) * 2.0 ** -(row // 64 + 3)
    for column, (left, right) in enumerate(pairs):
        v[0, left, column], v[0, right, column] = _VALUE_SIZE, -_VALUE_SIZE
    result = runner.run_finite(make_scene(runner.dtype, q, k, v, batch=batch))
    differs = (result.out[0, :, : len(pairs)] != 0).any(0)
    return Parts(
        keys=keys,
        starts=tuple(pairs[place][1] for place in differs.nonzero().flatten().tolist()),
        declared=result.arithmetic.splits,
        each_step=result.arithmetic.divides_each_step,
    )


LOWEST = 126  # Scores go down to −2^126, which is still finite in fp32 when multiplied by log2 e.

_FIRST = 4  # Scores go down from −2^4.
_PLACES, _BASE = 4, 8  # Places to which the sentinel is narrowed, and their base.
_CLOSEST = 2.0**24
"""Beyond it, rounding score · log2 e changes a weight by more than 2, unless a power of two."""

_CAUSAL, _BOTTOM_RIGHT = Spec.of("causal"), Spec.of("causal_bottom_right")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentinel:
    """Bounds on the score that stands for hidden keys (the sentinel), in natural units."""

    # Lower bound on the sentinel; None if hidden keys never had any weight.
    above: float | None = None
    below: float | None = None  # Upper bound on the sentinel; None likewise.
    empty: str = ""  # what a row returns that sees no key: "0", "NaN", "a mean"; "" if unknown


def read_sentinel(runner: SceneRunner) -> Sentinel:
    """Return bounds on the sentinel: lower visible scores under a causal mask till hidden keys win.

    Row 2m sees only scores of −L_m; column m of out is the weight of the keys hidden from it.

    Raises Unanswered if there are no outputs.
    """
    storage = dtype_named(runner.dtype).storage
    wide = storage.min_exponent == FORMATS["fp32"].min_exponent
    span = DIM - 4 if wide else 2 * _top(storage) - _FIRST + 1  # powers of two in one call
    for first in range(_FIRST, LOWEST + 1, span):
        powers = [2.0**e for e in range(first, min(first + span, LOWEST + 1))]
        # In the first call the scale is 1, so that a sentinel in units of q·k is found too.
        scale = 1.0 if wide else 2.0 ** (first - _FIRST)
        wins = _hidden_win(runner, [[low] for low in powers], scale)
        if any(wins):
            return _narrow_sentinel(runner, powers[wins.index(True)] / 2, scale)
    return Sentinel(empty=_empty_row(runner))


def _top(storage: Format) -> int:
    return math.floor(math.log2(storage.max))


def _narrow_sentinel(runner: SceneRunner, low: float, scale: float) -> Sentinel:
    """Narrow the bounds: hidden keys lose against scores of −``low`` and win against twice that."""
    parts, high = [low], 2 * low
    if low > _CLOSEST:
        return Sentinel(above=-high, below=-low, empty=_empty_row(runner))
    for place in range(1, _PLACES + 1):
        step = low * float(_BASE) ** -place
        wins = _hidden_win(runner, [[*parts, digit * step] for digit in range(1, _BASE)], scale)
        last = wins.index(True) if any(wins) else len(wins)
        if last:
            parts.append(last * step)
        high = sum(parts) + step
    # The winning keys may be up to 128 times fewer than the losing ones.
    slack = math.log(float(ROWS))
    return Sentinel(above=-(high + slack), below=-(sum(parts) - slack), empty=_empty_row(runner))


def _hidden_win(runner: SceneRunner, lows: list[list[float]], scale: float) -> list[bool]:
    """Return for each of these low scores whether hidden keys have half of the weight.

    Args:
        lows: Scores, each as the parts that it is the sum of.
        scale: Factor of the stored q·k: the Problem's scale in fp16, that of descales in fp8.
    """
    storage = dtype_named(runner.dtype).storage
    large = 2.0**15 if storage.name == "fp16" else 2.0**60
    q, k, v = blank_inputs()
    factor = scale if storage.name == "fp16" else 1.0
    if storage.saturates:  # the largest number, which meets zeros in k, sets the descale
        q[..., DIM - 1] = scale * 2.0 ** (2 * _top(storage)) / large
    column = 0
    for m, parts in enumerate(lows):
        row = 2 * m
        for part in parts:
            q[0, row, column], k[0, : row + 1, column] = part / large / factor, -large
            column += 1
        v[0, row + 1 :, m] = 1.0
    v[..., DIM - 1] = 1.0
    out = runner.run(make_scene(runner.dtype, q, k, v, mask=_CAUSAL, scale=factor)).out[0]
    # A row whose weights all overflow or vanish counts as won by its hidden keys too.
    return [not bool((out[2 * m, m] < 0.5) & (out[2 * m, DIM - 1] > 0.5)) for m in range(len(lows))]


def _empty_row(runner: SceneRunner) -> str:
    """Return what a row that sees no key gives: ``0``, ``NaN`` or ``a mean``; empty if refused."""
    q, k, v = blank_inputs(1, ROWS // 2)
    v[...] = 1.0
    try:
        out = runner.run(make_scene(runner.dtype, q, k, v, mask=_BOTTOM_RIGHT)).out[0, 0]
    except (Unanswered, ProblemError):
        return ""
    if bool(torch.isnan(out).any()):
        return "NaN"
    return "0" if not bool(out.any()) else "a mean"


def flushes_subnormals(runner: SceneRunner) -> tuple[str, ...]:
    """Return which of q, k and v (or out) are flushed to 0 if they are subnormal.

    q, then k, is half of the smallest normal number, and its product with a large number is a score
    of −1 next to one of 0: both have the same weight if it was flushed. Then v is subnormal, in all
    keys.

    Raises Unanswered if there are no outputs.
    """
    # One factor at a time, since the product of two subnormal numbers would vanish by itself.
    flushed = [name for name in ("q", "k") if _flushed_factor(runner, name)]
    fmt = dtype_named(runner.dtype).storage
    q, k, v = blank_inputs(1)
    v[0, :, 0] = 2.0 ** (fmt.min_exponent - 1)
    v[0, :, 1] = 1.0  # a number of normal size keeps fp8's descale
    if fmt.saturates:
        v[0, :, 1] = 2.0 ** _top(fmt)
    out = runner.run(make_scene(runner.dtype, q, k, v)).out
    if bool((out[0, :, 0] == 0).all()):
        flushed.append("v or out")
    return tuple(flushed)


def _flushed_factor(runner: SceneRunner, name: str) -> bool:
    fmt = dtype_named(runner.dtype).storage
    small, large = 2.0 ** (fmt.min_exponent - 1), 2.0 ** min(100, _top(fmt))
    q, k, v = blank_inputs()
    # A large number is in both q and k, which keeps fp8's descales.
    q[0, :, 0], k[0, 1:, 0] = (small, -large) if name == "q" else (large, -small)
    q[0, :, 1] = k[0, :, 2] = large
    v[0, 0, 0], v[0, 1, 1] = 1.0, 1.0
    scene = make_scene(runner.dtype, q, k, v, scale=LN2 / (small * large))
    out = runner.run(scene).out[0, ROWS // 2]
    return bool(out[0] == out[1])
