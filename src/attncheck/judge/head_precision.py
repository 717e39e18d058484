"""Accuracy of each head, compared with the prediction and with ideal kernels, within every bound.

Two measures, and only both together in one head fail a kernel:

* z: the root mean square of error ÷ predicted standard deviation. The prediction takes roundings
  for independent; where they are not, a right kernel may be above the gate.
* The spread: RMSE ÷ the largest RMSE of ideal kernels whose tiles differ in size and order and
  that rescale sooner or later. A right kernel may differ from all of them by more than the gate in
  a head by chance.

A third is reported beside them, the residual: the ideal kernel at the kernel's own tiling makes
nearly the same roundings, so that nearly the whole error cancels in their difference, and what
remains shows what neither measure can. What fp32 leaves to a kernel, as the order of its sums, does
not cancel: where scores are large it moves weights by more than their format's rounding. How much
of it a problem shows is measured, by the same ideal kernel with its operations in other orders.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import Tensor

from attncheck.core.declared_arithmetic import Arithmetic
from attncheck.core.judgement import Precision
from attncheck.judge import error_measures
from attncheck.judge.allowance import Allowance, at_rows

FEWEST = 512  # outputs of a head below which its statistics say too little to be judged by

Z = 1.25
"""Of right kernels in bf16, fp16 and fp8 in simulation the 99th percentile is 1.13, the largest
1.23; on an H200 the largest is 1.02."""

SPREAD = 1.3
"""Of right kernels in simulation the 99th percentile of RMSE ÷ one ideal kernel's is 1.28 in bf16,
1.19 in fp16, 1.10 in e4m3 and 1.03 in e5m2, the largest 1.38; beyond this gate over the largest of
four ideal kernels and beyond ``Z`` together was none of 30,017."""

FAR = 3.0
"""Of right kernels the largest is 1.38 in simulation, over one ideal kernel, and 1.2 in
``reports/h200/calibration.md``, over the largest of four: twice that has another cause."""

RESIDUAL = {"bf16": 0.15, "fp16": 0.55, "e4m3": 0.07}
"""Largest residual of right kernels by the format of P, in simulation, of scores of usual size; on
an H200 the Triton kernel's is at most 0.11, 0.31 and 0.013 over five problems of up to 4,096 keys.
A warning until it has been calibrated there. Other formats have none. See ``residual_gate``."""

_CALIBRATED_KEYS = 4096


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Residual:
    """Distance of out from its emulation, the ideal kernel at the kernel's own tiling.

    Root mean squares over the counted elements, in units of the emulation's error.
    """

    size: float  # of out; what underflow may cost is taken off
    gate: float | None  # largest of usual scores: see ``residual_gate``
    usual: float  # the unit: rms(emulation − exact)
    # Of the ideal kernel with its operations in other orders, the largest; 0 where none ran.
    other_orders: float = 0.0

    @property
    def allowed(self) -> float:
        """Largest residual that is no news; infinite where there is no gate.

        Two kernels that do fp32's operations in other orders than the emulation are as far from it
        as each other, but for chance: right kernels' errors differ by up to ``SPREAD``.
        """
        return math.inf if self.gate is None else math.hypot(self.gate, SPREAD * self.other_orders)

    def with_other_order(self, out: Tensor, emulation: Tensor, counted: Tensor) -> Residual:
        """Return this with the distance of ``out``, of the ideal kernel in another order."""
        distance = _distance(out, emulation, counted) / self.usual
        # What is broken in that order shows nothing of a kernel's.
        known = distance if math.isfinite(distance) else 0.0
        return replace(self, other_orders=max(self.other_orders, known))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HeadPrecision:
    """Accuracy of every head, ``(batch, heads)``; NaN where a head has too few outputs to judge."""

    # Root mean square of error ÷ predicted standard deviation over the sampled elements.
    z: Tensor
    rmse: Tensor  # RMSE of the kernel
    # RMSE ÷ that of the ideal kernel at the kernel's own tiling or the default one.
    single: Tensor
    lost: Tensor  # largest error by underflow in each head: errors no larger than it show nothing
    enough: Tensor  # bool: heads with ``FEWEST`` outputs or more
    # Whether some head is beyond a gate, so that the verdict rests on how ideal kernels at
    # several tilings do.
    needs_ensemble: bool
    residual: Residual | None  # None without an emulation, or where that is exact or broken
    # RMSE ÷ the largest of the ensemble's; None without an ensemble.
    spread: Tensor | None = None

    def with_ensemble(
        self, outs: Iterable[Tensor], truth: Tensor, counted: Tensor
    ) -> HeadPrecision:
        """Return this with ``spread`` over ideal kernels' ``outs``, each of the shape of truth."""
        rmse = (error_measures.head_rmse(out, truth, counted) for out in outs)
        ratio = error_measures.rmse_over_ideal(self.rmse, rmse, self.lost)
        return replace(self, spread=torch.where(self.enough, ratio, math.nan))


def residual_gate(weights: str, keys: int) -> float | None:
    """Return the largest residual that is no news, of P in format ``weights``; None of others.

    A kernel and its emulation add up the same numbers in fp32, each in its own order. After n
    terms their sums differ by the order of √n roundings. In that part of the outputs one sum is
    rounded up and the other down, by a whole unit of the output format: the root mean square of
    all differences grows as the root of that part, with n^¼. Our Triton kernels' are 0.097 to
    0.116 at 4,096 keys without a mask and 0.155 to 0.168 at 16,384, where this allows 0.21
    (``reports/h200/bench.json``): 1.45 to 1.6 times, where n^¼ is 1.41.
    """
    gate = RESIDUAL.get(weights)
    return None if gate is None else gate * max(1.0, keys / _CALIBRATED_KEYS) ** 0.25


def can_fail_by_precision(arithmetic: Arithmetic) -> bool:
    """Return whether precision has a gate: not in fp32 or tf32, where orders of a sum differ 5×."""
    # tf32 is stored as float32 too: its name in torch covers both.
    return arithmetic.products.torch_name != "float32"


def _has_ideal_kernels(arithmetic: Arithmetic) -> bool:
    """Return whether ideal kernels err as much as a kernel of this arithmetic.

    Their sums are fp32's, and they round P before it is divided by the row sum.
    """
    coarse = arithmetic.scores.coarse or arithmetic.values.coarse
    return not (coarse or arithmetic.normalised_weights)


def measure_heads(
    out: Tensor,
    truth: Tensor,
    counted: Tensor,
    allowance: Allowance,
    arithmetic: Arithmetic,
    ideal: Tensor | None,
    *,
    own_tiling: bool,
    keys: int,
) -> HeadPrecision:
    """Measure every head without the ensemble; ``with_ensemble`` adds it where it is needed.

    Args:
        out: What the kernel gave, ``(batch, heads, query, dim)``.
        truth: float64, same shape.
        counted: bool, same shape.
        allowance: With the predicted standard deviations of sampled rows.
        arithmetic: Of the kernel; of some arithmetics no ideal kernel errs as much.
        ideal: out of one ideal kernel.
        own_tiling: Whether that is at the kernel's own tiling.
        keys: How many there are.
    """
    comparable = _has_ideal_kernels(arithmetic)
    rmse = error_measures.head_rmse(out, truth, counted)
    enough = counted.sum((-2, -1)) >= FEWEST
    z, lost = _z(out, truth, counted, allowance), _underflow(counted, allowance)
    single = torch.full_like(rmse, math.nan)
    if ideal is not None and comparable:
        ratio = error_measures.rmse_over_ideal(
            rmse, [error_measures.head_rmse(ideal, truth, counted)], lost
        )
        single = torch.where(enough, ratio, math.nan)
    residual = None
    if ideal is not None and own_tiling and comparable:
        gate = residual_gate(arithmetic.weights.name, keys)
        residual = _residual(out, ideal, truth, counted, float(lost.max()), gate)
    # Four more kernels are run for the ensemble: only where a head is beyond a gate without it.
    suspect = bool(((z > Z) | (single > SPREAD)).any())
    return HeadPrecision(
        z=z,
        rmse=rmse,
        single=single,
        lost=lost,
        enough=enough,
        needs_ensemble=suspect and comparable and can_fail_by_precision(arithmetic),
        residual=residual,
    )


def _underflow(counted: Tensor, allowance: Allowance) -> Tensor:
    """Largest error by underflow of sampled elements that count, ``(batch, heads)`` float64."""
    lost = torch.zeros(counted.shape[:2], dtype=torch.float64, device=counted.device)
    flat = lost.view(-1)
    for sample in allowance.samples:
        if sample.lost_out is not None:
            heads = slice(sample.rows.heads.start, sample.rows.heads.stop)
            # Infinite where nothing is known: those elements have no part in an RMSE either.
            known = at_rows(sample.rows, counted) & sample.lost_out.isfinite()
            largest = torch.where(known, sample.lost_out, 0.0).amax((-2, -1))
            flat[heads] = torch.maximum(flat[heads], largest.to(flat))
    return lost


def _z(out: Tensor, truth: Tensor, counted: Tensor, allowance: Allowance) -> Tensor:
    """Root mean square of error ÷ predicted standard deviation, ``(batch, heads)``.

    Over the sampled elements that are counted and whose prediction is finite; NaN in heads with
    fewer than ``FEWEST`` of them, infinite where an error is NaN or not predicted at all.
    """
    squares = torch.zeros(truth.shape[:2], dtype=torch.float64, device=truth.device).flatten()
    elements = torch.zeros_like(squares)
    for sample in allowance.samples:
        rows, deviation = sample.rows, sample.sd_out
        used = at_rows(rows, counted) & deviation.isfinite()
        error = at_rows(rows, out).to(torch.float64) - at_rows(rows, truth)
        ratio = torch.where(used & (error != 0), error / deviation, 0.0)
        # A NaN is larger than nothing: no gate would see it.
        ratio = torch.where(ratio.isnan(), math.inf, ratio)
        # Samples of one head may come in several parts: they add up.
        numbers = torch.tensor(list(rows.heads), device=squares.device)
        squares.index_add_(0, numbers, ratio.square().sum((-2, -1)))
        elements.index_add_(0, numbers, used.sum((-2, -1)).to(torch.float64))
    z = torch.where(elements >= FEWEST, (squares / elements).sqrt(), math.nan)
    return z.view(truth.shape[:2])


def measure_precision(
    out: Tensor,
    truth: Tensor,
    counted: Tensor,
    heads: HeadPrecision,
    arithmetic: Arithmetic,
) -> Precision:
    """Return precision as it is reported; arguments as those of ``measure_heads``."""
    exact = truth[counted]
    values = out[counted].to(torch.float64)
    error = values - exact
    whole = error_measures.measure_errors(out, truth, counted)
    p50, p99 = error_measures.ulp_percentiles(error, exact, arithmetic.output)
    residual = heads.residual
    return Precision(
        z=_largest(heads.z),
        spread=None if heads.spread is None else _largest(heads.spread),
        residual=None if residual is None else residual.size,
        residual_allowed=msgspec.UNSET
        if residual is None or residual.gate is None
        else residual.allowed,
        # An exact kernel has no error to be biased.
        bias=whole.bias / whole.rmse if whole.rmse else 0.0,
        slope=error_measures.slope(error, exact),
        ulp_p50=p50,
        ulp_p99=p99,
        frobenius=error_measures.frobenius(error, exact),
        cosine=error_measures.cosine(values, exact),
    )


def _largest(of_heads: Tensor) -> float | None:
    measured = of_heads[~of_heads.isnan()]
    return float(measured.max()) if measured.numel() else None


def _residual(
    out: Tensor,
    emulation: Tensor,
    truth: Tensor,
    counted: Tensor,
    lost: float,
    gate: float | None,
) -> Residual | None:
    """Residual before other orders are run; None where the emulation is exact, or not finite."""
    # Of few outputs the ratio is noise.
    if int(counted.sum()) < FEWEST:
        return None
    # Both by the same measure, so that a factor in it cancels.
    usual = _distance(emulation, truth, counted)
    if not 0 < usual < math.inf:
        return None
    apart = _distance(out, emulation, counted)
    size = math.inf if math.isnan(apart / usual) else max(0.0, apart - lost) / usual
    return Residual(size=size, gate=gate, usual=usual)


def _distance(one: Tensor, other: Tensor, counted: Tensor) -> float:
    return error_measures.measure_errors(one, other.to(torch.float64), counted).rmse
