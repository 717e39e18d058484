"""The arithmetic that a kernel declares, and error bounds of its accumulators: equations B1–B3.

Imports no torch, since capability tables that declare arithmetics are read without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from attncheck.core.errors import ProblemError
from attncheck.core.formats import FORMATS, Format

if TYPE_CHECKING:
    from torch import Tensor

    from attncheck.core.formats import Dtype

    Count = TypeVar("Count", float, Tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulator:
    """The way in which a sum of products is accumulated.

    Raises:
        ValueError: A number is no integer of at least 1.
    """

    name: str  # Name in reports.
    # Number of consecutive products, from a multiple of ``block`` on, that are aligned to the
    # largest and added in one step; None if every addition is rounded to nearest, in any order.
    block: int | None = None
    alignment: int = 24  # Fraction bits of an aligned product.
    # Significant bits after a step: truncated with a ``block``, else rounded.
    result: int = 24
    format: Format = FORMATS["fp32"]  # Format of the sum.

    def __post_init__(self) -> None:
        for name in ("block", "alignment", "result"):
            number = getattr(self, name)
            if number is not None and not (isinstance(number, int) and number >= 1):
                raise ValueError(f"{name}={number!r} must be an integer of at least 1.")

    @property
    def unit(self) -> float:
        """Unit roundoff of the sum's format."""
        return self.format.unit_roundoff

    @property
    def coarse(self) -> bool:
        """Return whether steps are so much coarser than fp32 that a finer bound is worthwhile."""
        # Cores that keep 23 bits or more lose about as much as fp32: the plain bound suffices.
        return self.block is not None and 2.0**-self.alignment > 2 * self.format.unit_roundoff

    def step_loss(self) -> tuple[float, float]:
        """Return the largest loss of a step, relative to its largest term and to the sum (B2)."""
        assert self.block is not None
        # The block's products and the running sum are truncated at the largest one's last bit.
        return (self.block + 1) * 2.0**-self.alignment, 2.0 ** (1 - self.result)

    def rounded(self, n: Count) -> Count:
        """Return a bound of ``n`` roundings to nearest, relative to the sum of magnitudes (B1).

        Infinite if ``n`` is too large for B1.
        """
        # Higham's γ_n = nu ÷ (1 − nu), which holds for any order of the additions.
        roundings = n * self.unit
        if isinstance(roundings, (int, float)):
            return roundings / (1 - roundings) if roundings < 1 else math.inf
        error: Count = (roundings / (1 - roundings)).masked_fill(roundings >= 1, math.inf)
        return error

    def det(self, n: Count, nonzero_steps: Count | None = None) -> Count:
        """Return a bound of a sum of ``n`` products, relative to the sum of magnitudes (B1, B2).

        Truncation loses at most the whole sum. For ``nonzero_steps`` see ``bias``.
        """
        if self.block is None:
            return self.rounded(n)
        bias = self.bias(n, nonzero_steps)
        at_most_one: Count = min(bias, 1.0) if isinstance(bias, float) else bias.clamp(max=1)
        return self.rounded(n) + at_most_one

    def sd(self, n: Count) -> Count:
        """Return the standard deviation of n roundings, relative to the sum of magnitudes (B3)."""
        # An error of rounding to nearest is uniform on [−u, u]: its deviation is u ÷ √3.
        deviation: Count = n**0.5 * (self.unit / math.sqrt(3))
        return deviation

    def bias(self, n: Count, nonzero_steps: Count | None = None) -> Count:
        """Return a bound of the systematic error, relative to the largest running sum (B3).

        It is 0 for rounding to nearest.

        Args:
            nonzero_steps: Number of steps with a nonzero product, if these are not consecutive.
        """
        if self.block is None:
            return n * 0.0
        aligned, truncated = self.step_loss()
        if nonzero_steps is None:
            steps = n / self.block
            nonzero_steps = float(math.ceil(steps)) if isinstance(steps, float) else steps.ceil()
        return nonzero_steps * (aligned + truncated)


FP32 = Accumulator(name="fp32")
FP64 = Accumulator(name="fp64", result=53, format=FORMATS["fp64"])

# Tensor cores, as modelled bit for bit by MMA-Sim (Xie et al. 2025): products are aligned to the
# largest exponent of a step, truncated, added exactly, and the sum is truncated. Hopper's core for
# bf16 and fp16 (16 products, 25 bits) loses less than the any-order bound of FP32.
VOLTA = Accumulator(name="Volta tensor core", block=4, alignment=23, result=24)
AMPERE = Accumulator(name="Ampere tensor core", block=8, alignment=24, result=24)
HOPPER_FP8 = Accumulator(name="13-bit, 32 products a step", block=32, alignment=13, result=14)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """The arithmetic of a kernel.

    Raises:
        ProblemError: P times its scale can exceed the largest number of its format, which is a
            fault and not a bounded error.
        TypeError: A format or an accumulator is not of the right type.
        ValueError: A number is out of its range.
    """

    products: Format  # Format in which a product reads its operands; tf32 for tf32 kernels.
    # Whether tf32 operands are truncated, as by tensor cores, or rounded to nearest.
    truncates: bool = False
    scores: Accumulator = FP32  # Accumulator of q·k.
    values: Accumulator = FP32  # Accumulator of P·V.
    weights: Format  # Format of P as P·V reads it; fp32 where P is not rounded.
    weights_scale: float = 1.0  # Factor of P before it is rounded.
    lazy_rescale: float = 0.0  # Log2 units by which the running maximum may lag.
    # Whether the row sum adds the rounded P, which is a legitimate design.
    sums_rounded_weights: bool = False
    # Whether P is divided by the row sum before it is rounded, as in kernels that are not fused.
    normalised_weights: bool = False
    # Whether O is divided by the row sum after every tile, as in FlashAttention-1, even if the row
    # sees no key of the tile.
    divides_each_step: bool = False
    # Format to which a kernel rounds scale · q before the product; None where it does not.
    scaled_query: Format | None = None
    # Format to which a backward that is not fused rounds dO · v before Σ dO · O is subtracted; None
    # where it is not rounded.
    rounds_value_products: Format | None = None
    # Whether a backward rounds the gradients of k and v to the output format for each query head
    # before it adds those of the heads that share a key head.
    sums_rounded_heads: bool = False
    # Whether a fused backward multiplies dO · v − δ by the rounded P of the gradient of v.
    rereads_weights: bool = False
    # Largest number of parts, one for each head and tile of rows, in which a backward accumulates
    # the gradients of k and v in the output format; 1 where they are rounded once.
    dkv_parts: int = 1
    dq_parts: int = 1  # Largest number of such parts of q's gradient, one for each tile of keys.
    # CUDA documents an error of at most 2 ulps for exp2f.
    exp2_ulps: float = 2.0  # Largest error of exp2, in units in the last place of ``computes``.
    tanh_error: float = 2.0**-11  # Largest relative error of tanh (2^-11 for tanh.approx).
    block_kv: int = 16  # Fewest keys of a step; if unknown, the smallest that is usual.
    splits: int = 1  # Largest number of parts that are computed separately and merged through LSE.
    output: Format  # Format of out.
    # Format of everything else: scores, exponents, row sums, LSE.
    computes: Format = FORMATS["fp32"]

    def __post_init__(self) -> None:
        self._check_declaration()
        largest = self.weights_scale * 2.0**self.lazy_rescale
        if largest > self.weights.max:
            raise ProblemError(
                f"P reaches weights_scale · 2^lazy_rescale = {largest:g}; the largest "
                f"{self.weights.name} is {self.weights.max:g}: declare a smaller scale, or rescale "
                "sooner."
            )

    def _check_declaration(self) -> None:
        """Raise for fields of a wrong type or range, since users declare them."""
        optional = ("rounds_value_products", "scaled_query")
        for name in ("products", "weights", "output", "computes", *optional):
            value = getattr(self, name)
            if not isinstance(value, Format) and not (name in optional and value is None):
                raise TypeError(f"{name}={value!r} is no attncheck.core.formats.Format.")
        for name in ("scores", "values"):
            if not isinstance(getattr(self, name), Accumulator):
                raise TypeError(f"{name}={getattr(self, name)!r} is no Accumulator.")
        for name in ("lazy_rescale", "exp2_ulps", "tanh_error"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)!r} must be finite and at least 0.")
        if not 0 < self.weights_scale < math.inf:
            raise ValueError(f"weights_scale={self.weights_scale!r} must be finite and positive.")
        for name in ("block_kv", "splits", "dkv_parts", "dq_parts"):
            if not (isinstance(getattr(self, name), int) and getattr(self, name) >= 1):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} must be an integer of at least 1."
                )

    @property
    def unit(self) -> float:
        """Unit roundoff of everything that is not rounded to a narrower format."""
        return self.computes.unit_roundoff

    @property
    def operand_error(self) -> float:
        """Largest relative error of reading a stored fp32 operand: that of tf32, or 0."""
        return self._unit_of(self.products) if self.products.name == "tf32" else 0.0

    @property
    def weights_error(self) -> float:
        """Largest relative error of rounding a normal P; 0 where P is not rounded."""
        if self.weights.significand >= self.computes.significand:
            return 0.0
        return self._unit_of(self.weights)

    @property
    def score_gradients(self) -> Format:
        """Format in which a backward's products read the scores' gradients: the coarser one."""
        return min(self.products, self.weights, key=lambda fmt: fmt.significand)

    @property
    def score_gradients_error(self) -> float:
        """Largest relative error of rounding a normal score gradient; 0 where it is not rounded."""
        if self.score_gradients.significand >= self.computes.significand:
            return 0.0
        return self._unit_of(self.score_gradients)

    @property
    def fused(self) -> bool:
        """Return whether a backward recomputes P and its gradient by tiles, and stores neither."""
        return not self.normalised_weights and self.rounds_value_products is None

    @property
    def multiplies_rounded_weights(self) -> bool:
        """Return whether the scores' gradients have the rounded P as a factor."""
        return self.rereads_weights or not self.fused

    def _unit_of(self, fmt: Format) -> float:
        return fmt.unit_roundoff * (2 if self.truncates and fmt.name == "tf32" else 1)

    def __str__(self) -> str:
        """Return the arithmetic in one line, as printed in reports."""
        return "; ".join(part for part in self._parts() if part)

    def _parts(self) -> list[str]:
        cut = " (truncated)" if self.truncates and self.products.name == "tf32" else ""
        scaled = f" × {self.weights_scale:g}" if self.weights_scale != 1 else ""
        sums = (
            f"sums in {self.scores.name}"
            if self.scores == self.values
            else f"q·k in {self.scores.name}, P·V in {self.values.name}"
        )
        return [
            f"products of {self.products.name}{cut}",
            f"P in {self.weights.name}{scaled}",
            sums,
            f"maximum may lag by {self.lazy_rescale:g} binades" if self.lazy_rescale else "",
            "row sum of rounded P" if self.sums_rounded_weights else "",
            "P divided before it is rounded" if self.normalised_weights else "",
            "O divided after every tile" if self.divides_each_step else "",
            f"scale · q rounded to {self.scaled_query.name}" if self.scaled_query else "",
            f"dO · v rounded to {self.rounds_value_products.name}"
            if self.rounds_value_products
            else "",
            "gradients rounded for each query head" if self.sums_rounded_heads else "",
            "dS of rounded P" if self.rereads_weights else "",
            f"dK and dV in {self.dkv_parts} rounded parts" if self.dkv_parts > 1 else "",
            f"dQ in {self.dq_parts} rounded parts" if self.dq_parts > 1 else "",
            f"exp2 within {self.exp2_ulps:g} ulp",
            f"up to {self.splits} parts merged" if self.splits > 1 else "",
            f"out in {self.output.name}",
        ]


FP64_ORACLE = Arithmetic(
    products=FORMATS["fp64"],
    scores=FP64,
    values=FP64,
    weights=FORMATS["fp64"],
    # glibc documents its tanh as within 2 ulps, SLEEF as within 1.
    tanh_error=2.0**-51,
    block_kv=1,
    output=FORMATS["fp64"],
    computes=FORMATS["fp64"],
)
"""Arithmetic of the float64 oracle, for an a-priori bound of its error by the same formulas."""


def default_arithmetic(dtype: Dtype, capability: tuple[int, int] | None = None) -> Arithmetic:
    """Return the arithmetic that is assumed for a kernel that declares none.

    Args:
        capability: CUDA compute capability; None on a CPU.

    An fp8 P is assumed to be rounded without a scale, the least accurate of the usual designs. A
    kernel that scales P (by 2^8 in FlashAttention-3) can declare this to be judged more strictly.
    """
    if dtype.name == "fp64":
        return FP64_ORACLE
    accumulator = _accumulator(dtype, capability)
    return Arithmetic(
        products=dtype.products,
        truncates=dtype.products.name == "tf32" and capability is not None,
        scores=accumulator,
        values=accumulator,
        weights=dtype.weights,
        output=dtype.output,
    )


def _accumulator(dtype: Dtype, capability: tuple[int, int] | None) -> Accumulator:
    """Return the accumulator of the tensor core that multiplies this dtype."""
    if capability is None or dtype.name == "fp32":
        return FP32
    if dtype.products.saturates:
        return HOPPER_FP8 if capability == (8, 9) or capability[0] == 9 else FP32
    if capability[0] == 7:
        return VOLTA
    return AMPERE if capability[0] == 8 else FP32
