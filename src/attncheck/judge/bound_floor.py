"""Floors of the deterministic bound, from a few numbers of every row: equation B41.

The bound takes some hundred passes over all (row, key) pairs, for every arithmetic. Its terms are
not negative, so any subset of them is a lower bound of it, a floor. The largest terms depend on the
keys only through weighted means, which are the same for all arithmetics. An error within the floor
is within the bound; the bound itself is computed only for rows with larger errors.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attncheck.core.conditions import RowTotals
from attncheck.judge.score_errors import (
    exponent_error,
    factor_roundings,
    term_roundings,
    with_rounded_operands,
)
from attncheck.judge.sum_roundings import (
    division_error,
    half_ulp,
    row_sum_rounding,
    steps_with_keys,
    sum_accumulator,
    sum_roundings,
)
from attncheck.judge.weight_errors import SMALL, log_sum_base

if TYPE_CHECKING:
    from torch import Tensor

    from attncheck.core.conditions import WeightedRows
    from attncheck.core.declared_arithmetic import Arithmetic

# The terms of a bound sum to less than this many times the largest |v| where ``_is_bounded`` holds.
_BOUND_FACTOR = 128


def row_totals(rows: WeightedRows) -> RowTotals:
    """Sum ``rows`` up over their keys, in as few passes over all pairs as possible."""
    last, alive = rows.weights.shape[-1], rows.count > 0  # no row sees key ``last`` or later ones
    q, k, v = rows.q.abs(), rows.k[:, :last].abs(), rows.v[:, :last]
    # Means of a row that sees no key are 0.
    share = torch.where(alive, 1 / rows.total[..., None], 0.0)
    together = torch.cat([v, v.abs(), v.square(), k], -1)
    widths = [v.shape[-1]] * 3 + [k.shape[-1]]
    means = (rows.weights @ together).mul_(share).split_with_sizes(widths, -1)
    mean, size, square, mean_k = means
    # P of the largest score, whose weight is 1.
    peak = torch.where(alive, (rows.maximum - rows.lse).exp()[..., None], 0.0)
    # Σ P (v − mean)² is the least Σ P (v − c)² of any c; float64's rounding errors are subtracted.
    keys = rows.k.shape[1]
    error = 8 * (keys + 8) * 2.0**-53
    spread = (square * (1 - error) - mean.square() * (1 + error)).clamp_min(0).sqrt()
    sizes = q @ k.mT
    if rows.hidden is None:
        least, largest = torch.aminmax(sizes, dim=-1, keepdim=True)
    else:
        largest = sizes.masked_fill_(rows.hidden, 0.0).amax(-1, keepdim=True)
        least = sizes.masked_fill_(rows.hidden, math.inf).amin(-1, keepdim=True)
    return RowTotals(
        keys=keys,
        scale=rows.scale,
        head_dim=q.shape[-1],
        count=rows.count,
        maximum=rows.maximum,
        total=rows.total,
        out=rows.out,
        lse=rows.lse,
        weight=rows.total[..., None] * peak,
        peak=peak,
        size=(q * mean_k).sum(-1, keepdim=True),
        least_size=torch.where(alive, least, 0.0),
        largest_size=largest,
        mean_value=size,
        spread=spread,
        largest_query=q.max(),
        largest_key=rows.k.abs().max(),
        largest_value=rows.v.abs().max(),
    )


def bound_floor(totals: RowTotals, arithmetic: Arithmetic) -> tuple[Tensor, Tensor]:
    """Return floors of the deterministic bound, out ``(heads, rows, value_dim)`` and LSE.

    They are at most ``deterministic_bound``, 0 in rows that see no key, and NaN in rows whose bound
    may be infinite somewhere.
    """
    # Floors of B9's ρ over the keys of a row, and of Σ P ρ.
    least, nothing = _score_floor(totals, arithmetic, totals.least_size), totals.count * 0
    exponent = exponent_error(totals, arithmetic, 2 * least, nothing, nothing)
    units, mean_units = least + exponent, _score_floor(totals, arithmetic, totals.size) + exponent
    weights_error = arithmetic.weights_error
    # B15 with c_j of at least P_j · units, of which Cauchy and Schwarz's form is Σ P (v − O)².
    mean, spread, out = totals.mean_value, totals.spread, totals.out.abs()
    deviation = torch.minimum(mean + out, spread)
    # B12's ΔP vanishes if one key has all the weight.
    free = 1 + totals.weight.clamp_max(1) - 2 * totals.peak
    ceiling = _exponents_ceiling(totals, arithmetic)
    of_weights = torch.where(ceiling <= SMALL, units * free.clamp(min=0, max=1) * deviation, 0.0)
    if arithmetic.sums_rounded_weights:
        of_rounding = weights_error * (deviation + of_weights)
    else:
        of_rounding = weights_error * mean
    size = (1 + weights_error) * mean
    accumulator, count = arithmetic.values, sum_roundings(totals, arithmetic)
    if accumulator.coarse:  # the floor leaves out what alignment cuts off
        added = accumulator.rounded(count)
    else:
        added = accumulator.det(count, steps_with_keys(totals, accumulator))
    before = of_weights + of_rounding + (arithmetic.operand_error + added) * size
    before = before + division_error(totals, arithmetic) * (out + before)
    deflation = 1 - 8 * (totals.keys + totals.head_dim + 8) * 2.0**-53
    before = before * deflation
    floor = before + half_ulp(out + before, arithmetic.output)
    of_sum = torch.log1p(totals.weight.clamp_max(1) * mean_units)
    if arithmetic.sums_rounded_weights:
        of_sum = of_sum - math.log1p(-weights_error)
    of_sum = (of_sum - torch.log1p(-row_sum_rounding(totals, arithmetic)))[..., 0]
    lse = (of_sum + log_sum_base(totals, arithmetic, of_sum)) * deflation
    unknown, dead = ~_is_bounded(totals, arithmetic, ceiling), totals.count == 0
    floor, lse = floor.masked_fill(unknown, math.nan), lse.masked_fill(unknown[..., 0], math.nan)
    return floor.masked_fill(dead, 0.0), lse.masked_fill(dead[..., 0], 0.0)


def _score_floor(totals: RowTotals, arithmetic: Arithmetic, size: Tensor) -> Tensor:
    """Return a floor of B5 and B6 for a product with Σ |q_d k_d| = ``size``."""
    scaled, terms = abs(totals.scale) * size, term_roundings(totals.head_dim, arithmetic)
    # For coarse accumulators B7 replaces B5 and may be arbitrarily small.
    added = 0.0 if arithmetic.scores.coarse else arithmetic.scores.det(terms)
    return with_rounded_operands(arithmetic, added * scaled, scaled)


def _exponents_ceiling(totals: RowTotals, arithmetic: Arithmetic) -> Tensor:
    """Return an upper bound of a row's B9 ρ, ``(heads, rows, 1)``; infinite if none is known."""
    size, fmt, narrow = totals.largest_size, arithmetic.computes, arithmetic.products
    scaled, terms = abs(totals.scale) * size, term_roundings(totals.head_dim, arithmetic)
    contracted = with_rounded_operands(arithmetic, arithmetic.scores.det(terms) * scaled, scaled)
    roundings = factor_roundings(arithmetic) * arithmetic.unit
    stored = narrow.max**2 if narrow.saturates else 0.0
    lost = 2 + size + totals.head_dim * (abs(totals.scale) + stored + 2)
    radius = contracted + roundings / (1 - roundings) * (scaled + contracted)
    radius = radius + 2.0**fmt.min_exponent * lost
    exponent = exponent_error(totals, arithmetic, 2 * radius, 2 * scaled, scaled)
    beyond = (size > fmt.max / 4) | (scaled + radius > fmt.max / 4)
    # A ceiling for a query that is rounded after scaling would need more than these totals.
    largest = float(torch.maximum(totals.largest_query, totals.largest_key))
    if arithmetic.scaled_query is not None or (arithmetic.operand_error and largest > narrow.max):
        beyond = torch.ones_like(beyond)
    return torch.where(beyond, math.inf, radius + exponent)


def _is_bounded(totals: RowTotals, arithmetic: Arithmetic, ceiling: Tensor) -> Tensor:
    """Return which rows certainly have a finite bound, ``(heads, rows, 1)`` bool."""
    # If ρ ≤ 1, weights grow by a factor of e² at most, rounded or not, and the errors of adding,
    # dividing and rounding a weight times a value are each less than that product.
    fmt, largest = arithmetic.computes, float(totals.largest_value)
    small = ceiling <= 1
    count = sum_roundings(totals, arithmetic)
    accumulator = sum_accumulator(arithmetic)
    unit = max(accumulator.unit, arithmetic.values.unit)
    small &= (count * unit <= 0.25) & (row_sum_rounding(totals, arithmetic) <= 0.5)
    if accumulator.block is not None:
        # At worst each key that a row sees is in a step of its own.
        small &= accumulator.det(count, totals.count) <= 0.5
    if arithmetic.sums_rounded_weights:
        # B13 is at most the unit roundoff times e² ΣP, plus h ≤ η ÷ (2 S) · e² for every key.
        half = arithmetic.weights.subnormal_spacing / 2 / arithmetic.weights_scale
        small &= math.exp(2) * (arithmetic.weights_error + half * totals.count) <= 0.5
    unnormalised = arithmetic.weights_scale * 2.0**arithmetic.lazy_rescale * totals.keys * largest
    fits = 2 * unnormalised <= fmt.max / 4 and _BOUND_FACTOR * largest <= arithmetic.output.max
    if arithmetic.operand_error:
        fits = fits and largest <= arithmetic.products.max
    return small if fits else torch.zeros_like(small)
