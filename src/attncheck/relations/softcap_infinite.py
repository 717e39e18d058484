"""A softcap far above every score changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attncheck.mods.library import NONE
from attncheck.mods.spec import Spec
from attncheck.outputs import Outputs
from attncheck.relations.agreement import agree
from attncheck.relations.fit import of_attention
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attncheck.inputs import Inputs
    from attncheck.problem import Problem
    from attncheck.relations.finding import Finding

__all__ = ["SOFTCAP_INFINITE"]

# Powers of two: score / cap and cap · tanh are exact. 2^24 is as far above a score of 1 as fp32
# resolves; below 2^-62 a score would be a subnormal number when divided by 2^64.
_EXPONENTS = (24, 40, 64)


def _exponents(problem: Problem) -> Mapping[str, Sequence[int]]:
    del problem
    return {"exponent": _EXPONENTS}


def _unfit(problem: Problem) -> str | None:
    if problem.score.name not in {"none", "softcap"}:
        return "its score mod is neither none nor softcap"
    return None


def _runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    softcap = Spec.of("softcap", cap=2.0 ** parameters["exponent"])
    plain, capped = (inputs.problem.replace(score=score) for score in (NONE, softcap))
    return inputs.replace(problem=plain), inputs.replace(problem=capped)


def _holds(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], parameters: Parameters, errors: Errors
) -> Finding | None:
    assert errors is not None, "tanh rounds"
    plain, capped = outputs
    between = _difference(runs[0], 2.0 ** parameters["exponent"], errors[0])
    return agree(capped, plain, [*errors, between])


def _difference(inputs: Inputs, cap: float, like: Outputs) -> Outputs:
    """How far the two exact results may be apart, as far as ``like`` has out and LSE.

    |x − tanh x| ≤ |x|³ / 3, so that a score of at most S moves by at most δ = S³ / (3·cap²), LSE by
    δ and out by (e^2δ − 1)·max|v|: each weight changes by a factor within e^±2δ, and Σ of weights
    is 1. S = scale · max‖q‖ · max‖k‖ of a head, by Cauchy and Schwarz; twice that is more than
    float64's own roundings make of it.
    """
    q, k, v = inputs.promoted()
    group = inputs.problem.group
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    longest = (tensor.norm(dim=-1).amax(-1) for tensor in (q, k))
    largest = 2 * inputs.problem.scale * torch.stack(list(longest)).prod(0)
    moved = (largest**3 / (3 * cap**2))[..., None]
    out = torch.expm1(2 * moved)[..., None] * v.abs().amax(2, keepdim=True)
    lse = None if like.lse is None else moved.expand_as(like.lse)
    return Outputs(out.expand_as(like.out), lse)


SOFTCAP_INFINITE = Relation(
    name="softcap_infinite",
    summary="softcap with a cap of 2^`exponent`, far above every score, is no score mod",
    runs=_runs,
    holds=_holds,
    promise="bounds",
    unfit=of_attention(_unfit),
    allowed=_exponents,
)
"""Holds for every right kernel: what tanh of a small number leaves out is allowed for, see
``_difference``, and the judge's bounds know the kernel's tanh. Finds a tanh that is made of
exponentials and loses small numbers, and a cap that is fixed somewhere."""
