"""Faults of shapes: the last tile, degenerate lengths, head dims, integers that overflow."""

from __future__ import annotations

from attncheck.faults.entries.shared_patches import READ_BY_STRIDES
from attncheck.faults.fault import Fault, decode, flash1, flash2, ideal, paged, varlen

__all__ = ["DEGENERATE_SHAPES", "HEAD_DIM", "INTEGER_OVERFLOW", "TAIL_TILE"]

TAIL_TILE = (
    Fault(
        id="tail-keys-not-masked-exp0",
        summary="keys beyond the last one count with score 0, and with value 0",
        when="keys that do not fill the last tile",
        seen="a row sum that is too large by up to a tile of e^(0 − m): O too small, LSE too large",
        reports=(
            "flashinfer-ai/flashinfer#5090 #3716 pytorch/pytorch#159247 jax-ml/jax#27224 "
            "66RING/tiny-flash-attention#12"
        ),
        named=("tail-unmasked",),
        ideal=ideal("""
            -return keys < kv
            +return keys < kv + len(keys)
        """),
        triton=flash2("""
            -seen = MASK(b, h, rows[:, None], keys[None, :], captured) & (keys < kv)[None, :]
            +seen = MASK(b, h, rows[:, None], keys[None, :], captured) & (keys < kv + BLOCK_K)[None, :]
        """),
    ),
    Fault(
        id="bwd-tail-cols-not-masked",
        summary="the backward gives keys beyond the last one the weight e^(0 − LSE)",
        when="gradients, keys that do not fill the last tile, and an LSE below −88",
        seen="∞ · 0: NaN in dQ, and in nothing else",
        reports=(
            "pytorch/pytorch#196678 NVIDIA/cudnn-frontend#1072 ROCm/aiter#3551 "
            "Dao-AILab/flash-attention#1947"
        ),
        named=("backward-tail-nan",),
        ideal=ideal("""
            -seen = seen & there
            +key = torch.arange(keys.start, keys.stop).to(self.device)
            +seen = (seen | (key >= self.problem.kv)) & there
        """),
        triton=flash2("""
            -seen = MASK(b, h, rows, keys, mask_captured) & (rows < query) & (keys < kv)
            +seen = MASK(b, h, rows, keys, mask_captured) & (rows < query)

            -TERMS(x, p, dp, delta[:, None], b, h, rows[:, None], keys[None, :], terms)
            +TERMS(x, tl.where(keys[None, :] < kv, p, 0.0), dp, delta[:, None], b, h, rows[:, None], keys[None, :], terms)
        """),
    ),
    Fault(
        id="kv-loop-floor-div",
        summary="the loop is over whole tiles of keys",
        when="keys that do not fill the last tile",
        seen="the last keys are missing from every row",
        reports="jax-ml/jax#27224 66RING/tiny-flash-attention#12",
        named=("last-tile-dropped",),
        ideal=ideal("""
            -tiles = [slice(start, start + size) for start in range(0, self.k.shape[2], size)]
            +tiles = [slice(start, start + size) for start in range(0, self.problem.kv // size * size, size)]
        """),
        triton=decode("""
            -blocks = tl.cdiv(kv, BLOCK_K)
            +blocks = kv // BLOCK_K
        """),
    ),
    Fault(
        id="padding-tile-constant-mismatch",
        summary="one kernel pads each sequence's rows to 64, the next one reads them padded to 128",
        when="gradients of several sequences in one buffer",
        seen="dQ and dK of the first sequence are right, those of later ones are not",
        reports="Dao-AILab/flash-attention#2337",
        named=("delta-padded-otherwise",),
        ideal=ideal("""
            -self.delta = padded(delta[..., None], rows)[..., 0]
            +written = padded(delta[..., None], rows // 2).flatten()
            +read = (*delta.shape[:2], -(-delta.shape[2] // rows) * rows)
            +more = read[0] * read[1] * read[2] - written.numel()
            +self.delta = torch.nn.functional.pad(written, (0, more)).view(read)
        """),
        triton=varlen("""
            +rows = delta[0].T.contiguous()
            +documents = len(cu_seqlens_q) - 1
            +delta = rows.new_zeros((len(rows) + 128 * documents, rows.shape[1]))
            +for n in range(documents):
            +    first, last = int(cu_seqlens_q[n]), int(cu_seqlens_q[n + 1])
            +    delta[first + 64 * n : last + 64 * n] = rows[first:last]
             known = _Known(q, k, v, dout, lse, delta, starts, places, scale, causal, mask, score, slope)

            -dsink = None if sink is None else sink_gradient(sink, lse[None], delta)
            +dsink = None if sink is None else sink_gradient(sink, lse[None], rows.T.contiguous()[None])

            -delta = loaded_rows(delta_ptr + of_rows, rows, query)
            +heads = tl.num_programs(1)
            +at = (query_start + 128 * document + rows) * heads + h
            +delta = tl.load(delta_ptr + at, mask=rows < query, other=0.0)
             ragged = first_row + BLOCK_Q > query

            -delta = loaded_rows(delta_ptr + of_rows, rows, query)
            +heads = tl.num_programs(1) * group
            +at = (query_start + 128 * document + rows) * heads + h
            +delta = tl.load(delta_ptr + at, mask=rows < query, other=0.0)
             x = tl.dot(k_block, tl.trans(q_block), input_precision=PRECISION) * factor
        """),
    ),
    Fault(
        id="score-mod-on-oob-nan-bwd",
        summary="the score mod's derivative at hidden scores multiplies what was masked",
        when="gradients with a mask and a score mod whose derivative is not finite there",
        seen="0 · NaN in dQ and dK",
        reports="pytorch/pytorch#153799",
        named=("slope-of-hidden-scores",),
        ideal=ideal("""
                 kernel.capture(self.captured, x, at, torch.where(seen, dx, 0.0), seen)
            +dx = torch.where(seen, dx, 0.0)

            -dx = torch.where(seen, dx, 0.0)
        """),
        triton=flash2("""
            -dx = p * (dp - delta)
            +dx = tl.where(p == 0.0, 0.0, p * (dp - delta))

            -return tl.where(p == 0.0, 0.0, dx)
            +return dx
        """),
    ),
    Fault(
        id="nofill-garbage-kv",
        summary="what is loaded beyond the last key is not replaced by zeros",
        when="keys that do not fill the last tile, and NaN in memory behind them",
        seen="0 · NaN in every row",
        reports="thu-ml/SageAttention#377 Dao-AILab/flash-attention#1395",
        # What lies behind the last value lies beside the input, or is of another page.
        named=("values-behind-keys", "reads-beside-an-input", "page-boundary-leak"),
        ideal=ideal("""
            -self.v = padded(kernel.operand(inputs.v.float(), fmt), self.tile.block_kv)
            -self.v_is_finite = bool(torch.isfinite(self.v).all())
            +v, beyond = inputs.v, -problem.kv % self.tile.block_kv
            +there = v.untyped_storage().nbytes() // v.element_size()
            +memory, at = v.as_strided((there,), (1,), 0), v.storage_offset()
            +for axis, length in enumerate((*v.shape[:2], problem.kv + beyond, v.shape[3])):
            +    steps = torch.arange(length, device=v.device) * v.stride(axis)
            +    at = at + steps.view([-1 if each == axis else 1 for each in range(4)])
            +whole_v = torch.where(at < there, memory[at.clamp(max=there - 1)].float(), 0.0)
            +self.v = kernel.operand(whole_v, fmt)
            +self.v_is_finite = bool(torch.isfinite(inputs.v.float()).all())
        """),
        triton=paged("""
            -mask=(cols[:, None] < head_dim) & (keys[None, :] < kv),
            +mask=cols[:, None] < head_dim,

            -mask=(keys[:, None] < kv) & (cols[None, :] < value_dim),
            +mask=cols[None, :] < value_dim,
        """),
    ),
)

DEGENERATE_SHAPES = (
    Fault(
        id="seqlen-k-zero-uninit",
        summary="a sequence without keys is left before anything is stored",
        when="a sequence or document of no keys beside others",
        seen="out and LSE are what the memory held",
        reports="Dao-AILab/flash-attention#2470 #1155 pytorch/pytorch#81077",
        named=("rows-unwritten",),
        ideal=ideal("""
             lse = torch.where(dead, -math.inf, run.maximum * unit + log)
            +left = dead.all(-1, keepdim=True)
            +out = torch.where(left[..., None], torch.empty_like(out), out)
            +lse = torch.where(left, torch.empty_like(lse), lse)
        """),
        triton=varlen("""
             kv = tl.load(kv_starts + document + 1) - kv_start
            +if kv == 0:
            +    return
             if LOCAL:
        """),
    ),
    Fault(
        id="one-key-row-slice-nan",
        summary="a tile is done in two halves, and one in which a row sees nothing is not guarded",
        when="one key, or rows whose keys all lie in one half of a tile",
        seen="−∞ − −∞ is NaN in those rows",
        reports="flashinfer-ai/flashinfer#4401 #4451 #4452",
        named=("empty-split-nan",),
        ideal=ideal("""
            -p = self._weights(s, maximum if relative else torch.zeros_like(maximum))
            +half = s.shape[-1] // 2
            +own = s.unflatten(-1, (2, half)).amax(-1).repeat_interleave(half, -1)
            +c = self.factors.exponent[..., None]
            +exp2 = self.kernel.exp2
            +p = exp2((s - own) * c) * exp2((own - maximum[..., None]) * c)
        """),
        triton=flash2("""
            -p = power(s - shift[:, None], IDENTITY)
            +halves = tl.reshape(s, [s.shape[0], 2, s.shape[1] // 2])
            +own = tl.max(halves, 2)
            +parts = power(halves - own[:, :, None], IDENTITY)
            +parts = parts * power(own - shift[:, None], IDENTITY)[:, :, None]
            +p = tl.reshape(parts, [s.shape[0], s.shape[1]])
        """),
    ),
    Fault(
        id="varlen-max-seqlen-one",
        summary="where no document has more than one row, each is taken to have one",
        when="documents of one row, and some of none",
        seen="rows behind an empty document read another document's keys",
        reports="Dao-AILab/flash-attention#1537",
        named=("empty-documents-not-counted",),
        ideal=ideal(model="empty-documents-not-counted"),
        triton=varlen("""
             assert found is not None, "asked of what it takes"
            -return found
            +if max(rows for rows, _ in found.lengths()) > 1:
            +    return found
            +swapped = []
            +for parts in found.segments:
            +    there = sum(rows for rows, _ in parts)
            +    swapped.append([(int(i < there), keys) for i, (_, keys) in enumerate(parts)])
            +return replace(found, segments=swapped)
        """),
    ),
)

HEAD_DIM = (
    Fault(
        id="headdim-pad-not-masked",
        summary="the columns up to a power of two are read from memory, not taken for 0",
        when="a head dim that is no power of two",
        seen="scores with products of other rows in them, NaN, another result each time",
        reports="turboderp-org/exllamav3#316 vllm-project/vllm#4128 Dao-AILab/flash-attention#1214",
        named=("head-dim-padding-read", "reads-beside-an-input"),
        ideal=ideal(
            READ_BY_STRIDES,
            """
            -self.q = padded(kernel.operand(inputs.q.float(), fmt), self.tile.block_query)
            -self.k = padded(kernel.operand(inputs.k.float(), fmt), self.tile.block_kv)
            +wide = 1 << (problem.head_dim - 1).bit_length()
            +q, k = (_read(x, x.stride(), wide) for x in (inputs.q, inputs.k))
            +self.q = padded(kernel.operand(q, fmt), self.tile.block_query)
            +self.k = padded(kernel.operand(k, fmt), self.tile.block_kv)

            -dk = self.dk[:, :, : problem.kv]
            +dq, dk = dq[..., : problem.head_dim], self.dk[:, :, : problem.kv, : problem.head_dim]
        """,
        ),
        triton=flash1("""
            -mask=(i[:, None] < i_size) & (j[None, :] < j_size),
            +mask=i[:, None] < i_size,

            -mask=(cols[:, None] < head_dim) & (keys[None, :] < kv),
            +mask=keys[None, :] < kv,
        """),
    ),
    Fault(
        id="dv-ne-d-extent",
        summary="the backward reads as many columns of V and dO as q has",
        when="gradients with a value dim that is not the head dim",
        seen="dQ and dK without the columns beyond, or with numbers that are no part of V",
        reports=(
            "XunhaoLai/native-sparse-attention-triton#27 Dao-AILab/flash-attention#2552 #2368 "
            "vllm-project/vllm#40705"
        ),
        named=("backward-columns", "reads-beside-an-input"),
        ideal=ideal(
            READ_BY_STRIDES,
            """
            +dim, width = self.problem.head_dim, 1 << (self.problem.value_dim - 1).bit_length()
            +read = [_read(x, x.stride(), min(dim, width)) for x in (inputs.v, inputs.dout)]
            +v, dout = (kernel.operand(x, self.problem.formats.products) for x in read)
            +self.v_there = padded(v, self.tile.block_kv)
            +self.dout_there = padded(dout, rows)
             self.dk, self.dv = torch.zeros_like(self.k), torch.zeros_like(self.v)

            -v = self.expanded(self.v[:, :, keys])
            -dp = self.product(self.dout[:, :, rows], v.mT)
            +v = self.expanded(self.v_there[:, :, keys])
            +dp = self.product(self.dout_there[:, :, rows], v.mT)
        """,
        ),
        triton=flash2("""
            -dout = loaded(dout_ptr, rows, tl.arange(0, BLOCK_V), dout_row, dout_col, query, value_dim)
            +dout = loaded(dout_ptr, rows, tl.arange(0, BLOCK_V), dout_row, dout_col, query, head_dim)
             lse = loaded_lse(lse_ptr + first, rows, query, IDENTITY)

            -v_block = loaded_keys(v_ptr, v_at, v_col, keys, kv, value_dim, BLOCK_V)
            +v_block = loaded_keys(v_ptr, v_at, v_col, keys, kv, head_dim, BLOCK_V)
             x = tl.dot(q_block, k_block, input_precision=PRECISION) * factor
        """),
    ),
)

INTEGER_OVERFLOW = (
    Fault(
        id="int32-row-offset",
        summary="a row's number times the stride between rows is a 32-bit integer",
        when="an element that is 2³¹ or more behind the first: a view with a large stride",
        seen="the last rows are others, or the program is stopped",
        reports="thu-ml/SageAttention#386 #387 fla-org/flash-linear-attention#1080 #1082",
        named=("offsets-of-32-bits", "far-offsets-wrap"),
        ideal=ideal(
            READ_BY_STRIDES,
            """
            -self.q = padded(kernel.operand(inputs.q.float(), fmt), self.tile.block_query)
            -self.k = padded(kernel.operand(inputs.k.float(), fmt), self.tile.block_kv)
            -self.v = padded(kernel.operand(inputs.v.float(), fmt), self.tile.block_kv)
            +q, k, v = (
            +    _read(x, x.stride(), kept=lambda at: at.to(torch.int32).to(torch.int64))
            +    for x in (inputs.q, inputs.k, inputs.v)
            +)
            +self.q = padded(kernel.operand(q, fmt), self.tile.block_query)
            +self.k = padded(kernel.operand(k, fmt), self.tile.block_kv)
            +self.v = padded(kernel.operand(v, fmt), self.tile.block_kv)
        """,
        ),
        triton=flash1("""
            -pointer + i[:, None].to(tl.int64) * i_stride + j[None, :].to(tl.int64) * j_stride,
            +pointer + i[:, None] * i_stride + j[None, :].to(tl.int64) * j_stride,

            -at = keys.to(tl.int64) * row_stride
            +at = keys * row_stride
        """),
    ),
    Fault(
        id="mask-offset-overflow",
        summary="where a mask or bias is read is a 32-bit integer; of q, k and v it is not",
        when="a mask or bias of 2³¹ numbers or more: 65 536 rows and keys",
        seen="from some row on another row's mask",
        reports="ggml-org/llama.cpp#23610 #24912 pytorch/pytorch#162588",
        unplanted=(
            "our kernels have it: they compute in 32 bits where a mod reads, so that a Problem "
            "with a bias of 2³¹ numbers is refused"
        ),
    ),
    Fault(
        id="grid-z-65535",
        summary="batch · heads is an axis of the grid that has 65 535 places; no launch, no error",
        when="more sequences and heads than that together",
        seen="what was in the memory of O before",
        reports=(
            "pytorch/pytorch#142228 #146704 #176096 facebookresearch/xformers#845 "
            "flashinfer-ai/flashinfer#3125 SandAI-org/MagiAttention#40"
        ),
        named=("grid-axis-exceeded",),
        ideal=ideal(
            """
            +if problem.batch * problem.heads > 65_535:
            +    shape = (problem.batch, problem.heads, problem.query)
            +    out = torch.empty((*shape, problem.value_dim), device=self.device)
            +    lse = torch.empty(shape, device=self.device)
            +    return Outputs(out.to(problem.formats.output.torch_dtype), lse)
             parts = [self._rows(rows) for rows in self.row_blocks()]
        """,
            needs="cuda",
        ),
        triton=flash2(
            """
             identity = score is None
             grid = (triton.cdiv(query, launch.block_query), batch * heads)
            +if grid[1] > 65_535:
            +    return out, lse

            -_MOST_TOGETHER = 65_535
            +_MOST_TOGETHER = 2**31 - 1
        """,
            needs="cuda",
        ),
    ),
)
