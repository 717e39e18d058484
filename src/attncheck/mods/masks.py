"""The library's masks: FlexAttention callables, and the table that builds each from a Spec.

Indices are integer tensors: 0-d under ``vmap``, or any shapes that broadcast. True means that row
``q_idx`` sees key ``kv_idx``. Numbers are closed over, tensors are captured. Importing this module
does not import torch.
"""

# ruff: noqa: ARG001, ARG005  (every mask has FlexAttention's whole signature, whatever it reads of
# it)

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from operator import and_, or_
from typing import TYPE_CHECKING, TypeAlias

from attncheck.core import mod_spec as check
from attncheck.core.errors import ProblemError
from attncheck.core.mod_spec import Argument, Dimensions, Entry, Spec, Values
from attncheck.mods import formula

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attncheck.mods.signatures import MaskMod


def full(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Every row sees every key (FlexAttention's noop): a 0-d True on the indices' device."""
    import torch

    return b.new_ones((), dtype=torch.bool)


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Row i sees the keys j ≤ i: aligned top-left when the lengths differ, as in FlexAttention."""
    return q_idx >= kv_idx


def causal_bottom_right(offset: int) -> MaskMod:
    """Row i sees the keys j ≤ i + offset; with offset = kv − query the last row sees every key."""
    return lambda b, h, q_idx, kv_idx: q_idx + offset >= kv_idx


def sliding_window(window: int) -> MaskMod:
    """Row i sees the ``window`` keys that end with its own: i − window < j ≤ i; 0 sees nothing."""
    return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx < window) & (q_idx >= kv_idx)


def prefix_lm(prefix: int) -> MaskMod:
    """Row i sees the first ``prefix`` keys and the keys j ≤ i."""
    return lambda b, h, q_idx, kv_idx: (kv_idx < prefix) | (q_idx >= kv_idx)


def document(document_of: Tensor) -> MaskMod:
    """Row i sees the keys of its own document.

    Args:
        document_of: The document of each position, integers (max(query, kv),).
    """
    return documents(document_of, document_of)


def documents(query_of: Tensor, kv_of: Tensor) -> MaskMod:
    """Row i sees the keys whose document has the number of its own.

    Args:
        query_of: The document of each row, integers (query,).
        kv_of: The document of each key, integers (kv,).
    """
    return lambda b, h, q_idx, kv_idx: query_of[q_idx] == kv_of[kv_idx]


def padding(lengths: Tensor) -> MaskMod:
    """Rows of sequence b see its first ``lengths[b]`` keys.

    Args:
        lengths: Keys that are not padding, integers (batch,).
    """
    return lambda b, h, q_idx, kv_idx: kv_idx < lengths[b]


# --- neighborhoods ----------------------------------------------------------------------------
#
# A row or key is a cell (row, column) of a canvas. A cell sees a window of exactly
# kernel[0] · kernel[1] cells around it; at the canvas's edges the window is moved inside, not cut
# off (NATTEN: Hassani et al., "Neighborhood Attention Transformer", 2023, section 3.1;
# FlexAttention's examples). A window of even size has one cell more before its centre than after
# it, as in NATTEN. Rows and keys beyond the canvas see nothing and are not seen.

Pair: TypeAlias = tuple[int, int]  # rows and columns


def neighborhood(canvas: Pair, kernel: Pair) -> MaskMod:
    """A cell sees the ``kernel`` around it; index i is the cell (i // columns, i % columns)."""

    def cell(index: Tensor) -> tuple[Tensor, Tensor]:
        return index // canvas[1], index % canvas[1]

    return _neighbors(canvas, kernel, cell)


def neighborhood_tiled(canvas: Pair, kernel: Pair, tile: Pair) -> MaskMod:
    """As ``neighborhood``; cells are numbered tile by tile, tiles and the cells of each row by row.

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
    """As ``neighborhood``; cells are numbered along a Z curve.

    Args:
        canvas: Rows and columns.
        kernel: Rows and columns of the window.
        cells: From ``morton_order``, on the indices' device.
    """

    def cell(index: Tensor) -> tuple[Tensor, Tensor]:
        number = cells[index.clamp(max=len(cells) - 1)]
        return number // canvas[1], number % canvas[1]

    return _neighbors(canvas, kernel, cell)


def morton_order(canvas: Pair) -> Tensor:
    """Return a canvas's cells along a Z curve, int32 ``(cells,)``: row · columns + column.

    A cell's place is its rank by the bits of row and column, interleaved, the column's lowest
    first (G. M. Morton, 1966). On a canvas whose sides are no powers of two the curve skips cells
    outside of it.
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
        visible = (q_idx < cells) & (kv_idx < cells)
        axes = zip(canvas, kernel, cell(q_idx), cell(kv_idx), strict=True)
        for length, size, own, other in axes:
            gap = other - (own - size // 2).clamp(0, length - size)
            # At the border the window is moved inwards, not cut: all cells see equally many.
            visible = visible & (gap >= 0) & (gap < size)
        return visible

    return mask


# --- compositions: each part is any callable of a mask's signature ----------------------------


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
    return lambda b, h, q_idx, kv_idx: part(b, h, q_idx, kv_idx).logical_not()


def offset_mask(part: MaskMod, *, rows: int) -> MaskMod:
    """Row i sees what row i + ``rows`` sees in ``part``, as in decoding after ``rows`` rows."""
    return lambda b, h, q_idx, kv_idx: part(b, h, q_idx + rows, kv_idx)


def bottom_right(part: MaskMod, *, lengths: Tensor, query: int) -> MaskMod:
    """Row i of sequence b sees what row i + lengths[b] − query sees in ``part``.

    Its last row is the sequence's last position: FlashAttention's alignment in a cache.

    Args:
        part: A mask that shows no key after a row's own.
        lengths: Keys of each sequence, integers (batch,).
        query: Rows.
    """
    return lambda b, h, q_idx, kv_idx: part(b, h, q_idx + (lengths[b] - query), kv_idx)


def documents_bottom_right(
    part: MaskMod, *, query_of: Tensor, kv_of: Tensor, later: Tensor
) -> MaskMod:
    """Rows see keys of their own document alone, and of these what ``part`` shows its last rows.

    Args:
        part: A mask of the distance between row and key.
        query_of: The document of each row, integers (query,).
        kv_of: The document of each key, integers (kv,).
        later: The end of each row's document among the keys less its end among the rows, integers
            (query,).
    """
    return lambda b, h, q_idx, kv_idx: (
        (query_of[q_idx] == kv_of[kv_idx]) & part(b, h, q_idx + later[q_idx], kv_idx)
    )


def shifted_dimensions(values: Values, dimensions: Dimensions) -> Dimensions:
    """Return the dimensions of an offset's part: the longer problem that ends with these rows."""
    return replace(dimensions, query=dimensions.query + values["rows"])


# --- the library ------------------------------------------------------------------------------


def _document_of(lengths: tuple[int, ...], positions: int, device: str) -> Tensor:
    """Return the number of the document of each of the first ``positions``, int32."""
    import torch

    # Lengths may add up to more than int32 holds: sum them in int64.
    ends = torch.tensor(lengths).cumsum(0)
    number = torch.searchsorted(ends, torch.arange(positions), right=True)
    return number.to(device, torch.int32)


def _build_document(values: Values, dims: Dimensions, device: str) -> MaskMod:
    return document(_document_of(values["lengths"], max(dims.query, dims.kv), device))


def _build_documents(values: Values, dims: Dimensions, device: str) -> MaskMod:
    return documents(
        _document_of(values["query_lengths"], dims.query, device),
        _document_of(values["kv_lengths"], dims.kv, device),
    )


def _keywords_of_documents(values: Values, dims: Dimensions, device: str) -> Values:
    """Return the keywords of ``documents_bottom_right``."""
    import torch

    rows, keys = (torch.tensor(values[f"{side}_lengths"]).cumsum(0) for side in ("query", "kv"))
    query_of = _document_of(values["query_lengths"], dims.query, device)
    # Documents may end beyond the Problem's own lengths, where they are cut off.
    later = keys.clamp(max=dims.kv) - rows.clamp(max=dims.query)
    return {
        "query_of": query_of,
        "kv_of": _document_of(values["kv_lengths"], dims.kv, device),
        "later": later.to(device, torch.int32)[query_of.long()],
    }


def _keywords_of_lengths(values: Values, dims: Dimensions, device: str) -> Values:
    """Return the keywords of ``bottom_right``."""
    import torch

    lengths = torch.tensor(values["lengths"], dtype=torch.int32, device=device)
    return {"lengths": lengths, "query": dims.query}


def _build_padding(values: Values, _dims: Dimensions, device: str) -> MaskMod:
    import torch

    return padding(torch.tensor(values["lengths"], dtype=torch.int32, device=device))


def _build_morton(values: Values, _dims: Dimensions, device: str) -> MaskMod:
    cells = morton_order(values["canvas"]).to(device)
    return neighborhood_morton(values["canvas"], values["kernel"], cells)


def _check_equal_counts(name: str, values: Values, _dims: Dimensions) -> None:
    """Raise unless ``query_lengths`` and ``kv_lengths`` have equally many documents."""
    query, kv = len(values["query_lengths"]), len(values["kv_lengths"])
    if query != kv:
        raise ProblemError(
            f"{name} has {query} query_lengths and {kv} kv_lengths: each document has one of each."
        )


def _check_within_canvas(name: str, values: Values, _dims: Dimensions) -> None:
    """Raise if another argument is larger than ``canvas``."""
    canvas = values["canvas"]
    for part, sides in values.items():
        if any(side > length for side, length in zip(sides, canvas, strict=True)):
            raise ProblemError(
                f"{name}.{part}={list(sides)} is larger than the canvas {list(canvas)}."
            )


def later_rows(label: str, value: Argument, dimensions: Dimensions) -> None:
    """Raise unless an offset's ``rows`` leave row indices within 32 bits."""
    check.whole_number(0, check.INT32_LARGEST - dimensions.query)(label, value, dimensions)


# Masks that show no key after a row's own: within a sequence's keys, whatever its length.
_CAUSAL = ("causal", "sliding_window")
_ANY_LENGTH = check.whole_number(0, check.INT32_LARGEST)
_DOCUMENT_LENGTHS = {
    "query_lengths": check.lengths_covering("query", lambda d: d.query),
    "kv_lengths": check.lengths_covering("kv", lambda d: d.kv),
}
_CANVAS = {"canvas": check.rows_and_columns, "kernel": check.rows_and_columns}

MASKS: dict[str, Entry[MaskMod]] = {
    "full": Entry(summary="every row sees every key", build=check.from_arguments(lambda: full)),
    "causal": Entry(
        summary="row i sees keys up to i (aligned top-left)",
        build=check.from_arguments(lambda: causal),
    ),
    "causal_bottom_right": Entry(
        summary="row i sees keys up to i + kv − query: the last row sees every key",
        build=lambda _values, dims, _device: causal_bottom_right(dims.kv - dims.query),
    ),
    "sliding_window": Entry(
        summary="row i sees the last `window` keys up to its own",
        arguments={"window": _ANY_LENGTH},
        build=check.from_arguments(sliding_window),
    ),
    "prefix_lm": Entry(
        summary="row i sees the first `prefix` keys and keys up to i",
        arguments={"prefix": _ANY_LENGTH},
        build=check.from_arguments(prefix_lm),
    ),
    "document": Entry(
        summary="row i sees the keys of its own document; `lengths` one after another",
        arguments={
            "lengths": check.lengths_covering("max(query, kv)", lambda d: max(d.query, d.kv))
        },
        build=_build_document,
    ),
    "documents": Entry(
        summary="rows of document n see its keys; `query_lengths` and `kv_lengths` of each",
        arguments=_DOCUMENT_LENGTHS,
        together=_check_equal_counts,
        build=_build_documents,
    ),
    "padding": Entry(
        summary="rows of sequence b see its first `lengths[b]` keys",
        arguments={"lengths": check.padding_lengths},
        build=_build_padding,
    ),
    "neighborhood": Entry(
        summary="cell i of `canvas` (rows, columns) sees the `kernel` of cells around it",
        arguments=_CANVAS,
        together=_check_within_canvas,
        build=check.from_arguments(neighborhood),
    ),
    "neighborhood_tiled": Entry(
        summary="the same, where cells are numbered `tile` by tile",
        arguments=_CANVAS | {"tile": check.rows_and_columns},
        together=_check_within_canvas,
        build=check.from_arguments(neighborhood_tiled),
    ),
    "neighborhood_morton": Entry(
        summary="the same, where cells are numbered along a Z curve",
        arguments=_CANVAS,
        together=_check_within_canvas,
        build=_build_morton,
    ),
    "expression": Entry(
        summary="keys at which `text` is true, as q_idx % 3 <= kv_idx",
        arguments={"text": check.formula_text(formula.mask_formula_code)},
        build=lambda values, dims, _device: formula.formula_mask(values["text"], dims),
    ),
    "and": Entry(summary="keys that every part shows", compose=and_masks),
    "or": Entry(summary="keys that any part shows", compose=or_masks),
    "not": Entry(summary="keys that its part hides", compose=not_mask, most_parts=1),
    "offset": Entry(
        summary="row i sees what row i + `rows` sees in its part",
        compose=offset_mask,
        arguments={"rows": later_rows},
        within=shifted_dimensions,
        most_parts=1,
    ),
    "bottom_right": Entry(
        summary="causal or a window that ends at each sequence's own last key, of its `lengths[b]`",
        compose=bottom_right,
        keywords=_keywords_of_lengths,
        arguments={"lengths": check.padding_lengths},
        most_parts=1,
        takes=_CAUSAL,
    ),
    "documents_bottom_right": Entry(
        summary="the same in each of `documents`: at the last of its own keys",
        compose=documents_bottom_right,
        keywords=_keywords_of_documents,
        arguments=_DOCUMENT_LENGTHS,
        together=_check_equal_counts,
        most_parts=1,
        takes=_CAUSAL,
    ),
}


# --- masks that go by distance ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Band:
    """A mask that goes by distance: row i sees key j where least ≤ j − i ≤ most."""

    # None: no limit.
    least: int | None = None
    most: int | None = None

    def __and__(self, other: Band) -> Band:
        """Return the band of keys that both show."""
        least = [band.least for band in (self, other) if band.least is not None]
        most = [band.most for band in (self, other) if band.most is not None]
        return Band(max(least, default=None), min(most, default=None))

    def within(self, query: int, kv: int) -> Band:
        """Return the band for ``query`` rows and ``kv`` keys, without limits that hide nothing."""
        # Limits beyond these lengths may be so large that kernels' 32-bit sums overflow.
        most = None if self.most is None or self.most >= kv - 1 else max(self.most, -query)
        least = None if self.least is None or self.least <= 1 - query else min(self.least, kv)
        return Band(least, most)

    def shifted(self, rows: int) -> Band:
        """Return the band as seen from rows whose index is ``rows`` less than their position."""
        return Band(*(x if x is None else x + rows for x in (self.least, self.most)))


def band_of(mask: Spec, dims: Dimensions) -> Band | None:
    """Return the mask as a band; None where it is none, or cannot be recognised by its name."""
    if mask.name == "offset":
        part = band_of(mask.parts[0], shifted_dimensions(mask.values, dims))
        return part and part.shifted(mask.values["rows"])
    if mask.name == "and":
        bands = [band for part in mask.parts if (band := band_of(part, dims)) is not None]
        return reduce(and_, bands) if len(bands) == len(mask.parts) else None
    if mask.name == "bottom_right":
        part, lengths = band_of(mask.parts[0], dims), {*mask.values["lengths"]}
        # Sequences of one length have one diagonal, and no row sees a key behind it.
        return part and part.shifted(lengths.pop() - dims.query) if len(lengths) == 1 else None
    if mask.name == "sliding_window":
        return Band(1 - mask.values["window"], 0)
    most = {"full": None, "causal": 0, "causal_bottom_right": dims.kv - dims.query}
    return Band(most=most[mask.name]) if mask.name in most else None
