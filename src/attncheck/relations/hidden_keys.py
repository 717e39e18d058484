"""Relations about what a row does not see: no hidden or future key reaches it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import torch

from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Inputs, draw_inputs
from attncheck.inputs.problem import Allowed, Parameters, Problem, Promise
from attncheck.relations import mask_visibility
from attncheck.relations.relation import (
    Finding,
    Relation,
    Results,
    compare_outputs,
    compare_values,
    map_outputs,
    of_attention,
    replace_where,
    without_sink,
)

# ------------------------------------------------------------------ what takes their place

Fill = Callable[["Inputs"], tuple[torch.Tensor, torch.Tensor]]
"""Inputs → other k and v, of the same shapes and dtype."""

_HUGE = 1e30


def _redraw(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Another draw, normal whatever the first: constant values would change nothing."""
    seed = (inputs.problem.seed + 1) % 2**63
    problem = inputs.problem.replace(distribution="normal", seed=seed)
    other = draw_inputs(problem, inputs.device)
    return other.k, other.v


def _nan(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full_like(inputs.k, torch.nan), torch.full_like(inputs.v, torch.nan)


def _huge(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """1e30, in every other key the largest finite number: q·k may overflow, to inf − inf even."""
    largest = inputs.problem.formats.storage.max

    def fill(like: torch.Tensor) -> torch.Tensor:
        full = torch.full_like(like, min(_HUGE, largest))
        full[:, :, ::2] = largest
        return full

    return fill(inputs.k), fill(inputs.v)


# ------------------------------------------------------------------ the future


def first_hidden(problem: Problem, row: int) -> int:
    """Return the key from which on all are hidden to rows 0 to ``row``, by the mask's definition.

    Written down here for each mask by name, independently of its callable. kv where a mask's name
    says nothing: too many keys, never too few.
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


def _rows_with_future(problem: Problem) -> Allowed:
    """Rows for which at least one key is hidden to them and to all rows before them."""
    return {"row": [i for i in range(problem.query) if first_hidden(problem, i) < problem.kv]}


def _unless_future(problem: Problem) -> str | None:
    if _rows_with_future(problem)["row"]:
        return None
    return "no key is hidden to a row and to all rows before it, as far as its mask's name tells"


def _fill_future(fill: Fill, inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    first = first_hidden(inputs.problem, int(parameters["row"]))
    k, v = inputs.k.clone(), inputs.v.clone()
    for tensor, other in zip((k, v), fill(inputs), strict=True):
        tensor[:, :, first:] = other[:, :, first:]
    return inputs, inputs.replace(k=k, v=v)


def _compare_past(results: Results) -> Finding | None:
    rows = slice(results.number("row") + 1)
    past = partial(map_outputs, change=lambda tensor: tensor[:, :, rows])
    before, after = map(past, results.outputs)
    # What a row does not see is no part of its error either: the first run's is the second's.
    errors = results.errors and [past(results.errors[0])] * 2
    return compare_outputs(after, before, errors, signed_zeros=False)


def _future_relation(
    name: str, new: str, fill: Fill, *, poison: bool, promise: Promise = "hidden"
) -> Relation:
    """Rows up to ``row`` keep every bit of out and LSE when later keys and values are ``new``.

    A hidden key has weight 0 and its value is multiplied by it or left out, so nothing of it may
    arrive: not a NaN (0 · NaN), not an overflowed score. To the last bit this holds for a kernel
    whose tiling, order and number of splits depend on shapes and mask alone, not on what K and V
    hold: that is what ``hidden`` promises. One whose rows of a tile rescale together where one of
    them must, or that skips a tile by what it holds, does not promise it, and is compared within
    bounds. That a NaN does not arrive is a promise of its own, ``nan``, since common flash kernels
    multiply it by a weight of 0. The sign of a zero is left open: a row that sees nothing may have
    that of 0 · v.
    """
    return Relation(
        name=name,
        summary=f"rows up to `row` keep every bit when the keys and values after it are {new}",
        promise=promise,
        only_promised=frozenset({"hidden", promise}) if poison else frozenset(),
        runs=partial(_fill_future, fill),
        rule=_compare_past,
        unfit=of_attention(_unless_future),
        allowed=_rows_with_future,
    )


FUTURE_KEYS = _future_relation("future_keys", "others", _redraw, poison=False)
FUTURE_KEYS_NAN = _future_relation("future_keys_nan", "NaN", _nan, poison=True, promise="nan")
FUTURE_KEYS_HUGE = _future_relation("future_keys_huge", "huge", _huge, poison=True)

# ------------------------------------------------------------------ any hidden key


def _unless_hidden(problem: Problem) -> str | None:
    if mask_visibility.rows_with_hidden_keys(problem):
        return None
    return "its mask shows every row every key"


def _fill_hidden(fill: Fill, inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    paging = inputs.problem.paging
    if paging is not None and paging.shared:
        # Shared pages would be shared no more: both runs have one page table.
        problem = inputs.problem.replace(paging=replace(paging, shared=0))
        inputs = inputs.replace(problem=problem)
    row = int(parameters["row"])
    hidden = mask_visibility.keys_hidden_from(inputs.problem, row, inputs.device)[..., None]
    other_k, other_v = fill(inputs)
    return inputs, inputs.replace(
        k=replace_where(inputs.k, other_k, hidden), v=replace_where(inputs.v, other_v, hidden)
    )


def _compare_row(results: Results) -> Finding | None:
    row = results.number("row")

    def alone(outputs: Outputs) -> Outputs:
        dq = None if outputs.dq is None else outputs.dq[:, :, row : row + 1]
        return replace(map_outputs(outputs, lambda x: x[:, :, row : row + 1]), dq=dq)

    before, after = map(alone, results.outputs)
    # What a row does not see is no part of its error either: the first run's is the second's.
    errors = results.errors and [alone(results.errors[0])] * 2
    finding = compare_outputs(after, before, errors, signed_zeros=False)
    if finding is None:
        return None
    batch, head, _, *dim = finding.place
    return replace(finding, place=(batch, head, row, *dim))


def _hidden_relation(
    name: str,
    new: str,
    fill: Fill,
    *,
    poison: bool,
    promise: Promise = "hidden",
    gradients: bool = False,
) -> Relation:
    """Row ``row`` keeps every bit of out and LSE when what it does not see becomes ``new``.

    And of dQ where it is NaN: to the bit of a kernel that promises so much of its gradients, else
    within bounds. dK and dV are left out: rows that see the keys have a part in them. Huge values
    are no question of a backward: dOut · v may overflow there, as no product of the forward does.

    For any mask, as its callable has it: a key of a sequence and key head is replaced where no head
    that reads it shows it to the row; other rows may see it, and change. A hidden key has weight 0,
    and its value is multiplied by it or left out. To the last bit this holds for a kernel in which
    a row's order of operations depends on shapes and mask alone (promise ``hidden``, or ``nan``).
    Unlike ``future_keys``, which takes the mask's definition by name, it shares a mask's mistake.
    """
    return Relation(
        name=name,
        summary=f"row `row` keeps every bit when keys and values that it does not see are {new}",
        promise=promise,
        only_promised=frozenset({"hidden", promise}) if poison else frozenset(),
        runs=partial(_fill_hidden, fill),
        rule=_compare_row,
        unfit=of_attention(_unless_hidden, gradients=gradients),
        allowed=lambda problem: {"row": mask_visibility.rows_with_hidden_keys(problem)},
    )


HIDDEN_KEYS = _hidden_relation("hidden_keys", "others", _redraw, poison=False)
HIDDEN_KEYS_NAN = _hidden_relation(
    "hidden_keys_nan", "NaN", _nan, poison=True, promise="nan", gradients=True
)
HIDDEN_KEYS_HUGE = _hidden_relation("hidden_keys_huge", "huge", _huge, poison=True)

# ------------------------------------------------------------------ nothing seen at all


def _unless_empty(problem: Problem) -> str | None:
    return (
        None
        if bool(mask_visibility.rows_without_keys(problem).any())
        else "each of its rows sees a key"
    )


def _compare_empty(results: Results) -> Finding | None:
    (outputs,) = results.outputs
    empty = mask_visibility.rows_without_keys(results.inputs[0].problem).to(outputs.out.device)
    finding = compare_values("out", outputs.out, 0.0, empty[..., None].expand(outputs.out.shape))
    if finding or outputs.lse is None:
        return finding
    return compare_values("lse", outputs.lse, -torch.inf, empty)


EMPTY_ROWS = Relation(
    name="empty_rows",
    summary="rows that see no key give exactly 0 in out and −inf in LSE",
    runs=lambda inputs, _: (inputs,),
    rule=_compare_empty,
    unfit=of_attention(without_sink, _unless_empty),
)
"""Holds of every right kernel: a sum over nothing is 0, and so is what is made of it. The sign of a
zero is left open. Which rows see no key is decided by the mask's callable."""
