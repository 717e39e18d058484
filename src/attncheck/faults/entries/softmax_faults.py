"""Faults of the softmax: the online recurrence, sentinels, rows that see no key, sinks."""

from __future__ import annotations

from attncheck.faults.entries.shared_patches import UNGUARDED, UNGUARDED_TRITON
from attncheck.faults.fault import Fault, flash2, ideal, varlen

__all__ = ["FULLY_MASKED_ROWS", "ONLINE_SOFTMAX", "SENTINELS", "SINKS"]

FULLY_MASKED_ROWS = (
    Fault(
        id="fully-masked-nan",
        summary="nothing stands in for the maximum of a row that has seen no key: −∞ − −∞",
        when="rows of a visited tile that see no key of it",
        seen="NaN in those rows",
        reports=(
            "tracel-ai/burn#4694 #4697 pytorch/pytorch#131060 #41508 #103749 #103963 "
            "iree-org/iree#24175 huggingface/transformers#31035"
        ),
        named=("empty-rows-nan",),
        ideal=ideal(UNGUARDED),
        triton=flash2(UNGUARDED_TRITON),
    ),
    Fault(
        id="safe-max-clobbers-running-max",
        summary="the 0 that stands in for a maximum of −∞ is kept as the maximum",
        when="rows that see nothing in their first visited tile and low scores later",
        seen="weights relative to 0: of less precision in 16 bits, 0 where they underflow",
        reports="Dao-AILab/flash-attention#2082 #2174",
        named=("maximum-from-zero",),
        ideal=ideal(model="maximum-from-zero:1"),
        triton=flash2("""
            -return p, alpha, m_new, total * alpha + tl.sum(p, 1)
            +return p, alpha, shift, total * alpha + tl.sum(p, 1)
        """),
    ),
    Fault(
        id="fully-masked-row-uniform",
        summary="hidden keys get a finite score: a row of nothing else has a weight for each",
        when="rows that see no key in a visited tile",
        seen="the mean of values, and a finite LSE, in place of 0 and −∞",
        reports="pytorch/pytorch#131060 ml-explore/mlx#2626",
        named=("empty-rows-mean", "sentinel-finite"),
        ideal=ideal(model="sentinel-finite:1"),
        triton=flash2("""
            -return tl.where(seen, s, float("-inf"))
            +return tl.where(seen, s, -1.0e6)
        """),
    ),
    Fault(
        id="lse-plus-inf-for-empty",
        summary="LSE is +∞ where a row has seen no key",
        when="rows that see no key",
        seen="LSE alone; what merges by it later is not finite",
        reports="Dao-AILab/flash-attention#978 vllm-project/vllm#39148",
        named=("lse-plus-infinity-of-empty",),
        ideal=ideal(model="lse-plus-infinity-of-empty"),
        triton=flash2("""
            -return tl.where(empty, float("-inf"), lse)
            +return tl.where(empty, float("inf"), lse)
        """),
    ),
    Fault(
        id="bwd-empty-row-lse-inf",
        summary="the backward subtracts an LSE of −∞ from masked scores",
        when="gradients with rows that see no key in a visited tile",
        seen="NaN in dK and dV of every key of the tile",
        reports="NVIDIA/cudnn-frontend#262 #160 Dao-AILab/flash-attention#443 #978",
        named=("backward-empty-rows-nan",),
        ideal=ideal("""
            -base, c = finite(lse)[..., None], self.factors.exponent[..., None]
            +base, c = lse[..., None], self.factors.exponent[..., None]
             if self.in_nats:
            -    return power_of_two(self.kernel.exp2, (s - base) * c, s)
            +    return self.kernel.exp2((s - base) * c)
             exponent = (s.double() * c - (base * self.factors.log2_e).double()).float()
            -return power_of_two(self.kernel.exp2, exponent, s)
            +return self.kernel.exp2(exponent)
        """),
        triton=flash2("""
             lse = tl.load(lse_ptr + rows, mask=rows < query, other=float("inf"))
            -lse = tl.where(lse == float("-inf"), float("inf"), lse)

            -p = power(s - lse, IDENTITY)

            -    p = tl.where(seen, p, 0.0)
            -return p
            +    s = tl.where(seen, s, float("-inf"))
            +return power(s - lse, IDENTITY)
        """),
    ),
    Fault(
        id="masked-tile-skip-leaves-uninit",
        summary="a block of rows with no tile to visit is left before it is written",
        when="blocks of rows that see no key",
        seen="O and LSE there are what was in memory",
        reports="flashinfer-ai/flashinfer#1533 ROCm/aotriton#235",
        named=("rows-unwritten",),
        ideal=ideal("""
            -return Outputs(out.to(self.problem.formats.output.torch_dtype), lse)
            +out = out.to(self.problem.formats.output.torch_dtype)
            +blocks = dead.unflatten(2, (-1, self.tile.block_query))
            +left = blocks.all(-1, keepdim=True).expand_as(blocks).flatten(2)
            +out = torch.where(left[..., None], torch.empty_like(out), out)
            +return Outputs(out, torch.where(left, torch.empty_like(lse), lse))
        """),
        triton=flash2("""
             + rows[:, None].to(tl.int64) * out_row
             + value_cols[None, :] * out_col,
             out.to(out_ptr.dtype.element_ty),
            -mask=(rows[:, None] < query) & (value_cols[None, :] < value_dim),
            +mask=(rows[:, None] < query) & (value_cols[None, :] < value_dim) & (runs > 0),

             lse_ptr + (b64 * heads + h64) * query + rows,
             log_sum(m, total, IDENTITY),
            -mask=rows < query,
            +mask=(rows < query) & (runs > 0),
        """),
    ),
)

SENTINELS = (
    Fault(
        id="finite-sentinel-1e4",
        summary="hidden keys get the score −1e4",
        when="rows that see no key in a visited tile, or only scores below −1e4",
        seen="hidden values in O, with all the weight where seen scores are lower",
        reports="ohdearquant/lattice#361 #373",
        named=("sentinel-finite", "empty-rows-mean"),
        ideal=ideal(model="sentinel-finite"),
        triton=flash2("""
            -return tl.where(seen, s, float("-inf"))
            +return tl.where(seen, s, -1.0e4)
        """),
    ),
    Fault(
        id="running-max-init-zero",
        summary="the running maximum begins as 0",
        when="rows whose scores are all below 0",
        seen="weights relative to 0: of less precision in 16 bits, none below −88",
        reports="bytedance/lightseq#74 Dao-AILab/flash-attention#2082",
        named=("maximum-from-zero",),
        ideal=ideal(model="maximum-from-zero"),
        triton=flash2("""
            -m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
            +m = tl.zeros([BLOCK_Q], tl.float32)
        """),
    ),
    Fault(
        id="double-mask-add-overflow",
        summary="two masks, of the most negative number each, are added to the scores",
        when="keys that two masks hide, in rows that see no key",
        seen="−∞ where both hide and a finite score where one does: means of values, or NaN",
        reports="NVIDIA-NeMo/Automodel#2658",
        named=("empty-rows-mean", "empty-rows-nan", "backward-empty-rows-nan"),
        ideal=ideal(
            UNGUARDED,
            """
            +parts = problem.mask.parts if problem.mask.name == "and" else (problem.mask,)
            +masks = [problem.replace(mask=part).mask_mod(self.device) for part in parts]
            +self.planes = [inside, *(self.visible(mask, at) for mask in masks)]
             seen = self.visible(self.mask, at) & inside

            -return torch.where(seen, s, max(self.kernel.hidden_score, self.steps.hidden))
            +for plane in self.planes:
            +    s = s + torch.where(plane, 0.0, torch.finfo(torch.float32).min)
            +return s
        """,
        ),
        triton=varlen(
            UNGUARDED_TRITON,
            """
            -    s = hidden(s, seen)
            +    lowest = -3.4028234663852886e38
            +    s = s + tl.where((keys < kv)[None, :], 0.0, lowest)
            +    if CAUSAL:
            +        s = s + tl.where(keys[None, :] <= rows[:, None] + diagonal, 0.0, lowest)
            +    if not ALL:
            +        s = s + tl.where(seen, 0.0, lowest)
             p, alpha, m, total = advanced(s, m, total, IDENTITY)
             v_block = loaded_values(
        """,
        ),
    ),
    Fault(
        id="fp16-sentinel-overflow",
        summary="hidden keys get −1e9, rounded to the inputs' format: −∞ in fp16",
        when="fp16, and rows that see no key in a visited tile",
        seen="NaN in those rows, for nothing expects a maximum of −∞",
        reports="ahrefs/ocannl#548 tatp22/linformer-pytorch#19 google/flax#982",
        named=("empty-rows-nan",),
        ideal=ideal(
            UNGUARDED,
            """
            -return torch.where(seen, s, max(self.kernel.hidden_score, self.steps.hidden))
            +fill = torch.tensor(-1.0e9, device=self.device)
            +return torch.where(seen, s, fill.to(self.problem.formats.storage.torch_dtype).float())
        """,
            dtypes=("fp16",),
        ),
        triton=flash2(
            UNGUARDED_TRITON,
            """
             seen = tl.full([BLOCK_Q, BLOCK_K], True, tl.int1)
            +fill = tl.full([BLOCK_Q, BLOCK_K], -1.0e9, tl.float32)
            +fill = fill.to(q_block.dtype).to(tl.float32)
             if CAREFUL:

            -    s = hidden(s, seen)
            +    s = tl.where(seen, s, fill)
             elif partial:
            -    s = hidden(s, visible(b, h, rows, keys, kv, mask_captured, MASK, BLOCK_Q, BLOCK_K))
            +    shown = visible(b, h, rows, keys, kv, mask_captured, MASK, BLOCK_Q, BLOCK_K)
            +    s = tl.where(shown, s, fill)
        """,
            dtypes=("fp16",),
        ),
    ),
    Fault(
        id="zero-times-inf-mask",
        summary="a mask of truth values times −∞ is added to the scores: 0 · −∞",
        when="tiles that are masked",
        seen="NaN for what is seen",
        reports="ml-explore/mlx#1725",
        named=("mask-times-infinity",),
        ideal=ideal("""
            -return torch.where(seen, s, max(self.kernel.hidden_score, self.steps.hidden))
            +return s + (1.0 - seen.float()) * self.kernel.hidden_score
        """),
        triton=flash2("""
            -return tl.where(seen, s, float("-inf"))
            +return s + (1.0 - seen.to(tl.float32)) * float("-inf")
        """),
    ),
)

ONLINE_SOFTMAX = (
    Fault(
        id="missing-alpha-on-acc",
        summary="the output so far is not rescaled when the running maximum rises",
        when="two tiles of keys or more",
        seen="errors as large as the output; none where all keys are in one tile",
        reports="a classic; no report known",
        named=("alpha-not-on-out",),
        ideal=ideal(model="alpha-not-on-out"),
        triton=flash2("""
                 s = hidden(s, visible(b, h, rows, keys, kv, mask_captured, MASK, BLOCK_Q, BLOCK_K))
             p, alpha, m, total = advanced(s, m, total, IDENTITY)
             acc = with_values(
            -    p, v_block, seen, acc * alpha[:, None], CAREFUL, WEIGHTS_SCALE, PRECISION, IMPRECISE
            +    p, v_block, seen, acc, CAREFUL, WEIGHTS_SCALE, PRECISION, IMPRECISE
        """),
    ),
    Fault(
        id="missing-alpha-on-l",
        summary="the row sum so far is not rescaled when the running maximum rises",
        when="two tiles of keys or more",
        seen="O too small and LSE too large; nothing where all keys are in one tile",
        reports="a classic; no report known",
        named=("alpha-not-on-sum",),
        ideal=ideal(model="alpha-not-on-sum"),
        triton=flash2("""
            -return p, alpha, m_new, total * alpha + tl.sum(p, 1)
            +return p, alpha, m_new, total + tl.sum(p, 1)
        """),
    ),
    Fault(
        id="last-tile-no-max-subtraction",
        summary="the last tile's weights are of its scores, not of what they are below the maximum",
        when="any; where there is but one tile, LSE alone",
        seen="a last tile of another weight than the others, ∞ where scores are high",
        reports="tenstorrent/tt-metal#51278",
        named=("last-tile-without-maximum",),
        ideal=ideal(model="last-tile-without-maximum"),
        triton=flash2("""
            +    power,
                 run_of,
                 scores,
                 started,
                 turns_of,

                 s = hidden(s, visible(b, h, rows, keys, kv, mask_captured, MASK, BLOCK_Q, BLOCK_K))
            +before = total
             p, alpha, m, total = advanced(s, m, total, IDENTITY)
            +if start + BLOCK_K >= kv:
            +    p = power(s, IDENTITY)
            +    total = before * alpha + tl.sum(p, 1)
        """),
    ),
    Fault(
        id="skip-rescale-fp8-saturation",
        summary="a maximum may lag by 4 (in log2 units) while P is already scaled to fp8's range",
        when="fp8, and a maximum that rises by less than 4 from one tile to the next",
        seen="the largest weights are cut off at 448, the row sum is not: O too small",
        reports="Dao-AILab/flash-attention#2716 #2717 #2694",
        discrete=False,
        named=("weights-saturated",),
        ideal=ideal(
            """
            -if not self.tile.lazy_rescale:
            -    return new
             growth = (new - old) * self.factors.exponent
            -stays = (growth <= self.tile.lazy_rescale) & ~torch.isneginf(old)
            +stays = (growth <= 4.0) & ~torch.isneginf(old)
        """,
            dtypes=("e4m3",),
        ),
        triton=flash2(
            """
             m_new = tl.maximum(m, tl.max(s, 1))
            +lag = m_new - m
            +if not IDENTITY:
            +    lag = lag * 1.4426950408889634
            +m_new = tl.where(lag <= 4.0, m, m_new)  # not of a first tile: −inf lags by inf

            -weights = (p * WEIGHTS_SCALE).to(v_block.dtype)
            +weights = tl.minimum(p * WEIGHTS_SCALE, 448.0).to(v_block.dtype)
        """,
            dtypes=("e4m3",),
        ),
    ),
    Fault(
        id="acc-fp16-overflow",
        summary="the output that is not yet divided by the row sum is kept in fp16",
        when="long flat rows and large values: row sum times value above 65504",
        seen="∞ and NaN there, and a rounding a tile elsewhere",
        reports="ikawrakow/ik_llama.cpp#1196 ggml-org/llama.cpp#13991 #17558",
        discrete=False,
        named=("out-rounded",),
        ideal=ideal(model="out-rounded:1", dtypes=("fp16",)),
        triton=flash2(
            """
                 s = hidden(s, visible(b, h, rows, keys, kv, mask_captured, MASK, BLOCK_Q, BLOCK_K))
             p, alpha, m, total = advanced(s, m, total, IDENTITY)
             acc = with_values(
                 p, v_block, seen, acc * alpha[:, None], CAREFUL, WEIGHTS_SCALE, PRECISION, IMPRECISE
             )
            -return m, total, acc
            +return m, total, acc.to(tl.float16).to(tl.float32)
        """,
            dtypes=("fp16",),
        ),
    ),
    Fault(
        id="score-log2e-row-shift-asymmetric",
        summary="weights are powers of 2, and what rescales them is a power of e",
        when="two tiles of keys or more",
        seen="what earlier tiles gave counts too little wherever the maximum rises",
        reports="lightseekorg/tokenspeed#571",
        named=("alpha-of-another-base",),
        ideal=ideal(model="alpha-of-another-base"),
        triton=flash2("""
            -alpha = power(m - shift, IDENTITY)
            +alpha = tl.exp(m - shift)
        """),
    ),
)

SINKS = (
    Fault(
        id="sink-ignored-or-wrong-form",
        summary="the sink is taken and not added to the row sum",
        when="a sink that is not far below the scores",
        seen="out too large and LSE too small, by the sink's share",
        reports="modular/modular#6198 huggingface/transformers#41083 pytorch/torchtitan#2211",
        named=("sink-ignored",),
        ideal=ideal(model="sink-ignored"),
        triton=flash2("""
            -"SINK": sink is not None, "PAGE": 0 if pages is None else pages.size,
            +"SINK": False, "PAGE": 0 if pages is None else pages.size,
        """),
    ),
)
