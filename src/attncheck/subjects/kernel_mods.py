"""A Problem's mods as our kernels take them: traced expressions, and the tiles to visit."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from attncheck.core.errors import TraceError
from attncheck.mods import captured_reads as captured_reads_room
from attncheck.mods import library, trace
from attncheck.mods.block_mask import block_mask, list_visits
from attncheck.mods.trace import trace_derivative

if TYPE_CHECKING:
    from attncheck.inputs.problem import Problem
    from attncheck.kernels.gradient_terms import CapturedReads
    from attncheck.kernels.launch import VisitList
    from attncheck.mods.expression import Expression
    from attncheck.mods.spec import Dimensions, MaskMod, ScoreMod, Spec

__all__ = [
    "captured_reads",
    "mask_expression",
    "score_expression",
    "slope_expression",
    "visited_tiles",
    "visited_tiles_by_keys",
]


# A relation asks for the same Problem in several runs, and a trace costs more than a small kernel.
_KEPT = 64


def mask_expression(problem: Problem, device: str) -> Expression:
    """The mask as traced, its captured tensors on ``device``, checked on sampled indices.

    Raises TraceError where the trace and the callable disagree: then neither the kernel nor the
    mask is wrong, but the trace.
    """
    return (_kept_mask if _stays(problem.mask) else _mask)(_Asked.of(problem, "mask", device))


def score_expression(problem: Problem, device: str) -> Expression:
    """The score mod as traced, checked like the mask."""
    return (_kept_score if _stays(problem.score) else _score)(_Asked.of(problem, "score", device))


def slope_expression(problem: Problem, device: str) -> Expression:
    """The score mod's derivative with respect to the score, its captured tensors on ``device``.

    It is made of the trace of torch's own derivative, and the score mod's trace is what is checked:
    rounding may tell the two derivatives apart.
    """
    return (_kept_slope if _stays(problem.score) else _slope)(_Asked.of(problem, "score", device))


def captured_reads(problem: Problem, device: str) -> CapturedReads:
    """What the score mod reads from tensors, and its derivatives there, for a kernel of ours."""
    return (_kept_reads if _stays(problem.score) else _reads)(_Asked.of(problem, "score", device))


def _stays(spec: Spec) -> bool:
    """Whether its names mean the same next time."""
    return all(part.name in library.BUILT_IN for part in spec.walk())


@dataclass(frozen=True, slots=True)
class _Asked:
    """All that a mod is made of, and no more: Problems of other dtypes and seeds share a trace."""

    kind: type[Problem]
    spec: Spec
    dimensions: Dimensions
    device: str
    problem: Problem = field(compare=False)

    @classmethod
    def of(cls, problem: Problem, mod: str, device: str) -> _Asked:
        return cls(type(problem), getattr(problem, mod), problem.dimensions, device, problem)


def _mask(asked: _Asked) -> Expression:
    mod = asked.problem.mask_mod(asked.device)
    name = f"mask {str(asked.spec)!r}"
    return _checked(trace.trace_mask(mod, asked.device), mod, asked, name)


def _score(asked: _Asked) -> Expression:
    mod = asked.problem.score_mod(asked.device)
    name = f"score mod {str(asked.spec)!r}"
    return _checked(trace.trace_score(mod, asked.device), mod, asked, name)


def _slope(asked: _Asked) -> Expression:
    return trace_derivative(asked.problem.score_mod(asked.device), asked.device)


def _reads(asked: _Asked) -> CapturedReads:
    from attncheck.kernels.gradient_terms import CapturedReads
    from attncheck.mods.to_triton import to_triton

    found = captured_reads_room.trace_reads(asked.problem.score_mod(asked.device), asked.device)
    return CapturedReads(
        tuple((to_triton(read.slope), to_triton(read.place), read.start) for read in found),
        sum(tensor.numel() for tensor in captured_reads_room.read_tensors(found)),
    )


_kept_mask = functools.lru_cache(maxsize=_KEPT)(_mask)
_kept_score = functools.lru_cache(maxsize=_KEPT)(_score)
_kept_slope = functools.lru_cache(maxsize=_KEPT)(_slope)
_kept_reads = functools.lru_cache(maxsize=_KEPT)(_reads)


def _checked(
    expression: Expression, mod: MaskMod | ScoreMod, asked: _Asked, name: str
) -> Expression:
    problem = asked.problem
    wrong = trace.count_disagreements(expression, mod, problem.dimensions, device=asked.device)
    if wrong:
        raise TraceError(
            f"the trace of {name} differs from it at {wrong} sampled indices of {problem}."
        )
    return expression


# A relation asks for the same mask in several runs, and its tiles cost more than a small kernel.


def visited_tiles(problem: Problem, block_query: int, block_kv: int, device: str) -> VisitList:
    """The tiles of ``problem`` that its mask does not hide wholly, for blocks of these sizes.

    Found by calling the mask itself, on ``device``, at every index.
    """
    return _found(problem, block_query, block_kv, device)


def visited_tiles_by_keys(
    problem: Problem, block_query: int, block_kv: int, device: str
) -> VisitList:
    """The same tiles by blocks of keys: which blocks of query rows each of them has to visit."""
    return _found(problem, block_query, block_kv, device, by_keys=True)


def _found(
    problem: Problem, block_query: int, block_kv: int, device: str, *, by_keys: bool = False
) -> VisitList:
    lasting = all(part.name in library.BUILT_IN for part in problem.mask.walk())
    find = _kept if lasting else _visits
    return find(_only_the_mask(problem), block_query, block_kv, device, by_keys=by_keys)


def _only_the_mask(problem: Problem) -> Problem:
    """One Problem for all of a mask at the same lengths."""
    return problem.replace(
        score=library.NONE, seed=0, distribution="normal", head_dim=1, value_dim=1, scale=1.0,
        sink=False, paging=None, backward=False, dlse=False, dcaptured=False,
    )  # fmt: skip


def _visits(
    problem: Problem, block_query: int, block_kv: int, device: str, *, by_keys: bool
) -> VisitList:
    from attncheck.kernels.launch import VisitList

    found = block_mask(
        problem.mask_mod(device),
        problem.dimensions,
        block_query=block_query,
        block_kv=block_kv,
        device=device,
    )
    return VisitList(*list_visits(found.transposed() if by_keys else found))


_kept = lru_cache(maxsize=_KEPT)(_visits)
