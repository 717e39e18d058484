"""How a kernel is launched does not matter beyond rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.relations.agreement import agree
from attncheck.relations.fit import of_attention
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.question import Allowed
    from attncheck.relations.finding import Finding

__all__ = ["LAUNCHES"]

_MOST = 8


def _allowed(problem: Problem) -> Allowed:
    del problem
    return {"launch": range(_MOST)}


def _runs(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    return inputs, inputs


def _holds(
    _: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, errors: Errors
) -> Finding | None:
    own, other = outputs
    return agree(other, own, errors)


LAUNCHES = Relation(
    name="launches",
    summary="the kernel launched otherwise (`launch`: which of its launches, counted round) gives "
    "the same",
    runs=_runs,
    holds=_holds,
    promise="bounds",
    relaunched=True,
    unfit=of_attention(gradients=True),
    allowed=_allowed,
)
"""Other tiles, more splits or no list of tiles to skip: what the kernel's Subject says it has
(``Subject.launches``). Each run is within its own bound of the exact result, so that both together
are the bound between them. Finds what goes wrong at the edges of tiles and splits, wherever they
are, and a block mask that leaves out what a dense walk finds: at lengths where no oracle ends."""
