"""Casts between the six float formats of a GPU kernel, bit for bit as on an H200.

The interpreter stores bf16 and fp8 as bit patterns in unsigned arrays; this module converts them to
values and back. Formats have Triton's names. Checked against the casts of Triton 3.6 on an H200:
every pattern of the 8- and 16-bit formats, and in fp32 and fp64 every value of a narrower format,
every tie between two of them, and both neighbours of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

FORMATS: dict[str, np.dtype[Any]] = {
    "fp64": np.dtype(np.float64),
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8e5": np.dtype(ml_dtypes.float8_e5m2),
}
# The formats that the interpreter stores as bit patterns, and the unsigned dtype that holds them.
NARROW: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(np.uint16),
    "fp8e4nv": np.dtype(np.uint8),
    "fp8e5": np.dtype(np.uint8),
}
# cvt.rn.satfinite clamps to these; it clamps infinities too and lets NaN through.
_LARGEST = {"fp8e4nv": 448.0, "fp8e5": 57344.0}
_VALUES_OF_BYTE = {
    name: np.arange(256, dtype=np.uint8).view(FORMATS[name]).astype(np.float32) for name in _LARGEST
}


def values(data: Array, name: str) -> Array:
    """Return stored ``data`` (any shape) of format ``name`` as fp32, or as its own dtype if wider.

    Exact: every bf16, fp8 and fp16 number is an fp32 number.
    """
    if data.dtype == np.bool_:
        return data.astype(np.float32)
    if name in _VALUES_OF_BYTE:
        return _VALUES_OF_BYTE[name][data]
    if name in NARROW:
        return data.view(FORMATS[name]).astype(np.float32)
    return data.astype(np.float32) if name == "fp16" else data


def _to_odd(numbers: Array) -> Array:
    """Round fp64 to fp32 by rounding to odd, so that a second rounding acts like a single one.

    Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using
    rounding to odd", 2008: correct for a second format with at most 22 significant bits.
    """
    near = numbers.astype(np.float32)
    toward_zero = np.where(
        np.abs(near) > np.abs(numbers), np.nextafter(near, np.float32(0.0)), near
    )
    inexact = (toward_zero != numbers) & np.isfinite(numbers)
    bits: Array = toward_zero.view(np.uint32) | inexact.astype(np.uint32)
    return bits.view(np.float32)


def encode(numbers: Array, name: str) -> Array:
    """Return ``numbers`` (any shape, float or integer) as stored data of format ``name``.

    Rounds once, ties to even. Overflow gives infinity, but in fp8 the largest finite number, also
    for infinities (the GPU's ``satfinite``). torch's fp8 casts agree only below overflow: its e5m2
    cast overflows to infinity; its e4m3 cast to NaN in 2.11, to 448 in 2.13. Integers go through
    fp32, as Triton lowers them. NaN stays NaN, with an arbitrary sign and payload.
    """
    if name not in NARROW:
        return numbers.astype(FORMATS[name])
    if numbers.dtype == np.float64:
        numbers = _to_odd(numbers)
    elif numbers.dtype != np.float32:
        numbers = numbers.astype(np.float32)
    if name in _LARGEST:
        numbers = np.clip(numbers, -_LARGEST[name], _LARGEST[name])
    return numbers.astype(FORMATS[name]).view(NARROW[name])


def convert(data: Array, source: str, target: str, *, toward_zero: bool = False) -> Array:
    """Convert stored ``data`` (any shape) of format ``source`` to stored data of ``target``.

    ``toward_zero`` is Triton's ``fp_downcast_rounding="rtz"``: a finite number never overflows.
    """
    numbers = values(data, source)
    result = encode(numbers, target)
    if not toward_zero or target in ("fp32", "fp64"):
        return result
    bits = result.view(np.dtype(f"uint{8 * result.itemsize}"))
    # Formats are sign-magnitude: one less is the next number toward zero, and below infinity the
    # largest finite one. NaN compares false.
    away = np.abs(values(result, target)) > np.abs(numbers)
    nearer: Array = bits - away.astype(bits.dtype)
    return nearer.view(result.dtype)
