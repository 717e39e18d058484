"""The library's masks: FlexAttention callables, and the table that builds each from a Spec.

Indices are integer tensors: 0-d under ``vmap``, or any shapes that broadcast. True means that row
``q_idx`` sees key ``kv_idx``. Numbers are closed over, tensors are captured.

A row or key is a cell ``(row, column)`` of the canvas. A cell sees a window of exactly
``kernel[0] · kernel[1]`` cells around it; at the canvas's edges the window is moved inside, not
cut off (NATTEN: Hassani et al., "Neighborhood Attention Transformer", 2023, section 3.1;
FlexAttention's examples). A window of even size has one cell more before its centre than after it,
as in NATTEN. Rows and keys beyond the canvas see nothing and are not seen.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import and_, or_
from typing import TYPE_CHECKING, TypeAlias, cast

from attncheck.mods import formula
from attncheck.mods import spec as check
from attncheck.mods.spec import Entry, Values, text_value, whole_value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from attncheck.mods.spec import Argument, Dimensions, MaskMod, ScoreMod

__all__ = [
    "MASKS",
    "and_masks",
    "causal",
    "causal_bottom_right",
    "chain_scores",
    "document",
    "documents",
    "full",
    "morton_order",
    "neighborhood",
    "neighborhood_morton",
    "neighborhood_tiled",
    "not_mask",
    "offset_mask",
    "offset_score",
    "or_masks",
    "padding",
    "prefix_lm",
    "shifted_dimensions",
    "sliding_window",
]


# ruff: noqa: ARG001  (every mask has FlexAttention's whole signature, whatever it reads of it)


def full(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Every row sees every key (FlexAttention's noop): a 0-d True on the indices' device."""
    import torch

    return b.new_ones((), dtype=torch.bool)


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Row i sees the keys j ≤ i: aligned top-left when the lengths differ, as in FlexAttention."""
    return q_idx >= kv_idx


def causal_bottom_right(offset: int) -> MaskMod:
    """Row i sees the keys j ≤ i + offset; with offset = kv − query the last row sees every key."""

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx + offset >= kv_idx

    return mask


def sliding_window(window: int) -> MaskMod:
    """Row i sees the ``window`` keys that end with its own: i − window < j ≤ i; 0 sees nothing."""

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx < window) & (q_idx >= kv_idx)

    return mask


def prefix_lm(prefix: int) -> MaskMod:
    """Row i sees the first ``prefix`` keys and the keys j ≤ i."""

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx < prefix) | (q_idx >= kv_idx)

    return mask


def document(document_of: Tensor) -> MaskMod:
    """Row i sees the keys of its own document.

    Args:
        document_of: Which document a position belongs to, integers (max(query, kv),).
    """

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return document_of[q_idx] == document_of[kv_idx]

    return mask


def documents(query_of: Tensor, kv_of: Tensor) -> MaskMod:
    """Row i sees the keys of the document of its number.

    Args:
        query_of: Which document a row belongs to, integers (query,).
        kv_of: Which document a key belongs to, integers (kv,).
    """

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return query_of[q_idx] == kv_of[kv_idx]

    return mask


def padding(lengths: Tensor) -> MaskMod:
    """Rows of sequence b see its first ``lengths[b]`` keys.

    Args:
        lengths: Keys that are not padding, integers (batch,).
    """

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx < lengths[b]

    return mask


# ruff: noqa: ARG001  (every mask has FlexAttention's whole signature, whatever it reads of it)


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


def and_masks(first: MaskMod, *rest: MaskMod) -> MaskMod:
    """A row sees the keys that every part lets it see."""

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return reduce(and_, (part(b, h, q_idx, kv_idx) for part in (first, *rest)))

    return mask


def or_masks(first: MaskMod, *rest: MaskMod) -> MaskMod:
    """A row sees the keys that any part lets it see."""

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return reduce(or_, (part(b, h, q_idx, kv_idx) for part in (first, *rest)))

    return mask


def not_mask(part: MaskMod) -> MaskMod:
    """A row sees the keys that ``part`` hides from it."""

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return part(b, h, q_idx, kv_idx).logical_not()

    return mask


def chain_scores(first: ScoreMod, *rest: ScoreMod) -> ScoreMod:
    """Applies the parts from left to right: ``chain(f, g)`` is g(f(score))."""

    def chained(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        for part in (first, *rest):
            score = part(score, b, h, q_idx, kv_idx)
        return score

    return chained


def offset_mask(part: MaskMod, *, rows: int) -> MaskMod:
    """Row i sees what row i + ``rows`` sees in ``part``: decoding behind ``rows`` earlier ones."""

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return part(b, h, q_idx + rows, kv_idx)

    return mask


def offset_score(part: ScoreMod, *, rows: int) -> ScoreMod:
    """Row i gets what row i + ``rows`` gets from ``part``."""

    def scored(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return part(score, b, h, q_idx + rows, kv_idx)

    return scored


def shifted_dimensions(values: Mapping[str, Argument], dimensions: Dimensions) -> Dimensions:
    """What an offset's part is asked about: the long problem, whose last rows are these."""
    return replace(dimensions, query=dimensions.query + cast("int", values["rows"]))


_INT32_LARGEST = 2**31 - 1


def _lengths(values: Values, name: str = "lengths") -> tuple[int, ...]:
    return cast("tuple[int, ...]", values[name])


def _pair(values: Values, name: str) -> tuple[int, int]:
    return cast("tuple[int, int]", values[name])


def _document_of(lengths: tuple[int, ...], positions: int, device: str) -> Tensor:
    """Which document each of the first ``positions`` belongs to, int32."""
    import torch

    ends = torch.tensor(lengths).cumsum(0)
    found = torch.searchsorted(ends, torch.arange(positions), right=True)
    return found.to(device, torch.int32)


def _document(values: Values, dims: Dimensions, device: str) -> MaskMod:
    return document(_document_of(_lengths(values), max(dims.query, dims.kv), device))


def _documents(values: Values, dims: Dimensions, device: str) -> MaskMod:
    return documents(
        _document_of(_lengths(values, "query_lengths"), dims.query, device),
        _document_of(_lengths(values, "kv_lengths"), dims.kv, device),
    )


def _padding(values: Values, _dims: Dimensions, device: str) -> MaskMod:
    import torch

    return padding(torch.tensor(_lengths(values), dtype=torch.int32, device=device))


def _morton(values: Values, _dims: Dimensions, device: str) -> MaskMod:
    canvas = _pair(values, "canvas")
    cells = morton_order(canvas).to(device)
    return neighborhood_morton(canvas, _pair(values, "kernel"), cells)


MASKS: dict[str, Entry[MaskMod]] = {
    "full": Entry(
        summary="every row sees every key",
        build=lambda _values, _dims, _device: full,
    ),
    "causal": Entry(
        summary="row i sees keys up to i (aligned top-left)",
        build=lambda _values, _dims, _device: causal,
    ),
    "causal_bottom_right": Entry(
        summary="row i sees keys up to i + kv − query: the last row sees every key",
        build=lambda _values, dims, _device: causal_bottom_right(dims.kv - dims.query),
    ),
    "sliding_window": Entry(
        summary="row i sees the last `window` keys up to its own",
        arguments={"window": check.whole_number(0, _INT32_LARGEST)},
        build=lambda values, _dims, _device: sliding_window(whole_value(values, "window")),
    ),
    "prefix_lm": Entry(
        summary="row i sees the first `prefix` keys and keys up to i",
        arguments={"prefix": check.whole_number(0, _INT32_LARGEST)},
        build=lambda values, _dims, _device: prefix_lm(whole_value(values, "prefix")),
    ),
    "document": Entry(
        summary="row i sees the keys of its own document; `lengths` one after another",
        arguments={"lengths": check.document_lengths},
        build=_document,
    ),
    "documents": Entry(
        summary="rows of document n see its keys; `query_lengths` and `kv_lengths` of each",
        arguments={
            "query_lengths": check.lengths_of("query"),
            "kv_lengths": check.lengths_of("kv"),
        },
        together=check.as_many_lengths,
        build=_documents,
    ),
    "padding": Entry(
        summary="rows of sequence b see its first `lengths[b]` keys",
        arguments={"lengths": check.padding_lengths},
        build=_padding,
    ),
    "neighborhood": Entry(
        summary="cell i of `canvas` (rows, columns) sees the `kernel` of cells around it",
        arguments={"canvas": check.canvas, "kernel": check.canvas_part},
        together=check.within_the_canvas,
        build=lambda values, _dims, _device: neighborhood(
            _pair(values, "canvas"), _pair(values, "kernel")
        ),
    ),
    "neighborhood_tiled": Entry(
        summary="the same, where cells are numbered `tile` by tile",
        arguments={"canvas": check.canvas, "kernel": check.canvas_part, "tile": check.canvas_part},
        together=check.within_the_canvas,
        build=lambda values, _dims, _device: neighborhood_tiled(
            _pair(values, "canvas"), _pair(values, "kernel"), _pair(values, "tile")
        ),
    ),
    "neighborhood_morton": Entry(
        summary="the same, where cells are numbered along a Z curve",
        arguments={"canvas": check.canvas, "kernel": check.canvas_part},
        together=check.within_the_canvas,
        build=_morton,
    ),
    "expression": Entry(
        summary="keys at which `text` is true, as q_idx % 3 <= kv_idx",
        arguments={"text": check.formula_text(formula.mask_formula_code)},
        build=lambda values, dims, _device: formula.formula_mask(text_value(values), dims),
    ),
    "and": Entry(summary="keys that every part shows", compose=and_masks),
    "or": Entry(summary="keys that any part shows", compose=or_masks),
    "not": Entry(summary="keys that its part hides", compose=not_mask, most_parts=1),
    "offset": Entry(
        summary="row i sees what row i + `rows` sees in its part",
        compose=offset_mask,
        arguments={"rows": check.later_rows},
        within=shifted_dimensions,
        most_parts=1,
    ),
}
