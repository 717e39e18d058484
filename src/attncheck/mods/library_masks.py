"""The masks of the library: what each takes, and how it is built."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from attncheck.mods import arguments as check
from attncheck.mods import compose, masks, neighborhoods, written
from attncheck.mods.entries import Entry, Values, text, whole

if TYPE_CHECKING:
    from torch import Tensor

    from attncheck.mods.signatures import MaskMod
    from attncheck.mods.spec import Dimensions

__all__ = ["MASKS"]

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
    return masks.document(_document_of(_lengths(values), max(dims.query, dims.kv), device))


def _documents(values: Values, dims: Dimensions, device: str) -> MaskMod:
    return masks.documents(
        _document_of(_lengths(values, "query_lengths"), dims.query, device),
        _document_of(_lengths(values, "kv_lengths"), dims.kv, device),
    )


def _padding(values: Values, _dims: Dimensions, device: str) -> MaskMod:
    import torch

    return masks.padding(torch.tensor(_lengths(values), dtype=torch.int32, device=device))


def _morton(values: Values, _dims: Dimensions, device: str) -> MaskMod:
    canvas = _pair(values, "canvas")
    cells = neighborhoods.morton_order(canvas).to(device)
    return neighborhoods.neighborhood_morton(canvas, _pair(values, "kernel"), cells)


MASKS: dict[str, Entry[MaskMod]] = {
    "full": Entry(
        summary="every row sees every key",
        build=lambda _values, _dims, _device: masks.full,
    ),
    "causal": Entry(
        summary="row i sees keys up to i (aligned top-left)",
        build=lambda _values, _dims, _device: masks.causal,
    ),
    "causal_bottom_right": Entry(
        summary="row i sees keys up to i + kv − query: the last row sees every key",
        build=lambda _values, dims, _device: masks.causal_bottom_right(dims.kv - dims.query),
    ),
    "sliding_window": Entry(
        summary="row i sees the last `window` keys up to its own",
        arguments={"window": check.whole(0, _INT32_LARGEST)},
        build=lambda values, _dims, _device: masks.sliding_window(whole(values, "window")),
    ),
    "prefix_lm": Entry(
        summary="row i sees the first `prefix` keys and keys up to i",
        arguments={"prefix": check.whole(0, _INT32_LARGEST)},
        build=lambda values, _dims, _device: masks.prefix_lm(whole(values, "prefix")),
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
        arguments={"canvas": check.canvas, "kernel": check.cells},
        together=check.within_the_canvas,
        build=lambda values, _dims, _device: neighborhoods.neighborhood(
            _pair(values, "canvas"), _pair(values, "kernel")
        ),
    ),
    "neighborhood_tiled": Entry(
        summary="the same, where cells are numbered `tile` by tile",
        arguments={"canvas": check.canvas, "kernel": check.cells, "tile": check.cells},
        together=check.within_the_canvas,
        build=lambda values, _dims, _device: neighborhoods.neighborhood_tiled(
            _pair(values, "canvas"), _pair(values, "kernel"), _pair(values, "tile")
        ),
    ),
    "neighborhood_morton": Entry(
        summary="the same, where cells are numbered along a Z curve",
        arguments={"canvas": check.canvas, "kernel": check.cells},
        together=check.within_the_canvas,
        build=_morton,
    ),
    "expression": Entry(
        summary="keys at which `text` is true, as q_idx % 3 <= kv_idx",
        arguments={"text": check.text(written.read_mask)},
        build=lambda values, dims, _device: written.mask(text(values), dims),
    ),
    "and": Entry(summary="keys that every part shows", compose=compose.and_masks),
    "or": Entry(summary="keys that any part shows", compose=compose.or_masks),
    "not": Entry(summary="keys that its part hides", compose=compose.not_mask, most_parts=1),
    "offset": Entry(
        summary="row i sees what row i + `rows` sees in its part",
        compose=compose.offset_mask,
        arguments={"rows": check.later_rows},
        within=compose.later,
        most_parts=1,
    ),
}
