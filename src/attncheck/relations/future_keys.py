"""What lies in the future does not matter: other keys and values after a row, same row."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

from attncheck.relations import fills
from attncheck.relations.agreement import agree, mapped
from attncheck.relations.fit import of_attention
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attncheck.inputs import Inputs
    from attncheck.mods.spec import Spec
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.relations.fills import Fill
    from attncheck.relations.finding import Finding

__all__ = ["FUTURE_KEYS", "FUTURE_KEYS_HUGE", "FUTURE_KEYS_NAN", "first_hidden"]


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
        return mapped(given, lambda tensor: tensor[:, :, : int(parameters["row"]) + 1])

    before, after = map(past, outputs)
    # What a row does not see is no part of its error either: the first run's is the second's.
    return agree(after, before, errors and [past(errors[0])] * 2, signed_zeros=False)


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


FUTURE_KEYS = _relation("future_keys", "others", fills.others, poison=False)
FUTURE_KEYS_NAN = _relation("future_keys_nan", "NaN", fills.nan, poison=True)
FUTURE_KEYS_HUGE = _relation("future_keys_huge", "huge", fills.huge, poison=True)
