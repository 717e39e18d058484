"""A Problem's mods as expressions, for kernels that cannot take a callable."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attncheck.errors import TraceError
from attncheck.mods import captured, library, trace
from attncheck.mods.derivative import derivative

if TYPE_CHECKING:
    from attncheck.kernels.captured_terms import CapturedReads
    from attncheck.mods.expression import Expression
    from attncheck.mods.library import MaskMod, ScoreMod
    from attncheck.mods.spec import Dimensions, Spec
    from attncheck.problem import Problem

__all__ = ["traced_mask", "traced_reads", "traced_score", "traced_slope"]

# A relation asks for the same Problem in several runs, and a trace costs more than a small kernel.
_KEPT = 64


def traced_mask(problem: Problem, device: str) -> Expression:
    """The mask as traced, its captured tensors on ``device``, checked on sampled indices.

    Raises TraceError where the trace and the callable disagree: then neither the kernel nor the
    mask is wrong, but the trace.
    """
    return (_kept_mask if _stays(problem.mask) else _mask)(_Asked.of(problem, "mask", device))


def traced_score(problem: Problem, device: str) -> Expression:
    """The score mod as traced, checked like the mask."""
    return (_kept_score if _stays(problem.score) else _score)(_Asked.of(problem, "score", device))


def traced_slope(problem: Problem, device: str) -> Expression:
    """The score mod's derivative with respect to the score, its captured tensors on ``device``.

    It is made of the trace of torch's own derivative, and the score mod's trace is what is checked:
    rounding may tell the two derivatives apart.
    """
    return (_kept_slope if _stays(problem.score) else _slope)(_Asked.of(problem, "score", device))


def traced_reads(problem: Problem, device: str) -> CapturedReads:
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
    return derivative(asked.problem.score_mod(asked.device), asked.device)


def _reads(asked: _Asked) -> CapturedReads:
    from attncheck.kernels.captured_terms import CapturedReads
    from attncheck.mods.to_triton import to_triton

    found = captured.reads(asked.problem.score_mod(asked.device), asked.device)
    return CapturedReads(
        tuple((to_triton(read.slope), to_triton(read.place), read.start) for read in found),
        sum(tensor.numel() for tensor in captured.tensors(found)),
    )


_kept_mask = functools.lru_cache(maxsize=_KEPT)(_mask)
_kept_score = functools.lru_cache(maxsize=_KEPT)(_score)
_kept_slope = functools.lru_cache(maxsize=_KEPT)(_slope)
_kept_reads = functools.lru_cache(maxsize=_KEPT)(_reads)


def _checked(
    expression: Expression, mod: MaskMod | ScoreMod, asked: _Asked, name: str
) -> Expression:
    problem = asked.problem
    wrong = trace.disagreements(expression, mod, problem.dimensions, device=asked.device)
    if wrong:
        raise TraceError(
            f"the trace of {name} differs from it at {wrong} sampled indices of {problem}."
        )
    return expression
