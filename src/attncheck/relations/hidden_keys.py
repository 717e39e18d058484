"""Relations about hidden keys: what a row does not see must not change its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.core.tensor_names import TensorName
from attncheck.inputs.input_tensors import Inputs, draw_inputs
from attncheck.inputs.problem import Allowed, Parameters, Problem, Promise
from attncheck.relations import mask_visibility
from attncheck.relations.relation import (
    Finding,
    Relation,
    Results,
    compare_ends,
    compare_values,
    each_tensor,
    of_attention,
    replace_where,
    without_sink,
)

# ------------------------------------------------------------------ replacements for hidden keys

Fill = Callable[["Inputs"], tuple[torch.Tensor, torch.Tensor]]
"""Inputs → other k and v, of the same shapes and dtype."""

_HUGE_VALUE = 1e30


def _other_draw(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return another draw; always normal, because a redrawn constant would not change."""
    seed = (inputs.problem.seed + 1) % 2**63
    problem = inputs.problem.replace(distribution="normal", seed=seed)
    other = draw_inputs(problem, inputs.device)
    return other.k, other.v


def _nan_keys(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full_like(inputs.k, torch.nan), torch.full_like(inputs.v, torch.nan)


def _huge_keys(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 1e30, and the format's largest number in every other key: q·k may become inf − inf."""
    largest = inputs.problem.formats.storage.max

    def fill(like: torch.Tensor) -> torch.Tensor:
        full = torch.full_like(like, min(_HUGE_VALUE, largest))
        full[:, :, ::2] = largest
        return full

    return fill(inputs.k), fill(inputs.v)


# ------------------------------------------------------------------ the future


def first_hidden(problem: Problem, row: int) -> int:
    """Return the first key from which on all keys are hidden from rows 0 to ``row``.

    The definition of each mask is written here by its name, independently of its callable. For an
    unknown mask it returns kv, so that a visible key never counts as hidden.
    """
    return max(0, min(problem.kv, _first_hidden(problem.mask, problem, row)))


def _first_hidden(mask: Spec, problem: Problem, row: int) -> int:
    if mask.name in {"causal", "sliding_window"}:
        return row + 1
    if mask.name in {"causal_bottom_right", "bottom_right"}:
        return int(row + 1 + max(mask.values.get("lengths", [problem.kv])) - problem.query)
    if mask.name == "prefix_lm":
        return int(max(mask.values["prefix"], row + 1))
    if mask.name == "padding":
        return int(max(mask.values["lengths"]))
    if mask.name in {"and", "or"}:
        parts = (_first_hidden(part, problem, row) for part in mask.parts)
        return min(parts) if mask.name == "and" else max(parts)
    return problem.kv


def _rows_with_future(problem: Problem) -> Allowed:
    """Return the rows for which a key is hidden from them and from all earlier rows."""
    return {"row": [i for i in range(problem.query) if first_hidden(problem, i) < problem.kv]}


def _unless_future(problem: Problem) -> str | None:
    if _rows_with_future(problem)["row"]:
        return None
    return "no key is hidden to a row and to all rows before it, as far as its mask's name tells"


def _fill_future(fill: Fill, inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    first_key = first_hidden(inputs.problem, int(parameters["row"]))
    k, v = inputs.k.clone(), inputs.v.clone()
    for tensor, new in zip((k, v), fill(inputs), strict=True):
        tensor[:, :, first_key:] = new[:, :, first_key:]
    return inputs, inputs.replace(k=k, v=v)


def _compare_past(results: Results) -> Finding | None:
    rows = slice(results.number("row") + 1)
    return _compare_selected(results, each_tensor(lambda tensor: tensor[:, :, rows]))


def _compare_selected(results: Results, select: Callable[[Outputs], Outputs]) -> Finding | None:
    # Hidden keys do not affect a row's error bound, so the first run's also holds for the second.
    results = replace(results, errors=results.errors and results.errors[:1])
    return compare_ends(results, first=select, last=select, signed_zeros=False)


def _future_relation(
    name: str, new: str, fill: Fill, *, poison: bool, promise: Promise = "hidden"
) -> Relation:
    """Return the relation that rows up to ``row`` keep every bit when later keys become ``new``.

    A hidden key has weight 0, and its value is multiplied by 0 or left out, so it must not change
    the result: neither by a NaN (0 · NaN) nor by a score that overflows. Holds bitwise for a kernel
    whose tiling, order and number of splits depend on shapes and mask only, not on the contents of
    K and V: the promise ``hidden``. A kernel that rescales all rows of a tile when one needs it, or
    skips tiles by their contents, does not promise it and is compared within bounds. Blocking a NaN
    is a promise of its own, ``nan``, since common flash kernels multiply it by a weight of 0. The
    sign of a zero is not compared: a row that sees no key may return 0 · v.
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


FUTURE_KEYS = _future_relation("future_keys", "others", _other_draw, poison=False)
FUTURE_KEYS_NAN = _future_relation("future_keys_nan", "NaN", _nan_keys, poison=True, promise="nan")
FUTURE_KEYS_HUGE = _future_relation("future_keys_huge", "huge", _huge_keys, poison=True)

# ------------------------------------------------------------------ any hidden key


def _unless_hidden(problem: Problem) -> str | None:
    if mask_visibility.rows_with_hidden_keys(problem):
        return None
    return "its mask shows every row every key"


def _fill_hidden(fill: Fill, inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    paging = inputs.problem.paging
    if paging is not None and paging.shared:
        # A shared page could not hold the new keys of each sequence, and both runs need one table.
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

    def select(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:, :, row : row + 1]

    def select_dq(name: TensorName, tensor: torch.Tensor) -> torch.Tensor | None:
        return select(tensor) if name == "dq" else None

    finding = _compare_selected(results, each_tensor(select, select_dq))
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
    """Return the relation that row ``row`` keeps every bit when keys hidden from it become ``new``.

    With NaN, dQ is compared too: bitwise if the kernel promises it for gradients, else within
    bounds. dK and dV are not compared, since rows that see the keys contribute to them. Huge values
    are not tried in a backward, where dOut · v may overflow, unlike any product of the forward.

    Applies to any mask, evaluated by its callable: a key of a sequence and key head is replaced if
    no head that reads it shows it to the row; other rows may see it and change. A hidden key has
    weight 0, and its value is multiplied by 0 or left out. Holds bitwise for a kernel in which a
    row's order of operations depends on shapes and mask only (promise ``hidden`` or ``nan``).
    Unlike ``future_keys``, which defines masks by name, it cannot find a mistake in the callable.
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


HIDDEN_KEYS = _hidden_relation("hidden_keys", "others", _other_draw, poison=False)
HIDDEN_KEYS_NAN = _hidden_relation(
    "hidden_keys_nan", "NaN", _nan_keys, poison=True, promise="nan", gradients=True
)
HIDDEN_KEYS_HUGE = _hidden_relation("hidden_keys_huge", "huge", _huge_keys, poison=True)

# ------------------------------------------------------------------ rows that see no key


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
"""Holds for every right kernel: an empty sum is 0. The sign of a zero is not compared. The mask's
callable decides which rows see no key."""
