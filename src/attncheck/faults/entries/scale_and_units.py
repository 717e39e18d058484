"""Faults: the scale, log2 e, and the unit of LSE."""

from __future__ import annotations

from attncheck.faults.entries.changed_scores import changed_score
from attncheck.faults.fault import Edit, Fault, Host

__all__ = ["FAULTS"]

_BIAS_IN_LOG2 = changed_score(
    '''
def _other_score(problem, device):
    """The score mod; what adds something is given scores times log2 e, as exp2 wants them."""
    mod = problem.score_mod(device)
    if not library.is_additive(problem.score):
        return mod

    def added(score, b, h, q_idx, kv_idx):
        return mod(score * 1.4426950408889634, b, h, q_idx, kv_idx) / 1.4426950408889634

    return added
'''
)


def _of_scale(scale: str) -> tuple[Edit, ...]:
    """The ideal kernel takes ``scale``, a Python expression, for the scale it was given."""
    return (
        Edit(
            module="subjects.ideal_attention",
            old="self.scale = problem.scale * products",
            new=f"self.scale = fp32({scale}) * products",
        ),
        Edit(
            module="subjects.ideal_attention",
            old="fp32(problem.scale * kernel.log2_e)",
            new=f"fp32(fp32({scale}) * kernel.log2_e)",
        ),
    )


def _of_both_launches(scale: str) -> tuple[Edit, ...]:
    """The same of triton-flash2, forward and backward."""
    return tuple(
        Edit(module=module, old="scale=problem.scale,", new=f"scale={scale},")
        for module in ("subjects.flash", "subjects.flash2")
    )


FAULTS = (
    Fault(
        id="lse-base2-returned",
        category="scale and units",
        summary="LSE is returned in base 2, as the kernel has it",
        when="LSE is looked at, or merged",
        seen="LSE 1.44 times too large; O is right",
        sources=(
            "lightseekorg/tokenspeed#571",
            "sgl-project/sglang#35045",
            "sgl-project/sglang#40903",
            "vllm-project/vllm#43919",
            "flashinfer-ai/flashinfer#4485",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal",
                        old="""\
                    return with_gradients(self, inputs, outputs)
                return outputs
""",
                        new="""\
                    outputs = with_gradients(self, inputs, outputs)
                return replace(outputs, lse=outputs.lse * self.log2_e)
""",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash1",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old="lse = (m + tl.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453",
                        new="lse = m + tl.log2(tl.where(empty, 1.0, total))",
                    ),
                ),
            ),
        },
        named=("lse-base-2",),
    ),
    Fault(
        id="bias-not-scaled-log2e",
        category="scale and units",
        summary="a bias is added to scores in log2 units as if they were natural",
        when="ALiBi or a bias",
        seen="a bias that is 1.44 times too small",
        sources=("meta-pytorch/segment-anything-fast#71",),
        hosts={
            "ideal": Host(kernel="ideal", edits=_BIAS_IN_LOG2["ideal"]),
            "triton": Host(kernel="triton-flash2", edits=_BIAS_IN_LOG2["triton"]),
        },
        named=("bias-not-scaled",),
    ),
    Fault(
        id="scale-bias-order",
        category="scale and units",
        summary="(q·k + bias) · scale stands for q·k · scale + bias",
        when="a score mod, and a scale that is not 1",
        seen="a bias that is hardly there",
        sources=("HKUSTDial/flash-sparse-attention#199", "ml-explore/mlx#2626"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old="return s * self.factors.scale[..., None] if self.in_nats else s",
                        new="return s",
                    ),
                    Edit(
                        module="subjects.ideal_attention",
                        old="        return torch.where(seen, s, self.kernel.hidden_score)",
                        new="        s = s * self.factors.scale[..., None] if self.in_nats else s\n"
                        "        return torch.where(seen, s, self.kernel.hidden_score)",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-decode",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old="s = SCORE(s, b, h, rows[:, None], keys[None, :], captured)",
                        new="s = SCORE(product, b, h, rows[:, None], keys[None, :], captured)\n"
                        "        s = s * factor",
                    ),
                ),
            ),
        },
        named=("score-mod-before-scale",),
    ),
    Fault(
        id="bwd-lse-unit-mismatch",
        category="scale and units",
        summary="the backward pass takes a natural LSE for one in base 2",
        when="gradients",
        seen="weights that do not add up to 1: all gradients are wrong",
        sources=("meta-pytorch/attention-gym#200",),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_gradients",
                        old="(base * self.factors.log2_e).double()",
                        new="base.double()",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.gradient_tile",
                        old="        lse = lse * 1.4426950408889634\n",
                        new="        lse = lse * 1.0\n",
                    ),
                ),
            ),
        },
        named=("backward-lse-base-2",),
    ),
    Fault(
        id="bwd-k-prescaled-bf16",
        category="scale and units",
        summary="the backward pass alone rounds K after it multiplied it by scale · log2 e",
        when="gradients in 16 bits, the more the larger scores are",
        seen="a third more error than needed at usual scores, tens of times at large ones",
        sources=("hao-ai-lab/FastVideo#1730",),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_gradients",
                        old="        x = self.logits(self.q[:, :, rows], keys)\n",
                        new="""\
        c = (self.factors.scale * self.factors.log2_e)[..., None]
        k = kernel.operand(self.expanded(self.k[:, :, keys]) * c, self.problem.formats.products)
        x = self.product(self.q[:, :, rows], k.mT) / (self.factors.log2_e if self.in_nats else c)
""",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.gradients_by_rows",
                        old="x = tl.dot(q_block, k_block, input_precision=PRECISION) * factor",
                        new="scaled = (k_block.to(tl.float32) * factor).to(k_block.dtype)\n"
                        "            x = tl.dot(q_block, scaled, input_precision=PRECISION)",
                    ),
                    Edit(
                        module="kernels.gradients_by_keys",
                        old="x = tl.dot(k_block, tl.trans(q_block), input_precision=PRECISION) "
                        "* factor",
                        new="scaled = (k_block.to(tl.float32) * factor).to(k_block.dtype)\n"
                        "                x = tl.dot(scaled, tl.trans(q_block), "
                        "input_precision=PRECISION)",
                    ),
                ),
            ),
        },
        discrete=False,
        named=("scores-rounded",),
    ),
    Fault(
        id="scale-hardcoded",
        category="scale and units",
        summary="the scale is 1/8, whatever was asked for",
        when="a head dim other than 64, or a scale of one's own",
        seen="weights that are too even, or not even enough",
        sources=("BobMcDear/attorch#14",),
        hosts={
            "ideal": Host(kernel="ideal", edits=_of_scale("0.125")),
            "triton": Host(kernel="triton-flash2", edits=_of_both_launches("0.125")),
        },
        named=("scale-fixed",),
    ),
    Fault(
        id="zero-scale-times-inf",
        category="scale and units",
        summary="scores are multiplied by the scale after hidden ones became −∞",
        when="a scale of 0, or in fp8 one that underflows with its descales, and a hidden key",
        seen="NaN",
        sources=("Dao-AILab/flash-attention#1461",),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_steps",
                        old="return torch.where(torch.isneginf(score), 0.0, exp2(exponent))",
                        new="return exp2(exponent)",
                    ),
                ),
                dtypes=("e4m3",),
            ),
            "triton": Host(
                kernel="triton-flash1",
                edits=(
                    Edit(
                        module="kernels.flash1_forward",
                        old="        s = hidden(\n",
                        new="        after = factor_of(factor, descale, kv_head, SCALED)\n"
                        "        before = after\n"
                        "        if IDENTITY:\n"
                        "            before = 1.0\n"
                        "        s = hidden(\n",
                    ),
                    Edit(
                        module="kernels.flash1_forward",
                        old="keys, factor_of(factor, descale, kv_head, SCALED),",
                        new="keys, before,",
                    ),
                    Edit(
                        module="kernels.flash1_forward",
                        old="            seen,\n        )\n",
                        new="            seen,\n        )\n"
                        "        if IDENTITY:\n"
                        "            s = s * after\n",
                    ),
                ),
                dtypes=("e4m3",),
            ),
        },
        named=("scale-of-zero-after-mask",),
    ),
    Fault(
        id="scale-inverted",
        category="scale and units",
        summary="scores are divided by the scale: multiplied by √head_dim",
        when="always",
        seen="all but one weight of a row is 0",
        sources=("AI-Hypercomputer/maxtext#1370",),
        hosts={
            "ideal": Host(kernel="ideal", edits=_of_scale("1.0 / problem.scale")),
            "triton": Host(kernel="triton-flash2", edits=_of_both_launches("1.0 / problem.scale")),
        },
        named=("scale-inverted",),
    ),
    Fault(
        id="dk-missing-scale",
        category="scale and units",
        summary="dK is not multiplied by the scale",
        when="gradients",
        seen="dK too large, by √head_dim at the usual scale",
        sources=("Dao-AILab/flash-attention#2651",),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_gradients",
                        old="dk=self.kernel.scaled(dk, scale).to(dtype)",
                        new="dk=dk.to(dtype)",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.gradients_by_keys",
                        old="(dk * scale).to(dk_ptr.dtype.element_ty)",
                        new="dk.to(dk_ptr.dtype.element_ty)",
                    ),
                ),
            ),
        },
        named=("dk-without-scale",),
    ),
)
