"""Masks that are bands along the diagonal ↔ the windows, flags and slopes that kernels take."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from attncheck.core.formats import fp32
from attncheck.core.mod_spec import FULL, Spec
from attncheck.mods.scores import alibi_slopes, softcap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from attncheck.mods.masks import Band
    from attncheck.subjects.conventions.layouts import Lengths

    Mod = Callable[..., Tensor]

_FAR = 2**30  # beyond any key


# ------------------------------------------------------------------ masks → windows


def diagonal_offset(lengths: Lengths, *, bottom_right: bool) -> int:
    """``j - i`` on the diagonal: 0 where it is aligned top-left, else what ends in the corner."""
    query, kv = lengths
    return kv - query if bottom_right else 0


def band_window(
    band: Band,
    sequences: Iterable[Lengths],
    *,
    bottom_right: bool,
    leads: Iterable[int] | None = None,
) -> tuple[int, int] | None:
    """``(left, right)`` with which a kernel's window is ``band`` in every sequence.

    Row i of such a window sees the keys ``i + offset - left`` to ``i + offset + right``; -1 is no
    limit. None where no window is it: the diagonal lies elsewhere, or differs between sequences.

    Args:
        bottom_right: How the window is aligned.
        leads: By how much the index of a sequence's first key is above that of its first row, for
            each; None: by nothing.
    """
    alive = [
        (query - lead, kv + lead, diagonal_offset((query, kv), bottom_right=bottom_right) + lead)
        for (query, kv), lead in zip(
            sequences, itertools.repeat(0) if leads is None else leads, strict=False
        )
        if min(query, kv) > 0  # others see nothing
    ]
    low, high = band.least, band.most
    # Of a window's left edge everything is mirrored: rows for keys, and signs.
    left = _edge(None if low is None else -low, [(query, -at) for query, _, at in alive])
    right = _edge(high, [(kv, at) for _, kv, at in alive])
    return None if left is None or right is None else (left, right)


def _edge(limit: int | None, sequences: list[tuple[int, int]]) -> int | None:
    """The number for ``limit`` that holds in all sequences of (first index beyond, offset)."""
    if limit is None:
        return -1

    def holds(edge: int, end: int, at: int) -> bool:
        beyond = limit >= end - 1  # both may be beyond the last key
        if edge < 0:
            return beyond
        return edge + at == limit or (beyond and edge + at >= end - 1)

    exact = [limit - at for _, at in sequences if limit >= at]
    for edge in [*exact, -1]:
        if all(holds(edge, end, at) for end, at in sequences):
            return edge
    return None


# ------------------------------------------------------------------ windows → masks


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
    """The mask of a window in each of several sequences, one behind the other.

    Args:
        rows: Where each sequence's rows begin, and where the last one's end.
        keys: The same of keys.
    """
    query_lengths, kv_lengths = (
        tuple(end - start for start, end in itertools.pairwise(starts)) for starts in (rows, keys)
    )
    if query_lengths == kv_lengths:
        of_one = window_mask(left, right, 1, 1)
        document = Spec.of("document", lengths=query_lengths)
        if isinstance(of_one, Spec):
            return document if of_one == FULL else Spec.of("and", document, of_one)
    elif left < 0 and right < 0:
        return Spec.of("documents", query_lengths=query_lengths, kv_lengths=kv_lengths)
    first_key, last_key = [], []  # that each row sees
    for number, query in enumerate(query_lengths):
        first, end = keys[number : number + 2]
        for own in range(end - query, end):  # the key on each row's diagonal
            first_key.append(max(first, own - left) if left >= 0 else first)
            last_key.append(min(end - 1, own + right) if right >= 0 else end - 1)
    low, high = (torch.tensor(each, device=device) for each in (first_key, last_key))

    def seen(_b: Tensor, _h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx >= low[q_idx]) & (kv_idx <= high[q_idx])

    return seen


def softcap_and_slopes(
    cap: float, slopes: Tensor | None, heads: int, offset: int, *, causal: bool
) -> Spec | Mod | None:
    r"""A softcap and then slopes, as flash-attn has them: −slope · \\|i + offset − j\\|.

    Args:
        cap: 0 for none.
        slopes: ``(heads,)`` or ``(batch, heads)``; None for none.
        offset: By how much a row's own key is above it.
        causal: Whether no row sees a key after its own.
    """
    capped = Spec.of("softcap", cap=float(cap)) if cap else None
    if slopes is None:
        return capped
    usual = slopes.dim() == 1 and slopes.float().tolist() == list(alibi_slopes(heads))
    if causal and not offset and usual:
        sloped = Spec.of("alibi")
        return Spec.of("chain", capped, sloped) if capped else sloped
    bend = softcap(fp32(cap)) if cap else None
    by_batch = slopes.float().expand(1, -1) if slopes.dim() == 1 else slopes.float()
    per_batch = len(by_batch) > 1

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        bent = bend(score, b, h, q_idx, kv_idx) if bend else score
        slope = by_batch[b, h] if per_batch else by_batch[b * 0, h]
        return bent - slope.to(score.dtype) * (q_idx + offset - kv_idx).abs()

    return score_mod
