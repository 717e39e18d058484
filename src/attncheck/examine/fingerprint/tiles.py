"""Where a step over the keys ends and the next one begins, and what is merged at the end."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from attncheck.examine.fingerprint.scene import DIM, GROUP, ROWS, blank, every, scene

if TYPE_CHECKING:
    from attncheck.examine.fingerprint.asker import Asker, Told

__all__ = ["Parts", "Tiles", "parts", "tiles"]

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
    """What steps there are.

    Attributes:
        keys: How many keys were asked about.
        starts: The first key of each step but the first; none where nothing shows one.
        order: Which end comes first; empty where it does not show.
    """

    keys: int
    starts: tuple[int, ...]
    order: Literal["forward", "reverse", ""]

    @property
    def size(self) -> int | None:
        """Keys of a step; None where there is no boundary, or they are not alike."""
        edges = (0, *self.starts, self.keys)
        sizes = {b - a for a, b in itertools.pairwise(edges)}
        return sizes.pop() if self.starts and len(sizes) == 1 else None


def tiles(asker: Asker, keys: int, known: Parts | None, rows: int = ROWS) -> tuple[Tiles, Told]:
    """The steps over ``keys`` keys, and what is declared of them.

    Neighbours have the same score, and values +1 and −1 in a column of their own: it is 0 exactly
    where both weights were made and rounded alike. One key rises above the maximum: a weight of an
    earlier step has been rounded before it is scaled down, one of the same step is rounded after.

    Args:
        asker: The kernel.
        keys: A multiple of 256.
        known: Boundaries of parts that are merged: they say nothing of the order.
        rows: How many rows there are; the first 128 are looked at.

    Raises:
        Unanswered: where there are no outputs.
    """
    pairs = _pairs(keys)
    columns = min(DIM, -(-len(pairs) // 4)) if len(pairs) > DIM else len(pairs)
    heads = -(-len(pairs) // columns)
    q, k, v = blank(heads, keys, rows)
    peaks = [_RISING + peak * (keys // _PEAKS) for peak in range(_PEAKS)]
    k[:, :, _PEAKS] = 1.0
    k[:, every(_MAXIMUM, keys), _PEAKS] = 0.0
    for peak, key in enumerate(peaks):
        k[:, key, peak] = k[:, key, _PEAKS + 1 + peak] = 1.0
    for row in range(ROWS):
        fall, most, rest = _FALLS[row // _PEAKS]
        q[:, row, row % _PEAKS], q[:, row, _PEAKS] = most, -fall
        q[:, row, _PEAKS + 1 + row % _PEAKS] = rest
    for place, (left, right) in enumerate(pairs):
        head, column = divmod(place, columns)
        v[head, left, column], v[head, right, column] = _SIZE, -_SIZE
    told = asker.finite(scene(asker.dtype, q, k, v))
    differs = (told.out[:, :ROWS, :columns] != 0).view(heads, len(_FALLS), _PEAKS, columns).any(1)
    by_peak = differs.transpose(0, 1).reshape(_PEAKS, -1)[:, : len(pairs)]
    starts = [_boundary(*pairs[place]) for place in by_peak.any(0).nonzero().flatten().tolist()]
    merged = set(known.starts) if known is not None and known.keys == keys else set()
    sides = {
        "reverse" if _boundary(*pairs[place]) > peaks[peak] else "forward"
        for peak, place in by_peak.nonzero().tolist()
        if _boundary(*pairs[place]) not in merged
    }
    order = sides.pop() if len(sides) == 1 else ""
    found = Tiles(keys=keys, starts=tuple(starts), order=order)  # type: ignore[arg-type]  # of sides
    return found, told


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
    """What is computed apart and merged.

    Attributes:
        keys: How many keys were asked about.
        starts: The first key of each part but the first.
        declared: The number of parts that is declared.
        each_step: Whether it is declared that O is divided after each step.
    """

    keys: int
    starts: tuple[int, ...]
    declared: int
    each_step: bool

    @property
    def count(self) -> int:
        """How many parts."""
        return len(self.starts) + 1


def parts(asker: Asker, keys: int, batch: int = 1, rows: int = ROWS) -> Parts:
    """The parts of ``keys`` keys that are divided by sums of their own before they are added.

    As in ``tiles``, but no maximum ever rises: all steps round alike. Each group has another sum,
    so that what two parts are divided by, and what brings them together, is rounded otherwise.

    Raises:
        Unanswered: where there are no outputs.
    """
    pairs = [(key - 1, key) for key in range(GROUP, keys, max(GROUP, keys // DIM))]
    q, k, v = blank(1, keys, rows)
    k[0, :, 0] = 1.0
    k[0, every(_MAXIMUM, keys), 0] = 0.0
    groups = keys // GROUP
    for group in range(groups):
        key = group * GROUP + _RISING
        k[0, key, :2] = torch.tensor((0.0, 1.0 + group * 5 % 7), dtype=torch.float64)
    for row in range(ROWS):
        q[0, row, 0] = -(4 + row % 4) * 2.0 ** -(row // 4 % 4)
        q[0, row, 1] = -(4 + row // 16 % 4) * 2.0 ** -(row // 64 + 3)
    for column, (left, right) in enumerate(pairs):
        v[0, left, column], v[0, right, column] = _SIZE, -_SIZE
    told = asker.finite(scene(asker.dtype, q, k, v, batch=batch))
    differs = (told.out[0, :, : len(pairs)] != 0).any(0)
    return Parts(
        keys=keys,
        starts=tuple(pairs[place][1] for place in differs.nonzero().flatten().tolist()),
        declared=told.arithmetic.splits,
        each_step=told.arithmetic.divides_each_step,
    )
