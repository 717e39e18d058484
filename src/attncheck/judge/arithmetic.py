"""What a kernel declares of its own arithmetic: with Problem and truth it makes the bound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attncheck.errors import ProblemError
from attncheck.formats import FORMATS, Format
from attncheck.judge.accumulators import AMPERE, FP32, FP64, HOPPER_FP8, VOLTA, Accumulator

if TYPE_CHECKING:
    from attncheck.formats import Dtype

__all__ = ["FP32", "FP64_ORACLE", "HOPPER_FP8", "Accumulator", "Arithmetic", "default"]


_MAY_BE_NONE = "rounds_value_products"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """The profile of a kernel.

    Attributes:
        products: Format in which a product reads its operands; of tf32 kernels tf32.
        truncates: Whether tf32 operands are truncated, as tensor cores do, or rounded to nearest.
        scores: Accumulator of q·k.
        values: Accumulator of P·V.
        weights: Format of P as P·V reads it; fp32 where P is not rounded.
        weights_scale: What P is multiplied by before it is rounded.
        lazy_rescale: Log2 units by which the running maximum may lag.
        sums_rounded_weights: Whether the row sum takes the rounded P: a legitimate design.
        normalised_weights: Whether P is divided by the row sum before it is rounded, as kernels do
            that are not fused.
        divides_each_step: Whether O is divided by the row sum after every tile, as in
            FlashAttention-1, also where the row sees nothing of the tile.
        scaled_query: Format to which a kernel rounds scale · q before the product; None where it
            does not.
        rounds_value_products: Format to which a backward that is not fused rounds dO · v before
            Σ dO · O is taken off; None where it stays as it was computed.
        sums_rounded_heads: Whether a backward rounds the gradients of k and v to the output format
            for each query head, and adds those that share a key head afterwards.
        rereads_weights: Whether a fused backward multiplies dO · v − δ by the P that it has rounded
            for the gradient of v.
        dkv_parts: Most parts in which a backward adds the gradients of k and v up in the output
            format, each head and tile of rows one; 1 where they are rounded once.
        dq_parts: The same of the gradient of q, each tile of keys one.
        exp2_ulps: Largest error of its exp2, in units in the last place of ``computes``.
        tanh_error: Largest relative error of its tanh (2^-11 of tanh.approx).
        block_kv: Fewest keys of a step; the least that is usual where it is not known.
        splits: Most parts that are computed apart and merged through LSE.
        output: Format of out.
        computes: Format of everything else: scores, exponents, row sums, LSE.

    Raises:
        ProblemError: P times its scale can pass the largest number of its format, which is a fault
            and no error that could be bounded.
        TypeError: A format or an accumulator is none.
        ValueError: A number is out of its range.
    """

    products: Format
    truncates: bool = False
    scores: Accumulator = FP32
    values: Accumulator = FP32
    weights: Format
    weights_scale: float = 1.0
    lazy_rescale: float = 0.0
    sums_rounded_weights: bool = False
    normalised_weights: bool = False
    divides_each_step: bool = False
    scaled_query: Format | None = None
    rounds_value_products: Format | None = None
    sums_rounded_heads: bool = False
    rereads_weights: bool = False
    dkv_parts: int = 1
    dq_parts: int = 1
    exp2_ulps: float = 2.0
    tanh_error: float = 2.0**-11
    block_kv: int = 16
    splits: int = 1
    output: Format
    computes: Format = FORMATS["fp32"]

    def __post_init__(self) -> None:
        self._check_numbers()
        largest = self.weights_scale * 2.0**self.lazy_rescale
        if largest > self.weights.max:
            raise ProblemError(
                f"P reaches weights_scale · 2^lazy_rescale = {largest:g}; the largest "
                f"{self.weights.name} is {self.weights.max:g}: declare a smaller scale, or rescale "
                "sooner."
            )

    def _check_numbers(self) -> None:
        """Declared by users: what is no format or no such number is said at once."""
        for name in ("products", "weights", "output", "computes", "rounds_value_products"):
            given = getattr(self, name)
            if not isinstance(given, Format) and (name != _MAY_BE_NONE or given is not None):
                raise TypeError(f"{name}={given!r} is no attncheck.formats.Format.")
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
        """Whether a backward recomputes P and its gradient tile by tile, and stores neither."""
        return not self.normalised_weights and self.rounds_value_products is None

    @property
    def multiplies_rounded_weights(self) -> bool:
        """Whether the scores' gradients have the rounded P as a factor."""
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


def default(dtype: Dtype, capability: tuple[int, int] | None = None) -> Arithmetic:
    """What is assumed of a kernel that declares nothing.

    Args:
        dtype: Of the Problem.
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
