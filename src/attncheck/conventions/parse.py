"""Calls of somebody's function, read as the problem that they are."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attncheck.conventions.convention import SINKS
from attncheck.core.formats import fp32
from attncheck.mods.library import FULL
from attncheck.mods.scores import alibi_slopes, bias, softcap
from attncheck.mods.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from attncheck.core.outputs import Outputs

    Mod = Callable[..., Tensor]

__all__ = [
    "READERS",
    "ParsedCall",
    "UnreadableCall",
    "packed_window_mask",
    "parse_call",
    "softcap_and_slopes",
    "window_mask",
]


_FAR = 2**30  # beyond any key


def window_mask(left: int, right: int, query: int, kv: int) -> Spec | Mod:
    """The mask of a window: row i sees keys from i + kv − query − left to i + kv − query + right.

    One of the library where there is one: kernels know those by name. -1 is no limit.
    """
    offset = kv - query
    if left < 0 and right < 0:
        return FULL
    if left < 0 and right == 0:
        return Spec.of("causal_bottom_right" if offset else "causal")
    if right == 0 and offset >= 0:
        window = Spec.of("sliding_window", window=left + 1)
        return Spec.of("offset", window, rows=offset) if offset else window
    low = offset - left if left >= 0 else -_FAR
    high = offset + right if right >= 0 else _FAR

    def seen(_b: Tensor, _h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx - q_idx >= low) & (kv_idx - q_idx <= high)

    return seen


def packed_window_mask(
    left: int, right: int, rows: Sequence[int], keys: Sequence[int], *, device: torch.device
) -> Spec | Mod:
    """The same in each of several sequences, one behind the other.

    Args:
        left: As of a window.
        right: As of a window.
        rows: Where each sequence's rows begin, and where the last one's end.
        keys: The same of keys.
        device: Of what a mask captures.
    """
    query_lengths, kv_lengths = (_differences(each) for each in (rows, keys))
    if query_lengths == kv_lengths:
        of_one = window_mask(left, right, 1, 1)
        document = Spec.of("document", lengths=query_lengths)
        if isinstance(of_one, Spec):
            return document if of_one == FULL else Spec.of("and", document, of_one)
    elif left < 0 and right < 0:
        return Spec.of("documents", query_lengths=query_lengths, kv_lengths=kv_lengths)
    low, high = (torch.tensor(each, device=device) for each in _limits(left, right, rows, keys))

    def seen(_b: Tensor, _h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx >= low[q_idx]) & (kv_idx <= high[q_idx])

    return seen


def _limits(
    left: int, right: int, rows: Sequence[int], keys: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The first and last key that each row sees."""
    low, high = [], []
    for number in range(len(rows) - 1):
        first, end = keys[number : number + 2]
        query, offset = rows[number + 1] - rows[number], end - first
        for row in range(query):
            own = first + row + offset - query
            low.append(max(first, own - left) if left >= 0 else first)
            high.append(min(end - 1, own + right) if right >= 0 else end - 1)
    return low, high


def _differences(starts: Sequence[int]) -> tuple[int, ...]:
    return tuple(b - a for a, b in itertools.pairwise(starts))


def softcap_and_slopes(
    cap: float, slopes: Tensor | None, heads: int, offset: int, *, causal: bool
) -> Spec | Mod | None:
    r"""A softcap and then slopes, as flash-attn has them: −slope · \\|i + offset − j\\|.

    Args:
        cap: 0 for none.
        slopes: ``(heads,)`` or ``(batch, heads)``; None for none.
        heads: How many.
        offset: By how much a row's own key is above it.
        causal: Whether no row sees a key after its own.
    """
    capped = Spec.of("softcap", cap=float(cap)) if cap else None
    if slopes is None:
        return capped
    if causal and not offset and _usual(slopes, heads):
        sloped = Spec.of("alibi")
        return Spec.of("chain", capped, sloped) if capped else sloped
    bend = softcap(fp32(cap)) if cap else None
    each = slopes.float().expand(1, -1) if slopes.dim() == 1 else slopes.float()
    per_batch = len(each) > 1

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        bent = bend(score, b, h, q_idx, kv_idx) if bend else score
        slope = each[b, h] if per_batch else each[b * 0, h]
        return bent - slope.to(score.dtype) * (q_idx + offset - kv_idx).abs()

    return score_mod


def _usual(slopes: Tensor, heads: int) -> bool:
    return slopes.dim() == 1 and slopes.float().tolist() == list(alibi_slopes(heads))


class UnreadableCall(Exception):
    """What a call asks is nothing that a kernel of ours is asked: why, in a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
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


def parse_call(
    convention: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ParsedCall:
    """What ``function(*args, **kwargs)`` asks, by one of ``CONVENTIONS``.

    Raises Unlike for what no kernel of ours is asked: dropout, a bias with a gradient, an argument
    that the convention has not.
    """
    reader, order = READERS[convention]
    given = _Given(_bound(function, order, args, kwargs))
    q, k, v = (given.tensor(name) for name in "qkv")
    if given.value("dropout_p"):
        raise UnreadableCall("it has dropout")
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
        raise UnreadableCall(f"it has {len(args)} arguments")
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
            raise UnreadableCall(f"its {name} is {type(value).__name__}")
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
                raise UnreadableCall(f"it is given {name}")


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: _Given) -> ParsedCall:
    mask: Spec | torch.Tensor = Spec.of("causal") if given.value("is_causal") else FULL
    score, table = None, given.value("attn_mask")
    if table is not None:
        if not isinstance(table, torch.Tensor) or mask != FULL:
            raise UnreadableCall("its mask is no tensor, or is_causal is set beside it")
        if table.requires_grad:
            raise UnreadableCall("its mask has a gradient")
        if table.dtype is torch.bool:
            mask = table
        else:
            whole = (*q.shape[:3], k.shape[2])
            score = bias(table.float().expand(whole) if table.dim() < len(whole) else table.float())
    _check_heads(q, k, grouped=given.value("enable_gqa", usual=True))
    return ParsedCall(
        q=q,
        k=k,
        v=v,
        mask=mask,
        score=score,
        scale=given.value("scale"),
        sink=given.value("sinks"),
        returned=_with_lse(given, lambda out: out, lambda lse: lse),
    )


def _flash_attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: _Given) -> ParsedCall:
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    lengths = (q.shape[2], k.shape[2])
    left, right = _window(given)
    return ParsedCall(
        q=q,
        k=k,
        v=v,
        mask=window_mask(left, right, *lengths),
        score=_score(given, q.shape[1], lengths[1] - lengths[0], causal=right == 0),
        scale=given.value("scale"),
        sink=given.value("sinks"),
        returned=_with_lse(given, lambda out: out.transpose(1, 2), lambda lse: lse),
    )


def _varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: _Given) -> ParsedCall:
    starts = [given.tensor(f"cu_seqlens_{side}").tolist() for side in "qk"]
    if [each[-1] for each in starts] != [len(q), len(k)]:
        raise UnreadableCall("its sequences end elsewhere than its tensors")
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    left, right = _window(given)
    even = starts[0] == starts[1]
    if not even and given.value("alibi_slopes") is not None:
        raise UnreadableCall("it has slopes, and other numbers of rows than of keys")
    return ParsedCall(
        q=q,
        k=k,
        v=v,
        mask=packed_window_mask(left, right, *starts, device=q.device),
        score=_score(given, q.shape[1], 0, causal=right == 0),
        scale=given.value("scale"),
        sink=given.value("sinks"),
        returned=_with_lse(given, lambda out: out[0].transpose(0, 1), lambda lse: lse[0]),
    )


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: _Given) -> ParsedCall:
    blocks, mask = given.value("block_mask"), given.value("mask_mod")
    _check_heads(q, k, grouped=given.value("enable_gqa"))
    aux = given.value("return_aux")
    if aux is not None and aux.max_scores:
        raise UnreadableCall("it asks for the largest scores")

    def returned(outputs: Outputs) -> Any:
        if aux is not None:
            from torch.nn.attention.flex_attention import AuxOutput

            return outputs.out, AuxOutput(lse=outputs.lse if aux.lse else None)
        return (outputs.out, outputs.lse) if given.value("return_lse") else outputs.out

    given.value("return_lse")
    return ParsedCall(
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
        raise UnreadableCall("q and k have other heads, without enable_gqa")


def _window(given: _Given) -> tuple[int, int]:
    """``(left, right)``; -1 is no limit."""
    left, right = given.value("window_size") or (-1, -1)
    left, right = (-1 if side is None else side for side in (left, right))
    return left, 0 if given.value("is_causal") else right


def _score(given: _Given, heads: int, offset: int, *, causal: bool) -> Spec | Mod | None:
    slopes, cap = given.value("alibi_slopes"), given.value("softcap") or 0.0
    return softcap_and_slopes(cap, slopes, heads, offset, causal=causal)


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


READERS = {
    "sdpa": (_sdpa, _SDPA),
    "flash_attn": (_flash_attn, _FLASH),
    "varlen": (_varlen, _VARLEN),
    "flex": (_flex, _FLEX),
}
"""Readers by name, each with what the convention takes beyond q, k and v, in its order."""
