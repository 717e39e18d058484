"""Two runs on the same inputs agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.relations.finding import Finding, moved
from attncheck.relations.relation import Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs

__all__ = ["REPEAT"]


def _runs(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    return inputs, inputs


def _holds(_: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters) -> Finding | None:
    before, after = outputs
    found = moved("out", after.out, before.out)
    if found or before.lse is None or after.lse is None:
        return found
    return moved("lse", after.lse, before.lse)


REPEAT = Relation(
    name="repeat",
    summary="two runs on the same inputs agree to the last bit (in a deterministic kernel)",
    runs=_runs,
    holds=_holds,
)
"""Holds for a deterministic kernel only: atomics and unordered splits change the order of sums."""
