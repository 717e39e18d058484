"""Relations about order: heads, sequences, keys, cells and rows of scores, permuted."""

from __future__ import annotations

from dataclasses import replace
from functools import partial, reduce
from typing import TYPE_CHECKING, cast

import torch

from attncheck.core.draws import Draws
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Descale
from attncheck.mods.spec import Spec
from attncheck.relations.relation import (
    Errors,
    Relation,
    compare_outputs,
    compare_reordered,
    effective_turns,
    indices_read,
    of_attention,
    of_softmax,
    reflect,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attncheck.core.outputs import TensorName
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Allowed, Parameters, Problem
    from attncheck.relations.relation import Finding

__all__ = [
    "BATCH_PERMUTATION",
    "HEAD_PERMUTATION",
    "KEY_PERMUTATION",
    "NEIGHBORHOOD_ORDER",
    "SOFTMAX_COLUMNS",
    "SOFTMAX_ROWS",
]


def _key_heads(problem: Problem, turn: int) -> list[int]:
    return reflect(problem.kv_heads, turn % problem.kv_heads)


def _heads(problem: Problem, turn: int) -> list[int]:
    """Groups follow their key head, and within them heads move round, each group by one more.

    No kernel that takes another key head than h // group does so for all heads alike then.
    """
    group, further = problem.group, turn // problem.kv_heads
    return [
        key_head * group + (head + further + place) % group
        for place, key_head in enumerate(_key_heads(problem, turn))
        for head in range(group)
    ]


def _allowed(problem: Problem) -> Allowed:
    return {"turn": effective_turns(problem.heads, partial(_heads, problem))}


def _unfit(problem: Problem) -> str | None:
    if problem.heads == 1:
        return "it has one head"
    for name, mod in (("mask", problem.mask), ("score mod", problem.score)):
        if "h" in indices_read(mod):
            return f"its {name} reads the head's index"
    return None


def _runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    turn = int(parameters["turn"])
    heads, key_heads = (of(inputs.problem, turn) for of in (_heads, _key_heads))
    scales = inputs.descale
    return inputs, inputs.replace(
        q=inputs.q[:, heads],
        k=inputs.k[:, key_heads],
        v=inputs.v[:, key_heads],
        sink=None if inputs.sink is None else inputs.sink[heads],
        dout=None if inputs.dout is None else inputs.dout[:, heads],
        dlse=None if inputs.dlse is None else inputs.dlse[:, heads],
        descale=scales
        and Descale(q=scales.q[:, key_heads], k=scales.k[:, key_heads], v=scales.v[:, key_heads]),
    )


def _holds(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], parameters: Parameters, errors: Errors
) -> Finding | None:
    turn, problem = int(parameters["turn"]), runs[0].problem
    heads, key_heads = _heads(problem, turn), _key_heads(problem, turn)

    def gradient(name: TensorName, tensor: torch.Tensor) -> torch.Tensor:
        if name == "dcaptured":
            return tensor
        if name == "dsink":
            return tensor[heads]
        return tensor[:, key_heads if name in ("dk", "dv") else heads]

    if problem.group > 1:  # the sums over a group's heads are in another order
        outputs = [replace(each, dk=None, dv=None) for each in outputs]
    return compare_reordered(outputs, lambda tensor: tensor[:, heads], errors, gradient)


HEAD_PERMUTATION = Relation(
    name="head_permutation",
    summary="key heads in another order, their groups of query heads with them, give the same "
    "heads in that order",
    runs=_runs,
    holds=_holds,
    promise="batch",
    unfit=of_attention(_unfit, gradients=True),
    allowed=_allowed,
)
"""Holds of the exact results where neither mask nor score mod reads h: head h is a function of its
own q and sink, and of the keys and values of head h // group. To the last bit in a kernel whose
rows know nothing of their place; else within the bounds of both runs, the first one's moved like
its out. Of the gradients of keys that several heads share nothing is said."""


def _sequences(problem: Problem, turn: int) -> list[int]:
    return reflect(problem.batch, turn)


def _allowed_of_batch_permutation(problem: Problem) -> Allowed:
    return {"turn": effective_turns(problem.batch, partial(_sequences, problem))}


def _unfit_of_batch_permutation(problem: Problem) -> str | None:
    if problem.batch == 1:
        return "it has one sequence"
    parts = [part for part in problem.mask.walk() if part.name != "padding" and not part.parts]
    for name, mods in (("mask", parts), ("score mod", [problem.score])):
        if any("b" in indices_read(mod) for mod in mods):
            return f"its {name} reads the sequence's index"
    return None


def _mask(mask: Spec, order: list[int]) -> Spec:
    """The mask with each padded length where its sequence is."""
    if mask.name == "padding":
        lengths = cast("tuple[int, ...]", mask.values["lengths"])
        return Spec.of("padding", lengths=[lengths[b] for b in order])
    return Spec(mask.name, mask.arguments, tuple(_mask(part, order) for part in mask.parts))


def _runs_of_batch_permutation(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    problem, scales = inputs.problem, inputs.descale
    order = _sequences(problem, int(parameters["turn"]))
    return inputs, inputs.replace(
        problem=problem.replace(mask=_mask(problem.mask, order)),
        q=inputs.q[order],
        k=inputs.k[order],
        v=inputs.v[order],
        dout=None if inputs.dout is None else inputs.dout[order],
        dlse=None if inputs.dlse is None else inputs.dlse[order],
        descale=scales and Descale(q=scales.q[order], k=scales.k[order], v=scales.v[order]),
    )


def _holds_of_batch_permutation(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], parameters: Parameters, errors: Errors
) -> Finding | None:
    order = _sequences(runs[0].problem, int(parameters["turn"]))
    problem = runs[0].problem

    def gradient(name: TensorName, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if name in ("dsink", "dcaptured") else tensor[order]

    # A sink's is a sum over all sequences, in another order now.
    outputs = [_without_sink(each) for each in outputs] if problem.sink else outputs
    return compare_reordered(outputs, lambda tensor: tensor[order], errors, gradient)


def _without_sink(outputs: Outputs) -> Outputs:
    return replace(outputs, dsink=None)


BATCH_PERMUTATION = Relation(
    name="batch_permutation",
    summary="sequences in another order, padded lengths with them, give the same in that order",
    runs=_runs_of_batch_permutation,
    holds=_holds_of_batch_permutation,
    promise="batch",
    unfit=of_attention(_unfit_of_batch_permutation, gradients=True),
    allowed=_allowed_of_batch_permutation,
)
"""Holds of the exact results: a sequence is a function of its own q, k, v and padded length. To the
last bit in a kernel whose rows know nothing of their place; else within the bounds of both runs,
the first one's moved like its out. Of a sink's gradient nothing is said."""


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


def _unfit_of_key_permutation(problem: Problem) -> str | None:
    if "kv_idx" in indices_read(problem.score):
        return "its score mod reads the key's index"
    kinds = _kinds(problem).sort(-1).values
    if not bool((kinds[:, 1:] == kinds[:, :-1]).any()):
        return "no two keys are seen by the same rows, as far as its mask's names tell"
    return None


def _allowed_of_key_permutation(_: Problem) -> Allowed:
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


def _runs_of_key_permutation(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    order = _order(inputs.problem, int(parameters["shuffle"])).to(inputs.device)
    return inputs, inputs.replace(k=_moved(inputs.k, order), v=_moved(inputs.v, order))


def _moved(tensor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """``(batch, kv_heads, kv, dim)`` with the keys of each sequence in its order."""
    each = zip(tensor.unbind(), order, strict=True)
    return torch.stack([keys[:, places] for keys, places in each])


def _holds_of_key_permutation(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], parameters: Parameters, errors: Errors
) -> Finding | None:
    order = _order(runs[0].problem, int(parameters["shuffle"]))

    def gradient(name: TensorName, tensor: torch.Tensor) -> torch.Tensor:
        return _moved(tensor, order.to(tensor.device)) if name in ("dk", "dv") else tensor

    return compare_reordered(outputs, lambda tensor: tensor, errors, gradient)


KEY_PERMUTATION = Relation(
    name="key_permutation",
    summary="keys and values in another order, among those that the same rows see, give the same "
    "out and LSE, and their gradients in that order",
    runs=_runs_of_key_permutation,
    holds=_holds_of_key_permutation,
    promise="bounds",
    unfit=of_attention(_unfit_of_key_permutation, gradients=True),
    allowed=_allowed_of_key_permutation,
)
"""Holds of the exact results: a row's softmax is over a set of (key, value) pairs, and neither mask
nor score mod tells two keys of one kind apart. Sums in another order round otherwise, so that each
run may be off by its own bound: |second − first| ≤ the sum of both."""


Cell = tuple[int, int]


def _in_tiles(mask: Spec) -> Callable[[Cell], tuple[int, ...]]:
    tall, wide = _pair(mask, "tile")
    return lambda cell: (cell[0] // tall, cell[1] // wide, *cell)


def _along_a_curve(_: Spec) -> Callable[[Cell], tuple[int, ...]]:
    """Both numbers' bits from the highest down, a bit of the row before one of the column."""
    bits = range(_BITS - 1, -1, -1)
    return lambda cell: tuple(number >> bit & 1 for bit in bits for number in cell)


_BITS = 24  # of a side: canvases have at most 2^24 cells
_ORDERS = {"neighborhood_tiled": _in_tiles, "neighborhood_morton": _along_a_curve}
"""What cells are sorted by: written anew, and not how the masks compute it."""


def _pair(mask: Spec, name: str) -> Cell:
    return cast("Cell", mask.values[name])


def _cells(mask: Spec) -> int:
    rows, columns = _pair(mask, "canvas")
    return rows * columns


def _unfit_of_neighborhood_order(problem: Problem) -> str | None:
    mask = problem.mask
    if mask.name not in _ORDERS:
        return f"its mask is none of {', '.join(_ORDERS)}"
    if min(problem.query, problem.kv) < _cells(mask):
        return "its rows or keys do not cover the canvas"
    if indices_read(problem.score) & {"q_idx", "kv_idx"}:
        return "its score mod reads the place of a row or key"
    return None


def _order_of_neighborhood_order(mask: Spec) -> torch.Tensor:
    """int64 ``(cells,)``: the cell, numbered row by row, in each place."""
    rows, columns = _pair(mask, "canvas")
    cells = [(row, column) for row in range(rows) for column in range(columns)]
    rank = _ORDERS[mask.name](mask)
    order = sorted(range(len(cells)), key=lambda number: rank(cells[number]))
    return torch.tensor(order)


def _with_the_rest(order: torch.Tensor, length: int) -> torch.Tensor:
    """Places beyond the canvas stay where they are."""
    return torch.cat([order, torch.arange(len(order), length)])


def _runs_of_neighborhood_order(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    problem = inputs.problem
    row_by_row = _order_of_neighborhood_order(problem.mask).argsort()
    rows, keys = (
        _with_the_rest(row_by_row, length).to(inputs.device)
        for length in (problem.query, problem.kv)
    )
    sides = {name: list(_pair(problem.mask, name)) for name in ("canvas", "kernel")}
    plain = inputs.replace(
        problem=problem.replace(mask=Spec.of("neighborhood", **sides)),
        q=inputs.q[:, :, rows],
        k=inputs.k[:, :, keys],
        v=inputs.v[:, :, keys],
    )
    return plain, inputs


def _holds_of_neighborhood_order(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], _: Parameters, errors: Errors
) -> Finding | None:
    given = runs[-1]
    places = _with_the_rest(
        _order_of_neighborhood_order(given.problem.mask), given.problem.query
    ).to(given.device)
    return compare_reordered(outputs, lambda tensor: tensor[:, :, places], errors)


NEIGHBORHOOD_ORDER = Relation(
    name="neighborhood_order",
    summary="rows, keys and values of a canvas row by row give the same, in the cells' own order",
    runs=_runs_of_neighborhood_order,
    holds=_holds_of_neighborhood_order,
    promise="bounds",
    unfit=of_attention(_unfit_of_neighborhood_order),
)
"""Holds for every right kernel: a cell sees the same cells, however they are numbered. Within the
bounds of both runs, the first one's moved like its out: sums are in another order. Rows and keys
beyond the canvas see nothing and are not seen."""


def _unfit_of_softmax_columns(problem: Problem) -> str | None:
    return "it has one column" if problem.kv == 1 else None


def _allowed_of_softmax_columns(_: Problem) -> Allowed:
    return {"shuffle": range(_SHUFFLES)}


def _order_of_softmax_columns(problem: Problem, shuffle: int) -> torch.Tensor:
    """int64 ``(kv,)``: which column comes in each place; shuffle 0 turns them round."""
    if shuffle == 0:
        return torch.arange(problem.kv).flip(0)
    drawn = Draws(problem.seed).uniform(f"softmax columns {shuffle}", (problem.kv,))
    return torch.from_numpy(drawn).argsort()


def _runs_of_softmax_columns(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    assert inputs.x is not None, "a softmax has scores"
    order = _order_of_softmax_columns(inputs.problem, int(parameters["shuffle"])).to(inputs.device)
    return inputs, inputs.replace(x=inputs.x[..., order])


def _holds_of_softmax_columns(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], parameters: Parameters, errors: Errors
) -> Finding | None:
    before, after = outputs
    order = _order_of_softmax_columns(runs[0].problem, int(parameters["shuffle"])).to(
        before.out.device
    )

    def moved(given: Outputs) -> Outputs:
        return Outputs(given.out[..., order], given.lse)

    return compare_outputs(after, moved(before), errors and [moved(errors[0]), errors[1]])


SOFTMAX_COLUMNS = Relation(
    name="softmax_columns",
    summary="scores in another order within their rows give the same weights in that order, and "
    "the same LSE",
    runs=_runs_of_softmax_columns,
    holds=_holds_of_softmax_columns,
    promise="bounds",
    unfit=of_softmax(_unfit_of_softmax_columns),
    allowed=_allowed_of_softmax_columns,
)
"""Holds of the exact results, whose sums have no order. A kernel's round otherwise in another one:
|second − first| ≤ the sum of both bounds, the first one's moved like its out."""


def _rows(problem: Problem) -> int:
    return problem.batch * problem.heads * problem.query


def _allowed_of_softmax_rows(problem: Problem) -> Allowed:
    rows = _rows(problem)
    return {"turn": effective_turns(rows, partial(reflect, rows))}


def _unfit_of_softmax_rows(problem: Problem) -> str | None:
    return "it has one row" if _rows(problem) == 1 else None


def _moved_of_softmax_rows(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """Rows ``(batch, heads, query)`` in the order of ``turn``; a last axis goes with them."""
    rows = tensor.flatten(0, 2)
    return rows[reflect(len(rows), turn)].view(tensor.shape)


def _runs_of_softmax_rows(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    assert inputs.x is not None, "a softmax has scores"
    return inputs, inputs.replace(x=_moved_of_softmax_rows(inputs.x, int(parameters["turn"])))


def _holds_of_softmax_rows(
    _: Sequence[Inputs], outputs: Sequence[Outputs], parameters: Parameters, errors: Errors
) -> Finding | None:
    return compare_reordered(
        outputs, lambda tensor: _moved_of_softmax_rows(tensor, int(parameters["turn"])), errors
    )


SOFTMAX_ROWS = Relation(
    name="softmax_rows",
    summary="rows of scores in another order, of all heads and sequences, give the same rows in "
    "that order",
    runs=_runs_of_softmax_rows,
    holds=_holds_of_softmax_rows,
    promise="batch",
    unfit=of_softmax(_unfit_of_softmax_rows),
    allowed=_allowed_of_softmax_rows,
)
"""Holds of the exact results: a row is a function of its own scores. To the last bit in a kernel
whose rows know nothing of their place; else within the bounds of both runs, the first one's moved
like its out."""
