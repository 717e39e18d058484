"""Keys have no order but the mask's: keys and values in another one, same out."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, cast

import torch

from attncheck.draws import Draws
from attncheck.relations.fit import indices_read, of_attention
from attncheck.relations.order import compared
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.inputs import Inputs
    from attncheck.mods.spec import Spec
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.question import Allowed
    from attncheck.relations.finding import Finding
    from attncheck.tensor_names import TensorName

__all__ = ["KEY_PERMUTATION"]

_SHUFFLES = 4


def _kinds(problem: Problem) -> torch.Tensor:
    """int64 ``(batch, kv)``: keys of one number are seen by the same rows."""
    return _kinds_by(problem.mask, problem).expand(problem.batch, problem.kv)


def _kinds_by(mask: Spec, problem: Problem) -> torch.Tensor:
    """By the names of masks; where they say nothing, every key is of a kind of its own."""
    keys = torch.arange(problem.kv)[None]
    if mask.parts:
        return reduce(_both, (_kinds_by(part, problem) for part in mask.parts))
    if "kv_idx" not in indices_read(mask):
        return torch.zeros_like(keys)
    if mask.name == "padding":
        lengths = torch.tensor(cast("tuple[int, ...]", mask.values["lengths"]))
        return (keys < lengths[:, None]).long()
    if mask.name == "document":
        ends = torch.tensor(cast("tuple[int, ...]", mask.values["lengths"])).cumsum(0)
        return torch.searchsorted(ends, keys, right=True)
    if mask.name == "prefix_lm":
        return keys.masked_fill(keys < cast("int", mask.values["prefix"]), 0)
    return keys


def _both(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The kinds of keys that are alike in both."""
    pairs = one * (int(other.max()) + 1) + other
    kinds: torch.Tensor = torch.unique(pairs, return_inverse=True)[1]
    return kinds


def _unfit(problem: Problem) -> str | None:
    if "kv_idx" in indices_read(problem.score):
        return "its score mod reads the key's index"
    kinds = _kinds(problem).sort(-1).values
    if not bool((kinds[:, 1:] == kinds[:, :-1]).any()):
        return "no two keys are seen by the same rows, as far as its mask's names tell"
    return None


def _allowed(_: Problem) -> Allowed:
    return {"shuffle": range(_SHUFFLES)}


def _order(problem: Problem, shuffle: int) -> torch.Tensor:
    """int64 ``(batch, kv)``: which key comes in each place; its kind stays there.

    Shuffle 0 reverses each kind, which moves something wherever there is something to move.
    """
    kinds, shape = _kinds(problem), (problem.batch, problem.kv)
    backwards = torch.arange(problem.kv, 0, -1).double().expand(shape)
    drawn = Draws(problem.seed).uniform(f"key permutation {shuffle}", shape)
    by_rank = (torch.from_numpy(drawn) if shuffle else backwards).argsort(-1)
    keys = by_rank.gather(1, kinds.gather(1, by_rank).argsort(dim=-1, stable=True))
    places = kinds.argsort(dim=-1, stable=True)
    return torch.empty_like(keys).scatter_(1, places, keys)


def _runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    order = _order(inputs.problem, int(parameters["shuffle"])).to(inputs.device)
    return inputs, inputs.replace(k=_moved(inputs.k, order), v=_moved(inputs.v, order))


def _moved(tensor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """``(batch, kv_heads, kv, dim)`` with the keys of each sequence in its order."""
    each = zip(tensor.unbind(), order, strict=True)
    return torch.stack([keys[:, places] for keys, places in each])


def _holds(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], parameters: Parameters, errors: Errors
) -> Finding | None:
    order = _order(runs[0].problem, int(parameters["shuffle"]))

    def gradient(name: TensorName, tensor: torch.Tensor) -> torch.Tensor:
        return _moved(tensor, order.to(tensor.device)) if name in ("dk", "dv") else tensor

    return compared(outputs, lambda tensor: tensor, errors, gradient)


KEY_PERMUTATION = Relation(
    name="key_permutation",
    summary="keys and values in another order, among those that the same rows see, give the same "
    "out and LSE, and their gradients in that order",
    runs=_runs,
    holds=_holds,
    promise="bounds",
    unfit=of_attention(_unfit, gradients=True),
    allowed=_allowed,
)
"""Holds of the exact results: a row's softmax is over a set of (key, value) pairs, and neither mask
nor score mod tells two keys of one kind apart. Sums in another order round otherwise, so that each
run may be off by its own bound: |second − first| ≤ the sum of both."""
