"""The setting of torch's fp32 products, and the arithmetic of its fused kernels."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attncheck.core.declared_arithmetic import Arithmetic
from attncheck.inputs.problem import Problem

Products = Literal["ieee", "tf32"]

# torch's older, coarser names for the same setting.
_LEGACY: dict[Products, str] = {"ieee": "highest", "tf32": "high"}


@contextlib.contextmanager
def fp32_products(products: Products) -> Iterator[None]:
    """Inside, torch multiplies fp32 matrices exactly as fp32 (``ieee``) or in ``tf32``.

    Sets the older process-wide setting as well as the newer ones for each backend: parts of torch
    still read the older one, and refuse to when the two disagree (torch 2.9–2.13). Everything is
    as before afterwards, an unset backend included.
    """
    cuda = torch.backends.cuda.matmul
    mkldnn = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # a module made at import
    before = (cuda.fp32_precision, mkldnn.fp32_precision)
    legacy = _legacy_precision()
    try:
        _set_legacy(_LEGACY[products])
        yield
    finally:
        _set_legacy(legacy)
        cuda.fp32_precision, mkldnn.fp32_precision = before


def _legacy_precision() -> str:
    """The older setting; torch refuses to name it after tf32 came through a newer one alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 warns that the older setting is old
        try:
            return torch.get_float32_matmul_precision()
        except RuntimeError:
            return "highest"


def _set_legacy(precision: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 warns that the older setting is old
        torch.set_float32_matmul_precision(precision)


_16_BITS = {"fp16", "bf16"}
# Rows of a tile of the CPU's backward, from so many rows on; and keys of one.
_CPU_ROWS = ((768, 256), (192, 64), (0, 32))
_CPU_KEYS = 512
# Of flash on a GPU: head dims up to the first have so many keys in a block, and parts are blocks.
_BLOCKS = ((64, 256), (128, 128), (256, 64))
_MOST_PARTS = 128


def with_short_exp(assumed: Arithmetic, device: str) -> Arithmetic:
    """Flash's arithmetic, given what is assumed of any kernel.

    On the CPU its exp of 16-bit inputs is a short polynomial: exp(0) = 1 − 5.3e-5 and, at −0.69, an
    error of 1.02e-4 were measured (torch 2.13, by the LSE that
    ``aten._scaled_dot_product_flash_attention_for_cpu`` exposes); 1,024 ulps of fp32 are 1.22e-4.
    """
    if device != "cpu" or assumed.products.name not in _16_BITS:
        return assumed
    return replace(assumed, exp2_ulps=1024.0)


def with_split_keys(assumed: Arithmetic, problem: Problem, device: str) -> Arithmetic:
    """Flash's forward on a GPU, which cuts the keys where rows are too few for the processors.

    FlashAttention-2 chooses the number of parts by how many of them are at work at once: up to 128,
    of whole blocks of keys (``num_splits_heuristic`` and ``set_params_splitkv`` of its API). On an
    H200 (torch 2.11) 256 keys of head dim 64 were one part and 1,024 four.
    """
    if device == "cpu":
        return assumed
    dim = max(problem.head_dim, problem.value_dim)
    block = next((keys for widest, keys in _BLOCKS if dim <= widest), _BLOCKS[-1][1])
    return replace(assumed, splits=min(_MOST_PARTS, max(1, math.ceil(problem.kv / block))))


def with_three_products(assumed: Arithmetic) -> Arithmetic:
    """The efficient kernel in fp32 on a GPU, of which each product is three of tf32.

    P is its rounding to tf32 and that of the rest, at most 2^-12 beside 1/2 ≤ P < 1: together
    within 2^-24 of P, an ulp more than exp2's. On an H200 (torch 2.11) 3.1 ulps were seen, those of
    rounded arguments among them.
    """
    if assumed.products.name != "fp32":
        return assumed
    return replace(assumed, exp2_ulps=assumed.exp2_ulps + 1.0)


def with_rounded_sums(
    assumed: Arithmetic, problem: Problem, device: str, *, whole: bool = True
) -> Arithmetic:
    """The same of flash's gradients; not ``whole``: it may be called for parts of the rows.

    On the CPU it adds dK and dV of 16-bit inputs up in their own format, once for each tile of
    query rows (32, 64 from 192 rows on, 256 from 768) of each head that shares a key head, and dQ
    once for each 512 keys. Measured in bf16 and fp16 (torch 2.13): the RMSE of dK and dV, in units
    of the format's roundoff and of their own RMS, is 0.7 at 64 rows, 1.0 at 512 and at 2,048, and
    with 8 heads to a key head 1.3 and 2.4; where all is added in fp32 it is 0.4.
    """
    if device != "cpu":
        return with_rounded_heads(assumed, problem)
    if assumed.output.name not in _16_BITS:
        return assumed
    # Of a call for a part of the rows the smallest tiles are assumed: most sums.
    query = problem.query if whole else 0
    rows = next(size for least, size in _CPU_ROWS if query >= least)
    return replace(
        assumed,
        dkv_parts=problem.group * math.ceil(problem.query / rows),
        dq_parts=math.ceil(problem.kv / _CPU_KEYS),
    )


def with_rounded_heads(assumed: Arithmetic, problem: Problem) -> Arithmetic:
    """Flash's and cuDNN's gradients on a GPU, where query heads share a key head.

    Both have dK and dV of each query head in the output format, and add them up afterwards. On an
    H200 (torch 2.11) 2 to 5 heads to a key head, and no case of a head each, went beyond the bound
    of sums in fp32, by up to 1.2.
    """
    shared = problem.group > 1 and assumed.output.name in _16_BITS
    return replace(assumed, sums_rounded_heads=True) if shared else assumed


def with_rounded_weights(assumed: Arithmetic) -> Arithmetic:
    """The efficient kernel's gradients.

    It stores P in 16 bits for dV = Pᵀ dO, and takes dS = P (dO · v − δ) of what it stored
    (``kernel_backward.h`` of CUTLASS's fused attention). On an H200 (torch 2.11) dQ and dK went
    beyond the bound of an unrounded P by up to 1.1.
    """
    return replace(assumed, rereads_weights=assumed.output.name in _16_BITS)


_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class CpuFlashDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Within, notes whether the kernel is called; changes nothing."""

    supports_higher_order_operators = True  # flex_attention is one: it passes through as it is

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.called = False  # whether it was

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Else a kernel that compiles a graph would be called uncompiled, operator by operator."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports its compiler, which takes longer than torch itself, and Triton."""
        return False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """``func`` as it is."""
        del types
        self.called |= getattr(func, "overloadpacket", None) is _FLASH
        return func(*args, **(kwargs or {}))
