"""Relations about order: heads, sequences, keys, cells and rows of scores, permuted.

Attention of a head is a function of its own rows and of a set of (key, value) pairs. Where neither
mask nor score mod distinguishes two of them, permuting them permutes the results.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import TYPE_CHECKING

import torch

from attncheck.core.draws import Draws
from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Descale
from attncheck.relations.relation import (
    Relation,
    change_tensors,
    compare_ends,
    each_tensor,
    indices_read,
    of_attention,
    of_softmax,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.core.tensor_names import TensorName
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Allowed, Parameters, Problem
    from attncheck.relations.relation import Finding, Results

    Order = list[int]
    Cell = tuple[int, int]

_TURNS = 64
_SHUFFLES = 4


def _reflect(count: int, turn: int) -> Order:
    """Return (``turn`` − i) mod ``count`` for each i: left and right neighbours change sides."""
    return [(turn - i) % count for i in range(count)]


def _effective_turns(count: int, order: Callable[[int], Order]) -> Allowed:
    """Return the turns below ``count`` and ``_TURNS`` for which ``order`` moves anything."""
    return {"turn": [t for t in range(min(count, _TURNS)) if order(t) != list(range(count))]}


# ------------------------------------------------------------------ heads


def _key_head_order(problem: Problem, turn: int) -> Order:
    return _reflect(problem.kv_heads, turn % problem.kv_heads)


def _head_order(problem: Problem, turn: int) -> Order:
    """Return the order of query heads: groups follow their key head and are each rotated inside.

    Each group is rotated by one more, so that no wrong formula for h // group commutes with it.
    """
    group, further = problem.group, turn // problem.kv_heads
    return [
        key_head * group + (head + further + place) % group
        for place, key_head in enumerate(_key_head_order(problem, turn))
        for head in range(group)
    ]


def _unless_heads_are_alike(problem: Problem) -> str | None:
    if problem.heads == 1:
        return "it has one head"
    for name, mod in (("mask", problem.mask), ("score mod", problem.score)):
        if "h" in indices_read(mod):
            return f"its {name} reads the head's index"
    return None


def _reorder_heads(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    turn, scales = int(parameters["turn"]), inputs.descale
    heads, keys = (order(inputs.problem, turn) for order in (_head_order, _key_head_order))
    return inputs, inputs.replace(
        **change_tensors(inputs, lambda x: x[:, heads], "q", "dout", "dlse"),
        **change_tensors(inputs, lambda x: x[:, keys], "k", "v"),
        **change_tensors(inputs, lambda x: x[heads], "sink"),
        descale=scales and Descale(q=scales.q[:, keys], k=scales.k[:, keys], v=scales.v[:, keys]),
    )


def _compare_heads(results: Results) -> Finding | None:
    turn, problem = results.number("turn"), results.inputs[0].problem
    heads, keys = _head_order(problem, turn), _key_head_order(problem, turn)

    def gradient(name: TensorName, tensor: torch.Tensor) -> torch.Tensor | None:
        if name == "dcaptured":
            return tensor
        if name == "dsink":
            return tensor[heads]
        if name == "dq":
            return tensor[:, heads]
        # dk and dv of a group are sums over its heads, whose order has changed.
        return tensor[:, keys] if problem.group == 1 else None

    return compare_ends(results, first=each_tensor(lambda x: x[:, heads], gradient))


HEAD_PERMUTATION = Relation(
    name="head_permutation",
    summary="key heads in another order, their groups of query heads with them, give the same "
    "heads in that order",
    runs=_reorder_heads,
    rule=_compare_heads,
    promise="batch",
    unfit=of_attention(_unless_heads_are_alike, gradients=True),
    allowed=lambda problem: _effective_turns(problem.heads, partial(_head_order, problem)),
)
"""Holds for the exact results where neither mask nor score mod reads h: head h is a function of its
own q and sink, and of the keys and values of head h // group. Holds bitwise in a kernel whose rows
do not depend on their position; else within the bounds of both runs, the first run's permuted like
its out. Gradients of keys that several heads share are not compared."""


# ------------------------------------------------------------------ sequences


def _unless_sequences_are_alike(problem: Problem) -> str | None:
    if problem.batch == 1:
        return "it has one sequence"
    # Lengths go with their sequences: ``_reorder_lengths``.
    parts = [part for part in problem.mask.walk() if part.name != "padding" and not part.parts]
    for name, mods in (("mask", parts), ("score mod", [problem.score])):
        if any("b" in indices_read(mod) for mod in mods):
            return f"its {name} reads the sequence's index"
    return None


def _reorder_lengths(mask: Spec, order: Order) -> Spec:
    """Return the mask with its lengths of sequences in the order of the sequences."""
    if mask.name in {"padding", "bottom_right"}:
        lengths = mask.values["lengths"]
        return Spec.of(mask.name, *mask.parts, lengths=[lengths[b] for b in order])
    parts = tuple(_reorder_lengths(part, order) for part in mask.parts)
    return Spec(mask.name, mask.arguments, parts)


def _reorder_sequences(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    problem, scales = inputs.problem, inputs.descale
    order = _reflect(problem.batch, int(parameters["turn"]))
    return inputs, inputs.replace(
        problem=problem.replace(mask=_reorder_lengths(problem.mask, order)),
        **change_tensors(inputs, lambda x: x[order], "q", "k", "v", "dout", "dlse"),
        descale=scales and Descale(q=scales.q[order], k=scales.k[order], v=scales.v[order]),
    )


def _compare_sequences(results: Results) -> Finding | None:
    order = _reflect(results.inputs[0].problem.batch, results.number("turn"))

    def gradient(name: TensorName, tensor: torch.Tensor) -> torch.Tensor | None:
        if name == "dsink":  # a sum over all sequences, whose order has changed
            return None
        return tensor if name == "dcaptured" else tensor[order]

    return compare_ends(results, first=each_tensor(lambda x: x[order], gradient))


BATCH_PERMUTATION = Relation(
    name="batch_permutation",
    summary="sequences in another order, padded lengths with them, give the same in that order",
    runs=_reorder_sequences,
    rule=_compare_sequences,
    promise="batch",
    unfit=of_attention(_unless_sequences_are_alike, gradients=True),
    allowed=lambda problem: _effective_turns(problem.batch, partial(_reflect, problem.batch)),
)
"""Holds for the exact results: a sequence is a function of its own q, k, v and padded length. Holds
bitwise in a kernel whose rows do not depend on their position; else within the bounds of both runs,
the first run's permuted like its out. The gradient of a sink is not compared."""


# ------------------------------------------------------------------ keys


def _key_kinds(problem: Problem) -> torch.Tensor:
    """Return int64 ``(batch, kv)``: keys with the same number are seen by the same rows."""
    return _kinds_under_mask(problem.mask, problem).expand(problem.batch, problem.kv)


def _kinds_under_mask(mask: Spec, problem: Problem) -> torch.Tensor:
    """Return the kinds by the masks' names; under an unknown mask, every key has its own kind."""
    keys = torch.arange(problem.kv)[None]
    if mask.parts:
        return reduce(_combine_kinds, (_kinds_under_mask(part, problem) for part in mask.parts))
    if "kv_idx" not in indices_read(mask):
        return torch.zeros_like(keys)
    if mask.name == "padding":
        lengths = torch.tensor(mask.values["lengths"])
        return (keys < lengths[:, None]).long()
    if mask.name == "document":
        ends = torch.tensor(mask.values["lengths"]).cumsum(0)
        return torch.searchsorted(ends, keys, right=True)
    if mask.name == "prefix_lm":
        return keys.masked_fill(keys < mask.values["prefix"], 0)
    return keys


def _combine_kinds(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return kinds in which two keys agree if they agree in both ``one`` and ``other``."""
    pairs = one * (int(other.max()) + 1) + other
    kinds: torch.Tensor = torch.unique(pairs, return_inverse=True)[1]
    return kinds


def _unless_keys_are_alike(problem: Problem) -> str | None:
    if "kv_idx" in indices_read(problem.score):
        return "its score mod reads the key's index"
    kinds = _key_kinds(problem).sort(-1).values
    if not bool((kinds[:, 1:] == kinds[:, :-1]).any()):
        return "no two keys are seen by the same rows, as far as its mask's names tell"
    return None


def _key_order(problem: Problem, shuffle: int) -> torch.Tensor:
    """Return the key in each position, int64 ``(batch, kv)``; each position keeps its kind.

    Shuffle 0 reverses the keys of each kind, so that it never leaves all keys in place.
    """
    kinds, shape = _key_kinds(problem), (problem.batch, problem.kv)
    reversed_ranks = torch.arange(problem.kv, 0, -1).double().expand(shape)
    random_ranks = Draws(problem.seed).uniform(f"key permutation {shuffle}", shape)
    by_rank = (torch.from_numpy(random_ranks) if shuffle else reversed_ranks).argsort(-1)
    keys = by_rank.gather(1, kinds.gather(1, by_rank).argsort(dim=-1, stable=True))
    places = kinds.argsort(dim=-1, stable=True)
    return torch.empty_like(keys).scatter_(1, places, keys)


def _move_keys(tensor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return ``(batch, kv_heads, kv, dim)`` with each sequence's keys in its ``order``."""
    each = zip(tensor.unbind(), order.to(tensor.device), strict=True)
    return torch.stack([keys[:, places] for keys, places in each])


def _reorder_keys(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    order = _key_order(inputs.problem, int(parameters["shuffle"]))
    return inputs, inputs.replace(
        **change_tensors(inputs, partial(_move_keys, order=order), "k", "v")
    )


def _compare_keys(results: Results) -> Finding | None:
    order = _key_order(results.inputs[0].problem, results.number("shuffle"))

    def gradient(name: TensorName, tensor: torch.Tensor) -> torch.Tensor:
        return _move_keys(tensor, order) if name in ("dk", "dv") else tensor

    return compare_ends(results, first=each_tensor(lambda tensor: tensor, gradient))


KEY_PERMUTATION = Relation(
    name="key_permutation",
    summary="keys and values in another order, among those that the same rows see, give the same "
    "out and LSE, and their gradients in that order",
    runs=_reorder_keys,
    rule=_compare_keys,
    promise="bounds",
    unfit=of_attention(_unless_keys_are_alike, gradients=True),
    allowed=lambda _: {"shuffle": range(_SHUFFLES)},
)
"""Holds for the exact results: a row's softmax is over a set of (key, value) pairs, and neither the
mask nor the score mod distinguishes keys of one kind. Sums in another order round differently, so
that each run may be off by its own bound: |second − first| ≤ the sum of both."""


# ------------------------------------------------------------------ cells of a canvas

_BITS = 24  # Bits of a row or column number: canvases have at most 2^24 cells.


def _rank_in_tiles(mask: Spec, cell: Cell) -> tuple[int, ...]:
    tall, wide = mask.values["tile"]
    return (cell[0] // tall, cell[1] // wide, *cell)


def _rank_on_curve(_: Spec, cell: Cell) -> tuple[int, ...]:
    """Return the bits of row and column interleaved from the highest down, row first."""
    return tuple(number >> bit & 1 for bit in range(_BITS - 1, -1, -1) for number in cell)


_RANKS = {"neighborhood_tiled": _rank_in_tiles, "neighborhood_morton": _rank_on_curve}
"""Sort keys of cells, written independently of how the masks compute them."""


def _unless_cells_are_reordered(problem: Problem) -> str | None:
    mask = problem.mask
    if mask.name not in _RANKS:
        return f"its mask is none of {', '.join(_RANKS)}"
    rows, columns = mask.values["canvas"]
    if min(problem.query, problem.kv) < rows * columns:
        return "its rows or keys do not cover the canvas"
    if indices_read(problem.score) & {"q_idx", "kv_idx"}:
        return "its score mod reads the place of a row or key"
    return None


def _cell_order(mask: Spec) -> torch.Tensor:
    """Return the cell in each position, int64 ``(cells,)``; cells are numbered row by row."""
    rows, columns = mask.values["canvas"]
    cells = [(row, column) for row in range(rows) for column in range(columns)]
    rank = _RANKS[mask.name]
    return torch.tensor(sorted(range(len(cells)), key=lambda number: rank(mask, cells[number])))


def _extend(order: torch.Tensor, length: int) -> torch.Tensor:
    """Append the positions beyond the canvas, which stay where they are."""
    return torch.cat([order, torch.arange(len(order), length)])


def _reorder_cells(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    problem = inputs.problem
    row_by_row = _cell_order(problem.mask).argsort()
    rows, keys = (
        _extend(row_by_row, length).to(inputs.device) for length in (problem.query, problem.kv)
    )
    sides = {name: list(problem.mask.values[name]) for name in ("canvas", "kernel")}
    plain = inputs.replace(
        problem=problem.replace(mask=Spec.of("neighborhood", **sides)),
        **change_tensors(inputs, lambda x: x[:, :, rows], "q"),
        **change_tensors(inputs, lambda x: x[:, :, keys], "k", "v"),
    )
    return plain, inputs


def _compare_cells(results: Results) -> Finding | None:
    last = results.inputs[-1]
    places = _extend(_cell_order(last.problem.mask), last.problem.query).to(last.device)
    return compare_ends(results, first=each_tensor(lambda tensor: tensor[:, :, places]))


NEIGHBORHOOD_ORDER = Relation(
    name="neighborhood_order",
    summary="rows, keys and values of a canvas row by row give the same, in the cells' own order",
    runs=_reorder_cells,
    rule=_compare_cells,
    promise="bounds",
    unfit=of_attention(_unless_cells_are_reordered),
)
"""Holds for every right kernel: a cell sees the same cells, however they are numbered. Sums are in
another order, so it holds within the bounds of both runs, the first run's permuted like its out.
Rows beyond the canvas see no key, and keys beyond it are not seen."""


# ------------------------------------------------------------------ rows and columns of a softmax


def _row_count(problem: Problem) -> int:
    return problem.batch * problem.heads * problem.query


def _move_rows(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """Return the rows ``(batch, heads, query)``, or with a last axis, in the order of ``turn``."""
    rows = tensor.flatten(0, 2)
    return rows[_reflect(len(rows), turn)].view(tensor.shape)


def _reorder_rows(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    turn = int(parameters["turn"])
    return inputs, inputs.replace(**change_tensors(inputs, lambda x: _move_rows(x, turn), "x"))


SOFTMAX_ROWS = Relation(
    name="softmax_rows",
    summary="rows of scores in another order, of all heads and sequences, give the same rows in "
    "that order",
    runs=_reorder_rows,
    rule=lambda results: compare_ends(
        results, first=each_tensor(partial(_move_rows, turn=results.number("turn")))
    ),
    promise="batch",
    unfit=of_softmax(lambda problem: "it has one row" if _row_count(problem) == 1 else None),
    allowed=lambda problem: _effective_turns(
        _row_count(problem), partial(_reflect, _row_count(problem))
    ),
)
"""Holds for the exact results: a row is a function of its own scores. Holds bitwise in a kernel
whose rows do not depend on their position; else within the bounds of both runs, the first run's
permuted like its out."""


def _column_order(problem: Problem, shuffle: int) -> torch.Tensor:
    """Return the column in each position, int64 ``(kv,)``; shuffle 0 reverses them."""
    if shuffle == 0:
        return torch.arange(problem.kv).flip(0)
    random_ranks = Draws(problem.seed).uniform(f"softmax columns {shuffle}", (problem.kv,))
    return torch.from_numpy(random_ranks).argsort()


def _reorder_columns(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    order = _column_order(inputs.problem, int(parameters["shuffle"])).to(inputs.device)
    return inputs, inputs.replace(**change_tensors(inputs, lambda x: x[..., order], "x"))


def _compare_columns(results: Results) -> Finding | None:
    order = _column_order(results.inputs[0].problem, results.number("shuffle"))
    order = order.to(results.outputs[0].out.device)
    return compare_ends(results, first=lambda run: Outputs(run.out[..., order], run.lse))


SOFTMAX_COLUMNS = Relation(
    name="softmax_columns",
    summary="scores in another order within their rows give the same weights in that order, and "
    "the same LSE",
    runs=_reorder_columns,
    rule=_compare_columns,
    promise="bounds",
    unfit=of_softmax(lambda problem: "it has one column" if problem.kv == 1 else None),
    allowed=lambda _: {"shuffle": range(_SHUFFLES)},
)
"""Holds for the exact results, whose sums have no order. A kernel's sums round differently in each
order: |second − first| ≤ the sum of both bounds, the first run's permuted like its out."""
