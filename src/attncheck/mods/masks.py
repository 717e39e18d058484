"""Masks as FlexAttention callables ``mask(b, h, q_idx, kv_idx) -> bool tensor``.

Indices are integer tensors: 0-d under ``vmap``, or any shapes that broadcast. True means that row
``q_idx`` sees key ``kv_idx``. Numbers are closed over, tensors are captured.
"""

# ruff: noqa: ARG001  (every mask has FlexAttention's whole signature, whatever it reads of it)

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from attncheck.mods.signatures import MaskMod

__all__ = [
    "causal",
    "causal_bottom_right",
    "document",
    "documents",
    "full",
    "padding",
    "prefix_lm",
    "sliding_window",
]


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
