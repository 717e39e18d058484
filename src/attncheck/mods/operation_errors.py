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

    # The incoming score's format, the widest one. Operations that torch computes in a narrower
    # format may be computed in that one.
    format: Format
    # Largest error of each operation on exact operands, in units in the last place; operations that
    # are not listed are exact.
    ulps: Mapping[str, float]
    # Largest error by which an operation rounds its operand first, in the operand's ulps.
    argument_ulps: Mapping[str, float] = field(default_factory=dict)

    def format_of(self, dtype: torch.dtype | None) -> Format | None:
        """Return the format in which ``dtype`` is computed; None for whole and Python numbers."""
        if dtype is None or not dtype.is_floating_point:
            return None
        own = next(f for f in FORMATS.values() if f.torch_dtype == dtype)
        return own if own.significand < self.format.significand else self.format


TRITON_ULP: dict[str, float] = {
    # One IEEE rounding; a fused multiplication and addition rounds once instead of twice.
    "add": 0.5,
    "sub": 0.5,
    "mul": 0.5,
    "sqrt": 0.5,  # sqrt.rn
    "cast": 0.5,  # of whole numbers beyond 2^24
    "number": 0.5,  # of Python floats that are no fp32 numbers
    # While |a / b| < 2^47 all but the last addition is exact, which torch rounds too.
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
    # exp2's error, and 0.7 units of 2^-24 from the argument. Interpreted: 1.26.
    "exp": 3.0,
    # 4.7 units of 2^-24 from e, one from 1 + e, half an ulp from div.rn. Interpreted: 1.90.
    "sigmoid": 6.5,
    # See ``triton_functions._tanh``: 1.73, plus 2.5 for ex2.approx and div.full. Interpreted: 1.73.
    "tanh": 4.5,
    # libdevice: 1 (log, log2) and 2 (sin, cos) by the CUDA programming guide. Interpreted, NumPy's
    # vector forms, which promise 4: 3.83, 2.11, 1.46 and 1.49.
    "log": 4.0,
    "log2": 4.0,
    "sin": 4.0,
    "cos": 4.0,
}
"""Error in ulps of each printed Triton operation (``to_triton``) on exact fp32 operands: the larger
of its errors compiled and interpreted. Operations that are not listed are exact.

Whole-number operands are cast first, which may round the operand. Interpreted errors are the
largest of 4·10^6 arguments or of ``tests/mods/to_triton/test_triton_ulp.py``, on x86-64 with
AVX-512, NumPy 2. Parts of the code of log, log2, sin, cos, floor and ceil flush subnormal operands
to 0 (``.ftz``): their error may be 2^-126 larger, or 1 for floor and ceil.
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

_TORCH_GPU_ULPS = {"sqrt": 1.0, "rsqrt": 2.0}

KERNEL_FP32 = Arithmetic(
    format=FORMATS["fp32"],
    # Where torch on a GPU (sqrt.approx, CUDA's rsqrtf) is less accurate than our kernels, its
    # error counts.
    ulps=TRITON_ULP | {op: max(TRITON_ULP[op], n) for op, n in _TORCH_GPU_ULPS.items()},
    # e^x is computed as 2^(x·log2 e): a rounded product with a rounded constant.
    argument_ulps={"exp": 1.0, "sigmoid": 1.0},
)
"""A kernel that computes scores in fp32: ours in Triton, or torch's flex_attention."""
