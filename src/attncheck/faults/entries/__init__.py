"""The faults, a file for each category."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.faults.entries import (
    backward,
    block_mask,
    degenerate_shapes,
    determinism,
    documents,
    fp8,
    fully_masked_rows,
    gqa,
    head_dim,
    integer_overflow,
    mask_alignment,
    online_softmax,
    paged_kv,
    precision,
    scale_and_units,
    score_mods,
    sentinels,
    sinks,
    sliding_window,
    softcap,
    split_kv,
    strides,
    tail_tile,
)
from attncheck.faults.entries.controls import CONTROLS

if TYPE_CHECKING:
    from attncheck.faults.fault import Fault

__all__ = ["CONTROLS", "FAULTS"]

FAULTS: tuple[Fault, ...] = (
    *mask_alignment.FAULTS,
    *sliding_window.FAULTS,
    *tail_tile.FAULTS,
    *fully_masked_rows.FAULTS,
    *sentinels.FAULTS,
    *online_softmax.FAULTS,
    *scale_and_units.FAULTS,
    *softcap.FAULTS,
    *score_mods.FAULTS,
    *gqa.FAULTS,
    *strides.FAULTS,
    *integer_overflow.FAULTS,
    *head_dim.FAULTS,
    *precision.FAULTS,
    *fp8.FAULTS,
    *split_kv.FAULTS,
    *paged_kv.FAULTS,
    *block_mask.FAULTS,
    *documents.FAULTS,
    *degenerate_shapes.FAULTS,
    *determinism.FAULTS,
    *backward.FAULTS,
    *sinks.FAULTS,
)
