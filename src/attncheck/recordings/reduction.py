"""One call of ``scaled_dot_product_attention`` as a Call and its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from attncheck.formats import FORMATS
from attncheck.recordings.axes import batch_axes, four_axes, mask_axes
from attncheck.recordings.facts import call_fact, tensor_fact
from attncheck.recordings.schema import DTYPES, Call

if TYPE_CHECKING:
    from attncheck.recordings.schema import Dtype, MaskKind

__all__ = ["Given", "Unfit", "reduced"]


class Unfit(Exception):
    """A call that a recording cannot hold; the text says why."""


@dataclass(frozen=True, slots=True)
class Given:
    """What the function is given: its parameters, in torch's order and by torch's names."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def reduced(name: str, given: Given, out: Tensor) -> tuple[Call, dict[str, Tensor]]:
    """The call and copies of its tensors q, k, v and, where there is one, mask, on the CPU.

    Args:
        name: What it is called.
        given: Its arguments.
        out: Its result. Its dtype is what q, k and v were cast to, if autocast is on.

    Raises:
        Unfit: for tensors that a recording cannot hold, and for whatever ``reading`` would refuse.
    """
    kind, mask = _mask(given)
    tensors = [given.query, given.key, given.value] + ([] if mask is None else [mask])
    for tensor in tensors:
        _require_plain(tensor)
    if any(0 in tensor.shape for tensor in tensors):
        raise Unfit(f"shapes {_shapes(tensors)} have a size of 0")
    dtype = _dtype(out)
    try:
        q, k, v = four_axes(*tensors[:3], gqa=given.enable_gqa)
        mask = None if mask is None else mask_axes(mask, batch_axes(*tensors[:3]))
    except RuntimeError:
        raise Unfit(_not_four_axes(tensors)) from None
    call = _call(name, given, (q, k, v), dtype=dtype, mask=kind)
    if out.numel() != q[..., 0].numel() * v.shape[3]:
        raise Unfit(_not_four_axes(tensors))
    copies = {n: _copy(t, out.dtype) for n, t in zip("qkv", (q, k, v), strict=True)}
    if mask is not None:
        # Autocast casts an added mask too.
        cast_too = mask.is_floating_point() and given.query.dtype != out.dtype
        copies["mask"] = _copy(mask, out.dtype if cast_too else mask.dtype)
    _require(*(tensor_fact(call, n, tensor) for n, tensor in copies.items()))
    return call, copies


def _require(*facts: str | None) -> None:
    for fact in facts:
        if fact:
            raise Unfit(fact)


def _call(
    name: str,
    given: Given,
    tensors: tuple[Tensor, Tensor, Tensor],
    *,
    dtype: Dtype,
    mask: MaskKind,
) -> Call:
    q, k, v = tensors
    call = Call(
        name=name,
        batch=q.shape[0],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        query=q.shape[2],
        kv=k.shape[2],
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        dtype=dtype,
        mask=mask,
        scale=None if given.scale is None else float(given.scale),
        dropout=float(given.dropout_p),
    )
    _require(call_fact(call))
    return call


def _mask(given: Given) -> tuple[MaskKind, Tensor | None]:
    attn_mask = given.attn_mask
    if isinstance(attn_mask, CausalBias):
        top_left = attn_mask.variant == CausalVariant.UPPER_LEFT
        return ("causal" if top_left else "causal_bottom_right"), None
    if attn_mask is None:
        return ("causal" if given.is_causal else "none"), None
    return ("bool" if attn_mask.dtype is torch.bool else "additive"), attn_mask


def _require_plain(tensor: Tensor) -> None:
    if tensor.is_nested:
        raise Unfit("nested tensors have sequences of several lengths: pad them")
    if type(tensor) not in {Tensor, torch.nn.Parameter}:
        raise Unfit(f"{type(tensor).__name__} is not a plain tensor")
    if tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise Unfit("a tensor on meta or under vmap or grad has no numbers to copy")


def _dtype(out: Tensor) -> Dtype:
    for name in DTYPES:
        if FORMATS[name].torch_dtype == out.dtype:
            return cast("Dtype", name)
    raise Unfit(f"{out.dtype} is not one of {', '.join(DTYPES)}")


def _shapes(tensors: list[Tensor]) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors)


def _not_four_axes(tensors: list[Tensor]) -> str:
    return f"shapes {_shapes(tensors)} are not those of (batch, heads, length, dim)"


def _copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
