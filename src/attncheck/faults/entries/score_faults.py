"""Faults of scores: the scale and units, softcap, ALiBi and other score mods."""

from __future__ import annotations

from attncheck.faults.entries.shared_patches import OTHER_SCORE, OTHER_SLOPE, other_part
from attncheck.faults.fault import Fault, decode, flash1, flash2, ideal

__all__ = ["SCALE_AND_UNITS", "SCORE_MODS", "SOFTCAP"]

SCALE_AND_UNITS = (
    Fault(
        id="lse-base2-returned",
        summary="LSE is returned in base 2, as the kernel has it",
        when="LSE is looked at, or merged",
        seen="LSE 1.44 times too large; O is right",
        reports=(
            "lightseekorg/tokenspeed#571 sgl-project/sglang#35045 #40903 vllm-project/vllm#43919 "
            "flashinfer-ai/flashinfer#4485"
        ),
        named=("lse-base-2",),
        ideal=ideal(model="lse-base-2"),
        triton=flash1("""
            -lse = (m + tl.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453
            +lse = m + tl.log2(tl.where(empty, 1.0, total))
        """),
    ),
    Fault(
        id="bias-not-scaled-log2e",
        summary="a bias is added to scores in log2 units as if they were natural",
        when="ALiBi or a bias",
        seen="a bias that is 1.44 times too small",
        reports="meta-pytorch/segment-anything-fast#71",
        named=("bias-not-scaled",),
        ideal=ideal(model="bias-not-scaled"),
        triton=flash2(
            OTHER_SCORE,
            '''
            +def _other_score(problem, device):
            +    """What adds something is given scores times log2 e, as exp2 wants them."""
            +    mod = problem.score_mod(device)
            +    if not library.is_additive(problem.score):
            +        return mod
            +    def added(score, b, h, q_idx, kv_idx):
            +        return mod(score * 1.4426950408889634, b, h, q_idx, kv_idx) / 1.4426950408889634
            +    return added
        ''',
        ),
    ),
    Fault(
        id="scale-bias-order",
        summary="(q·k + bias) · scale stands for q·k · scale + bias",
        when="a score mod, and a scale that is not 1",
        seen="a bias that is hardly there",
        reports="HKUSTDial/flash-sparse-attention#199 ml-explore/mlx#2626",
        named=("score-mod-before-scale",),
        ideal=ideal("""
            -return s * self.factors.scale[..., None] if self.in_nats else s
            +return s

                 s = self.score(s, at.b, at.h, at.q_idx, at.kv_idx).to(s.dtype)
            +s = s * self.factors.scale[..., None] if self.in_nats else s
        """),
        triton=decode("""
            -s = SCORE(s, b, h, rows[:, None], keys[None, :], captured)
            +s = SCORE(product, b, h, rows[:, None], keys[None, :], captured)
            +s = s * factor
        """),
    ),
    Fault(
        id="bwd-lse-unit-mismatch",
        summary="the backward pass takes a natural LSE for one in base 2",
        when="gradients",
        seen="weights that do not add up to 1: all gradients are wrong",
        reports="meta-pytorch/attention-gym#200",
        named=("backward-lse-base-2",),
        ideal=ideal(model="backward-lse-base-2"),
        triton=flash2("""
            -lse = lse * 1.4426950408889634
            +lse = lse * 1.0
        """),
    ),
    Fault(
        id="bwd-k-prescaled-bf16",
        summary="the backward pass alone rounds K after it multiplied it by scale · log2 e",
        when="gradients in 16 bits, the more the larger scores are",
        seen="a third more error than needed at usual scores, tens of times at large ones",
        reports="hao-ai-lab/FastVideo#1730",
        discrete=False,
        named=("scores-rounded",),
        ideal=ideal("""
            -x = self.logits(self.q[:, :, rows], keys)
            +c = (self.factors.scale * self.factors.log2_e)[..., None]
            +k = kernel.operand(self.expanded(self.k[:, :, keys]) * c, self.problem.formats.products)
            +x = self.product(self.q[:, :, rows], k.mT) / (self.factors.log2_e if self.in_nats else c)
        """),
        triton=flash2("""
             delta = loaded_rows(delta_ptr + first, rows, query)
            -x = tl.dot(k_block, tl.trans(q_block), input_precision=PRECISION) * factor
            +scaled = (k_block.to(tl.float32) * factor).to(k_block.dtype)
            +x = tl.dot(scaled, tl.trans(q_block), input_precision=PRECISION)

             v_block = loaded_keys(v_ptr, v_at, v_col, keys, kv, value_dim, BLOCK_V)
            -x = tl.dot(q_block, k_block, input_precision=PRECISION) * factor
            +scaled = (k_block.to(tl.float32) * factor).to(k_block.dtype)
            +x = tl.dot(q_block, scaled, input_precision=PRECISION)
        """),
    ),
    Fault(
        id="scale-hardcoded",
        summary="the scale is 1/8, whatever was asked for",
        when="a head dim other than 64, or a scale of one's own",
        seen="weights that are too even, or not even enough",
        reports="BobMcDear/attorch#14",
        named=("scale-fixed",),
        ideal=ideal(model="scale-fixed"),
        triton=flash2("""
             v,
            -scale=problem.scale,
            +scale=0.125,

            -self.backward_launcher(), scale=problem.scale,
            +self.backward_launcher(), scale=0.125,
        """),
    ),
    Fault(
        id="zero-scale-times-inf",
        summary="scores are multiplied by the scale after hidden ones became −∞",
        when="a scale of 0, or in fp8 one that underflows with its descales, and a hidden key",
        seen="NaN",
        reports="Dao-AILab/flash-attention#1461",
        named=("scale-of-zero-after-mask",),
        ideal=ideal(
            """
            -return torch.where(torch.isneginf(score), 0.0, exp2(exponent))
            +return exp2(exponent)
        """,
            dtypes=("e4m3",),
        ),
        triton=flash1(
            """
            +after = factor_of(factor, descale, kv_head, SCALED)
            +before = after
            +if IDENTITY:
            +    before = 1.0
             s = hidden(

            -q_block, k_block, b, h, rows, keys, factor_of(factor, descale, kv_head, SCALED),
            +q_block, k_block, b, h, rows, keys, before,

            +if IDENTITY:
            +    s = s * after
             m_block = tl.max(s, 1)
        """,
            dtypes=("e4m3",),
        ),
    ),
    Fault(
        id="scale-inverted",
        summary="scores are divided by the scale: multiplied by √head_dim",
        when="always",
        seen="all but one weight of a row is 0",
        reports="AI-Hypercomputer/maxtext#1370",
        named=("scale-inverted",),
        ideal=ideal(model="scale-inverted"),
        triton=flash2("""
             v,
            -scale=problem.scale,
            +scale=1.0 / problem.scale,

            -self.backward_launcher(), scale=problem.scale,
            +self.backward_launcher(), scale=1.0 / problem.scale,
        """),
    ),
    Fault(
        id="dk-missing-scale",
        summary="dK is not multiplied by the scale",
        when="gradients",
        seen="dK too large, by √head_dim at the usual scale",
        reports="Dao-AILab/flash-attention#2651",
        named=("dk-without-scale",),
        ideal=ideal(model="dk-without-scale"),
        triton=flash2("""
             at = tl.program_id(1).to(tl.int64) * kv + keys[:, None].to(tl.int64)
             inside = keys[:, None] < kv
             tl.store(
                 dk_ptr + at * head_dim + cols[None, :],
            -    (dk * scale).to(dk_ptr.dtype.element_ty),
            +    dk.to(dk_ptr.dtype.element_ty),
        """),
    ),
)

SOFTCAP = (
    Fault(
        id="softcap-missing",
        summary="the cap is taken as an argument, and nothing is capped",
        when="a softcap, and scores that are not small beside it",
        seen="a tenth of a percent where scores are small; another softmax where they are large",
        reports="sgl-project/sgl-kernel-xpu#491",
        named=("softcap-missing",),
        ideal=ideal(model="softcap-missing"),
        triton=flash2(
            OTHER_SCORE,
            other_part("softcap"),
            """
            +def _other(_values, _dims, _device):
            +    from attncheck.mods import scores
            +    return scores.none
        """,
        ),
    ),
    Fault(
        id="softcap-s-times-tanh",
        summary="score · tanh(score / cap) stands for cap · tanh(score / cap)",
        when="a softcap",
        seen="every score is wrong: none keeps its sign",
        reports="Dao-AILab/flash-attention#2402",
        named=("softcap-times-score",),
        ideal=ideal(model="softcap-times-score"),
        triton=flash2(
            OTHER_SCORE,
            other_part("softcap"),
            """
            +def _other(values, _dims, _device):
            +    cap = values["cap"]
            +    def capped(score, b, h, q_idx, kv_idx):
            +        return score * (score / cap).tanh()
            +    return capped
        """,
        ),
    ),
    Fault(
        id="softcap-on-log2-logits",
        summary="scores are capped after they were multiplied by log2 e",
        when="a softcap, and scores that are not small beside it",
        seen="a cap that is 1.44 times too small",
        reports="sgl-project/sgl-kernel-xpu#491 ROCm/rocm-libraries#12229",
        named=("softcap-of-log2",),
        ideal=ideal(model="softcap-of-log2"),
        triton=flash2(
            OTHER_SCORE,
            other_part("softcap"),
            """
            +def _other(values, _dims, _device):
            +    cap = values["cap"]
            +    def capped(score, b, h, q_idx, kv_idx):
            +        in_log2 = score * 1.4426950408889634
            +        return cap * (in_log2 / cap).tanh() / 1.4426950408889634
            +    return capped
        """,
        ),
    ),
    Fault(
        id="softcap-bwd-missing-dtanh",
        summary="the backward pass leaves out the derivative of tanh",
        when="gradients of a softcap, and scores that are not small beside it",
        seen="dQ and dK too large where scores are bent; O and dV are right",
        reports="Dao-AILab/flash-attention#1033 #2402",
        named=("slope-missing",),
        ideal=ideal(model="slope-missing:1"),
        triton=flash2(
            OTHER_SLOPE,
            other_part("softcap"),
            """
            +def _other(_values, _dims, _device):
            +    from attncheck.mods import scores
            +    return scores.none
        """,
        ),
    ),
    Fault(
        id="softcap-tanh-overflow",
        summary="tanh by (e^x − e^−x) / (e^x + e^−x), which is ∞ / ∞ for a large x",
        when="a score of more than 88 caps",
        seen="rows of NaN",
        reports="vllm-project/vllm#56578 #56579",
        named=("tanh-overflows",),
        ideal=ideal(model="tanh-overflows"),
        triton=flash2(
            OTHER_SCORE,
            other_part("softcap"),
            """
            +def _other(values, _dims, _device):
            +    cap = values["cap"]
            +    def capped(score, b, h, q_idx, kv_idx):
            +        up, down = (score / cap).exp(), (-score / cap).exp()
            +        return cap * ((up - down) / (up + down))
            +    return capped
        """,
        ),
    ),
)

SCORE_MODS = (
    Fault(
        id="alibi-sign-flip",
        summary="ALiBi's bias grows with the distance that it is to punish",
        when="ALiBi",
        seen="other weights altogether",
        reports="meta-pytorch/attention-gym#29 #86",
        named=("alibi-sign",),
        ideal=ideal(model="alibi-sign"),
        triton=flash2(
            OTHER_SCORE,
            other_part("alibi"),
            """
            +def _other(_values, dims, device):
            +    import torch
            +    from attncheck.mods import scores
            +    from attncheck.mods.scores import alibi_slopes
            +    slopes = torch.tensor(alibi_slopes(dims.heads), dtype=torch.float32, device=device)
            +    return scores.alibi(-slopes)
        """,
        ),
    ),
    Fault(
        id="alibi-offset-rect",
        summary="distances are of a row's number in the call, not of its place in the sequence",
        when="fewer query rows than keys, with a bias by distance: decoding",
        seen="LSE is off by the slope times the offset; O where the bias is not linear",
        reports="keras-team/keras-hub#2862",
        named=("alibi-offset", "query-offset-missing"),
        ideal=ideal(model="alibi-offset"),
        triton=decode(
            OTHER_SCORE,
            other_part("offset", "compose"),
            """
            +def _other(part, *, rows):
            +    return part
        """,
        ),
    ),
    Fault(
        id="alibi-head-index-local",
        summary="a query head has the slope that belongs to the number of its key head",
        when="ALiBi or a bias by head, where heads share key heads",
        seen="all heads but the first have another head's bias",
        reports="flashinfer-ai/flashinfer#1606 #5101",
        named=("alibi-head-order",),
        ideal=ideal(model="alibi-head-order"),
        triton=flash1("""
            -q_block, k_block, b, h, rows, keys, factor_of(factor, descale, kv_head, SCALED),
            +q_block, k_block, b, h // group, rows, keys, factor_of(factor, descale, kv_head, SCALED),
        """),
    ),
    Fault(
        id="alibi-slopes-non-pow2-heads",
        summary="slopes by another rule than was asked for, the same at powers of two alone",
        when="ALiBi with 3, 6, 12 … heads",
        seen="most heads have another slope",
        reports="Dao-AILab/flash-attention#540 lucidrains/x-transformers#85",
        named=("alibi-slopes",),
        ideal=ideal(model="alibi-slopes"),
        triton=flash2(
            OTHER_SCORE,
            other_part("alibi"),
            """
            +def _other(_values, dims, device):
            +    import torch
            +    from attncheck.mods import scores
            +    from attncheck.mods.scores import alibi_slopes
            +    whole = 1 << (dims.heads.bit_length() - 1)
            +    slopes = [*alibi_slopes(whole), *alibi_slopes(2 * whole)[::2]][: dims.heads]
            +    return scores.alibi(torch.tensor(slopes, dtype=torch.float32, device=device))
        """,
        ),
    ),
    Fault(
        id="score-mod-grad-missing",
        summary="the backward pass takes every score mod's derivative for 1",
        when="gradients, and a score mod that is not a sum",
        seen="dQ and dK off by the derivative; O and dV are right",
        reports="pytorch/pytorch#145208 #185991",
        named=("slope-missing",),
        ideal=ideal(model="slope-missing"),
        triton=flash2("""
             x, p, dp, delta[None, :], b, h, rows[None, :], keys[:, None], slope_captured,
            -SLOPE, IDENTITY,
            +SLOPE, True,

             x, p, dp, delta[:, None], b, h, rows[:, None], keys[None, :], slope_captured,
            -SLOPE, IDENTITY,
            +SLOPE, True,
        """),
    ),
    Fault(
        id="dbias-broadcast-not-reduced",
        summary="what is read for several scores has the gradient that the last of them wrote",
        when="gradients of a bias that batch, heads or distances share",
        seen="its gradient lacks all contributions but one",
        reports="HKUSTDial/flash-sparse-attention#193 #199 pytorch/pytorch#145208",
        named=("captured-not-summed",),
        ideal=ideal("""
            -sums.add(x, (at.b, at.h, at.q_idx, at.kv_idx), ds, seen)
            +before = sums.sums.clone()
            +for b in at.b.flatten():
            +    for h in at.h.flatten():
            +        sums.sums.zero_()
            +        here = (at.b == b) & (at.h == h)
            +        sums.add(x, (at.b, at.h, at.q_idx, at.kv_idx), ds, seen & here)
            +        before = torch.where(sums.sums != 0, sums.sums, before)
            +sums.sums.copy_(before)
        """),
        triton=flash2("""
            -tl.atomic_add(gradients + place, terms, mask=terms != 0.0, sem="relaxed")
            +tl.store(gradients + place, terms, mask=terms != 0.0)
        """),
    ),
)
