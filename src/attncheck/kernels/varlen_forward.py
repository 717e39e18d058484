"""FlashAttention-2 forward of packed documents in Triton, for any mask and score mod.

Documents are concatenated without padding, as in flash-attn's ``flash_attn_varlen_func``
(https://github.com/Dao-AILab/flash-attention). The recurrence is Dao 2023 (arXiv:2307.08691),
Algorithm 1; a program owns some rows of one document and walks over that document's keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import triton
import triton.language as tl

from attncheck.core.errors import UsageError
from attncheck.inputs.input_tensors import Descale
from attncheck.kernels.compilation import sound_assembler
from attncheck.kernels.launch import COUNTS, LOG2E, Launch, block_dim, scales
from attncheck.kernels.tile import (
    factor_of,
    hidden,
    key_rows,
    loaded,
    loaded_keys,
    loaded_values,
    log_sum,
    normalised,
    power,
    scores,
    started,
    update_softmax,
    visible,
    with_values,
)
from attncheck.mods.to_triton import TritonMod

Causal = Literal["", "top_left", "bottom_right"]
"""A causal flag within documents of n rows and m keys: the last key that row i sees is i for
``top_left``, i + m − n for ``bottom_right``; with the empty string row i sees all keys."""


def program_list(query_lengths: Sequence[int], block_query: int) -> torch.Tensor:
    """Return the first row of each program: int32 ``(programs, 2)``, (document, row).

    Rows count from the document's first one. Raises UsageError where no document has a row.
    """
    programs = [
        (document, first)
        for document, length in enumerate(query_lengths)
        for first in range(0, length, block_query)
    ]
    if not programs:
        raise UsageError(f"query_lengths={tuple(query_lengths)}: no document has a row.")
    return torch.tensor(programs, dtype=torch.int32)


def varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    programs: torch.Tensor,
    scale: float,
    launch: Launch,
    causal: Causal = "",
    mask: TritonMod | None = None,
    score: TritonMod | None = None,
    places: torch.Tensor | None = None,
    descale: Descale | None = None,
    sink: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of each document's rows over its keys and values, and its log-sum-exp.

    Args:
        q: ``(total_query, heads, head_dim)``, any strides.
        k: ``(total_kv, kv_heads, head_dim)``; kv_heads divides heads.
        v: ``(total_kv, kv_heads, value_dim)``.
        cu_seqlens_q: The first row of each document, and the end of the last one, int32
            ``(documents + 1,)``, from 0 to total_query. A document may have no row.
        cu_seqlens_k: The first key of each document, and the end of the last one; keys outside of
            this range are in no document.
        programs: ``program_list`` of the documents' query lengths and ``launch.block_query``.
        causal: A causal flag, which holds besides ``mask``.
        mask: The traced mask within documents; None shows all their keys.
        places: Each document's indices as the mods see them, int32 ``(documents, 3)``: its b, and
            q_idx and kv_idx of its first row and key. None: indices count from 0 in each
            document, and b is its number.
        descale: In fp8, the factors of the stored numbers, fp32 ``(documents, kv_heads)`` each.
        sink: A natural logit per head, fp32 ``(heads,)``: the score of one more key of value 0.
        out_dtype: The dtype of out (default: q's).

    Returns:
        out ``(total_query, heads, value_dim)`` and LSE ``(heads, total_query)`` in fp32, natural
        log. Rows that see no key: 0 and −∞, or with a sink 0 and the sink. For non-finite values
        and large scores see ``flash2_forward``.
    """
    total, heads, head_dim = q.shape
    kv_heads, value_dim = k.shape[1], v.shape[2]
    out = torch.empty((total, heads, value_dim), dtype=out_dtype or q.dtype, device=q.device)
    lse = torch.empty((heads, total), dtype=torch.float32, device=q.device)
    identity = score is None
    # ``power`` stands in for an absent mod, and is not called: a constexpr has to be hashable.
    functions = [power if mod is None else mod.function for mod in (mask, score)]
    # fmt: off
    with sound_assembler(q.device.type):
        _forward[len(programs), heads](
            q, k, v, out, lse, *q.stride(), *k.stride(), *v.stride(), *out.stride(), cu_seqlens_q,
            cu_seqlens_k, programs, places, sink, heads // kv_heads, kv_heads, total, head_dim,
            value_dim, scale * LOG2E if identity else scale, scales(descale),
            () if mask is None else mask.captured, () if score is None else score.captured,
            MASK=functions[0], SCORE=functions[1], ALL=mask is None, IDENTITY=identity,
            CAUSAL=causal != "", BOTTOM_RIGHT=causal == "bottom_right", LOCAL=places is None,
            SINK=sink is not None, SCALED=descale is not None,
            WEIGHTS_SCALE=launch.weights_scale, BLOCK_Q=launch.block_query,
            BLOCK_K=launch.block_kv, BLOCK_D=block_dim(head_dim, q.dtype),
            BLOCK_V=block_dim(value_dim, v.dtype), PRECISION=launch.precision,
            IMPRECISE=launch.max_num_imprecise_acc, num_warps=launch.warps,
            num_stages=launch.stages,
        )
    # fmt: on
    return out, lse


# Forty parameters are easier to read on five lines than in a column.
# fmt: off
@triton.jit(do_not_specialize=COUNTS)
def _forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, q_row, q_head, q_col, k_row, k_head, k_col, v_row,
    v_head, v_col, out_row, out_head, out_col, query_starts, kv_starts, programs, places, sink,
    group, kv_heads, total_query, head_dim, value_dim, factor, descale, mask_captured,
    score_captured, MASK: tl.constexpr, SCORE: tl.constexpr, ALL: tl.constexpr,
    IDENTITY: tl.constexpr, CAUSAL: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, LOCAL: tl.constexpr,
    SINK: tl.constexpr, SCALED: tl.constexpr, WEIGHTS_SCALE: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
    IMPRECISE: tl.constexpr,
):
    document = tl.load(programs + 2 * tl.program_id(0))
    first_row = tl.load(programs + 2 * tl.program_id(0) + 1)
    h = tl.program_id(1)
    kv_head = h // group
    query_start = tl.load(query_starts + document)
    query = tl.load(query_starts + document + 1) - query_start
    kv_start = tl.load(kv_starts + document)
    kv = tl.load(kv_starts + document + 1) - kv_start
    if LOCAL:
        b, first_q_idx, first_kv_idx = document, 0, 0
    else:
        b = tl.load(places + 3 * document)
        first_q_idx = tl.load(places + 3 * document + 1)
        first_kv_idx = tl.load(places + 3 * document + 2)

    rows = first_row + tl.arange(0, BLOCK_Q)
    value_cols = tl.arange(0, BLOCK_V)
    q_ptr += query_start.to(tl.int64) * q_row + h.to(tl.int64) * q_head
    k_ptr += kv_start.to(tl.int64) * k_row + kv_head.to(tl.int64) * k_head
    v_ptr += kv_start.to(tl.int64) * v_row + kv_head.to(tl.int64) * v_head
    q_block = loaded(q_ptr, rows, tl.arange(0, BLOCK_D), q_row, q_col, query, head_dim)
    scales_at = document * kv_heads + kv_head
    factor = factor_of(factor, descale, scales_at, SCALED)
    m, total = started(sink, h, SINK, IDENTITY, BLOCK_Q)
    acc = tl.zeros([BLOCK_Q, BLOCK_V], tl.float32)

    end = kv
    diagonal = 0  # the last key that the causal flag shows to row i is i + diagonal
    if BOTTOM_RIGHT:
        diagonal = kv - query
    if CAUSAL:
        end = tl.minimum(kv, first_row + BLOCK_Q + diagonal)  # below 0 where no row sees a key
    whole = 0  # keys before it are visible to every row of the block
    if ALL:
        whole = kv // BLOCK_K * BLOCK_K
        if CAUSAL:
            seen_by_first = tl.maximum(0, tl.minimum(kv, first_row + 1 + diagonal))
            whole = seen_by_first // BLOCK_K * BLOCK_K
        for start in range(0, whole, BLOCK_K):
            m, total, acc = _step(
                start, q_block, k_ptr, v_ptr, k_row, k_col, v_row, v_col, m, total, acc, b, h,
                rows, kv, diagonal, first_q_idx, first_kv_idx, head_dim, value_dim, factor,
                mask_captured, score_captured, MASK, SCORE, ALL, IDENTITY, CAUSAL, False,
                WEIGHTS_SCALE, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_V, PRECISION, IMPRECISE,
            )
    for start in range(whole, end, BLOCK_K):
        m, total, acc = _step(
            start, q_block, k_ptr, v_ptr, k_row, k_col, v_row, v_col, m, total, acc, b, h, rows,
            kv, diagonal, first_q_idx, first_kv_idx, head_dim, value_dim, factor, mask_captured,
            score_captured, MASK, SCORE, ALL, IDENTITY, CAUSAL, True, WEIGHTS_SCALE, BLOCK_Q,
            BLOCK_K, BLOCK_D, BLOCK_V, PRECISION, IMPRECISE,
        )

    out = normalised(acc, total)
    if SCALED:
        out = out * (tl.load(descale[2] + scales_at) / WEIGHTS_SCALE)
    row_of_all = query_start.to(tl.int64) + rows
    tl.store(
        out_ptr
        + h.to(tl.int64) * out_head
        + row_of_all[:, None] * out_row
        + value_cols[None, :] * out_col,
        out.to(out_ptr.dtype.element_ty),
        mask=(rows[:, None] < query) & (value_cols[None, :] < value_dim),
    )
    tl.store(
        lse_ptr + h.to(tl.int64) * total_query + row_of_all,
        log_sum(m, total, IDENTITY),
        mask=rows < query,
    )


@triton.jit
def _step(
    start, q_block, k_ptr, v_ptr, k_row, k_col, v_row, v_col, m, total, acc, b, h, rows, kv,
    diagonal, first_q_idx, first_kv_idx, head_dim, value_dim, factor, mask_captured,
    score_captured, MASK: tl.constexpr, SCORE: tl.constexpr, ALL: tl.constexpr,
    IDENTITY: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    WEIGHTS_SCALE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
    IMPRECISE: tl.constexpr,
):
    """Add one block of keys; rows and keys count from the document's first ones."""
    keys = start + tl.arange(0, BLOCK_K)
    q_idx = first_q_idx + rows
    kv_idx = first_kv_idx + keys
    k_block = loaded_keys(
        k_ptr, key_rows(keys, kv, k_row, 0, k_ptr, 0), k_col, keys, kv, head_dim, BLOCK_D
    )
    s = scores(
        q_block, k_block, b, h, q_idx, kv_idx, factor, score_captured, SCORE, IDENTITY, PRECISION,
        IMPRECISE,
    )
    seen = (keys < kv)[None, :]  # of no effect if not MASKED
    if MASKED:
        if CAUSAL:
            seen = seen & (keys[None, :] <= rows[:, None] + diagonal)
        if ALL:
            seen = tl.broadcast_to(seen, [BLOCK_Q, BLOCK_K])
        else:
            seen = seen & visible(
                b, h, q_idx, kv_idx, first_kv_idx + kv, mask_captured, MASK, BLOCK_Q, BLOCK_K
            )
        s = hidden(s, seen)
    p, alpha, m, total = update_softmax(s, m, total, IDENTITY)
    v_block = loaded_values(
        v_ptr, key_rows(keys, kv, v_row, 0, v_ptr, 0), v_col, keys, kv, value_dim, BLOCK_V
    )
    acc = with_values(
        p, v_block, seen, acc * alpha[:, None], MASKED, WEIGHTS_SCALE, PRECISION, IMPRECISE
    )
    return m, total, acc


# fmt: on
