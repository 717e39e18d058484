"""Windows, sequences and slopes as a caller passes them → masks and score mods."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from attncheck.formats import fp32
from attncheck.mods.library import FULL, alibi_slopes
from attncheck.mods.scores import softcap
from attncheck.mods.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    Mod = Callable[..., Tensor]

__all__ = ["banded", "capped_and_sloped", "packed_band"]

_FAR = 2**30  # beyond any key


def banded(left: int, right: int, query: int, kv: int) -> Spec | Mod:
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


def packed_band(
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
        of_one = banded(left, right, 1, 1)
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


def capped_and_sloped(
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
