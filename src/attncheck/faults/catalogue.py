"""The catalogue: all faults and controls, by id."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from attncheck.core.errors import UnknownName
from attncheck.faults.entries import (
    execution_faults,
    mask_faults,
    memory_faults,
    precision_faults,
    score_faults,
    shape_faults,
    softmax_faults,
)
from attncheck.faults.entries.control_changes import CONTROLS as _CONTROLS

if TYPE_CHECKING:
    from attncheck.faults.fault import Control, Fault

__all__ = ["CATEGORIES", "CONTROLS", "FAULTS", "fault_named"]

CATEGORIES: dict[str, tuple[Fault, ...]] = {
    "mask alignment": mask_faults.MASK_ALIGNMENT,
    "sliding window": mask_faults.SLIDING_WINDOW,
    "tail tile": shape_faults.TAIL_TILE,
    "fully masked rows": softmax_faults.FULLY_MASKED_ROWS,
    "sentinels": softmax_faults.SENTINELS,
    "online softmax": softmax_faults.ONLINE_SOFTMAX,
    "scale and units": score_faults.SCALE_AND_UNITS,
    "softcap": score_faults.SOFTCAP,
    "score mods": score_faults.SCORE_MODS,
    "gqa": memory_faults.GQA,
    "strides": memory_faults.STRIDES,
    "integer overflow": shape_faults.INTEGER_OVERFLOW,
    "head dim": shape_faults.HEAD_DIM,
    "precision": precision_faults.PRECISION,
    "fp8": precision_faults.FP8,
    "split kv": execution_faults.SPLIT_KV,
    "paged kv": memory_faults.PAGED_KV,
    "block mask": mask_faults.BLOCK_MASK,
    "documents": mask_faults.DOCUMENTS,
    "degenerate shapes": shape_faults.DEGENERATE_SHAPES,
    "determinism": execution_faults.DETERMINISM,
    "backward": execution_faults.BACKWARD,
    "sinks": softmax_faults.SINKS,
}
"""Faults by what they are about."""

FAULTS: dict[str, Fault] = {
    fault.id: replace(fault, category=category)
    for category, faults in CATEGORIES.items()
    for fault in faults
}
"""Every fault, category by category."""

CONTROLS: dict[str, Control] = {control.id: control for control in _CONTROLS}
"""Changes that leave a kernel right: nothing may flag them."""


def fault_named(name: str) -> Fault | Control:
    """Return the fault or control called ``name``; raise UnknownName with the valid ones."""
    everything = FAULTS | CONTROLS
    if name not in everything:
        raise UnknownName("fault", name, everything)
    return everything[name]
