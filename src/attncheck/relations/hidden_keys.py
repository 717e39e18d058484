"""Relations about what a row does not see: no hidden or future key reaches it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from attncheck.relations import mask_visibility, relation
from attncheck.relations.relation import (
    Errors,
    Finding,
    Relation,
    compare_outputs,
    compare_values,
    map_outputs,
    of_attention,
    without_sink,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attncheck.core.outputs import Outputs, TensorName
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Allowed, Parameters, Problem
    from attncheck.mods.spec import Spec
    from attncheck.relations.relation import Fill

__all__ = [
    "EMPTY_ROWS",
    "FUTURE_KEYS",
    "FUTURE_KEYS_HUGE",
    "FUTURE_KEYS_NAN",
    "HIDDEN_KEYS",
    "HIDDEN_KEYS_HUGE",
    "HIDDEN_KEYS_NAN",
    "first_hidden",
]


def first_hidden(problem: Problem, row: int) -> int:
    """The key from which on all are hidden to rows 0 to ``row``, by the mask's definition.

    Written down here for each mask by name, and not asked of its callable. kv where a mask's
    name says nothing: too many keys, never too few.
    """
    return max(0, min(problem.kv, _first_hidden(problem.mask, problem, row)))


def _first_hidden(mask: Spec, problem: Problem, row: int) -> int:
    if mask.name in {"causal", "sliding_window"}:
        return row + 1
    if mask.name == "causal_bottom_right":
        return row + 1 + problem.kv - problem.query
    if mask.name == "prefix_lm":
        return max(cast("int", mask.values["prefix"]), row + 1)
    if mask.name == "padding":
        return max(cast("tuple[int, ...]", mask.values["lengths"]))
    if mask.name in {"and", "or"}:
        parts = (_first_hidden(part, problem, row) for part in mask.parts)
        return min(parts) if mask.name == "and" else max(parts)
    return problem.kv


def _rows(problem: Problem) -> Mapping[str, Sequence[int]]:
    """Rows that have a future: at least one key is hidden to it and to all rows before it."""
    return {"row": [i for i in range(problem.query) if first_hidden(problem, i) < problem.kv]}


def _unfit(problem: Problem) -> str | None:
    if _rows(problem)["row"]:
        return None
    return "no key is hidden to a row and to all rows before it, as far as its mask's name tells"


def _runs(fill: Fill, inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    first = first_hidden(inputs.problem, int(parameters["row"]))
    k, v = inputs.k.clone(), inputs.v.clone()
    other_k, other_v = fill(inputs)
    k[:, :, first:], v[:, :, first:] = other_k[:, :, first:], other_v[:, :, first:]
    return inputs, inputs.replace(k=k, v=v)


def _holds(
    _: Sequence[Inputs], outputs: Sequence[Outputs], parameters: Parameters, errors: Errors
) -> Finding | None:
    def past(given: Outputs) -> Outputs:
        return map_outputs(given, lambda tensor: tensor[:, :, : int(parameters["row"]) + 1])

    before, after = map(past, outputs)
    # What a row does not see is no part of its error either: the first run's is the second's.
    return compare_outputs(after, before, errors and [past(errors[0])] * 2, signed_zeros=False)


def _relation(name: str, what: str, fill: Fill, *, poison: bool) -> Relation:
    """Rows up to ``row`` keep every bit of out and LSE when later keys and values are ``what``.

    A hidden key has weight 0 and its value is multiplied by it or left out, so nothing of it may
    arrive: not a NaN (0 · NaN), not an overflowed score. To the last bit this holds for a kernel
    whose tiling, order and number of splits depend on shapes and mask alone, not on what K and V
    hold: that is what ``hidden`` promises. One whose rows of a tile rescale together where one of
    them must, or that skips a tile by what it holds, does not promise it, and is asked within
    bounds. The sign of a zero is left open: a row that sees nothing may have that of 0 · v.
    """
    return Relation(
        name=name,
        summary=f"rows up to `row` keep every bit when the keys and values after it are {what}",
        promise="hidden",
        only_promised=poison,
        runs=partial(_runs, fill),
        holds=_holds,
        unfit=of_attention(_unfit),
        allowed=_rows,
    )


FUTURE_KEYS = _relation("future_keys", "others", relation.redraw_keys, poison=False)
FUTURE_KEYS_NAN = _relation("future_keys_nan", "NaN", relation.nan_keys, poison=True)
FUTURE_KEYS_HUGE = _relation("future_keys_huge", "huge", relation.huge_keys, poison=True)


def _rows_of_hidden_keys(problem: Problem) -> Allowed:
    return {"row": mask_visibility.rows_with_hidden_keys(problem)}


def _unfit_of_hidden_keys(problem: Problem) -> str | None:
    return (
        None
        if mask_visibility.rows_with_hidden_keys(problem)
        else "its mask shows every row every key"
    )


def _runs_of_hidden_keys(fill: Fill, inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    inputs = _unshared(inputs)
    row = int(parameters["row"])
    hidden = mask_visibility.keys_hidden_from(inputs.problem, row, inputs.device)[..., None]
    k, v = (
        relation.replace_where(old, new, hidden)
        for old, new in zip((inputs.k, inputs.v), fill(inputs), strict=True)
    )
    return inputs, inputs.replace(k=k, v=v)


def _unshared(inputs: Inputs) -> Inputs:
    """Without shared pages, which would be shared no more: both runs have one page table."""
    paging = inputs.problem.paging
    if paging is None or not paging.shared:
        return inputs
    return inputs.replace(problem=inputs.problem.replace(paging=replace(paging, shared=0)))


def _holds_of_hidden_keys(
    __: Sequence[Inputs], outputs: Sequence[Outputs], parameters: Parameters, errors: Errors
) -> Finding | None:
    row = int(parameters["row"])

    def alone(given: Outputs) -> Outputs:
        found = map_outputs(given, lambda tensor: tensor[:, :, row : row + 1])
        return found if given.dq is None else replace(found, dq=given.dq[:, :, row : row + 1])

    before, after = map(alone, outputs)
    # What a row does not see is no part of its error either: the first run's is the second's.
    found = compare_outputs(after, before, errors and [alone(errors[0])] * 2, signed_zeros=False)
    if found is None:
        return None
    batch, head, _, *dim = found.place
    return replace(found, place=(batch, head, row, *dim))


def _relation_of_hidden_keys(
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
        runs=partial(_runs_of_hidden_keys, fill),
        holds=_holds_of_hidden_keys,
        unfit=of_attention(_unfit_of_hidden_keys, gradients=gradients),
        allowed=_rows_of_hidden_keys,
    )


HIDDEN_KEYS = _relation_of_hidden_keys("hidden_keys", "others", relation.redraw_keys, poison=False)
HIDDEN_KEYS_NAN = _relation_of_hidden_keys(
    "hidden_keys_nan", "NaN", relation.nan_keys, poison=True, gradients=True
)
HIDDEN_KEYS_HUGE = _relation_of_hidden_keys(
    "hidden_keys_huge", "huge", relation.huge_keys, poison=True
)


def _unfit_of_empty_rows(problem: Problem) -> str | None:
    return (
        None
        if bool(mask_visibility.rows_without_keys(problem).any())
        else "each of its rows sees a key"
    )


def _runs_of_empty_rows(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    return (inputs,)


def _holds_of_empty_rows(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], _: Parameters, __: Errors
) -> Finding | None:
    (given,) = outputs
    empty = mask_visibility.rows_without_keys(runs[0].problem).to(given.out.device)
    rows = empty[..., None].expand(given.out.shape)
    found = _in_rows("out", given.out, rows, 0.0)
    if found or given.lse is None:
        return found
    return _in_rows("lse", given.lse, empty, -torch.inf)


def _in_rows(
    name: TensorName, tensor: torch.Tensor, rows: torch.Tensor, expected: float
) -> Finding | None:
    found = compare_values(
        name, torch.where(rows, tensor, expected), torch.full_like(tensor, expected)
    )
    return found and replace(found, compared=int(rows.sum()))


EMPTY_ROWS = Relation(
    name="empty_rows",
    summary="rows that see no key give exactly 0 in out and −inf in LSE",
    runs=_runs_of_empty_rows,
    holds=_holds_of_empty_rows,
    unfit=of_attention(without_sink, _unfit_of_empty_rows),
)
"""Holds of every right kernel: a sum over nothing is 0, and so is what is made of it. The sign of a
zero is left open. Which rows see no key is asked of the mask's callable."""
