"""Rows that see no key."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attncheck.relations import sight
from attncheck.relations.finding import Finding, wrong
from attncheck.relations.fit import of_attention, without_sink
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.tensor_names import TensorName

__all__ = ["EMPTY_ROWS"]


def _unfit(problem: Problem) -> str | None:
    return None if bool(sight.empty(problem).any()) else "each of its rows sees a key"


def _runs(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    return (inputs,)


def _holds(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], _: Parameters, __: Errors
) -> Finding | None:
    (given,) = outputs
    empty = sight.empty(runs[0].problem).to(given.out.device)
    rows = empty[..., None].expand(given.out.shape)
    found = _in_rows("out", given.out, rows, 0.0)
    if found or given.lse is None:
        return found
    return _in_rows("lse", given.lse, empty, -torch.inf)


def _in_rows(
    name: TensorName, tensor: torch.Tensor, rows: torch.Tensor, expected: float
) -> Finding | None:
    found = wrong(name, torch.where(rows, tensor, expected), torch.full_like(tensor, expected))
    return found and replace(found, compared=int(rows.sum()))


EMPTY_ROWS = Relation(
    name="empty_rows",
    summary="rows that see no key give exactly 0 in out and −inf in LSE",
    runs=_runs,
    holds=_holds,
    unfit=of_attention(without_sink, _unfit),
)
"""Holds of every right kernel: a sum over nothing is 0, and so is what is made of it. The sign of a
zero is left open. Which rows see no key is asked of the mask's callable."""
