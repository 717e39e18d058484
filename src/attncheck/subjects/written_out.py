"""Mask and additive score mod of a Problem written out as tensors, for torch's SDPA."""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from attncheck.formats import FORMATS
from attncheck.mods import library
from attncheck.mods.spec import Spec
from attncheck.problem import Problem

if TYPE_CHECKING:
    from attncheck.formats import Format
    from attncheck.mods.spec import Dimensions

__all__ = [
    "attention_bias",
    "attention_mask",
    "bias_is_exact",
    "is_causal",
    "mask_size",
    "needs_no_mask",
    "row_blocks",
]

_CAUSAL = Spec.of("causal")
_CAUSAL_BOTTOM_RIGHT = Spec.of("causal_bottom_right")


def attention_mask(
    problem: Problem, device: str = "cpu", rows: range | None = None
) -> torch.Tensor:
    """What ``rows`` (default: all) see, bool ``(batch or 1, heads or 1, rows, kv)``."""
    rows = rows or range(problem.query)
    seen = problem.mask_mod(device)(*_indices(problem, device, rows))
    return seen & torch.ones((1, 1, len(rows), problem.kv), dtype=torch.bool, device=device)


def attention_bias(
    problem: Problem, device: str = "cpu", rows: range | None = None
) -> torch.Tensor:
    """What an additive score mod adds, in float64: ``(batch or 1, heads or 1, rows, kv)``."""
    rows = rows or range(problem.query)
    zeros = torch.zeros((1, 1, len(rows), problem.kv), dtype=torch.float64, device=device)
    return problem.score_mod(device)(zeros, *_indices(problem, device, rows))


# Float64 numbers of a bias held at a time: 32 MiB, where the whole may be a hundred GiB.
_AT_A_TIME = 2**22


def row_blocks(problem: Problem) -> list[range]:
    """All its rows, as many at a time as may be held."""
    size = max(1, _AT_A_TIME // (problem.batch * problem.heads * problem.kv))
    starts = range(0, problem.query, size)
    return [range(start, min(start + size, problem.query)) for start in starts]


def _indices(problem: Problem, device: str, rows: range) -> tuple[torch.Tensor, ...]:
    return (
        torch.arange(problem.batch, device=device).view(-1, 1, 1, 1),
        torch.arange(problem.heads, device=device).view(1, -1, 1, 1),
        torch.arange(rows.start, rows.stop, device=device).view(1, 1, -1, 1),
        torch.arange(problem.kv, device=device).view(1, 1, 1, -1),
    )


def bias_is_exact(problem: Problem, fmt: Format, device: str) -> bool:
    """Whether an additive score mod's numbers are of ``fmt``, wherever the mask shows them."""
    exact = _exact_once if _stays(problem) else _exact
    return exact(problem.mask, problem.score, problem.dimensions, fmt.name, device)


def mask_size(problem: Problem, device: str) -> tuple[int, ...]:
    """Of mask and score mod in one tensor, ``(batch or 1, heads or 1, query, kv)``."""
    size = _size_once if _stays(problem) else _size
    return size(problem.mask, problem.score, problem.dimensions, device)


def _stays(problem: Problem) -> bool:
    """Whether its mods mean the same for good."""
    parts = itertools.chain(problem.mask.walk(), problem.score.walk())
    return all(part.name in library.BUILT_IN for part in parts)


def _of_mods(mask: Spec, score: Spec, sizes: Dimensions) -> Problem:
    """A Problem of these mods and lengths, whatever else it has."""
    heads, query, kv = sizes.heads, sizes.query, sizes.kv
    return Problem(batch=sizes.batch, heads=heads, query=query, kv=kv, mask=mask, score=score)


def _exact(mask: Spec, score: Spec, sizes: Dimensions, fmt: str, device: str) -> bool:
    problem = _of_mods(mask, score, sizes)
    for rows in row_blocks(problem):
        bias = attention_bias(problem, device, rows)
        exact = bias.to(FORMATS[fmt].torch_dtype).double() == bias
        if not bool((exact | ~attention_mask(problem, device, rows)).all()):
            return False
    return True


def _size(mask: Spec, score: Spec, sizes: Dimensions, device: str) -> tuple[int, ...]:
    """By the first row."""
    problem = _of_mods(mask, score, sizes)
    row = attention_mask(problem, device, range(1))
    if score != library.NONE:
        row = row * attention_bias(problem, device, range(1))
    return (*row.shape[:2], sizes.query, sizes.kv)


# The nearest Problem that is taken is one of a hundred with the same mods, of few lengths.
_exact_once = lru_cache(maxsize=64)(_exact)
_size_once = lru_cache(maxsize=64)(_size)


def needs_no_mask(problem: Problem) -> bool:
    """Whether ``is_causal`` says all of it, or there is nothing to say."""
    return problem.score == library.NONE and (problem.mask == library.FULL or is_causal(problem))


def is_causal(problem: Problem) -> bool:
    """Whether the mask is torch's ``is_causal``, which is aligned top-left."""
    square = problem.query == problem.kv
    return problem.mask == _CAUSAL or (square and problem.mask == _CAUSAL_BOTTOM_RIGHT)
