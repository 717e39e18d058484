"""Rules about precision within every bound: by ideal kernels, prediction and emulation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attncheck.judge.precision import FAR, RESIDUAL, SPREAD, Heads, Z, gated
from attncheck.judge.rules import Finding
from attncheck.judge.sentences import times

if TYPE_CHECKING:
    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.judgement import Precision

__all__ = ["imprecise", "residual"]


def imprecise(
    heads: Heads, arithmetic: Arithmetic, *, generic: bool, proven: bool
) -> list[Finding]:
    """Less accurate than ideal kernels and than predicted, in one head; one of the two is odd.

    Far less accurate than any ideal kernel is enough on generic inputs: the prediction takes errors
    that are equal for equal ones, and is large where they happen not to be.
    """
    if not gated(arithmetic):
        return []
    spread = torch.full_like(heads.z, math.nan) if heads.spread is None else heads.spread
    # Where an ideal kernel errs as much, a large z is the prediction's fault.
    usual = (spread > 0) & (spread <= 1)  # 0 where they are exact
    by_z, by_spread = (heads.z > Z) & ~usual, spread > SPREAD
    both = by_z & by_spread
    if generic:
        both = both | (spread > FAR)
    found = []
    for wrong, status in (
        (both, "fail" if proven else "warn"),
        ((by_z | by_spread) & ~both, "warn"),
    ):
        if bool(wrong.any()):
            found.append(_of_head(heads.z, spread, wrong, status))
    return found


def _of_head(z: torch.Tensor, spread: torch.Tensor, wrong: torch.Tensor, status: str) -> Finding:
    """A finding about the worst of the ``wrong`` heads."""
    by = torch.where(wrong, torch.fmax(z / Z, spread / SPREAD), -1.0)
    batch, head = divmod(int(by.argmax()), by.shape[1])
    parts = []
    if z[batch, head] > Z:
        parts.append(
            f"errors of head {[batch, head]} are {times(float(z[batch, head]))} × their "
            f"predicted size, but should be at most {Z:g} ×"
        )
    if spread[batch, head] > SPREAD:
        parts.append(
            f"RMSE of head {[batch, head]} is {times(float(spread[batch, head]))} × the "
            f"largest of ideal kernels', but should be at most {SPREAD:g} ×"
        )
    text = f"{'; '.join(parts)} ({int(wrong.sum())} of {wrong.numel()} heads)"
    return Finding(status="fail" if status == "fail" else "warn", rule="precision", text=text)


def residual(precision: Precision, arithmetic: Arithmetic, *, generic: bool) -> list[Finding]:
    """Farther from the emulation at its own tiling than right kernels are: odd.

    Of generic inputs alone: where a problem has few different roundings, one that falls the other
    way is a large part of the whole error.
    """
    gate = RESIDUAL.get(arithmetic.weights.name)
    if not generic or gate is None or precision.residual is None or precision.residual <= gate:
        return []
    text = (
        f"out differs from the ideal kernel at the same tiling by {times(precision.residual)} × "
        f"that kernel's error, but should by at most {gate:g} ×: it rounds elsewhere than declared"
    )
    return [Finding(status="warn", rule="precision", text=text)]
