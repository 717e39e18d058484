"""Pairs of values that a covering array has, and the Problems that come of it have not.

A row that a kernel refuses is moved to the nearest Problem that it takes: it loses values on the
way.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, cast

from attncheck.core.errors import ProblemError
from attncheck.gate.axes import DIMS, EXCLUSIONS, HEADS, SHAPES, problem_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from attncheck.inputs.problem import Problem

__all__ = ["restored", "values_of"]

Row = dict[str, Any]


def values_of(row: Mapping[str, Any], problem: Problem, shapes: str) -> Row:
    """What ``problem``, to which ``row`` was moved, has of each axis; None of no value of it."""
    row_was = problem_of(row, shapes, 0)
    stored = "paged" if problem.paging is not None else "sink" if problem.sink else "plain"
    return {
        "mask": row["mask"] if _has_mask(problem, row_was.mask.name) else None,
        # Not as ``problem_of`` has it: a score mod that it dropped would count as had.
        "score": row["score"] if problem.score.name == row["score"] else None,
        "stored": stored,
        "backward": "backward" if problem.backward else "",
        "dtype": problem.dtype,
        "shape": _named(SHAPES[shapes], (problem.query, problem.kv)),
        "heads": _named(HEADS, (problem.batch, problem.heads, problem.kv_heads)),
        "dims": _named(DIMS, (problem.head_dim, problem.value_dim)),
        "distribution": problem.distribution,
    }


def _has_mask(problem: Problem, name: str) -> bool:
    """A window that hides none of what is causal is no window: who ignores it is right."""
    if problem.mask.name == "sliding_window" and problem.query <= cast(
        "int", problem.mask.values["window"]
    ):
        return False
    return problem.mask.name == name


def restored(
    axes: Mapping[str, Sequence[Any]],
    had: Sequence[Row],
    shapes: str,
    supports: Callable[[Problem], bool],
) -> Iterator[Row]:
    """A row for each pair that ``had`` lacks and some Problem near the plainest has.

    Args:
        axes: The values of each; the first are the plainest.
        had: Values of the Problems that are asked already.
        shapes: A name of ``axes.SHAPES``.
        supports: Whether the kernel takes a Problem.
    """
    if not all(axes.values()):
        return
    seen: set[tuple[tuple[str, Any], ...]] = set()
    for row in had:
        seen.update(_pairs(row))
    taken: dict[tuple[Any, ...], bool] = {}
    for pair in _all_pairs(axes):
        if pair in seen:
            continue
        seen.add(pair)
        candidates = list(_candidates(axes, had, dict(pair)))
        # Those first that make up for most; where as many, the plainest.
        candidates.sort(key=lambda row: sum(each in seen for each in _pairs(row)))
        for row in candidates:
            key = tuple(row.values())
            if key not in taken:
                taken[key] = _possible(row) and _supported(row, shapes, supports)
            if taken[key]:
                seen.update(_pairs(row))
                yield row
                break


def _candidates(axes: Mapping[str, Sequence[Any]], had: Sequence[Row], pair: Row) -> Iterator[Row]:
    """Rows with ``pair``: the plainest, that with one more value another, and those asked."""
    plain = {name: values[0] for name, values in axes.items()} | pair
    yield plain
    for name, values in axes.items():
        if name not in pair:
            yield from (plain | {name: value} for value in values[1:])
    for row in had:
        if all(row[name] in axes[name] for name in axes):
            yield {name: row[name] for name in axes} | pair


def _all_pairs(
    axes: Mapping[str, Sequence[Any]],
) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    for one, other in itertools.combinations(axes, 2):
        for value, beside in itertools.product(axes[one], axes[other]):
            yield (one, value), (other, beside)


def _pairs(row: Row) -> Iterator[tuple[tuple[str, Any], ...]]:
    return itertools.combinations(row.items(), 2)


def _possible(row: Row) -> bool:
    return not any(cannot_be(row) for _, cannot_be in EXCLUSIONS)


def _supported(row: Row, shapes: str, supports: Callable[[Problem], bool]) -> bool:
    try:
        return supports(problem_of(row, shapes, 0))
    except ProblemError:
        return False


def _named(values: Mapping[str, Any], value: Any) -> str | None:
    return next((name for name, each in values.items() if each == value), None)
