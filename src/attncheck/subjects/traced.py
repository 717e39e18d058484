"""A Problem's mods as expressions, for kernels that cannot take a callable."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from attncheck.errors import TraceError
from attncheck.mods import library, trace
from attncheck.mods.derivative import derivative

if TYPE_CHECKING:
    from attncheck.mods.expression import Expression
    from attncheck.mods.library import MaskMod, ScoreMod
    from attncheck.mods.spec import Spec
    from attncheck.problem import Problem

__all__ = ["traced_mask", "traced_score", "traced_slope"]

# A relation asks for the same Problem in several runs, and a trace costs more than a small kernel.
_KEPT = 64


def traced_mask(problem: Problem, device: str) -> Expression:
    """The mask as traced, its captured tensors on ``device``, checked on sampled indices.

    Raises TraceError where the trace and the callable disagree: then neither the kernel nor the
    mask is wrong, but the trace.
    """
    return (_kept_mask if _stays(problem.mask) else _mask)(problem, device)


def traced_score(problem: Problem, device: str) -> Expression:
    """The score mod as traced, checked like the mask."""
    return (_kept_score if _stays(problem.score) else _score)(problem, device)


def traced_slope(problem: Problem, device: str) -> Expression:
    """The score mod's derivative with respect to the score, its captured tensors on ``device``.

    It is made of the trace of torch's own derivative, and the score mod's trace is what is checked:
    rounding may tell the two derivatives apart.
    """
    return (_kept_slope if _stays(problem.score) else _slope)(problem, device)


def _stays(spec: Spec) -> bool:
    """Whether its names mean the same next time."""
    return all(part.name in library.BUILT_IN for part in spec.walk())


def _mask(problem: Problem, device: str) -> Expression:
    mod = problem.mask_mod(device)
    name = f"mask {str(problem.mask)!r}"
    return _checked(trace.trace_mask(mod, device), mod, problem, device, name)


def _score(problem: Problem, device: str) -> Expression:
    mod = problem.score_mod(device)
    name = f"score mod {str(problem.score)!r}"
    return _checked(trace.trace_score(mod, device), mod, problem, device, name)


def _slope(problem: Problem, device: str) -> Expression:
    return derivative(problem.score_mod(device), device)


_kept_mask = functools.lru_cache(maxsize=_KEPT)(_mask)
_kept_score = functools.lru_cache(maxsize=_KEPT)(_score)
_kept_slope = functools.lru_cache(maxsize=_KEPT)(_slope)


def _checked(
    expression: Expression, mod: MaskMod | ScoreMod, problem: Problem, device: str, name: str
) -> Expression:
    wrong = trace.disagreements(expression, mod, problem.dimensions, device=device)
    if wrong:
        raise TraceError(
            f"the trace of {name} differs from it at {wrong} sampled indices of {problem}."
        )
    return expression
