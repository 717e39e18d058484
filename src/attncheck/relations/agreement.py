"""Outputs of one run against what they should be, as other runs have it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attncheck.outputs import Outputs
from attncheck.relations.fills import replaced
from attncheck.relations.finding import Finding, same

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attncheck.tensor_names import TensorName

__all__ = ["agree", "mapped"]


def agree(
    value: Outputs,
    expected: Outputs,
    errors: Sequence[Outputs] | None,
    *,
    signed_zeros: bool = True,
) -> Finding | None:
    """What of ``value`` is not what is expected; LSE and gradients where both have them.

    Args:
        value: Of the last run.
        expected: In the same axes.
        errors: How far each of the runs that the two are made of may be from the exact result, in
            these axes: together they may be apart by the sum. None: every bit must agree.
        signed_zeros: Whether the sign of a zero is a bit like any.
    """
    given, wanted = value.tensors(), expected.tensors()
    asked = [name for name in given if name in wanted]
    if errors is not None:  # gradients that nobody asked for have no bound
        asked = [name for name in asked if all(name in each.tensors() for each in errors)]
    for name in asked:
        should = wanted[name]
        if not signed_zeros:
            should = replaced(should, given[name], (given[name] == 0) & (should == 0))
        found = same(name, given[name], should, _sum(errors, name))
        if found:
            return found
    return None


def mapped(
    outputs: Outputs,
    change: Callable[[torch.Tensor], torch.Tensor],
    gradients: Callable[[TensorName, torch.Tensor], torch.Tensor] | None = None,
) -> Outputs:
    """Outputs with out and LSE changed alike: indexed, permuted or repeated in common axes.

    Gradients are left out, unless ``gradients`` says for each what becomes of it.
    """
    changed = {name: change(tensor) for name, tensor in _forward(outputs).items()}
    if gradients is not None:
        changed |= {name: gradients(name, one) for name, one in outputs.gradients().items()}
    return Outputs(**changed)


def _forward(outputs: Outputs) -> dict[TensorName, torch.Tensor]:
    gradients = outputs.gradients()
    return {name: one for name, one in outputs.tensors().items() if name not in gradients}


def _sum(errors: Sequence[Outputs] | None, tensor: TensorName) -> torch.Tensor | None:
    if errors is None:
        return None
    return torch.stack([each.tensors()[tensor] for each in errors]).sum(0)
