"""A power of two moves from the scale into q, and no bit of the result moves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attncheck.formats import FORMATS
from attncheck.relations.agreement import agree
from attncheck.relations.fit import of_attention
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.relations.finding import Finding

__all__ = ["SCALED_QUERY"]

# Even, for kernels that multiply q and k by the root of the scale each.
_FIRST = 2
_EXPONENTS = (4, 6, 10)
_FP32 = FORMATS["fp32"]
_LEAST_WITH_SINK = 2.0**-60  # of the scale, by which kernels divide a sink


def _exponents(problem: Problem) -> Mapping[str, Sequence[int]]:
    smallest = 2.0**_FP32.min_exponent
    return {"exponent": [n for n in _EXPONENTS if problem.scale >= smallest * 2.0**n]}


def _unfit(problem: Problem) -> str | None:
    if problem.formats.scaled:
        return "fp8's stored q is as large as can be"
    if problem.sink and not _LEAST_WITH_SINK <= problem.scale <= 1 / _LEAST_WITH_SINK:
        return f"its sink divided by scale={problem.scale:g} may be no normal number"
    return None if _exponents(problem)["exponent"] else "its scale is a subnormal number, or nearly"


def _runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    problem, factors = inputs.problem, (2.0**_FIRST, 2.0 ** parameters["exponent"])
    q, k = (_ordinary(tensor, problem, factors[1]) for tensor in (inputs.q, inputs.k))
    return tuple(
        inputs.replace(problem=problem.replace(scale=problem.scale / factor), q=q * factor, k=k)
        for factor in factors
    )


def _ordinary(tensor: torch.Tensor, problem: Problem, factor: float) -> torch.Tensor:
    """0 for what might become subnormal or infinite on the way to a score; see SCALED_QUERY."""
    fmt, root = problem.formats.storage, math.sqrt(problem.scale)
    lowest = max(2.0**fmt.min_exponent, 2.0 ** (fmt.significand - 64))
    highest = min(fmt.max, 2.0**59)
    size = tensor.double().abs()
    ordinary = size >= lowest * math.sqrt(factor) / min(1.0, root)
    ordinary &= size <= highest / (factor * max(1.0, root))
    return torch.where(ordinary, tensor, 0.0)


def _holds(
    _: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, errors: Errors
) -> Finding | None:
    before, scaled = outputs
    return agree(scaled, before, errors)


SCALED_QUERY = Relation(
    name="scaled_query",
    summary="q · 2^`exponent` with scale / 2^`exponent` keeps every bit of q · 4 with scale / 4",
    runs=_runs,
    holds=_holds,
    unfit=of_attention(_unfit),
    allowed=_exponents,
)
"""Holds for every right kernel: rounding commutes with powers of two where no number is subnormal
or overflows, so that each sum of products is 2^n times what it was, whatever its order, and its
product with the scale, or with scale · log2 e, is the same number. As of q times the scale. Neither
run has the Problem's own scale: where that is 1/√head_dim, a convention leaves it out, and the
kernel's own may be rounded otherwise.

Elements of q and k for which this might not be so are 0 in both runs. Kept are those that are
normal numbers in both also when multiplied by √scale (torch's unfused formula does that to q and k,
and √2^n is a power of two for even n). With p significant bits they are multiples of 2^-63, as none
is below 2^(p − 64): a sum of products, when not 0, is at least 2^-126, a normal number of fp32. And
none passes 2^59: a sum of 256 products stays below 2^127."""
