"""What our attention forwards are compiled for, and how their tiles cover a head dim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton

if TYPE_CHECKING:
    import torch

    from attncheck.inputs import Descale

__all__ = ["Launch", "block_dim", "scales"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Compile-time choices of one launch.

    Attributes:
        block_query, block_kv: Tile sizes, powers of two from 16 to 128; of keys at least 32 in fp8,
            which tensor cores contract 32 at a time.
        warps, stages: Warps per program and depth of the load pipeline.
        precision: ``input_precision`` of fp32 products: ``ieee`` or ``tf32``.
        causal: Keys after a row's own index are never visible: their tiles are skipped.
        free: The mask hides nothing else, so that tiles it leaves whole need no mask.
        max_num_imprecise_acc: How many products of fp8 operands may be added up in the accumulator
            of Hopper's fp8 instructions (QGMMA), which keeps about 13 bits, before the sum goes to
            an fp32 register. 0: none. Triton 3.6 to 3.9 then widens fp8 to fp16, which holds every
            number of it, for instructions that add up in fp32 (HMMA; read from the SASS that
            benchmarks/spills.py counts). None: Triton's default, on Hopper all of them. Of no
            effect on other operands, on other GPUs and in the interpreter.
        weights_scale: What P is multiplied by before it is rounded to v's format: a power of two.
    """

    block_query: int
    block_kv: int
    warps: int = 4
    stages: int = 2
    precision: str = "ieee"
    causal: bool = False
    free: bool = False
    max_num_imprecise_acc: int | None = 0
    weights_scale: float = 1.0


def block_dim(dim: int, dtype: torch.dtype) -> int:
    """The power of two that covers ``dim`` columns: tl.dot contracts over 16 or, in fp8, 32."""
    return max(16 if dtype.itemsize > 1 else 32, int(triton.next_power_of_2(dim)))


def scales(descale: Descale | None) -> tuple[torch.Tensor, ...]:
    """What a kernel gets of ``descale``: q's, k's and v's, each ``(batch, kv_heads)`` in a row."""
    if descale is None:
        return ()
    return tuple(tensor.contiguous() for tensor in (descale.q, descale.k, descale.v))
