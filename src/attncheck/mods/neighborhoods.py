"""Neighborhood attention on a canvas of cells, for three orders in which cells are numbered.

A row or key is a cell ``(row, column)`` of the canvas. A cell sees a window of exactly
``kernel[0] · kernel[1]`` cells around it; at the canvas's edges the window is moved inside, not
cut off (NATTEN: Hassani et al., "Neighborhood Attention Transformer", 2023, section 3.1;
FlexAttention's examples). A window of even size has one cell more before its centre than after it,
as in NATTEN. Rows and keys beyond the canvas see nothing and are not seen.
"""

# ruff: noqa: ARG001  (every mask has FlexAttention's whole signature, whatever it reads of it)

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attncheck.mods.signatures import MaskMod

__all__ = ["morton_order", "neighborhood", "neighborhood_morton", "neighborhood_tiled"]

Pair: TypeAlias = tuple[int, int]
"""Rows and columns."""


def neighborhood(canvas: Pair, kernel: Pair) -> MaskMod:
    """Cells numbered row by row: index i is the cell (i // columns, i % columns)."""

    def cell(index: Tensor) -> tuple[Tensor, Tensor]:
        return index // canvas[1], index % canvas[1]

    return _neighbors(canvas, kernel, cell)


def neighborhood_tiled(canvas: Pair, kernel: Pair, tile: Pair) -> MaskMod:
    """Cells numbered tile by tile, tiles and the cells of each row by row.

    The last tiles are smaller where ``tile`` does not divide the canvas.
    """
    (rows, columns), (tall, wide) = canvas, tile

    def cell(index: Tensor) -> tuple[Tensor, Tensor]:
        index = index.clamp(max=rows * columns - 1)  # beyond it a tile would have no height
        band, within = index // (tall * columns), index % (tall * columns)
        height = (rows - band * tall).clamp(max=tall)
        turn, place = within // (height * wide), within % (height * wide)
        width = (columns - turn * wide).clamp(max=wide)
        return band * tall + place // width, turn * wide + place % width

    return _neighbors(canvas, kernel, cell)


def neighborhood_morton(canvas: Pair, kernel: Pair, cells: Tensor) -> MaskMod:
    """Cells numbered along a Z curve.

    Args:
        canvas: Rows and columns.
        kernel: Of the window.
        cells: What ``morton_order`` gives, on the indices' device.
    """

    def cell(index: Tensor) -> tuple[Tensor, Tensor]:
        number = cells[index.clamp(max=len(cells) - 1)]
        return number // canvas[1], number % canvas[1]

    return _neighbors(canvas, kernel, cell)


def morton_order(canvas: Pair) -> Tensor:
    """The canvas's cells along a Z curve, int32 ``(cells,)``: row · columns + column of each.

    A cell's place is its rank by the bits of row and column, interleaved, the column's lowest
    first (G. M. Morton, 1966): on a canvas whose sides are no powers of two the curve leaves out
    what lies outside.
    """
    import torch

    number = torch.arange(canvas[0] * canvas[1])
    row, column = number // canvas[1], number % canvas[1]
    code = torch.zeros_like(number)
    for bit in range(max(canvas).bit_length()):
        code |= (column >> bit & 1) << 2 * bit | (row >> bit & 1) << 2 * bit + 1
    return code.argsort().to(torch.int32)


def _neighbors(
    canvas: Pair, kernel: Pair, cell: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> MaskMod:
    """A cell sees the ``kernel`` around it; ``cell`` gives an index's row and column."""
    cells = canvas[0] * canvas[1]

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = (q_idx < cells) & (kv_idx < cells)
        axes = zip(canvas, kernel, cell(q_idx), cell(kv_idx), strict=True)
        for length, size, own, other in axes:
            gap = other - (own - size // 2).clamp(0, length - size)
            seen = seen & (gap >= 0) & (gap < size)
        return seen

    return mask
