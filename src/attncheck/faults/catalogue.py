"""The catalogue of faults and controls."""

from __future__ import annotations

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
from attncheck.faults.entries.controls import CONTROLS as CONTROLS_of_controls

if TYPE_CHECKING:
    from attncheck.faults.fault import Control, Fault

__all__ = ["CONTROLS", "FAULTS", "CONTROLS_of_controls", "FAULTS_of_catalogue", "fault_named"]


FAULTS: tuple[Fault, ...] = (
    *mask_faults.FAULTS,
    *mask_faults.FAULTS_of_sliding_window,
    *shape_faults.FAULTS,
    *softmax_faults.FAULTS_of_fully_masked_rows,
    *softmax_faults.FAULTS_of_sentinels,
    *softmax_faults.FAULTS,
    *score_faults.FAULTS,
    *score_faults.FAULTS_of_softcap,
    *score_faults.FAULTS_of_score_mods,
    *memory_faults.FAULTS_of_gqa,
    *memory_faults.FAULTS,
    *shape_faults.FAULTS_of_integer_overflow,
    *shape_faults.FAULTS_of_head_dim,
    *precision_faults.FAULTS,
    *precision_faults.FAULTS_of_fp8,
    *execution_faults.FAULTS,
    *memory_faults.FAULTS_of_paged_kv,
    *mask_faults.FAULTS_of_block_mask,
    *mask_faults.FAULTS_of_documents,
    *shape_faults.FAULTS_of_degenerate_shapes,
    *execution_faults.FAULTS_of_determinism,
    *execution_faults.FAULTS_of_backward,
    *softmax_faults.FAULTS_of_sinks,
)


FAULTS_of_catalogue: dict[str, Fault] = {fault.id: fault for fault in FAULTS}
"""Every fault, category by category."""

CONTROLS: dict[str, Control] = {control.id: control for control in CONTROLS_of_controls}
"""Changes that leave a kernel right: nothing may flag them."""


def fault_named(name: str) -> Fault | Control:
    """The fault or control called ``name``; raises UnknownName with the valid ones."""
    everything = FAULTS_of_catalogue | CONTROLS
    if name not in everything:
        raise UnknownName("fault", name, everything)
    return everything[name]
