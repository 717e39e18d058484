"""Out and LSE of one run against what they should be, as other runs have it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attncheck.outputs import Outputs
from attncheck.relations.fills import replaced
from attncheck.relations.finding import Finding, same

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


__all__ = ["agree", "mapped"]


def agree(
    value: Outputs,
    expected: Outputs,
    errors: Sequence[Outputs] | None,
    *,
    signed_zeros: bool = True,
) -> Finding | None:
    """What of ``value`` is not what is expected; LSE where both have one.

    Args:
        value: Of the last run.
        expected: In the same axes.
        errors: How far each of the runs that the two are made of may be from the exact result, in
            these axes: together they may be apart by the sum. None: every bit must agree.
        signed_zeros: Whether the sign of a zero in out is a bit like any.
    """
    out = expected.out
    if not signed_zeros:
        zeros = (value.out == 0) & (out == 0)
        out = replaced(out, value.out, zeros)
    found = same("out", value.out, out, _sum(errors, "out"))
    if found or value.lse is None or expected.lse is None:
        return found
    return same("lse", value.lse, expected.lse, _sum(errors, "lse"))


def mapped(outputs: Outputs, change: Callable[[torch.Tensor], torch.Tensor]) -> Outputs:
    """Outputs with out and LSE changed alike: indexed, permuted or repeated in common axes."""
    return Outputs(change(outputs.out), None if outputs.lse is None else change(outputs.lse))


def _sum(errors: Sequence[Outputs] | None, tensor: str) -> torch.Tensor | None:
    if errors is None:
        return None
    return torch.stack([getattr(each, tensor) for each in errors]).sum(0)
