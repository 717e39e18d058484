"""The nearest Problem that a kernel takes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attncheck.core.errors import ProblemError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from attncheck.inputs.problem import Problem

__all__ = ["supported"]

Changes = dict[str, Any]

_COMMON_HEAD_DIMS = (64, 128, 32, 256)
_COMMON_PAGE_SIZES = (16, 64, 256)
_LARGEST_TILE, _SMALLEST_TILE = 128, 16


def supported(
    problem: Problem,
    supports: Callable[[Problem], bool],
    dtypes: Sequence[str],
    *,
    drops: Sequence[str] = (),
) -> Problem | None:
    """``problem`` itself, or as few of its fields changed as make ``supports`` true; else None.

    With another head_dim the scale changes too, so that scores stay as large as they were.

    kv, mask, score mod and values stay, except that kv may grow to whole tiles, so that what was
    chosen for them (a key to hide, say) stays possible; it shrinks only where all else is refused.

    Args:
        problem: What was drawn.
        supports: What is asked.
        dtypes: Those that ``problem`` may have instead, plainest first.
        drops: What it may do without: ``sink``, ``dlse``.
    """
    if supports(problem):  # nearly always: what else it could be is not worked out
        return problem
    default = _default_scale(problem)
    refused: set[frozenset[tuple[str, Any]]] = {frozenset()}
    for changes in _fewest_first(problem, dtypes, drops, default=default):
        real = frozenset(_real(problem, changes, default=default).items())
        if real in refused:  # a plain Problem has few that differ
            continue
        refused.add(real)
        try:
            moved = problem.replace(**changes)
        except ProblemError:  # documents do not cover a length that has grown
            continue
        if supports(moved):
            return moved
    return None


def _real(problem: Problem, changes: Changes, *, default: bool) -> Changes:
    """Without those to what it is already; a scale of 0 is the default of a head_dim."""
    real = {name: value for name, value in changes.items() if getattr(problem, name) != value}
    if default and "head_dim" not in real:
        real.pop("scale", None)
    return real


def _fewest_first(
    problem: Problem, dtypes: Sequence[str], drops: Sequence[str], *, default: bool
) -> Iterator[Changes]:
    combinations = itertools.product(
        _dims(problem, default=default),
        _lengths(problem),
        _heads(problem),
        _pagings(problem),
        _dtypes(problem, dtypes),
        *_without(problem, drops),
        [{}] if default else [{}, {"scale": 0.0}],
    )
    for changed in sorted(combinations, key=lambda axes: sum(map(bool, axes))):
        yield {name: value for axis in changed for name, value in axis.items()}


def _dims(problem: Problem, *, default: bool) -> list[Changes]:
    def scale(dim: int) -> float:
        # 0 asks for 1/√dim, to its last bit: a kernel may take no other.
        kept = problem.scale * math.sqrt(problem.head_dim / dim)
        return 0.0 if default else kept

    common: list[Changes] = [
        {"head_dim": dim, "value_dim": dim, "scale": scale(dim)} for dim in _COMMON_HEAD_DIMS
    ]
    return [{}, {"value_dim": problem.head_dim}, *common]


def _default_scale(problem: Problem) -> bool:
    return problem.scale == problem.replace(scale=0.0).scale


def _lengths(problem: Problem) -> list[Changes]:
    whole = -(-problem.kv // _LARGEST_TILE) * _LARGEST_TILE
    # One row is what decoding takes, and few keys what lies whole in one tile.
    few = {"query": min(problem.query, _SMALLEST_TILE), "kv": min(problem.kv, _SMALLEST_TILE)}
    return [{}, {"query": problem.kv}, {"query": whole, "kv": whole}, {"query": 1}, few]


def _heads(problem: Problem) -> list[Changes]:
    return [{}, {"kv_heads": problem.heads}]


def _pagings(problem: Problem) -> list[Changes]:
    """Pages stay pages: a kernel that takes none of a size may take others."""
    if problem.paging is None:
        return [{}]
    sizes = [size for size in _COMMON_PAGE_SIZES if size != problem.paging.size]
    return [{}, *({"paging": replace(problem.paging, size=size)} for size in sizes)]


def _without(problem: Problem, drops: Sequence[str]) -> list[list[Changes]]:
    return [[{}, {name: False}] for name in drops if getattr(problem, name)]


def _dtypes(problem: Problem, dtypes: Sequence[str]) -> list[Changes]:
    return [{}, *({"dtype": dtype} for dtype in dtypes if dtype != problem.dtype)]
