"""Faults: attention sinks."""

from __future__ import annotations

from attncheck.faults.fault import Edit, Fault, Host

__all__ = ["FAULTS"]

FAULTS = (
    Fault(
        id="sink-ignored-or-wrong-form",
        category="sinks",
        summary="the sink is taken and not added to the row sum",
        when="a sink that is not far below the scores",
        seen="out too large and LSE too small, by the sink's share",
        sources=(
            "modular/modular#6198",
            "huggingface/transformers#41083",
            "pytorch/torchtitan#2211",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old="        if self.sink is not None:\n            maximum =",
                        new="        if False:\n            maximum =",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.flash2_forward",
                        old='"SINK": sink is not None,',
                        new='"SINK": False,',
                    ),
                ),
            ),
        },
        named=("sink-ignored",),
    ),
)
