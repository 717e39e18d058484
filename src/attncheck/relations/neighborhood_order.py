"""A canvas's cells numbered otherwise: rows, keys and values in that order give the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from attncheck.mods.spec import Spec
from attncheck.relations.fit import indices_read, of_attention
from attncheck.relations.order import compared
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.relations.finding import Finding

__all__ = ["NEIGHBORHOOD_ORDER"]

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


def _unfit(problem: Problem) -> str | None:
    mask = problem.mask
    if mask.name not in _ORDERS:
        return f"its mask is none of {', '.join(_ORDERS)}"
    if min(problem.query, problem.kv) < _cells(mask):
        return "its rows or keys do not cover the canvas"
    if indices_read(problem.score) & {"q_idx", "kv_idx"}:
        return "its score mod reads the place of a row or key"
    return None


def _order(mask: Spec) -> torch.Tensor:
    """int64 ``(cells,)``: the cell, numbered row by row, in each place."""
    rows, columns = _pair(mask, "canvas")
    cells = [(row, column) for row in range(rows) for column in range(columns)]
    rank = _ORDERS[mask.name](mask)
    order = sorted(range(len(cells)), key=lambda number: rank(cells[number]))
    return torch.tensor(order)


def _with_the_rest(order: torch.Tensor, length: int) -> torch.Tensor:
    """Places beyond the canvas stay where they are."""
    return torch.cat([order, torch.arange(len(order), length)])


def _runs(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    problem = inputs.problem
    row_by_row = _order(problem.mask).argsort()
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


def _holds(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], _: Parameters, errors: Errors
) -> Finding | None:
    given = runs[-1]
    places = _with_the_rest(_order(given.problem.mask), given.problem.query).to(given.device)
    return compared(outputs, lambda tensor: tensor[:, :, places], errors)


NEIGHBORHOOD_ORDER = Relation(
    name="neighborhood_order",
    summary="rows, keys and values of a canvas row by row give the same, in the cells' own order",
    runs=_runs,
    holds=_holds,
    promise="bounds",
    unfit=of_attention(_unfit),
)
"""Holds for every right kernel: a cell sees the same cells, however they are numbered. Within the
bounds of both runs, the first one's moved like its out: sums are in another order. Rows and keys
beyond the canvas see nothing and are not seen."""
