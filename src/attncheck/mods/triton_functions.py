"""Operations in fp32 and int32 that Triton lacks, or computes too inaccurately.

``operation_errors`` lists the error of each. They replace Triton's own functions, which in the PTX
of Triton 3.9 for Hopper are as follows: ``tl.sqrt`` and ``tl.rsqrt`` are ``.approx.ftz``;
``tl.exp`` is ``ex2.approx`` of a rounded product (its error grows with |x|, to 100 ulp and more);
``%`` on fp32 is a division and one multiplication (it can be off by the divisor); ``//`` and ``%``
on whole numbers round towards zero; a shift by 32 or more places is undefined. ``tl.log``,
``tl.log2``, ``tl.sin`` and ``tl.cos`` are CUDA's libdevice and are used as they are.
"""

# The body of a Triton function is another language: its arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Whether functions are compiled for an NVIDIA GPU, and may use its instructions.
_NVIDIA: tl.constexpr = tl.constexpr(not triton.knobs.runtime.interpret and not torch.version.hip)


@triton.jit
def _inside(index, size):
    """Return ``index`` ≥ 0 clamped below ``size``, so that tails of tiles read in the tensor."""
    return tl.minimum(index, size - 1)


@triton.jit
def _wrapped(index, size):
    """Return ``index``, a negative one counted from the end, clamped to the tensor."""
    return tl.minimum(tl.maximum(tl.where(index < 0, index + size, index), 0), size - 1)


@triton.jit
def _whole(x):
    """Return a whole number as a tensor, even if Triton made it a constant."""
    return tl.cast(0, tl.int32) + x


@triton.jit
def _real(x):
    return tl.cast(x, tl.float32)


@triton.jit
def _floor_divide(a, b):
    """Return ⌊a / b⌋ of whole numbers; Triton's own quotient rounds towards zero."""
    quotient = a // b
    remainder = a - quotient * b
    return tl.where((remainder != 0) & ((remainder < 0) != (b < 0)), quotient - 1, quotient)


@triton.jit
def _remainder(a, b):
    """Return the remainder of ``_floor_divide``, of b's sign, as in Python and torch."""
    remainder = a - (a // b) * b
    return tl.where((remainder != 0) & ((remainder < 0) != (b < 0)), remainder + b, remainder)


@triton.jit
def _cut_remainder(a, b):
    """Return C's fmod in fp32: a − n·b, n = a / b rounded towards zero; exact for |a / b| < 2^47.

    Each step subtracts a rounded quotient's multiple, and is exact: with q = a/b·(1 + δ),
    |δ| ≤ 2^-24, a − q·b is a multiple of ulp(q)·ulp(b) and smaller than 2^24 of them. A step
    leaves |a / b| below 1 or divided by 2^23; the last line undoes a quotient rounded up.
    """
    size = tl.abs(b)
    remainder = tl.abs(a)
    for _ in tl.static_range(2):
        quotient = tl.floor(tl.div_rn(remainder, size))
        remainder = tl.where(quotient == 0, remainder, tl.fma(-quotient, size, remainder))
    remainder = tl.where(remainder < 0, remainder + size, remainder)
    return tl.where(a < 0, -remainder, remainder)


@triton.jit
def _remainder_real(a, b):
    """Return the remainder of ``_floor_divide_real``, of b's sign, as in torch."""
    a, b = _real(a), _real(b)
    remainder = _cut_remainder(a, b)
    return tl.where((remainder != 0) & ((remainder < 0) != (b < 0)), remainder + b, remainder)


@triton.jit
def _floor_divide_real(a, b):
    """Return ⌊a / b⌋ of the exact quotient in fp32, by torch's algorithm."""
    a, b = _real(a), _real(b)
    remainder = _cut_remainder(a, b)
    quotient = tl.div_rn(a - remainder, b)
    quotient = tl.where((remainder != 0) & ((remainder < 0) != (b < 0)), quotient - 1.0, quotient)
    floor = tl.floor(quotient)
    floor = tl.where(quotient - floor > 0.5, floor + 1.0, floor)
    return tl.where(b == 0, tl.div_rn(a, b), floor)


@triton.jit
def _left_shift(a, places):
    """Return ``a << places``; 0, as in torch, for negative shifts and those by a word or more."""
    a, places = _whole(a), _whole(places)
    valid = (places >= 0) & (places < a.dtype.primitive_bitwidth)
    return tl.where(valid, a << tl.where(valid, places, 0), 0)


@triton.jit
def _right_shift(a, places):
    """Return ``a >> places``; only the sign for negative shifts and those by a word or more."""
    a, places = _whole(a), _whole(places)
    last = a.dtype.primitive_bitwidth - 1
    return a >> tl.where((places >= 0) & (places < last), places, last)


@triton.jit
def _sign(x):
    """Return −1, 0 or 1, a whole number; 0 for NaN, as in torch."""
    return (x > 0).to(tl.int32) - (x < 0).to(tl.int32)


@triton.jit
def _quotient(a, b):
    """Return a / b in fp32 for 2^-126 ≤ |b| ≤ 2^126, with the bits of ``/``, ``div.full.f32``.

    That is a reciprocal and a product too, with three more instructions for a ``b`` whose
    reciprocal overflows or is flushed.
    """
    a, b = _real(a), _real(b)
    if _NVIDIA:
        quotient = a * tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        quotient = a / b
    return quotient


@triton.jit
def _rsqrt(x):
    """Return 1 / √x with two IEEE roundings: ``rsqrt.approx.ftz`` flushes subnormals to 0."""
    return tl.div_rn(1.0, tl.sqrt_rn(x))


@triton.jit
def _scaled(value, exponent):
    """Return ``value``·2^``exponent``, −252 ≤ exponent ≤ 254; only subnormals are rounded, once."""
    half = exponent >> 1
    first = ((half + 127) << 23).to(tl.float32, bitcast=True)
    second = ((exponent - half + 127) << 23).to(tl.float32, bitcast=True)
    return value * first * second


@triton.jit
def _exp2(x):
    """Return 2^x as 2^n·2^f, n whole, |f| ≤ ½, both exact: 2^n is exact and nothing is flushed."""
    n = tl.floor(tl.minimum(tl.maximum(x, -152.0), 129.0) + 0.5)  # finite for NaN
    return _scaled(tl.exp2(x - n), n.to(tl.int32))


@triton.jit
def _exp(x):
    """Return e^x as 2^n·e^r, r = x − n·ln 2 with ln 2 in two parts.

    |r| ≤ 0.35: the two roundings of r, that of r·log2(e) and of its constant change the result by
    at most 0.7 units of 2^-24.
    """
    n = tl.floor(tl.minimum(tl.maximum(x, -105.0), 89.0) * 1.4426950408889634 + 0.5)
    r = tl.fma(n, -0.693147182464599609375, x)  # fp32(ln 2)
    r = tl.fma(n, 1.904654299957768e-09, r)  # fp32(ln 2) − ln 2
    return _scaled(tl.exp2(r * 1.4426950408889634), n.to(tl.int32))


@triton.jit
def _sigmoid(x):
    """Return 1 / (1 + e^-x), computed from e^-|x|, which does not overflow."""
    e = _exp(-tl.abs(x))
    return tl.div_rn(tl.where(x < 0, e, 1.0), 1.0 + e)


@triton.jit
def _tanh(x):
    """Return the hyperbolic tangent in fp32.

    Below 5/8: x + x³·P(x²), P the minimax polynomial of degree 4 (our Remez fit in 40 digits;
    relative error of the form 0.074·2^-24), where a quotient of exponentials would cancel.
    From there on 1 − 2e/(1 + e) with e = exp(−2|x|): nothing overflows, ±∞ gives ±1.
    Error against float64: at most 0.75 ulp below 5/8 and 1.73 ulp above with IEEE division and
    a good exp2 (10^6 arguments in the interpreter); ``div.full`` and ``ex2.approx``, 2 ulp each
    by the PTX manual, can add 2.5 ulp next to 5/8 and ever less from there on.
    """
    a = tl.abs(x)
    small = tl.minimum(a, 0.625)
    z = small * small
    p = 0.020639078691601753 + z * -0.005704977549612522
    p = -0.05373971164226532 + z * p
    p = 0.13331441581249237 + z * p
    p = -0.3333328068256378 + z * p
    e = tl.exp2(a * -2.8853900817779268)  # −2·log2(e)
    value = tl.where(a < 0.625, small + small * (z * p), 1.0 - _quotient(2.0 * e, 1.0 + e))
    sign = x.to(tl.int32, bitcast=True) & -2147483648
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


FUNCTIONS = {
    function.__name__: function
    for function in (
        *(_inside, _wrapped, _floor_divide, _remainder, _floor_divide_real, _remainder_real),
        *(_left_shift, _right_shift, _sign, _quotient, _rsqrt, _exp, _exp2, _sigmoid, _tanh),
    )
}
"""Functions that a printed function may call, by name."""
