"""Arithmetic that a kernel declares, and what its accumulators cost: equations B1–B3.

Light on purpose: capability tables declare it, and are read without torch.
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
    """Way in which a sum of products is added up.

    Raises:
        ValueError: A number is no integer of at least 1.
    """

    name: str  # what reports call it
    # Products added in one step, aligned to the largest; None where every addition is rounded to
    # nearest on its own, in any order. A step takes consecutive products, from a multiple of
    # ``block`` on.
    block: int | None = None
    alignment: int = 24  # fraction bits that an aligned product keeps
    # Significant bits after a step: truncated where ``block`` is given, else rounded.
    result: int = 24
    format: Format = FORMATS["fp32"]  # of the sum

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
        """Return whether steps keep too few bits to pass for fp32, so that a finer bound pays."""
        # Cores that keep 23 bits or more lose about as much as fp32: the plain bound will do.
        return self.block is not None and 2.0**-self.alignment > 2 * self.format.unit_roundoff

    def step_loss(self) -> tuple[float, float]:
        """Largest loss of a step: of its largest term, and of the running sum (B2)."""
        assert self.block is not None
        # Each of the block's products and the running sum are cut to the largest's last bit.
        return (self.block + 1) * 2.0**-self.alignment, 2.0 ** (1 - self.result)

    def rounded(self, n: Count) -> Count:
        """Largest error of ``n`` roundings to nearest, relative to the sum of magnitudes (B1).

        Infinite of so many that B1 says nothing.
        """
        # Higham's γ_n = nu ÷ (1 − nu), which holds for any order of the additions.
        roundings = n * self.unit
        if isinstance(roundings, (int, float)):
            return roundings / (1 - roundings) if roundings < 1 else math.inf
        error: Count = (roundings / (1 - roundings)).masked_fill(roundings >= 1, math.inf)
        return error

    def det(self, n: Count, nonzero_steps: Count | None = None) -> Count:
        """Largest error of a sum of ``n`` products, relative to the sum of magnitudes (B1, B2).

        What is cut off toward zero is less than everything. Of ``nonzero_steps`` see ``bias``.
        """
        if self.block is None:
            return self.rounded(n)
        bias = self.bias(n, nonzero_steps)
        at_most_one: Count = min(bias, 1.0) if isinstance(bias, float) else bias.clamp(max=1)
        return self.rounded(n) + at_most_one

    def sd(self, n: Count) -> Count:
        """Standard deviation of rounding to nearest, relative to the sum of magnitudes (B3)."""
        # A rounding to nearest is uniform over half a unit on either side: u ÷ √3 each.
        deviation: Count = n**0.5 * (self.unit / math.sqrt(3))
        return deviation

    def bias(self, n: Count, nonzero_steps: Count | None = None) -> Count:
        """Largest systematic error, relative to the largest running sum; 0 of rounding (B3).

        Args:
            nonzero_steps: Steps in which one of them is not 0, where those do not follow on each
                other.
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

# Tensor cores, as MMA-Sim found them bit for bit (Xie et al. 2025): products are aligned to the
# largest exponent of a step, cut off, added exactly, and the sum is truncated. Hopper's for bf16
# and fp16 (16 products, 25 bits) loses less than FP32's any-order bound.
VOLTA = Accumulator(name="Volta tensor core", block=4, alignment=23, result=24)
AMPERE = Accumulator(name="Ampere tensor core", block=8, alignment=24, result=24)
HOPPER_FP8 = Accumulator(name="13-bit, 32 products a step", block=32, alignment=13, result=14)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """The profile of a kernel.

    Raises:
        ProblemError: P times its scale can pass the largest number of its format, which is a fault
            and no error that could be bounded.
        TypeError: A format or an accumulator is none.
        ValueError: A number is out of its range.
    """

    products: Format  # format in which a product reads its operands; of tf32 kernels tf32
    # Whether tf32 operands are truncated, as tensor cores do, or rounded to nearest.
    truncates: bool = False
    scores: Accumulator = FP32  # accumulator of q·k
    values: Accumulator = FP32  # accumulator of P·V
    weights: Format  # format of P as P·V reads it; fp32 where P is not rounded
    weights_scale: float = 1.0  # what P is multiplied by before it is rounded
    lazy_rescale: float = 0.0  # Log2 units by which the running maximum may lag
    # Whether the row sum takes the rounded P: a legitimate design.
    sums_rounded_weights: bool = False
    # Whether P is divided by the row sum before it is rounded, as kernels do that are not fused.
    normalised_weights: bool = False
    # Whether O is divided by the row sum after every tile, as in FlashAttention-1, also where the
    # row sees nothing of the tile.
    divides_each_step: bool = False
    # Format to which a kernel rounds scale · q before the product; None where it does not.
    scaled_query: Format | None = None
    # Format to which a backward that is not fused rounds dO · v before Σ dO · O is taken off;
    # None where it stays as it was computed.
    rounds_value_products: Format | None = None
    # Whether a backward rounds the gradients of k and v to the output format for each query head,
    # and adds those that share a key head afterwards.
    sums_rounded_heads: bool = False
    # Whether a fused backward multiplies dO · v − δ by the P that it has rounded for the gradient
    # of v.
    rereads_weights: bool = False
    # Most parts in which a backward adds the gradients of k and v up in the output format, each
    # head and tile of rows one; 1 where they are rounded once.
    dkv_parts: int = 1
    dq_parts: int = 1  # the same of the gradient of q, each tile of keys one
    # CUDA documents exp2f within 2 ulps.
    exp2_ulps: float = 2.0  # largest error of its exp2, in units in the last place of ``computes``
    tanh_error: float = 2.0**-11  # largest relative error of its tanh (2^-11 of tanh.approx)
    block_kv: int = 16  # fewest keys of a step; the least that is usual where it is not known
    splits: int = 1  # most parts that are computed apart and merged through LSE
    output: Format  # format of out
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
        """Raise at once for what is no format or no such number: users declare these."""
        for name in ("products", "weights", "output", "computes", "rounds_value_products"):
            value, optional = getattr(self, name), name == "rounds_value_products"
            if not isinstance(value, Format) and not (optional and value is None):
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
        """Largest relative error with which a product reads a stored fp32 number: tf32's, or 0."""
        return self._unit_of(self.products) if self.products.name == "tf32" else 0.0

    @property
    def weights_error(self) -> float:
        """Largest relative error of rounding a normal P; 0 where P stays as it was computed."""
        if self.weights.significand >= self.computes.significand:
            return 0.0
        return self._unit_of(self.weights)

    @property
    def score_gradients(self) -> Format:
        """Format in which the products of a backward read the scores' gradients: the coarser."""
        return min(self.products, self.weights, key=lambda fmt: fmt.significand)

    @property
    def score_gradients_error(self) -> float:
        """Largest relative error of rounding a normal one to it; 0 where it stays as computed."""
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
        """The profile in one line, as every report prints it."""
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
"""The float64 oracle judged by the same formulas: an a-priori proof of its own error."""


def default_arithmetic(dtype: Dtype, capability: tuple[int, int] | None = None) -> Arithmetic:
    """Return the arithmetic that is assumed of a kernel that declares nothing.

    Args:
        capability: CUDA compute capability; None on a CPU.

    An fp8 P is taken to be rounded as it is, without a scale: the poorest usual design. One that
    scales P (FlashAttention-3's 2^8) declares it and is held to more.
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
    """That of the tensor core that products of this dtype run on."""
    if capability is None or dtype.name == "fp32":
        return FP32
    if dtype.products.saturates:
        return HOPPER_FP8 if capability == (8, 9) or capability[0] == 9 else FP32
    if capability[0] == 7:
        return VOLTA
    return AMPERE if capability[0] == 8 else FP32
