"""Bit patterns and reference casts for tests of the repaired interpreter's number formats."""

# ruff: noqa: N803  # Triton: constexprs in capitals

import numpy as np
import torch
import triton
import triton.language as tl


@triton.jit
def cast_kernel(source, target, DTYPE: tl.constexpr, SIZE: tl.constexpr, MODE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(target + at, tl.load(source + at).to(DTYPE, fp_downcast_rounding=MODE))


TORCH = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
TRITON = {
    "fp64": tl.float64,
    "fp32": tl.float32,
    "fp16": tl.float16,
    "bf16": tl.bfloat16,
    "fp8e4nv": tl.float8e4nv,
    "fp8e5": tl.float8e5,
}


def patterns(name: str) -> torch.Tensor:
    """Every bit pattern of an 8- or 16-bit format."""
    bits = torch.finfo(TORCH[name]).bits
    array = np.arange(2**bits).astype(f"uint{bits}")
    return torch.from_numpy(array).view(TORCH[name])


def around(target: str, source: str) -> torch.Tensor:
    """All finite numbers of ``target``, all ties, the neighbours of both, overflow, inf and NaN."""
    numbers = patterns(target).double().numpy()
    numbers = np.unique(numbers[np.isfinite(numbers)])
    step = numbers[-1] - numbers[-2]
    beyond = numbers[-1] + step * np.arange(1, 17) / 8
    points = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2, beyond, -beyond])
    with np.errstate(over="ignore", under="ignore"):
        points = points.astype(np.float32 if source == "fp32" else np.float64)
        up, down = (np.nextafter(points, points.dtype.type(s * np.inf)) for s in (1, -1))
        special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-149, 3.4e38, 1e300])
        return torch.from_numpy(np.concatenate([points, up, down, special.astype(points.dtype)]))


def double_to(numbers: torch.Tensor, name: str) -> torch.Tensor:
    """Round fp64 once; torch's own casts to 8 and 16 bits go through fp32 and round twice."""
    near = numbers.float()
    odd = (near.double() != numbers) & numbers.isfinite()
    away = near.double().abs() > numbers.abs()
    bits = near.view(torch.int32) - away.int()
    return (bits | odd.int()).view(torch.float32).to(TORCH[name])


def mismatches(left: torch.Tensor, right: torch.Tensor) -> int:
    """How many numbers differ; NaN equals NaN, and 0 differs from −0."""
    a, b = left.double(), right.double()
    same = (a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()
    return int((~same).sum())


def cast(source: torch.Tensor, target: str, mode: str | None = None) -> torch.Tensor:
    size = 1 << (source.numel() - 1).bit_length()
    padded = torch.zeros(size, dtype=source.dtype)
    padded[: source.numel()] = source
    result = torch.zeros(size, dtype=TORCH[target])
    cast_kernel[(1,)](padded, result, TRITON[target], size, mode)
    return result[: source.numel()]
