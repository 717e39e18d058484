"""Calls of somebody's function, read as what they ask: the reverse of ``subjects.conventions``."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attncheck.faults.own_masks import banded, capped_and_sloped, packed_band
from attncheck.mods.library import FULL
from attncheck.mods.scores import bias
from attncheck.mods.spec import Spec
from attncheck.subjects.conventions.arguments import SINKS

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.outputs import Outputs

    Mod = Callable[..., torch.Tensor]

__all__ = ["CONVENTIONS", "Call", "Unlike", "read"]


class Unlike(Exception):
    """What a call asks is nothing that a kernel of ours is asked: why, in a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a call asks.

    Attributes:
        q: ``(batch, heads, query, head_dim)``.
        k: ``(batch, kv_heads, kv, head_dim)``.
        v: ``(batch, kv_heads, kv, value_dim)``.
        mask: Of the library, or a FlexAttention mask, or bool numbers ``(batch, heads, query,
            kv)``, with axes of 1 where they are alike.
        score: Of the library, or a FlexAttention score mod; None for none.
        scale: Factor of q·k; None for 1/√head_dim.
        sink: fp32 ``(heads,)``; None for none.
        returned: Outputs → what the caller is given, in the axes in which it asked.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: Spec | Mod | torch.Tensor = FULL
    score: Spec | Mod | None = None
    scale: float | None = None
    sink: torch.Tensor | None = None
    returned: Callable[[Outputs], Any]


# What each convention takes beyond q, k and v, in its order; and other names for the same.
_SDPA = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_FLASH = (
    *("dropout_p", "scale", "is_causal", "window_size", "softcap", "alibi_slopes"),
    *("deterministic", "return_lse"),
)
_VARLEN = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", *_FLASH)
_FLEX = ("score_mod", "block_mask", "scale", "enable_gqa", "return_lse", "kernel_options")
_MEANINGS = {
    "mask": "attn_mask",
    "causal": "is_causal",
    "sm_scale": "scale",
    "softmax_scale": "scale",
    "return_attn_probs": "return_lse",
    "return_softmax_lse": "return_lse",
    **dict.fromkeys(SINKS, "sinks"),
}
# How fast, not what.
_NO_MATTER = {
    *("deterministic", "kernel_options", "max_seqlen_q", "max_seqlen_k"),
    *("num_splits", "pack_gqa", "sm_margin"),
}


def read(
    convention: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Call:
    """What ``function(*args, **kwargs)`` asks, by one of ``CONVENTIONS``.

    Raises Unlike for what no kernel of ours is asked: dropout, a bias with a gradient, an argument
    that the convention has not.
    """
    reader, order = CONVENTIONS[convention]
    given = _Given(_bound(function, order, args, kwargs))
    q, k, v = (given.tensor(name) for name in "qkv")
    if given.value("dropout_p"):
        raise Unlike("it has dropout")
    call = reader(q, k, v, given)
    given.check()
    return call


def _bound(
    function: Callable[..., Any],
    order: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[str, Any]:
    """Arguments by meaning; those at their defaults too."""
    names, defaults = _signature(function)
    if not names:
        names = ["q", "k", "v", *order]
    if len(args) > len(names):
        raise Unlike(f"it has {len(args)} arguments")
    found = defaults | dict(zip(names, args, strict=False)) | kwargs
    first = dict(zip(names[:3], "qkv", strict=True)) | {"query": "q", "key": "k", "value": "v"}
    return {first.get(name, _MEANINGS.get(name, name)): value for name, value in found.items()}


def _signature(function: Callable[..., Any]) -> tuple[list[str], dict[str, Any]]:
    """Names in their order, and defaults; none of a function whose signature says nothing."""
    owner = getattr(function, "__self__", None)
    applied = isinstance(owner, type) and issubclass(owner, torch.autograd.Function)
    read_of: Callable[..., Any] = owner.forward if applied else function  # type: ignore[union-attr]  # it is one
    try:
        parameters = list(inspect.signature(read_of).parameters.values())
    except (TypeError, ValueError):
        return [], {}
    parameters = parameters[1:] if applied else parameters
    if any(one.kind is one.VAR_POSITIONAL for one in parameters) or len(parameters) < len("qkv"):
        return [], {}
    named = [one for one in parameters if one.kind is not one.VAR_KEYWORD]
    return [one.name for one in named], {
        one.name: one.default for one in named if one.default is not one.empty
    }


class _Given:
    """Arguments by meaning, and which of them were looked at."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self._seen = {"q", "k", "v", "dropout_p", *_NO_MATTER}

    def tensor(self, name: str) -> torch.Tensor:
        """One that must be there."""
        value = self.value(name)
        if not isinstance(value, torch.Tensor):
            raise Unlike(f"its {name} is {type(value).__name__}")
        return value

    def value(self, name: str, usual: Any = None) -> Any:
        """One that may be left out."""
        self._seen.add(name)
        return self._values.get(name, usual)

    def check(self) -> None:
        """Raises Unlike for an argument that means something and that nobody looked at."""
        for name in sorted(set(self._values) - self._seen):
            value = self._values[name]
            if isinstance(value, torch.Tensor) or (value is not None and value not in (0, "")):
                raise Unlike(f"it is given {name}")


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: _Given) -> Call:
    mask: Spec | torch.Tensor = Spec.of("causal") if given.value("is_causal") else FULL
    score, table = None, given.value("attn_mask")
    if table is not None:
        if not isinstance(table, torch.Tensor) or mask != FULL:
            raise Unlike("its mask is no tensor, or is_causal is set beside it")
        if table.requires_grad:
            raise Unlike("its mask has a gradient")
        if table.dtype is torch.bool:
            mask = table
        else:
            whole = (*q.shape[:3], k.shape[2])
            score = bias(table.float().expand(whole) if table.dim() < len(whole) else table.float())
    _check_heads(q, k, grouped=given.value("enable_gqa", usual=True))
    return Call(
        q=q,
        k=k,
        v=v,
        mask=mask,
        score=score,
        scale=given.value("scale"),
        sink=given.value("sinks"),
        returned=_with_lse(given, lambda out: out, lambda lse: lse),
    )


def _flash_attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: _Given) -> Call:
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    lengths = (q.shape[2], k.shape[2])
    left, right = _window(given)
    return Call(
        q=q,
        k=k,
        v=v,
        mask=banded(left, right, *lengths),
        score=_score(given, q.shape[1], lengths[1] - lengths[0], causal=right == 0),
        scale=given.value("scale"),
        sink=given.value("sinks"),
        returned=_with_lse(given, lambda out: out.transpose(1, 2), lambda lse: lse),
    )


def _varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: _Given) -> Call:
    starts = [given.tensor(f"cu_seqlens_{side}").tolist() for side in "qk"]
    if [each[-1] for each in starts] != [len(q), len(k)]:
        raise Unlike("its sequences end elsewhere than its tensors")
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    left, right = _window(given)
    even = starts[0] == starts[1]
    if not even and given.value("alibi_slopes") is not None:
        raise Unlike("it has slopes, and other numbers of rows than of keys")
    return Call(
        q=q,
        k=k,
        v=v,
        mask=packed_band(left, right, *starts, device=q.device),
        score=_score(given, q.shape[1], 0, causal=right == 0),
        scale=given.value("scale"),
        sink=given.value("sinks"),
        returned=_with_lse(given, lambda out: out[0].transpose(0, 1), lambda lse: lse[0]),
    )


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: _Given) -> Call:
    blocks, mask = given.value("block_mask"), given.value("mask_mod")
    _check_heads(q, k, grouped=given.value("enable_gqa"))
    aux = given.value("return_aux")
    if aux is not None and aux.max_scores:
        raise Unlike("it asks for the largest scores")

    def returned(outputs: Outputs) -> Any:
        if aux is not None:
            from torch.nn.attention.flex_attention import AuxOutput

            return outputs.out, AuxOutput(lse=outputs.lse if aux.lse else None)
        return (outputs.out, outputs.lse) if given.value("return_lse") else outputs.out

    given.value("return_lse")
    return Call(
        q=q,
        k=k,
        v=v,
        mask=blocks.mask_mod if blocks is not None else mask or FULL,
        score=given.value("score_mod"),
        scale=given.value("scale"),
        returned=returned,
    )


def _check_heads(q: torch.Tensor, k: torch.Tensor, *, grouped: bool) -> None:
    if q.dim() == k.dim() == 4 and q.shape[1] != k.shape[1] and not grouped:  # axes
        raise Unlike("q and k have other heads, without enable_gqa")


def _window(given: _Given) -> tuple[int, int]:
    """``(left, right)``; -1 is no limit."""
    left, right = given.value("window_size") or (-1, -1)
    left, right = (-1 if side is None else side for side in (left, right))
    return left, 0 if given.value("is_causal") else right


def _score(given: _Given, heads: int, offset: int, *, causal: bool) -> Spec | Mod | None:
    slopes, cap = given.value("alibi_slopes"), given.value("softcap") or 0.0
    return capped_and_sloped(cap, slopes, heads, offset, causal=causal)


def _with_lse(given: _Given, out: Mod, lse: Mod) -> Callable[[Outputs], Any]:
    """As flash-attn gives it: out, or out, LSE and what dropout left, None."""
    asked = given.value("return_lse")
    three = "deterministic" in given._values  # this module's own

    def returned(outputs: Outputs) -> Any:
        if not asked:
            return out(outputs.out)
        assert outputs.lse is not None, "a kernel of ours gives it"
        found = (out(outputs.out), lse(outputs.lse))
        return (*found, None) if three else found

    return returned


CONVENTIONS = {
    "sdpa": (_sdpa, _SDPA),
    "flash_attn": (_flash_attn, _FLASH),
    "varlen": (_varlen, _VARLEN),
    "flex": (_flex, _FLEX),
}
"""Readers by name, each with what the convention takes beyond q, k and v, in its order."""
