"""Two runs on the same inputs agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.relations.agreement import agree
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.relations.finding import Finding

__all__ = ["REPEAT"]


def _runs(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    return inputs, inputs


def _holds(
    _: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, errors: Errors
) -> Finding | None:
    before, after = outputs
    return agree(after, before, errors)


REPEAT = Relation(
    name="repeat",
    summary="two runs on the same inputs agree",
    runs=_runs,
    holds=_holds,
    promise="repeat",
)
"""D1: to the last bit in a deterministic kernel; atomics change the order of sums."""
