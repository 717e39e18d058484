"""Readings of exp2, of a kernel's steps over the keys, and of its hidden and subnormal scores."""

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
_ULP = 2.0**-_BITS  # of fp32 numbers from 1/2 to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponential:
    """The error of exp2, as far as it shows."""

    ulps: float  # largest error that was shown, in ulps of fp32
    places: int  # arguments at which it was looked for


def read_exponential(runner: SceneRunner, held: Grid, *, rounded: bool) -> Exponential | None:
    """The largest error of a weight in [1/2, 1) that shows; None where none would.

    Args:
        rounded: Whether that is a format to which P is rounded, and not all that exp2 gives.

    Raises Unanswered where there are no outputs.
    """
    fp32 = dtype_named(runner.dtype).output.significand == _BITS
    try:
        if fp32 and not rounded:
            return _measured(runner)
        if held.bits >= _BITS:
            return None
        return _by_turns(runner, held)
    except ProblemError:  # the grid of P is none of V's
        return None


_EACH = 4
_POINTS = _EACH * (KEYS // GROUP)
_STEP = 2.0**-13


def _measured(runner: SceneRunner) -> Exponential:
    """In fp32: weights less the next multiple of 1/128, which leaves no rounding but exp2's.

    A key of weight 1/2 in the same group takes off what is near: the difference of two such numbers
    is exact (Sterbenz), and dividing it by the row sum costs 2^-23 of the little that is left.
    """
    q, k, v = blank_inputs()
    q[0, :, 0] = 1.0
    for row in range(ROWS):
        q[0, row, 1] = row * _STEP
    k[0, :, 0] = -1.0
    k[0, ::GROUP, 0] = 0.0
    logits = torch.full((ROWS, KEYS), -1.0, dtype=torch.float64)
    logits[:, ::GROUP] = 0.0
    anchored = []
    for point in range(_POINTS):
        key = point // _EACH * GROUP + 1 + point % _EACH
        k[0, key, :2] = torch.tensor((point / (_POINTS + 1) - 1.0, 1.0), dtype=torch.float64)
        # A few bits, so that adding the row's multiple of 2^-13 to it rounds nothing.
        k[0, key, 0] = round(float(k[0, key, 0]) * 64) / 64
        logits[:, key] = k[0, key, 0] + q[0, :, 1]
        near = round(2.0 ** float(logits[ROWS // 2, key]) * 128) / 64
        v[0, key, point], v[0, key // GROUP * GROUP + GROUP // 2, point] = 1.0, -near
        anchored.append((key, near))
    out = runner.run_finite(make_scene(runner.dtype, q, k, v)).out[0]
    weights = torch.exp2(logits)
    total = weights.sum(-1)
    keys = [key for key, _ in anchored]
    anchors = torch.tensor([near for _, near in anchored], dtype=torch.float64)
    right = weights[:, keys] - anchors / 2
    wrong = (out[:, :_POINTS] * total[:, None] - right).abs().max() / _ULP
    return Exponential(ulps=float(wrong), places=_POINTS * ROWS)


_HEADS = 8
_DIGITS = _BITS // 3


def _by_turns(runner: SceneRunner, held: Grid) -> Exponential | None:
    """Read, where P is rounded, on which side of the turn from one number to the next weights fall.

    Arguments lie around the logarithm of a turn, as close as fp32 has them (2^-24, a third of an
    ulp of the weight) and ever further. A weight on the wrong side is off by its distance at least.
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
    out = runner.run_finite(make_scene(runner.dtype, q, k, v)).out[..., 0]
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


_MAXIMUM, _RISING = 5, 8
"""Offsets in a group: of the key that is its maximum, and of the one that may rise above it."""

_PEAKS = 16  # keys that rise, each in rows of its own
# How far below the maximum a key lies, and how far it lies below the risen one: that is in two
# parts, so that each number has three bits (log2). A lazy maximum follows the large rises.
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
_SIZE = 2.0**15  # of values: differences of small weights show in fp16


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """The steps over the keys."""

    keys: int  # how many keys were measured
    # The first key of each step but the first; none where nothing shows one.
    starts: tuple[int, ...]
    order: Literal["forward", "reverse", ""]  # which end comes first; empty where it does not show

    @property
    def size(self) -> int | None:
        """Keys of a step; None where there is no boundary, or they are not alike."""
        edges = (0, *self.starts, self.keys)
        sizes = {b - a for a, b in itertools.pairwise(edges)}
        return sizes.pop() if self.starts and len(sizes) == 1 else None


def read_tiles(
    runner: SceneRunner, keys: int, known: Parts | None, rows: int = ROWS
) -> tuple[Tiles, SceneResult]:
    """The steps over ``keys`` keys, and what is declared of them.

    Neighbours have the same score, and values +1 and −1 in a column of their own: it is 0 exactly
    where both weights were made and rounded alike. One key rises above the maximum: a weight of an
    earlier step has been rounded before it is scaled down, one of the same step is rounded after.

    Args:
        keys: A multiple of 256.
        known: Boundaries of parts that are merged: they say nothing of the order.
        rows: How many rows there are; the first 128 are looked at.

    Raises Unanswered where there are no outputs.
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
        v[head, left, column], v[head, right, column] = _SIZE, -_SIZE
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
    """Neighbours that are compared: all, or of many keys those on both sides of multiples."""
    special = {_MAXIMUM, _RISING}
    if keys <= 2 * GROUP * 8:
        plain = [key for key in range(keys) if key % GROUP not in special]
        return list(itertools.pairwise(plain))
    step = max(GROUP, keys // DIM)
    return [(key - 1, key) for key in range(step, keys, step)]


def _boundary(left: int, right: int) -> int:
    """The key after ``left``, up to ``right``, of the most twos: where a step may well begin."""
    return max(range(left + 1, right + 1), key=lambda key: key & -key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts that are computed apart and merged."""

    keys: int  # how many keys were measured
    starts: tuple[int, ...]  # the first key of each part but the first
    declared: int  # the number of parts that is declared
    each_step: bool  # whether it is declared that O is divided after each step

    @property
    def count(self) -> int:
        """The number of parts."""
        return len(self.starts) + 1


def read_parts(runner: SceneRunner, keys: int, batch: int = 1, rows: int = ROWS) -> Parts:
    """The parts of ``keys`` keys that are divided by sums of their own before they are added.

    As in ``tiles``, but no maximum ever rises: all steps round alike. Each group has another sum,
    so that what two parts are divided by, and what brings them together, is rounded otherwise.

    Raises Unanswered where there are no outputs.
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
        v[0, left, column], v[0, right, column] = _SIZE, -_SIZE
    result = runner.run_finite(make_scene(runner.dtype, q, k, v, batch=batch))
    differs = (result.out[0, :, : len(pairs)] != 0).any(0)
    return Parts(
        keys=keys,
        starts=tuple(pairs[place][1] for place in differs.nonzero().flatten().tolist()),
        declared=result.arithmetic.splits,
        each_step=result.arithmetic.divides_each_step,
    )


LOWEST = 126  # scores go down to −2^126: log2 e times that is still a number of fp32

_FIRST = 4
_PLACES, _BASE = 4, 8
_CLOSEST = 2.0**24
"""Beyond, rounding a score that is no power of two, times log2 e, makes more than 2 of a weight."""

_CAUSAL, _DEAD = Spec.of("causal"), Spec.of("causal_bottom_right")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentinel:
    """The weight of hidden keys."""

    # Natural score that the sentinel is not below; None where hidden keys never weighed.
    above: float | None = None
    below: float | None = None  # the same from the other side
    empty: str = ""


def read_sentinel(runner: SceneRunner) -> Sentinel:
    """Under a causal mask rows have ever lower scores, and hidden keys 0: when do these win?

    Row 2m sees scores of −L_m alone; column m is what the keys weigh that it does not see.

    Raises Unanswered where there are no outputs.
    """
    storage = dtype_named(runner.dtype).storage
    wide = storage.min_exponent == FORMATS["fp32"].min_exponent
    span = DIM - 4 if wide else 2 * _top(storage) - _FIRST + 1  # powers of two that q holds
    for first in range(_FIRST, LOWEST + 1, span):
        powers = [2.0**e for e in range(first, min(first + span, LOWEST + 1))]
        # A sentinel in units of q·k as it is stored shows where that is the score: at first.
        scale = 1.0 if wide else 2.0 ** (first - _FIRST)
        wins = _hidden_win(runner, [[low] for low in powers], scale)
        if any(wins):
            return _within(runner, powers[wins.index(True)] / 2, scale)
    return Sentinel(empty=_empty_row(runner))


def _top(storage: Format) -> int:
    return math.floor(math.log2(storage.max))


def _within(runner: SceneRunner, low: float, scale: float) -> Sentinel:
    """The same ever closer: ``low`` is not enough for hidden keys to win, twice that is."""
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
    # Keys that win are up to 128 times fewer than those that lose.
    slack = math.log(float(ROWS))
    return Sentinel(above=-(high + slack), below=-(sum(parts) - slack), empty=_empty_row(runner))


def _hidden_win(runner: SceneRunner, lows: list[list[float]], scale: float) -> list[bool]:
    """Return whether hidden keys have half of the weight, of each of these sums of low scores.

    Args:
        lows: Sums, each in parts.
        scale: Of q·k as it is stored: fp16's is the Problem's, fp8's that of its descales.
    """
    storage = dtype_named(runner.dtype).storage
    large = 2.0**15 if storage.name == "fp16" else 2.0**60
    q, k, v = blank_inputs()
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
    out = runner.run(make_scene(runner.dtype, q, k, v, mask=_CAUSAL, scale=factor)).out[0]
    # With weights that overflow or vanish together, a row is its hidden keys' prey as well.
    return [not bool((out[2 * m, m] < 0.5) & (out[2 * m, DIM - 1] > 0.5)) for m in range(len(lows))]


def _empty_row(runner: SceneRunner) -> str:
    """Read what a row gives that sees no key."""
    q, k, v = blank_inputs(1, ROWS // 2)
    v[...] = 1.0
    try:
        out = runner.run(make_scene(runner.dtype, q, k, v, mask=_DEAD)).out[0, 0]
    except (Unanswered, ProblemError):
        return ""
    if bool(torch.isnan(out).any()):
        return "NaN"
    return "0" if not bool(out.any()) else "a mean"


def flushes_subnormals(runner: SceneRunner) -> tuple[str, ...]:
    """Read which of q, k and v (or out) are 0 where they are subnormal.

    q of one head and k of another are half of the smallest normal number, and the product with a
    large one makes a score of −1 beside one of 0: the same weight where it was flushed. Then v is
    the subnormal one, in all keys.

    Raises Unanswered where there are no outputs.
    """
    # One factor at a time: a product of two such numbers would vanish by itself.
    flushed = [name for name in ("q", "k") if _flushed_factor(runner, name)]
    fmt = dtype_named(runner.dtype).storage
    q, k, v = blank_inputs(1)
    v[0, :, 0] = 2.0 ** (fmt.min_exponent - 1)
    v[0, :, 1] = 1.0  # in fp8 it keeps the descale what it is
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
    # The large one is there in any case: fp8 keeps its descale.
    q[0, :, 0], k[0, 1:, 0] = (small, -large) if name == "q" else (large, -small)
    q[0, :, 1] = k[0, :, 2] = large
    v[0, 0, 0], v[0, 1, 1] = 1.0, 1.0
    scene = make_scene(runner.dtype, q, k, v, scale=LN2 / (small * large))
    out = runner.run(scene).out[0, ROWS // 2]
    return bool(out[0] == out[1])
