"""Sets the precision of torch's fp32 products, and declares the arithmetic of its fused kernels."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from attncheck.core.declared_arithmetic import Arithmetic
from attncheck.core.quiet_mode import QuietMode
from attncheck.inputs.problem import Problem


@contextlib.contextmanager
def fp32_products(dtype: str) -> Iterator[None]:
    """Make torch multiply fp32 matrices in tf32 within this context for ``tf32``, else in fp32.

    This sets the older process-wide setting and each backend's newer one: parts of torch still read
    the older one, and fail if the two disagree (torch 2.9–2.13). Afterwards all are restored, also
    a backend's unset one.
    """
    cuda = torch.backends.cuda.matmul
    mkldnn = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # a module made at import
    before = (cuda.fp32_precision, mkldnn.fp32_precision)
    legacy = _legacy_precision()
    try:
        _set_legacy("high" if dtype == "tf32" else "highest")
        yield
    finally:
        _set_legacy(legacy)
        cuda.fp32_precision, mkldnn.fp32_precision = before


def _legacy_precision() -> str:
    """Return the older, coarser setting; torch raises if only a newer one was set to tf32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 warns that the setting is deprecated
        try:
            return torch.get_float32_matmul_precision()
        except RuntimeError:
            return "highest"


def _set_legacy(precision: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 warns that the setting is deprecated
        torch.set_float32_matmul_precision(precision)


_16_BITS = {"fp16", "bf16"}
# Tiles of the CPU's flash backward: (least number of query rows, rows per tile), and keys per tile.
_CPU_ROWS = ((768, 256), (192, 64), (0, 32))
_CPU_KEYS = 512
# Flash on a GPU: (largest head dim, keys per block). Parts of split keys are whole blocks.
_BLOCKS = ((64, 256), (128, 128), (256, 64))
_MOST_PARTS = 128


def with_short_exp(assumed: Arithmetic, device: str) -> Arithmetic:
    """Return the arithmetic of torch's flash kernel, by changing that assumed of any kernel.

    On the CPU its exp for 16-bit inputs is a short polynomial: exp(0) = 1 − 5.3e-5 and an error of
    1.02e-4 at −0.69 were measured (torch 2.13, by the LSE that
    ``aten._scaled_dot_product_flash_attention_for_cpu`` exposes); 1,024 ulps of fp32 are 1.22e-4.
    """
    if device != "cpu" or assumed.products.name not in _16_BITS:
        return assumed
    return replace(assumed, exp2_ulps=1024.0)


def with_split_keys(assumed: Arithmetic, problem: Problem, device: str) -> Arithmetic:
    """Return the arithmetic of flash's forward on a GPU, which splits keys if rows are few.

    FlashAttention-2 chooses the number of parts by how many processors they keep busy: up to 128
    parts of whole key blocks (``num_splits_heuristic`` and ``set_params_splitkv`` of its API). On
    an H200 (torch 2.11) 256 keys of head dim 64 were one part and 1,024 were four.
    """
    if device == "cpu":
        return assumed
    dim = max(problem.head_dim, problem.value_dim)
    block = next((keys for widest, keys in _BLOCKS if dim <= widest), _BLOCKS[-1][1])
    return replace(assumed, splits=min(_MOST_PARTS, max(1, math.ceil(problem.kv / block))))


def with_three_products(assumed: Arithmetic) -> Arithmetic:
    """Return the arithmetic of the efficient kernel in fp32 on a GPU: products of 3 × tf32.

    P is the sum of its rounding to tf32 and the rounded rest, at most 2^-12 for 1/2 ≤ P < 1:
    together within 2^-24 of P, an ulp in addition to exp2's. On an H200 (torch 2.11) 3.1 ulps were
    measured, which include rounded arguments.
    """
    if assumed.products.name != "fp32":
        return assumed
    return replace(assumed, exp2_ulps=assumed.exp2_ulps + 1.0)


def with_rounded_sums(
    assumed: Arithmetic, problem: Problem, device: str, *, whole: bool = True
) -> Arithmetic:
    """Return the arithmetic of flash's gradients, which it sums in 16 bits on the CPU.

    For 16-bit inputs it adds to dK and dV in the inputs' format after each tile of query rows (32,
    64 from 192 rows on, 256 from 768) of each head that shares a key head, and to dQ after each 512
    keys. If not ``whole``, it may be called for parts of the rows. Measured in bf16 and fp16
    (torch 2.13): the RMSE of dK and dV, in units of the format's roundoff and of their own RMS, is
    0.7 at 64 rows, 1.0 at 512 and at 2,048, and with 8 heads to a key head 1.3 and 2.4; with sums
    in fp32 it is 0.4.
    """
    if device != "cpu":
        return with_rounded_heads(assumed, problem)
    if assumed.output.name not in _16_BITS:
        return assumed
    # A call for part of the rows may use the smallest tiles, which means the most sums.
    query = problem.query if whole else 0
    rows = next(size for least, size in _CPU_ROWS if query >= least)
    return replace(
        assumed,
        dkv_parts=problem.group * math.ceil(problem.query / rows),
        dq_parts=math.ceil(problem.kv / _CPU_KEYS),
    )


def with_rounded_heads(assumed: Arithmetic, problem: Problem) -> Arithmetic:
    """Return the arithmetic of flash's and cuDNN's gradients on a GPU with shared key heads.

    Both round dK and dV of each query head to the output format before they sum over heads. On an
    H200 (torch 2.11) cases with 2 to 5 heads to a key head exceeded the bound of fp32 sums, up to
    1.2 times; no case with one head each did.
    """
    shared = problem.group > 1 and assumed.output.name in _16_BITS
    return replace(assumed, sums_rounded_heads=True) if shared else assumed


def with_rounded_weights(assumed: Arithmetic) -> Arithmetic:
    """Return the arithmetic of the efficient kernel's gradients.

    It stores P in 16 bits for dV = Pᵀ dO, and computes dS = P (dO · v − δ) from the stored P
    (``kernel_backward.h`` of CUTLASS's fused attention). On an H200 (torch 2.11) dQ and dK exceeded
    the bound for an unrounded P up to 1.1 times.
    """
    return replace(assumed, rereads_weights=assumed.output.name in _16_BITS)


_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class CpuFlashDetector(QuietMode):  # type: ignore[no-untyped-call]  # torch's
    """A mode that detects calls of torch's CPU flash kernel, and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.called = False  # whether the kernel was called

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call ``func`` unchanged."""
        del types
        self.called |= getattr(func, "overloadpacket", None) is _FLASH
        return func(*args, **(kwargs or {}))
