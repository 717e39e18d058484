"""Accuracy of each head, compared with the prediction and with ideal kernels, within every bound.

Two measures, which fail a kernel only if both are too large in one head:

* z: the root mean square of error ÷ predicted standard deviation. The prediction assumes that
  roundings are independent; where they are not, a right kernel may be above the gate.
* The spread: RMSE ÷ the largest RMSE of ideal kernels that differ in the size and order of their
  tiles and in when they rescale. By chance a right kernel may exceed the gate in a head.

A third one, the residual, is reported with them. The ideal kernel at the kernel's own tiling makes
nearly the same roundings, so nearly the whole error cancels in their difference, and the residual
shows faults that neither measure can. Differences that fp32 permits, such as the order of sums, do
not cancel: if scores are large, they move weights by more than their format's rounding. Their
effect on a problem is measured by the same ideal kernel with its operations in other orders.
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

FEWEST = 512  # Heads with fewer outputs are not judged: their statistics are too noisy.

Z = 1.25
"""Gate of z. Of right kernels in bf16, fp16 and fp8 in simulation the 99th percentile is 1.13, the
largest 1.23; on an H200 the largest is 1.02."""

SPREAD = 1.3
"""Gate of the spread. Of right kernels in simulation the 99th percentile of RMSE ÷ one ideal
kernel's is 1.28 in bf16, 1.19 in fp16, 1.10 in e4m3 and 1.03 in e5m2, the largest 1.38. None of
30,017 was beyond both ``Z`` and this gate over the largest of four ideal kernels."""

FAR = 3.0
"""Spread that fails a kernel by itself on generic inputs. The largest of right kernels is 1.38 in
simulation, over one ideal kernel, and 1.2 over the largest of four in
``reports/h200/calibration.md``: more than twice that has another cause."""

RESIDUAL = {"bf16": 0.15, "fp16": 0.55, "e4m3": 0.07}
"""Gate of the residual by format of P: the largest of right kernels in simulation, with scores of
usual size. The Triton kernel's on an H200 is at most 0.11, 0.31 and 0.013 over five problems of up
to 4,096 keys. Only a warning until it has been calibrated there. Other formats have no gate."""

_CALIBRATED_KEYS = 4096  # Number of keys up to which ``RESIDUAL`` holds; see ``residual_gate``.


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Residual:
    """Distance of out from its emulation, the ideal kernel at the kernel's own tiling.

    Root mean squares over the counted elements, in units of the emulation's error.
    """

    size: float  # the distance, less the largest error by underflow
    gate: float | None  # largest distance with scores of usual size: see ``residual_gate``
    usual: float  # the unit: rms(emulation − exact)
    # Largest distance of the ideal kernel with its operations in other orders; 0 if none ran.
    other_orders: float = 0.0

    @property
    def allowed(self) -> float:
        """Largest residual without a warning; infinite if there is no gate.

        Kernels that order fp32's operations differently from the emulation are about equally far
        from it; by chance right kernels' errors differ by a factor of up to ``SPREAD``.
        """
        return math.inf if self.gate is None else math.hypot(self.gate, SPREAD * self.other_orders)

    def with_other_order(self, out: Tensor, emulation: Tensor, counted: Tensor) -> Residual:
        """Return this with the distance of ``out`` of the ideal kernel in another order."""
        distance = _distance(out, emulation, counted) / self.usual
        # A result that is not finite in that order says nothing about the kernel.
        finite_distance = distance if math.isfinite(distance) else 0.0
        return replace(self, other_orders=max(self.other_orders, finite_distance))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HeadPrecision:
    """Accuracy of every head, ``(batch, heads)``; NaN where a head has too few outputs to judge."""

    # Root mean square of error ÷ predicted standard deviation over the sampled elements.
    z: Tensor
    rmse: Tensor  # RMSE of the kernel
    lost: Tensor  # largest error by underflow in each head, which RMSE is not judged below
    enough: Tensor  # bool: heads with ``FEWEST`` outputs or more
    # Whether some head is beyond a gate, so that the verdict needs ideal kernels at several
    # tilings.
    needs_ensemble: bool
    residual: Residual | None  # None without an emulation, or if that is exact or not finite
    spread: Tensor | None = None  # RMSE ÷ the ensemble's largest; None without an ensemble

    def with_ensemble(
        self, outs: Iterable[Tensor], truth: Tensor, counted: Tensor
    ) -> HeadPrecision:
        """Return this with ``spread`` over ideal kernels' ``outs``, each of truth's shape."""
        rmse = (error_measures.head_rmse(out, truth, counted) for out in outs)
        ratio = error_measures.rmse_over_ideal(self.rmse, rmse, self.lost)
        return replace(self, spread=torch.where(self.enough, ratio, math.nan))


def residual_gate(weights: str, keys: int) -> float | None:
    """Return the gate of the residual for P in format ``weights``; None if it has no gate.

    A kernel and its emulation add up the same numbers in fp32, each in its own order. After n
    terms their sums differ by about √n roundings. In a proportional share of the outputs one sum is
    rounded up and the other down, by a whole unit of the output format: the root mean square of
    all differences grows as the root of that share, with n^¼. Our Triton kernels' are 0.097 to
    0.116 at 4,096 keys without a mask and 0.155 to 0.168 at 16,384, where this allows 0.21
    (``reports/h200/bench.json``): they grow 1.45 to 1.6 times, where n^¼ is 1.41.
    """
    gate = RESIDUAL.get(weights)
    return None if gate is None else gate * max(1.0, keys / _CALIBRATED_KEYS) ** 0.25


def can_fail_by_precision(arithmetic: Arithmetic) -> bool:
    """Return whether precision has a gate: not in fp32 or tf32, where orders of a sum differ 5×."""
    # tf32 is stored as float32, so this name in torch covers both.
    return arithmetic.products.torch_name != "float32"


def _has_ideal_kernels(arithmetic: Arithmetic) -> bool:
    """Return whether ideal kernels have errors like those of a kernel of this arithmetic.

    Ideal kernels add up in fp32, and round P before it is divided by the row sum.
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
    """Measure every head without the ensemble; ``with_ensemble`` adds it if it is needed.

    Args:
        out: The kernel's, ``(batch, heads, query, dim)``.
        truth: float64, same shape.
        counted: bool, same shape.
        allowance: With the predicted standard deviations of sampled rows.
        arithmetic: The kernel's; ideal kernels are comparable only with some arithmetics.
        ideal: out of one ideal kernel.
        own_tiling: Whether the ideal kernel has the kernel's own tiling.
        keys: Number of keys.
    """
    comparable = _has_ideal_kernels(arithmetic)
    rmse = error_measures.head_rmse(out, truth, counted)
    enough = counted.sum((-2, -1)) >= FEWEST
    z, lost = _measure_z(out, truth, counted, allowance), _largest_underflow(counted, allowance)
    suspect = bool((z > Z).any())
    if ideal is not None and comparable:
        ratio = error_measures.rmse_over_ideal(
            rmse, [error_measures.head_rmse(ideal, truth, counted)], lost
        )
        suspect = suspect or bool((enough & (ratio > SPREAD)).any())
    residual = None
    if ideal is not None and own_tiling and comparable:
        gate = residual_gate(arithmetic.weights.name, keys)
        residual = _measure_residual(out, ideal, truth, counted, float(lost.max()), gate)
    return HeadPrecision(
        z=z,
        rmse=rmse,
        lost=lost,
        enough=enough,
        # The ensemble takes four more kernels: it runs only if a head is beyond a gate without it.
        needs_ensemble=suspect and comparable and can_fail_by_precision(arithmetic),
        residual=residual,
    )


def _largest_underflow(counted: Tensor, allowance: Allowance) -> Tensor:
    """Return the largest underflow error of counted sampled elements, ``(batch, heads)``."""
    lost = torch.zeros(counted.shape[:2], dtype=torch.float64, device=counted.device)
    flat = lost.view(-1)
    for sample in allowance.samples:
        if sample.lost_out is not None:
            heads = slice(sample.rows.heads.start, sample.rows.heads.stop)
            # Elements without a bound have an infinite one; they are in no RMSE either.
            bounded = at_rows(sample.rows, counted) & sample.lost_out.isfinite()
            largest = torch.where(bounded, sample.lost_out, 0.0).amax((-2, -1))
            flat[heads] = torch.maximum(flat[heads], largest.to(flat))
    return lost


def _measure_z(out: Tensor, truth: Tensor, counted: Tensor, allowance: Allowance) -> Tensor:
    """Return the root mean square of error ÷ predicted standard deviation, ``(batch, heads)``.

    Over the counted sampled elements with a finite prediction; NaN in heads with fewer than
    ``FEWEST`` of them, infinite if an error is NaN or its predicted deviation is 0.
    """
    squares = torch.zeros(truth.shape[:2], dtype=torch.float64, device=truth.device).flatten()
    elements = torch.zeros_like(squares)
    for sample in allowance.samples:
        rows, deviation = sample.rows, sample.sd_out
        used = at_rows(rows, counted) & deviation.isfinite()
        error = at_rows(rows, out).to(torch.float64) - at_rows(rows, truth)
        ratio = torch.where(used & (error != 0), error / deviation, 0.0)
        # NaN compares as not larger than any gate.
        ratio = torch.where(ratio.isnan(), math.inf, ratio)
        # Samples of one head may come in several parts.
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
    """Return the reported precision; for the arguments see ``measure_heads``."""
    exact = truth[counted]
    values = out[counted].to(torch.float64)
    error = values - exact
    measures = error_measures.measure_errors(out, truth, counted)
    p50, p99 = error_measures.ulp_percentiles(error, exact, arithmetic.output)
    residual = heads.residual
    return Precision(
        z=_largest(heads.z),
        spread=None if heads.spread is None else _largest(heads.spread),
        residual=None if residual is None else residual.size,
        residual_allowed=msgspec.UNSET
        if residual is None or residual.gate is None
        else residual.allowed,
        bias=measures.bias / measures.rmse if measures.rmse else 0.0,
        slope=error_measures.slope(error, exact),
        ulp_p50=p50,
        ulp_p99=p99,
        frobenius=error_measures.frobenius(error, exact),
        cosine=error_measures.cosine(values, exact),
    )


def _largest(of_heads: Tensor) -> float | None:
    measured = of_heads[~of_heads.isnan()]
    return float(measured.max()) if measured.numel() else None


def _measure_residual(
    out: Tensor,
    emulation: Tensor,
    truth: Tensor,
    counted: Tensor,
    lost: float,
    gate: float | None,
) -> Residual | None:
    """Return the residual without other orders; None if the emulation is exact or not finite."""
    # With few outputs the ratio is noise.
    if int(counted.sum()) < FEWEST:
        return None
    usual = _distance(emulation, truth, counted)
    if not 0 < usual < math.inf:
        return None
    distance = _distance(out, emulation, counted)
    size = math.inf if math.isnan(distance / usual) else max(0.0, distance - lost) / usual
    return Residual(size=size, gate=gate, usual=usual)


def _distance(one: Tensor, other: Tensor, counted: Tensor) -> float:
    return error_measures.measure_errors(one, other.to(torch.float64), counted).rmse
