"""What a row does not see does not matter to it: other keys and values there, same row."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from attncheck.relations import fills, sight
from attncheck.relations.agreement import agree, mapped
from attncheck.relations.fit import of_attention
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.question import Allowed
    from attncheck.relations.fills import Fill
    from attncheck.relations.finding import Finding

__all__ = ["HIDDEN_KEYS", "HIDDEN_KEYS_HUGE", "HIDDEN_KEYS_NAN"]


def _rows(problem: Problem) -> Allowed:
    return {"row": sight.rows_that_miss_keys(problem)}


def _unfit(problem: Problem) -> str | None:
    return None if sight.rows_that_miss_keys(problem) else "its mask shows every row every key"


def _runs(fill: Fill, inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    inputs = _unshared(inputs)
    row = int(parameters["row"])
    hidden = sight.hidden_from(inputs.problem, row, inputs.device)[..., None]
    k, v = (
        fills.replaced(old, new, hidden)
        for old, new in zip((inputs.k, inputs.v), fill(inputs), strict=True)
    )
    return inputs, inputs.replace(k=k, v=v)


def _unshared(inputs: Inputs) -> Inputs:
    """Without shared pages, which would be shared no more: both runs have one page table."""
    paging = inputs.problem.paging
    if paging is None or not paging.shared:
        return inputs
    return inputs.replace(problem=inputs.problem.replace(paging=replace(paging, shared=0)))


def _holds(
    __: Sequence[Inputs], outputs: Sequence[Outputs], parameters: Parameters, errors: Errors
) -> Finding | None:
    row = int(parameters["row"])

    def alone(given: Outputs) -> Outputs:
        found = mapped(given, lambda tensor: tensor[:, :, row : row + 1])
        return found if given.dq is None else replace(found, dq=given.dq[:, :, row : row + 1])

    before, after = map(alone, outputs)
    # What a row does not see is no part of its error either: the first run's is the second's.
    found = agree(after, before, errors and [alone(errors[0])] * 2, signed_zeros=False)
    if found is None:
        return None
    batch, head, _, *dim = found.place
    return replace(found, place=(batch, head, row, *dim))


def _relation(
    name: str, what: str, fill: Fill, *, poison: bool, gradients: bool = False
) -> Relation:
    """Row ``row`` keeps every bit of out and LSE when what it does not see becomes ``what``.

    And of dQ where it is NaN: to the bit of a kernel that promises so much of its gradients, else
    within bounds. dK and dV are left out: rows that see the keys have a part in them. Huge values
    are no question of a backward: dOut · v may overflow there, as no product of the forward does.

    For any mask, as its callable has it: a key of a sequence and key head is replaced where no head
    that reads it shows it to the row; other rows may see it, and change. A hidden key has weight 0,
    and its value is multiplied by it or left out. To the last bit this holds for a kernel in which
    a row's order of operations depends on shapes and mask alone (promise ``hidden``); see
    ``future_keys``, which takes
    the mask's definition by name, and so does not share a mask's mistake.
    """
    return Relation(
        name=name,
        summary=f"row `row` keeps every bit when keys and values that it does not see are {what}",
        promise="hidden",
        only_promised=poison,
        runs=partial(_runs, fill),
        holds=_holds,
        unfit=of_attention(_unfit, gradients=gradients),
        allowed=_rows,
    )


HIDDEN_KEYS = _relation("hidden_keys", "others", fills.others, poison=False)
HIDDEN_KEYS_NAN = _relation("hidden_keys_nan", "NaN", fills.nan, poison=True, gradients=True)
HIDDEN_KEYS_HUGE = _relation("hidden_keys_huge", "huge", fills.huge, poison=True)
