"""Rounding margins: how far rounding can move a probe's counts, and so when counting is safe.

Derived in ``docs/reference/probes.md``, section "What rounding does to a count".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from attncheck.core.declared_arithmetic import FP32, Accumulator, Arithmetic
from attncheck.core.formats import FORMATS
from attncheck.inputs.problem import Problem

HALF = 0.5  # A count with an error from this on is nearer to another whole number.

QUARTER = HALF / 2  # Part of that error that rounding may take; the rest is left for faults.

GAP = 16 * math.log(2.0)
"""Least distance of all other scores of a row below its tied largest ones, in nats.

Their weights are at most 2^-16. No kernel's maximum lags by as much (lazy rescaling: 8 in base 2),
so tied largest scores have the weight 1, or one common power of two near it.
"""

HARDWARE_ULPS = 2.0
"""Largest error of exp2 in units in the last place, for CUDA and all libm, exact at 0."""


_U = FORMATS["fp32"].unit_roundoff
_DIVIDED_EXACTLY = 2  # Up to this many keys, all partial row sums are powers of two.


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightErrors:
    """Errors of weights and of sums of values in a kernel's arithmetic."""

    # Largest error of its exp2, in units in the last place of fp32.
    exp2_ulps: float = HARDWARE_ULPS
    # Largest part of P that is cut off if its format is truncated to, not rounded to, as tensor
    # cores read tf32: a weight just below 1 then becomes one step of tf32 less.
    cut: float = 0.0
    # Whether P may be divided before it is rounded, by the row sum, that of a split or that of the
    # tiles so far. Then P is no power of two even if the number of keys is.
    divides: bool = True
    scale: float = 1.0  # factor of P before it is rounded
    values: Accumulator = FP32  # accumulator of the values
    unit: float = _U  # unit roundoff of everything else, at least fp32's

    @classmethod
    def of(cls, arithmetic: Arithmetic) -> WeightErrors:
        """Return the errors of ``arithmetic``."""
        return cls(
            exp2_ulps=arithmetic.exp2_ulps,
            cut=arithmetic.weights_error if arithmetic.truncates else 0.0,
            divides=arithmetic.normalised_weights,
            scale=arithmetic.weights_scale,
            values=arithmetic.values,
            unit=max(_U, arithmetic.unit),
        )

    def division(self, problem: Problem, keys: torch.Tensor) -> torch.Tensor:
        """Return the largest relative error of rounding a P divided by a sum of up to ``keys``."""
        fmt = problem.formats.weights
        subnormal = keys * (fmt.subnormal_spacing / 2 / self.scale)
        return subnormal.clamp(min=fmt.unit_roundoff).masked_fill(keys <= _DIVIDED_EXACTLY, 0.0)

    def addition(self, problem: Problem) -> float:
        """Return the largest relative error of adding up values beyond fp32's; 0 in fp32."""
        if self.bits >= FP32.result:
            return 0.0
        # O is also rescaled once for every tile, of one key at least, and rounded there.
        return self.values.det(float(problem.kv)) + self.values.rounded(2.0 * problem.kv)

    @property
    def bits(self) -> int:
        """Bits up to which a sum of values is exact."""
        values = self.values
        if values.block is None:
            return values.format.significand
        # Tensor cores that are not coarse lose about as much as fp32: ``Accumulator.coarse``.
        return min(values.alignment, values.result) if values.coarse else FP32.result


USUAL_WEIGHT_ERRORS = WeightErrors()
"""Errors of a kernel that declares nothing: the largest that are right without a declaration."""

_LOGARITHMS = 2  # Logarithms on the way to LSE: of a split, and of the merged splits.


def error_before_rounding(
    problem: Problem, top: torch.Tensor, errors: WeightErrors = USUAL_WEIGHT_ERRORS
) -> torch.Tensor:
    """Return the largest relative error of out before rounding if tied keys share all weight.

    Args:
        top: Sum of the magnitudes of their score's terms, float64, any shape.
    """
    # An ulp is up to 2u; a key's own weight and the sum of all may be off in opposite directions.
    weights = 6.0 * (top.abs() + math.log(problem.kv) + 1.0) + 4.0 * errors.exp2_ulps
    sums = 2.0 * (problem.kv + 1.0)
    ends = 8.0
    return torch.expm1((weights + sums + ends) * errors.unit) + errors.cut


def is_countable(
    problem: Problem,
    sizes: torch.Tensor,
    keys: torch.Tensor,
    top: torch.Tensor,
    others: torch.Tensor | float = 0.0,
    errors: WeightErrors = USUAL_WEIGHT_ERRORS,
    *,
    exact: torch.Tensor | bool = True,
) -> torch.Tensor:
    """Return whether rounding moves out · keys by less than a quarter.

    In a kernel that may divide P by a row sum before rounding it, which rounds 1 / keys or more, it
    must also move it by less than a half with that rounding.

    Args:
        sizes: Σ |v| of the tied keys in units of V, float64; other arguments broadcast to it.
        others: Contribution of the keys below them, in units of V.
        exact: Where sums of values are exact.
    """
    before, added = error_before_rounding(problem, top, errors), errors.addition(problem)
    error = before + (1.0 + before) * problem.formats.output.unit_roundoff
    countable = sizes * (error + torch.where(torch.as_tensor(exact), 0.0, added)) + others < QUARTER
    if not errors.divides:
        return countable
    return countable & (sizes * (error + added + errors.division(problem, keys)) + others < HALF)


def lse_error(keys: torch.Tensor, errors: WeightErrors = USUAL_WEIGHT_ERRORS) -> torch.Tensor:
    """Return the largest error of the natural-log LSE of ``keys``, float64, with scores of 0.

    Their weights exp2(0) are exactly 1, and a sum of ones is exact, unless exp2 is a coarse one.
    """
    logarithms = _LOGARITHMS * (6.0 * torch.log(keys) + 8.0) * errors.unit
    if errors.exp2_ulps <= HARDWARE_ULPS:
        return logarithms
    return logarithms + torch.expm1(2.0 * (errors.exp2_ulps + keys + 1.0) * errors.unit)
