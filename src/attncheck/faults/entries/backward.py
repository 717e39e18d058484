"""Faults: dropout, and what a backward takes off dP."""

from __future__ import annotations

from attncheck.faults.fault import Edit, Fault, Host

__all__ = ["FAULTS"]

_NO_DROPOUT = "no kernel of ours has dropout, and no Problem asks for it"

FAULTS = (
    Fault(
        id="dropout-seed-bwd-mismatch",
        category="backward",
        summary="the backward draws another dropout mask than the forward",
        when="dropout, and gradients",
        seen="gradients off by their own size",
        sources=("pytorch/pytorch#197563", "pytorch/pytorch#196586"),
        unplanted=_NO_DROPOUT,
    ),
    Fault(
        id="dropout-constant-seed",
        category="backward",
        summary="every call draws the same dropout mask",
        when="dropout, in two calls",
        seen="nothing in one call; the same keys are dropped in each",
        sources=("Dao-AILab/flash-attention#2088",),
        unplanted=_NO_DROPOUT,
    ),
    Fault(
        id="dlse-ignored",
        category="backward",
        summary="the gradient of LSE is dropped",
        when="a loss that reads LSE",
        seen="dQ and dK lack that part; all else right",
        sources=(
            "Dao-AILab/flash-attention#1817",
            "Dao-AILab/flash-attention#889",
            "Dao-AILab/flash-attention#1137",
            "Dao-AILab/flash-attention#141",
            "pytorch/pytorch#189784",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal",
                        old="return delta if dlse is None else delta - dlse",
                        new="return delta",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.delta",
                        old="        delta -= loaded_rows(dlse[0] + first, rows, query)\n",
                        new="        pass\n",
                    ),
                ),
            ),
        },
        named=("dlse-ignored",),
    ),
    Fault(
        id="delta-missing",
        category="backward",
        summary="dS is P · dP: delta is not taken off",
        when="every gradient",
        seen="dQ and dK off by about a third of their size; dV right",
        sources=("a classic; no report known",),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal", old="return p * (dp - delta)", new="return p * dp"
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.gradient_tile",
                        old="dx = p * (dp - delta)",
                        new="dx = p * dp",
                    ),
                ),
            ),
        },
        named=("delta-missing",),
    ),
)
