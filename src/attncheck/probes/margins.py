"""Rounding margins: how far rounding can move what a probe counts, and so when counting is safe.

Derived in ``docs/reference/probes.md``, section "What rounding does to a count".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from attncheck.core.declared_arithmetic import FP32, Accumulator, Arithmetic
from attncheck.core.formats import FORMATS
from attncheck.inputs.problem import Problem

HALF = 0.5  # a count that is off by this much is nearer to another whole number

QUARTER = HALF / 2  # the part of it that rounding may use: the rest shows a fault

GAP = 16 * math.log(2.0)
"""Distance below the largest score of a row at which all but its equals must lie, in nats.

Weights of 2^-16 and less; and no kernel's maximum lags by as much (lazy rescaling: 8 in base 2),
so that equal largest scores have the weight 1, or one and the same power of two near it.
"""

HARDWARE_ULPS = 2.0
"""Of exp2 in units in the last place, at most, where it is exact at 0: CUDA's, and every libm's."""


_U = FORMATS["fp32"].unit_roundoff
_DIVIDED_EXACTLY = 2  # keys: every row sum on the way to theirs is a power of two


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightErrors:
    """What a kernel's arithmetic says of its weights, and of sums of values."""

    # Largest error of its exp2, in units in the last place of fp32.
    exp2_ulps: float = HARDWARE_ULPS
    # Largest part of P that is cut off where its format is not rounded to, but truncated, as
    # tensor cores read tf32: a weight a little below 1 is then one step of tf32 below it.
    cut: float = 0.0
    # Whether P may be divided before it is rounded: by the row sum, by that of a split or by what
    # a tile has brought it to. Then it is no power of two where the keys are.
    divides: bool = True
    scale: float = 1.0  # what P is multiplied by before it is rounded
    values: Accumulator = FP32  # in which values are added up
    unit: float = _U  # unit roundoff of everything else, no less than fp32's

    @classmethod
    def of(cls, arithmetic: Arithmetic) -> WeightErrors:
        """Return what ``arithmetic`` says."""
        return cls(
            exp2_ulps=arithmetic.exp2_ulps,
            cut=arithmetic.weights_error if arithmetic.truncates else 0.0,
            divides=arithmetic.normalised_weights,
            scale=arithmetic.weights_scale,
            values=arithmetic.values,
            unit=max(_U, arithmetic.unit),
        )

    def division(self, problem: Problem, keys: torch.Tensor) -> torch.Tensor:
        """Largest relative error of rounding a P that is divided by a sum of up to ``keys``."""
        fmt = problem.formats.weights
        subnormal = keys * (fmt.subnormal_spacing / 2 / self.scale)
        return subnormal.clamp(min=fmt.unit_roundoff).masked_fill(keys <= _DIVIDED_EXACTLY, 0.0)

    def addition(self, problem: Problem) -> float:
        """Largest relative error of adding up values, beside fp32's; 0 of sums like fp32's."""
        if self.bits >= FP32.result:
            return 0.0
        # O is also rescaled once for every tile, of one key at least, and rounded there.
        return self.values.det(float(problem.kv)) + self.values.rounded(2.0 * problem.kv)

    @property
    def bits(self) -> int:
        """Bits of a sum of values that nothing is cut from."""
        values = self.values
        if values.block is None:
            return values.format.significand
        # Cores that are not coarse lose about what fp32 does: ``Accumulator.coarse``.
        return min(values.alignment, values.result) if values.coarse else FP32.result


USUAL_WEIGHT_ERRORS = WeightErrors()
"""Of a kernel that declares nothing else: all that may be right without being declared."""

_LOGARITHMS = 2  # that LSE goes through: a split's own, and that of the merged splits


def error_before_rounding(
    problem: Problem, top: torch.Tensor, errors: WeightErrors = USUAL_WEIGHT_ERRORS
) -> torch.Tensor:
    """Largest relative error of out before it is rounded, where tied keys share a row's weight.

    Args:
        top: What the terms of their score add up to without their signs, any shape; float64.
    """
    # An ulp is up to 2u; a key's own weight and the sum of all may be off in opposite directions.
    weights = 6.0 * (top.abs() + math.log(problem.kv) + 1.0) + 4.0 * errors.exp2_ulps
    sums = 2.0 * (problem.kv + 1.0)
    ends = 8.0
    return torch.expm1((weights + sums + ends) * errors.unit) + errors.cut


def relative_error(
    problem: Problem, top: torch.Tensor, errors: WeightErrors = USUAL_WEIGHT_ERRORS
) -> torch.Tensor:
    """The same with the rounding of out."""
    before = error_before_rounding(problem, top, errors)
    return before + (1.0 + before) * problem.formats.output.unit_roundoff


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

    And by less than a half in a kernel that divides P by a row sum before it is rounded, where the
    kernel may be one: it rounds 1 / keys, or more on the way to it.

    Args:
        sizes: Σ |v| of the tied keys in units of V, float64; what follows broadcasts to it.
        others: What the keys below them move, in units of V.
        exact: Where a sum of values loses nothing.
    """
    error, added = relative_error(problem, top, errors), errors.addition(problem)
    whole = sizes * (error + torch.where(torch.as_tensor(exact), 0.0, added)) + others < QUARTER
    if not errors.divides:
        return whole
    return whole & (sizes * (error + added + errors.division(problem, keys)) + others < HALF)


def lse_error(keys: torch.Tensor, errors: WeightErrors = USUAL_WEIGHT_ERRORS) -> torch.Tensor:
    """Largest error of LSE, natural log, of float64 ``keys`` whose scores are all 0.

    Their weights are exp2(0), which is 1, and a sum of ones is exact; unless exp2 is a coarse one.
    """
    logarithms = _LOGARITHMS * (6.0 * torch.log(keys) + 8.0) * errors.unit
    if errors.exp2_ulps <= HARDWARE_ULPS:
        return logarithms
    return logarithms + torch.expm1(2.0 * (errors.exp2_ulps + keys + 1.0) * errors.unit)
