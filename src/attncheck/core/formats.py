"""Number formats, and the dtypes of a Problem in terms of them.

A *format* is a set of representable numbers (bf16 has 8 significant bits); a *dtype* is what a
Problem asks for (``tf32`` stores fp32 and multiplies in tf32).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attncheck.core.errors import UnknownName

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Format:
    """A binary floating-point format."""

    name: str
    torch_name: str  # attribute of ``torch`` for its storage; tf32 values are stored as float32
    significand: int  # significant bits, the implicit one included
    min_exponent: int  # exponent of the smallest normal number, 2**min_exponent
    max: float  # largest finite number

    @property
    def saturates(self) -> bool:
        """Whether a GPU's conversion clamps to ``max`` where IEEE gives infinity: in fp8."""
        return self.torch_name.startswith("float8")

    @property
    def unit_roundoff(self) -> float:
        """Half the distance from 1 to the next number: the largest relative rounding error."""
        return 2.0**-self.significand

    @property
    def subnormal_spacing(self) -> float:
        """Distance between neighbours below the smallest normal number."""
        return 2.0 ** (self.min_exponent - self.significand + 1)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype that stores values of this format."""
        import torch

        dtype: torch.dtype = getattr(torch, self.torch_name)
        return dtype


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("fp64", "float64", 53, -1022, math.ldexp(2 - 2.0**-52, 1023)),
        Format("fp32", "float32", 24, -126, math.ldexp(2 - 2.0**-23, 127)),
        # tf32 is the part of fp32 that tensor cores read: its exponent, and 10 fraction bits.
        Format("tf32", "float32", 11, -126, math.ldexp(2 - 2.0**-10, 127)),
        Format("fp16", "float16", 11, -14, 65504.0),
        Format("bf16", "bfloat16", 8, -126, math.ldexp(2 - 2.0**-7, 127)),
        # e4m3fn has no infinity: its top exponent holds numbers too, up to 448 instead of 240.
        Format("e4m3", "float8_e4m3fn", 4, -6, 448.0),
        Format("e5m2", "float8_e5m2", 3, -14, 57344.0),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtype:
    """The formats that a Problem's ``dtype`` stands for."""

    name: str
    storage: Format  # format of q, k and v as stored
    products: Format  # format in which a matrix product reads its operands
    weights: Format  # format of the softmax weights P as the product P·V reads them
    # Factor of P before it is rounded to the weights' format. P is at most 1, so that in fp8 the
    # largest power of two in range loses the fewest small weights (256 for e4m3, as in
    # FlashAttention-3); a power of two, so that the significands do not change.
    weights_scale: float = 1.0
    output: Format  # Format of out; LSE is always fp32.
    measured: bool = True  # Whether kernels are measured in it; fp64 is only for exact results.

    @property
    def scaled(self) -> bool:
        """Return whether stored numbers have a descale for each batch and key head, as in fp8."""
        return self.storage.saturates


def _dtype(name: str, storage: str, output: str, *, measured: bool = True) -> Dtype:
    weights = FORMATS[name]
    return Dtype(
        name=name,
        storage=FORMATS[storage],
        products=FORMATS[name],
        weights=weights,
        weights_scale=2.0 ** math.floor(math.log2(weights.max)) if weights.saturates else 1.0,
        output=FORMATS[output],
        measured=measured,
    )


DTYPES: dict[str, Dtype] = {
    d.name: d
    for d in (
        _dtype("fp32", "fp32", "fp32"),
        _dtype("tf32", "fp32", "fp32"),
        _dtype("fp16", "fp16", "fp16"),
        _dtype("bf16", "bf16", "bf16"),
        # Kernels return bf16 for fp8 inputs, since 3 or 4 bits are too few for a result.
        _dtype("e4m3", "e4m3", "bf16"),
        _dtype("e5m2", "e5m2", "bf16"),
        _dtype("fp64", "fp64", "fp64", measured=False),
    )
}
MEASURED_DTYPES = tuple(name for name, dtype in DTYPES.items() if dtype.measured)


def dtype_named(name: str) -> Dtype:
    """Return the dtype called ``name``; raise UnknownName with the valid names."""
    if not isinstance(name, str) or name not in DTYPES:
        raise UnknownName("dtype", name, DTYPES)
    return DTYPES[name]


def fp32(number: float) -> float:
    """Return ``number`` rounded to the nearest fp32 value (ties to even), as a Python float.

    The Problem applies it to every number that a kernel receives in fp32, so that oracle and kernel
    read the same number. Numbers that are too large become infinite.
    """
    try:
        # Converts to nearest, ties to even, without NumPy.
        value: float = struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)
    return value


def round_to(values: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Round float64 ``values`` (any shape) once to ``fmt``, ties to even; the result is float64.

    Unlike a cast from float64 to a 16-bit dtype, which goes through float32, this rounds only once.
    Numbers that overflow become infinite, or ``fmt.max`` where conversions saturate. NaN and
    infinities stay as they are (except that infinities saturate too, as on a GPU).
    """
    import torch

    if fmt.name == "fp64":
        return values.clone()
    # Scaling by a power of two and rounding to an integer are exact: one rounding in all.
    unit = spacing(values, fmt)
    rounded = (values / unit).round_().mul_(unit)
    if fmt.saturates:
        return rounded.clamp_(-fmt.max, fmt.max)
    return torch.where(rounded.abs() > fmt.max, rounded * math.inf, rounded)


def spacing(values: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the ulp of ``fmt``, the distance of its numbers, at finite float64 ``values``.

    At a power of two: that above it; below the smallest normal number: that of subnormal numbers.
    ``fmt`` is treated as if it had no largest number; for fp64 it is never below 2^-1022.
    """
    import torch

    # Integer arithmetic on the bits is exact, and on a CPU five times as fast as frexp: a value of
    # exponent e has e + 1023 in the 11 bits after its sign, or 0 if it is subnormal.
    exponent = (values.view(torch.int64) >> 52).bitwise_and_(0x7FF)
    exponent.masked_fill_(values == 0, 1022)
    lowest = max(fmt.min_exponent - fmt.significand + 1, FORMATS["fp64"].min_exponent)
    exponent.sub_(fmt.significand - 1).clamp_(min=lowest + 1023)
    return exponent.bitwise_left_shift_(52).view(torch.float64)
