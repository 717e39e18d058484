"""Declared errors of each operation of a mod, in units in the last place.

An ulp is the distance of neighbouring numbers of the format at the exact result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attncheck.core.formats import FORMATS, Format

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Declared errors of an implementation's operations."""

    # Of the score that comes in; what torch computes in a narrower one may be computed there,
    # nothing is computed in a wider one.
    format: Format
    # Largest error of each operation on exact operands, in units in the last place; what is not
    # there is exact.
    ulps: Mapping[str, float]
    # How far its operand may be rounded before, likewise.
    argument_ulps: Mapping[str, float] = field(default_factory=dict)

    def format_of(self, dtype: torch.dtype | None) -> Format | None:
        """Return what values of ``dtype`` are computed in; None for whole and Python numbers."""
        if dtype is None or not dtype.is_floating_point:
            return None
        own = next(f for f in FORMATS.values() if f.torch_dtype == dtype)
        return own if own.significand < self.format.significand else self.format


TRITON_ULP: dict[str, float] = {
    # One IEEE rounding; a fused multiplication and addition has one in place of two.
    "add": 0.5,
    "sub": 0.5,
    "mul": 0.5,
    "sqrt": 0.5,  # sqrt.rn
    "cast": 0.5,  # of a whole number beyond 2^24
    "number": 0.5,  # of a Python float that is no fp32 number
    # Exact but for the last addition, which torch rounds too, while |a / b| < 2^47.
    "remainder": 0.5,
    # Exact while the result is below 2^22; then (a - a % b) / b - 1, torch's rule: each operation
    # of the quotient one unit of 2^-24, the last half an ulp. Interpreted: 2.
    "floor_divide": 2.5,
    # div.full, or its bits: 2 ulp by the PTX manual. Interpreted: 0.5.
    "div": 2.0,
    # div.rn of sqrt.rn: one unit of 2^-24 and half an ulp. Interpreted: 1.42.
    "rsqrt": 1.5,
    # ex2.approx: 2 ulp by the PTX manual, on an exact argument. Interpreted: 1.00.
    "exp2": 2.0,
    # The same, and 0.7 units of 2^-24 from the argument. Interpreted: 1.26.
    "exp": 3.0,
    # Of e: 4.7 units of 2^-24; of 1 + e: one; of div.rn half an ulp. Interpreted: 1.90.
    "sigmoid": 6.5,
    # ``triton_functions._tanh`` says: 1.73, and 2.5 for ex2.approx and div.full. Interpreted: 1.73.
    "tanh": 4.5,
    # libdevice: 1 (log, log2) and 2 (sin, cos) by the CUDA programming guide. Interpreted, NumPy's
    # vector forms, which promise 4: 3.83, 2.11, 1.46 and 1.49.
    "log": 4.0,
    "log2": 4.0,
    "sin": 4.0,
    "cos": 4.0,
}
"""Error of each printed Triton operation (``to_triton``) on fp32 operands that are exact, compiled
or interpreted, whichever is larger; an operation that is not here is exact.

Whole-number operands are cast first, which may add a rounding of the operand. Interpreted figures:
the largest of 4·10^6 arguments or of ``tests/mods/to_triton/test_triton_ulp.py``, on x86-64 with
AVX-512, NumPy 2. A subnormal operand of log, log2, sin, cos, floor or ceil counts as 0 in parts of
their code (``.ftz``): their error may be 2^-126 larger, or that of floor and ceil 1.
"""

_IEEE = dict.fromkeys(("add", "sub", "mul", "div", "sqrt", "cast"), 0.5)

TORCH_FP64 = Arithmetic(
    format=FORMATS["fp64"],
    ulps={
        **_IEEE,
        # The vector functions of SLEEF (u10) and MKL (HA), which torch calls, state 1 ulp.
        **dict.fromkeys(("tanh", "exp", "exp2", "log", "log2", "sin", "cos"), 1.0),
        "rsqrt": 1.5,  # a root and a division, half an ulp or one u each, and their product
        "sigmoid": 2.5,  # e^−x 2u, its sum with 1 and the division u each, and their products
        "remainder": 0.5,  # fmod is exact; the divisor added once
        "floor_divide": 2.5,  # as in TRITON_ULP: torch's own rule
    },
)
"""torch on a CPU with float64 scores; what it computes in float32 is rounded to that."""

_TORCH_ON_A_GPU = {"sqrt": 1.0, "rsqrt": 2.0}

KERNEL_FP32 = Arithmetic(
    format=FORMATS["fp32"],
    # Where our kernels are better than what torch calls on a GPU (sqrt.approx, CUDA's rsqrtf),
    # torch counts.
    ulps=TRITON_ULP | {op: max(TRITON_ULP[op], n) for op, n in _TORCH_ON_A_GPU.items()},
    # Its e^x is 2^(x·log2 e): a rounded product with a rounded constant.
    argument_ulps={"exp": 1.0, "sigmoid": 1.0},
)
"""A kernel that computes scores in fp32: ours in Triton, or torch's flex_attention."""
