"""Declared errors of each operation of a mod, in units in the last place."""

from __future__ import annotations

__all__ = ["TRITON_FLUSHED", "TRITON_ULP"]

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
    # div.full: 2 ulp by the PTX manual. Interpreted: 0.5.
    "div": 2.0,
    # div.rn of sqrt.rn: one unit of 2^-24 and half an ulp. Interpreted: 1.42.
    "rsqrt": 1.5,
    # ex2.approx: 2 ulp by the PTX manual, on an exact argument. Interpreted: 1.00.
    "exp2": 2.0,
    # The same, and 0.7 units of 2^-24 from the argument. Interpreted: 1.26.
    "exp": 3.0,
    # Of e: 4.7 units of 2^-24; of 1 + e: one; of div.rn half an ulp. Interpreted: 1.90.
    "sigmoid": 6.5,
    # ``_tanh`` says how: 1.73, and 2.5 for ex2.approx and div.full. Interpreted: 1.73.
    "tanh": 4.5,
    # libdevice: 1 (log, log2) and 2 (sin, cos) by the CUDA programming guide. Interpreted, NumPy's
    # vector forms, which promise 4: 3.83, 2.11, 1.46 and 1.49.
    "log": 4.0,
    "log2": 4.0,
    "sin": 4.0,
    "cos": 4.0,
}
"""Error of each operation on fp32 operands that are exact, compiled or interpreted, whichever is
larger; an operation that is not here is exact.

An ulp is the distance of neighbouring fp32 numbers at the exact result. Whole-number operands are
cast first, which may add a rounding of the operand. Interpreted figures: the largest of 4·10^6
arguments or of ``tests/mods/to_triton/test_triton_ulp.py``, on x86-64 with AVX-512, NumPy 2.
"""

TRITON_FLUSHED = 2.0**-126
"""A subnormal operand of log, log2, sin, cos, floor or ceil counts as 0 in parts of their code
(``.ftz``): their error may be this much larger, or that of floor and ceil 1."""
