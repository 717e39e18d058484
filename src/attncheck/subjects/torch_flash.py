"""The arithmetic of torch's flash kernel, where it is measured to be otherwise than assumed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attncheck.judge.arithmetic import Arithmetic

__all__ = ["with_rounded_sums", "with_short_exp"]


def with_short_exp(assumed: Arithmetic, device: str) -> Arithmetic:
    """Its arithmetic, given what is assumed of any kernel.

    On the CPU its exp of 16-bit inputs is a short polynomial: exp(0) = 1 − 5.3e-5 and, at −0.69, an
    error of 1.02e-4 were measured (torch 2.13, by the LSE that
    ``aten._scaled_dot_product_flash_attention_for_cpu`` exposes); 1,024 ulps of fp32 are 1.22e-4.
    """
    if device != "cpu" or assumed.products.name not in {"fp16", "bf16"}:
        return assumed
    return replace(assumed, exp2_ulps=1024.0)


def with_rounded_sums(assumed: Arithmetic, device: str) -> Arithmetic:
    """The same of its gradients.

    On the CPU it adds dK and dV of 16-bit inputs up in their own format, once for each tile of
    query rows (32, 64 from 192 rows on, 256 from 768) of each head that shares a key head, and dQ
    once for each 512 keys. Measured in bf16 and fp16 (torch 2.13): the RMSE of dK and dV, in units
    of the format's roundoff and of their own RMS, is 0.7 at 64 rows, 1.0 at 512 and at 2,048, and
    with 8 heads to a key head 1.3 and 2.4; where all is added in fp32 it is 0.4.
    """
    if device != "cpu" or assumed.output.name not in {"fp16", "bf16"}:
        return assumed
    return replace(assumed, sums_rounded_heads=True)
