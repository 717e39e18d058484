"""A loss that depends on nothing has no gradients; one that depends on LSE alone none of values."""

from __future__ import annotations

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

__all__ = ["LSE_LOSS", "ZERO_LOSS"]


def _nothing(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    dout, dlse = (None if one is None else torch.zeros_like(one) for one in _loss(inputs))
    return (inputs.replace(dout=dout, dlse=dlse),)


def _loss(inputs: Inputs) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return inputs.dout, inputs.dlse


def _all_zero(
    _: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, ___: Errors
) -> Finding | None:
    (given,) = outputs
    found = (wrong(n, one, torch.zeros_like(one)) for n, one in given.gradients().items())
    return next((one for one in found if one), None)


ZERO_LOSS = Relation(
    name="zero_loss",
    summary="a loss that depends on neither out nor LSE has gradients of exactly 0",
    runs=_nothing,
    holds=_all_zero,
    unfit=of_gradients(),
)
"""Holds for every right kernel whose q, k and v are finite: each gradient is a sum of products with
dOut or dLSE. What is left in it is a buffer's that was not cleared, or of another call. The sign of
a zero is left open."""


def _of_lse(inputs: Inputs, __: Parameters) -> tuple[Inputs, ...]:
    dout, _ = _loss(inputs)
    return (inputs.replace(dout=None if dout is None else torch.zeros_like(dout)),)


def _no_values(
    _: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, ___: Errors
) -> Finding | None:
    (given,) = outputs
    return None if given.dv is None else wrong("dv", given.dv, torch.zeros_like(given.dv))


def _without_lse(problem: Problem) -> str | None:
    return None if problem.dlse else "its loss does not depend on LSE"


LSE_LOSS = Relation(
    name="lse_loss",
    summary="a loss that depends on LSE alone has a gradient of exactly 0 in v",
    runs=_of_lse,
    holds=_no_values,
    unfit=of_gradients(_without_lse),
)
"""Holds for every right kernel: LSE is a function of q and k, and dV = Pᵀ · dOut is a sum of zeros.
The sign of a zero is left open."""
