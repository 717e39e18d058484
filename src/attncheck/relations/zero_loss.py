"""A loss that depends on nothing has no gradients; one that depends on LSE alone none of values."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attncheck.relations.finding import Finding, wrong
from attncheck.relations.fit import of_gradients
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.tensor_names import TensorName

__all__ = ["LSE_LOSS", "ZERO_LOSS"]


def _nothing(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    dout, dlse = (None if one is None else torch.zeros_like(one) for one in _loss(inputs))
    return (inputs.replace(dout=dout, dlse=dlse),)


def _loss(inputs: Inputs) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return inputs.dout, inputs.dlse


def _all_zero(
    _: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, errors: Errors
) -> Finding | None:
    (given,) = outputs
    return next(filter(None, (_zero(name, given, errors) for name in given.gradients())), None)


def _zero(name: TensorName, given: Outputs, errors: Errors) -> Finding | None:
    """What is not 0, where the bounds know anything: what overflows may be NaN."""
    assert errors is not None, "asked within bounds"
    tensor, known = given.tensors()[name], errors[0].tensors()[name].isfinite()
    nothing = torch.zeros_like(tensor)
    found = wrong(name, torch.where(known, tensor, nothing), nothing)
    return found and replace(found, compared=int(known.sum()))


ZERO_LOSS = Relation(
    name="zero_loss",
    summary="a loss that depends on neither out nor LSE has gradients of exactly 0",
    runs=_nothing,
    holds=_all_zero,
    promise="bounds",
    unfit=of_gradients(),
)
"""Holds for every right kernel: each gradient is a sum of products with dOut or dLSE. It is asked
where those have a finite bound: what overflows, or a slope that is infinite, times 0 is NaN. What
is left in it is a buffer's that was not cleared, or of another call. The sign of a zero is open."""


def _of_lse(inputs: Inputs, __: Parameters) -> tuple[Inputs, ...]:
    dout, _ = _loss(inputs)
    return (inputs.replace(dout=None if dout is None else torch.zeros_like(dout)),)


def _no_values(
    _: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, errors: Errors
) -> Finding | None:
    (given,) = outputs
    return None if given.dv is None else _zero("dv", given, errors)


def _without_lse(problem: Problem) -> str | None:
    return None if problem.dlse else "its loss does not depend on LSE"


LSE_LOSS = Relation(
    name="lse_loss",
    summary="a loss that depends on LSE alone has a gradient of exactly 0 in v",
    runs=_of_lse,
    holds=_no_values,
    promise="bounds",
    unfit=of_gradients(_without_lse),
)
"""Holds for every right kernel: LSE is a function of q and k, and dV = Pᵀ · dOut is a sum of zeros.
Asked as ``ZERO_LOSS`` is."""
