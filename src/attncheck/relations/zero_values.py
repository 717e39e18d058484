"""Values of 0 give 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attncheck.relations.finding import Finding, wrong
from attncheck.relations.fit import of_attention
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs

__all__ = ["ZERO_VALUES"]


def _runs(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    return (inputs.replace(v=torch.zeros_like(inputs.v)),)


def _holds(
    _: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, ___: Errors
) -> Finding | None:
    (given,) = outputs
    return wrong("out", given.out, torch.zeros_like(given.out))


ZERO_VALUES = Relation(
    name="zero_values",
    summary="V = 0 gives exactly 0 in every row, seen keys or not",
    runs=_runs,
    holds=_holds,
    unfit=of_attention(),
)
"""Holds for every right kernel: weights and row sums are finite, and 0 is also what a row that sees
no key gives. The sign of a zero is left open."""
