"""Which tiles of rows and keys an error of out is from: by how much weights must be off."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attncheck.record import TileMap

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from attncheck.hypotheses import Given
    from attncheck.judge.diagnose import Error
    from attncheck.tensor_names import TensorName

__all__ = ["MOST_CELLS", "tile_map"]

MOST_CELLS = 16
"""Of a map, down and to the right."""

_MOST_KEYS = 1024


def tile_map(given: Given, got: Mapping[TensorName, Tensor], error: Error) -> TileMap | None:
    """The map of a kernel's error; None where some of it is not finite, or there is one cell.

    With w the exact weights of a row, what a kernel gave is Σ (w + δ) v and its row sum 1 + Σ δ, by
    LSE; 1 where it has none. Of all δ that say so, which are many where there are more keys than
    columns, the smallest is taken: ``[v 1]⁺``, once for a head.

    Args:
        given: The call; every row of it.
        got: What the kernel gave.
        error: That it is wrong.
    """
    problem = given.problem
    out, lse = got["out"], got.get("lse")
    if not given.whole or problem.kv > _MOST_KEYS or not error.wrong:
        return None
    exact = given.parts
    grown = torch.ones_like(exact.total)
    if lse is not None:
        grown = (lse - exact.lse).exp()
        grown = torch.where(exact.dead, 1.0, grown)
    moved = out * grown[..., None] - exact.out
    target = torch.cat([moved, (grown - 1.0)[..., None]], -1)
    v = given.v.expand(problem.batch, problem.heads, -1, -1)
    if not bool(target.isfinite().all()) or not bool(v.isfinite().all()):
        return None
    unit = v.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    columns = torch.cat([v / unit, torch.ones_like(v[..., :1])], -1)
    target = torch.cat([target[..., :-1] / unit, target[..., -1:]], -1)
    change = (target @ torch.linalg.pinv(columns)).abs().sum(dim=(0, 1))  # (rows, kv)
    tile = given.tiles[0] if len(given.tiles) == 1 else (1, 1)
    rows, keys = (_step(n, t) for n, t in zip(change.shape, tile, strict=True))
    values = _cells(change, rows, keys)
    one = len(values) * len(values[0]) == 1
    return None if one else TileMap(rows=rows, keys=keys, values=values)


def _step(size: int, tile: int) -> int:
    """The fewest whole tiles, at most ``MOST_CELLS`` of which make up ``size``."""
    tile = tile if tile < size else 1
    return tile * math.ceil(math.ceil(size / tile) / MOST_CELLS)


def _cells(change: Tensor, rows: int, keys: int) -> tuple[tuple[float, ...], ...]:
    """Sums of cells, as shares of the largest, in two digits."""
    sums = [
        [change[i : i + rows, j : j + keys].sum() for j in range(0, change.shape[1], keys)]
        for i in range(0, change.shape[0], rows)
    ]
    largest = max((float(cell) for line in sums for cell in line), default=0.0)
    unit = largest if largest > 0 else 1.0
    return tuple(tuple(float(f"{float(cell) / unit:.2g}") for cell in line) for line in sums)
