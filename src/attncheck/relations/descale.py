"""Half the stored numbers with twice the descale are the same numbers, to the last bit."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING

import torch

from attncheck.relations.agreement import agree
from attncheck.relations.fit import of_attention
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.relations.finding import Finding

__all__ = ["DESCALE"]

_TENSORS = ("q", "k", "v")


def _allowed(problem: Problem) -> Mapping[str, Sequence[int]]:
    del problem
    return {"tensor": range(len(_TENSORS))}


def _unfit(problem: Problem) -> str | None:
    return None if problem.formats.scaled else "only fp8 has descales"


def _runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    name = _TENSORS[int(parameters["tensor"])]
    whole, half = _halved(inputs.tensors()[name])
    scales = inputs.descale
    assert scales is not None, "asked of fp8"
    doubled = dataclasses.replace(scales, **{name: inputs.tensors()[f"{name}_descale"] * 2})
    replaced = partial(dataclasses.replace, inputs)
    return replaced(**{name: whole}), replaced(**{name: half, "descale": doubled})


def _halved(stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stored numbers and their halves; 0 in both where a half is not a number of the format."""
    values = stored.float()
    exact = (values / 2).to(stored.dtype).float() * 2 == values
    values = torch.where(exact, values, 0.0)
    return values.to(stored.dtype), (values / 2).to(stored.dtype)


def _holds(
    _: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, errors: Errors
) -> Finding | None:
    before, after = outputs
    return agree(after, before, errors)


DESCALE = Relation(
    name="descale",
    summary="q, k or v (`tensor` 0, 1, 2) stored half as large with twice the descale keeps every "
    "bit",
    runs=_runs,
    holds=_holds,
    unfit=of_attention(_unfit),
    allowed=_allowed,
)
"""Holds for every right kernel, in whatever order it multiplies descales: a power of two commutes
with every rounding, also with sums that tensor cores align to their largest product. Products of
fp8 numbers and sums of them are no subnormal numbers of fp32, and drawn descales are far from both
ends of it. So it is for kernels that multiply by the descale first."""
