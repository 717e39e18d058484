"""Converts masks that are bands along the diagonal to windows and flags of kernels, and back."""

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
    from attncheck.subjects.conventions.parse import CallArguments

    Mod = Callable[..., Tensor]

_UNLIMITED = 2**30  # beyond any key


# ------------------------------------------------------------------ masks → windows


def diagonal_offset(lengths: Lengths, *, bottom_right: bool) -> int:
    """Return ``j - i`` on the diagonal: 0 if aligned top-left, kv - query if bottom-right."""
    query, kv = lengths
    return kv - query if bottom_right else 0


def band_window(
    band: Band,
    sequences: Iterable[Lengths],
    *,
    bottom_right: bool,
    leads: Iterable[int] | None = None,
    aligned: bool = False,
) -> tuple[int, int] | None:
    """Return ``(left, right)`` of the kernel's window that equals ``band`` in every sequence.

    Row i of such a window sees the keys ``i + offset - left`` to ``i + offset + right``; -1 is no
    limit. None if there is none: the diagonal lies elsewhere, or differs between sequences.

    Args:
        bottom_right: Whether the window is aligned bottom-right.
        leads: The index of each sequence's first key minus that of its first row; None: 0.
        aligned: Whether the band counts from the key of each sequence's row, if the last row has
            the last key, and not from the row's index; ``leads`` are then of no account.
    """
    sequences = list(sequences)
    if aligned:  # as if the sequence's first key came so much before its first row
        leads = [query - kv for query, kv in sequences]
    nonempty = [
        (query - lead, kv + lead, diagonal_offset((query, kv), bottom_right=bottom_right) + lead)
        for (query, kv), lead in zip(
            sequences, itertools.repeat(0) if leads is None else leads, strict=False
        )
        if min(query, kv) > 0  # other sequences have nothing to see
    ]
    low, high = band.least, band.most
    # The left edge is the right one mirrored: rows in place of keys, and opposite signs.
    left = _edge(None if low is None else -low, [(query, -at) for query, _, at in nonempty])
    right = _edge(high, [(kv, at) for _, kv, at in nonempty])
    return None if left is None or right is None else (left, right)


def _edge(limit: int | None, sequences: list[tuple[int, int]]) -> int | None:
    """Return the window's edge for ``limit`` in all sequences of (end index, offset), or None."""
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
    """Return the mask in which row i sees keys i + kv − query − left to i + kv − query + right.

    -1 is no limit. The mask is one of the library if possible, because kernels know their names.
    """
    offset = kv - query
    if left < 0 and right < 0:
        return FULL
    if left < 0 and right == 0:
        return Spec.of("causal_bottom_right" if offset else "causal")
    if right == 0 and offset >= 0:
        window = Spec.of("sliding_window", window=left + 1)
        return Spec.of("offset", window, rows=offset) if offset else window
    low = offset - left if left >= 0 else -_UNLIMITED
    high = offset + right if right >= 0 else _UNLIMITED

    def seen(_b: Tensor, _h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx - q_idx >= low) & (kv_idx - q_idx <= high)

    return seen


def packed_window_mask(
    left: int, right: int, rows: Sequence[int], keys: Sequence[int], *, device: torch.device
) -> Spec | Mod:
    """Return the mask of a window in each of several packed sequences.

    Args:
        rows: The first row of each sequence, and the end of the last sequence.
        keys: The first key of each sequence, and the end of the last sequence.
    """
    query_lengths, kv_lengths = (
        tuple(end - start for start, end in itertools.pairwise(starts)) for starts in (rows, keys)
    )
    if query_lengths == kv_lengths:
        window = window_mask(left, right, 1, 1)
        document = Spec.of("document", lengths=query_lengths)
        if isinstance(window, Spec):
            return document if window == FULL else Spec.of("and", document, window)
    elif left < 0 and right < 0:
        return Spec.of("documents", query_lengths=query_lengths, kv_lengths=kv_lengths)
    first_key, last_key = [], []  # of those that each row sees
    for number, query in enumerate(query_lengths):
        first, end = keys[number : number + 2]
        for diagonal in range(end - query, end):
            first_key.append(max(first, diagonal - left) if left >= 0 else first)
            last_key.append(min(end - 1, diagonal + right) if right >= 0 else end - 1)
    low, high = (torch.tensor(each, device=device) for each in (first_key, last_key))

    def seen(_b: Tensor, _h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx >= low[q_idx]) & (kv_idx <= high[q_idx])

    return seen


def softcap_and_slopes(
    call: CallArguments, heads: int, offset: int, *, causal: bool
) -> Spec | Mod | None:
    r"""Return a call's softcap followed by flash-attn's slopes, −slope · \\|i + offset − j\\|.

    Args:
        offset: Row i is on the diagonal at key i + offset.
        causal: Whether rows see no keys after the diagonal.
    """
    slopes: Tensor | None = call.value("alibi_slopes")  # ``(heads,)`` or ``(batch, heads)``
    cap = call.value("softcap") or 0.0
    capped = Spec.of("softcap", cap=float(cap)) if cap else None
    if slopes is None:
        return capped
    is_alibi = slopes.dim() == 1 and slopes.float().tolist() == list(alibi_slopes(heads))
    if causal and not offset and is_alibi:
        sloped = Spec.of("alibi")
        return Spec.of("chain", capped, sloped) if capped else sloped
    apply_cap = softcap(fp32(cap)) if cap else None
    by_batch = slopes.float().expand(1, -1) if slopes.dim() == 1 else slopes.float()
    per_batch = len(by_batch) > 1

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        capped_score = apply_cap(score, b, h, q_idx, kv_idx) if apply_cap else score
        slope = by_batch[b, h] if per_batch else by_batch[b * 0, h]
        return capped_score - slope.to(score.dtype) * (q_idx + offset - kv_idx).abs()

    return score_mod
