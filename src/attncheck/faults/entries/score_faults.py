"""Faults of scores: the scale, units, softcap, score mods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from attncheck.faults.fault import Edit, Fault, Host

if TYPE_CHECKING:
    from attncheck.faults.fault import HostName

__all__ = [
    "FAULTS",
    "FAULTS_of_score_mods",
    "FAULTS_of_softcap",
    "changed_entry",
    "changed_score",
    "changed_slope",
]


Edits = dict["HostName", tuple[Edit, ...]]

_ENTRY = '''def _other_score(problem, device):
    """The score mod as this kernel has it."""
    import dataclasses
    from attncheck.mods.spec import build_entry
    from attncheck.mods.library import SCORES

    if all(part.name != "{name}" for part in problem.score.walk()):
        return problem.score_mod(device)
    other = dataclasses.replace(SCORES["{name}"], {field}=_other)
    table = SCORES | {{"{name}": other}}
    return build_entry(table, problem.score, problem.dimensions, device)


{text}


'''

_IDEAL, _TRACED = "subjects.ideal_attention", "subjects.traced"
_IN_IDEAL, _IN_TRACED = "def _in_nats(problem: Problem)", "def _stays(spec: Spec)"
_OF_TRACED = "asked.problem.score_mod(asked.device)"
_OTHER = "_other_score(asked.problem, asked.device)"


def changed_score(text: str) -> Edits:
    """Both hosts' score mod, its derivatives included, is what ``text`` says.

    Args:
        text: Python of a function ``_other_score(problem, device)``.
    """
    text = text.strip() + "\n\n\n"
    return {
        "ideal": (
            Edit(
                module=_IDEAL,
                old="problem.score_mod(self.device)",
                new="_other_score(problem, self.device)",
            ),
            Edit(module=_IDEAL, old=_IN_IDEAL, new=text + _IN_IDEAL),
        ),
        "triton": (
            Edit(module=_TRACED, old=_IN_TRACED, new=text + _IN_TRACED),
            *(
                Edit(module=_TRACED, old=before + _OF_TRACED, new=before + _OTHER)
                for before in ("mod = ", "derivative(", "captured.reads(")
            ),
        ),
    }


def changed_entry(name: str, text: str, field: Literal["build", "compose"] = "build") -> Edits:
    """The same with one score mod of the library, wherever it is a part.

    Args:
        name: Which.
        text: Python of a function ``_other``: its entry's ``field``, with the same arguments.
        field: What of the entry is another.
    """
    return changed_score(_ENTRY.format(name=name, field=field, text=text.strip()))


def changed_slope(name: str, text: str) -> Edits:
    """The same of the derivative alone: the score mod itself is right."""
    helper = _ENTRY.format(name=name, field="build", text=text.strip())
    gradients, before = "subjects.ideal_gradients", "def _in_tiles("
    return {
        "ideal": (
            Edit(
                module=gradients,
                old="kernel.slope(self.score, x, at)",
                new="kernel.slope(_other_score(self.problem, self.device), x, at)",
            ),
            Edit(
                module=gradients,
                old=before + "x: torch.Tensor",
                new=helper + before + "x: torch.Tensor",
            ),
        ),
        "triton": (
            Edit(module=_TRACED, old=_IN_TRACED, new=helper + _IN_TRACED),
            Edit(module=_TRACED, old="derivative(" + _OF_TRACED, new="derivative(" + _OTHER),
        ),
    }


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
                        module="kernels.tile",
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
                        module="kernels.flash2_backward",
                        old="x = tl.dot(q_block, k_block, input_precision=PRECISION) * factor",
                        new="scaled = (k_block.to(tl.float32) * factor).to(k_block.dtype)\n"
                        "            x = tl.dot(q_block, scaled, input_precision=PRECISION)",
                    ),
                    Edit(
                        module="kernels.flash2_backward",
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
                        module="kernels.flash2_backward",
                        old="(dk * scale).to(dk_ptr.dtype.element_ty)",
                        new="dk.to(dk_ptr.dtype.element_ty)",
                    ),
                ),
            ),
        },
        named=("dk-without-scale",),
    ),
)


_MISSING = changed_entry(
    "softcap",
    """
def _other(_values, _dims, _device):
    from attncheck.mods import scores

    return scores.none
""",
)
_TIMES_SCORE = changed_entry(
    "softcap",
    """
def _other(values, _dims, _device):
    cap = values["cap"]

    def capped(score, b, h, q_idx, kv_idx):
        return score * (score / cap).tanh()

    return capped
""",
)
_OF_LOG2 = changed_entry(
    "softcap",
    """
def _other(values, _dims, _device):
    cap = values["cap"]

    def capped(score, b, h, q_idx, kv_idx):
        in_log2 = score * 1.4426950408889634
        return cap * (in_log2 / cap).tanh() / 1.4426950408889634

    return capped
""",
)
_NO_SLOPE = changed_slope(
    "softcap",
    """
def _other(_values, _dims, _device):
    from attncheck.mods import scores

    return scores.none
""",
)
_BY_EXP = changed_entry(
    "softcap",
    """
def _other(values, _dims, _device):
    cap = values["cap"]

    def capped(score, b, h, q_idx, kv_idx):
        up, down = (score / cap).exp(), (-score / cap).exp()
        return cap * ((up - down) / (up + down))

    return capped
""",
)

FAULTS_of_softcap = (
    Fault(
        id="softcap-missing",
        category="softcap",
        summary="the cap is taken as an argument, and nothing is capped",
        when="a softcap, and scores that are not small beside it",
        seen="a tenth of a percent where scores are small; another softmax where they are large",
        sources=("sgl-project/sgl-kernel-xpu#491",),
        hosts={
            "ideal": Host(kernel="ideal", edits=_MISSING["ideal"]),
            "triton": Host(kernel="triton-flash2", edits=_MISSING["triton"]),
        },
        named=("softcap-missing",),
    ),
    Fault(
        id="softcap-s-times-tanh",
        category="softcap",
        summary="score · tanh(score / cap) stands for cap · tanh(score / cap)",
        when="a softcap",
        seen="every score is wrong: none keeps its sign",
        sources=("Dao-AILab/flash-attention#2402",),
        hosts={
            "ideal": Host(kernel="ideal", edits=_TIMES_SCORE["ideal"]),
            "triton": Host(kernel="triton-decode", edits=_TIMES_SCORE["triton"]),
        },
        named=("softcap-times-score",),
    ),
    Fault(
        id="softcap-on-log2-logits",
        category="softcap",
        summary="scores are capped after they were multiplied by log2 e",
        when="a softcap, and scores that are not small beside it",
        seen="a cap that is 1.44 times too small",
        sources=("sgl-project/sgl-kernel-xpu#491", "ROCm/rocm-libraries#12229"),
        hosts={
            "ideal": Host(kernel="ideal", edits=_OF_LOG2["ideal"]),
            "triton": Host(kernel="triton-flash1", edits=_OF_LOG2["triton"]),
        },
        named=("softcap-of-log2",),
    ),
    Fault(
        id="softcap-bwd-missing-dtanh",
        category="softcap",
        summary="the backward pass leaves out the derivative of tanh",
        when="gradients of a softcap, and scores that are not small beside it",
        seen="dQ and dK too large where scores are bent; O and dV are right",
        sources=("Dao-AILab/flash-attention#1033", "Dao-AILab/flash-attention#2402"),
        hosts={
            "ideal": Host(kernel="ideal", edits=_NO_SLOPE["ideal"]),
            "triton": Host(kernel="triton-flash2", edits=_NO_SLOPE["triton"]),
        },
        named=("slope-missing",),
    ),
    Fault(
        id="softcap-tanh-overflow",
        category="softcap",
        summary="tanh by (e^x − e^−x) / (e^x + e^−x), which is ∞ / ∞ for a large x",
        when="a score of more than 88 caps",
        seen="rows of NaN",
        sources=("vllm-project/vllm#56578", "vllm-project/vllm#56579"),
        hosts={
            "ideal": Host(kernel="ideal", edits=_BY_EXP["ideal"]),
            "triton": Host(kernel="triton-flash2", edits=_BY_EXP["triton"]),
        },
        named=("tanh-overflows",),
    ),
)


_SIGN = changed_entry(
    "alibi",
    """
def _other(_values, dims, device):
    import torch
    from attncheck.mods import scores
    from attncheck.mods.library import alibi_slopes

    slopes = torch.tensor(alibi_slopes(dims.heads), dtype=torch.float32, device=device)
    return scores.alibi(-slopes)
""",
)
_OFFSET = changed_entry(
    "offset",
    """
def _other(part, *, rows):
    return part
""",
    field="compose",
)
_POWER_OF_TWO = changed_entry(
    "alibi",
    """
def _other(_values, dims, device):
    import torch
    from attncheck.mods import scores
    from attncheck.mods.library import alibi_slopes

    whole = 1 << (dims.heads.bit_length() - 1)
    slopes = [*alibi_slopes(whole), *alibi_slopes(2 * whole)[::2]][: dims.heads]
    return scores.alibi(torch.tensor(slopes, dtype=torch.float32, device=device))
""",
)
_LAST = """        before = sums.sums.clone()
        for b in at.b.flatten():
            for h in at.h.flatten():
                sums.sums.zero_()
                here = (at.b == b) & (at.h == h)
                sums.add(x, (at.b, at.h, at.q_idx, at.kv_idx), ds, seen & here)
                before = torch.where(sums.sums != 0, sums.sums, before)
        sums.sums.copy_(before)
"""

FAULTS_of_score_mods = (
    Fault(
        id="alibi-sign-flip",
        category="score mods",
        summary="ALiBi's bias grows with the distance that it is to punish",
        when="ALiBi",
        seen="other weights altogether",
        sources=("meta-pytorch/attention-gym#29", "meta-pytorch/attention-gym#86"),
        hosts={
            "ideal": Host(kernel="ideal", edits=_SIGN["ideal"]),
            "triton": Host(kernel="triton-flash2", edits=_SIGN["triton"]),
        },
        named=("alibi-sign",),
    ),
    Fault(
        id="alibi-offset-rect",
        category="score mods",
        summary="distances are of a row's number in the call, not of its place in the sequence",
        when="fewer query rows than keys, with a bias by distance: decoding",
        seen="LSE is off by the slope times the offset; O where the bias is not linear",
        sources=("keras-team/keras-hub#2862",),
        hosts={
            "ideal": Host(kernel="ideal", edits=_OFFSET["ideal"]),
            "triton": Host(kernel="triton-decode", edits=_OFFSET["triton"]),
        },
        named=("alibi-offset", "query-offset-missing"),
    ),
    Fault(
        id="alibi-head-index-local",
        category="score mods",
        summary="a query head has the slope that belongs to the number of its key head",
        when="ALiBi or a bias by head, where heads share key heads",
        seen="all heads but the first have another head's bias",
        sources=("flashinfer-ai/flashinfer#1606", "flashinfer-ai/flashinfer#5101"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old="s = self.score(s, at.b, at.h, at.q_idx, at.kv_idx)",
                        new="h = at.h // self.problem.group\n"
                        "            s = self.score(s, at.b, h, at.q_idx, at.kv_idx)",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash1",
                edits=(
                    Edit(
                        module="kernels.flash1_forward",
                        old="q_block, k_block, b, h, rows, keys, factor_of(",
                        new="q_block, k_block, b, h // group, rows, keys, factor_of(",
                    ),
                ),
            ),
        },
        named=("alibi-head-order",),
    ),
    Fault(
        id="alibi-slopes-non-pow2-heads",
        category="score mods",
        summary="slopes by another rule than was asked for, the same at powers of two alone",
        when="ALiBi with 3, 6, 12 … heads",
        seen="most heads have another slope",
        sources=("Dao-AILab/flash-attention#540", "lucidrains/x-transformers#85"),
        hosts={
            "ideal": Host(kernel="ideal", edits=_POWER_OF_TWO["ideal"]),
            "triton": Host(kernel="triton-flash2", edits=_POWER_OF_TWO["triton"]),
        },
        named=("alibi-slopes",),
    ),
    Fault(
        id="score-mod-grad-missing",
        category="score mods",
        summary="the backward pass takes every score mod's derivative for 1",
        when="gradients, and a score mod that is not a sum",
        seen="dQ and dK off by the derivative; O and dV are right",
        sources=("pytorch/pytorch#145208", "pytorch/pytorch#185991"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_gradients",
                        old="dx = dx * kernel.slope(self.score, x, at)",
                        new="pass",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.flash2_backward",
                        old="                SLOPE, IDENTITY,\n            )\n",
                        new="                SLOPE, True,\n            )\n",
                    ),
                    Edit(
                        module="kernels.flash2_backward",
                        old="                    SLOPE, IDENTITY,\n",
                        new="                    SLOPE, True,\n",
                    ),
                ),
            ),
        },
        named=("slope-missing",),
    ),
    Fault(
        id="dbias-broadcast-not-reduced",
        category="score mods",
        summary="what is read for several scores has the gradient that the last of them wrote",
        when="gradients of a bias that batch, heads or distances share",
        seen="its gradient lacks all contributions but one",
        sources=(
            "HKUSTDial/flash-sparse-attention#193",
            "HKUSTDial/flash-sparse-attention#199",
            "pytorch/pytorch#145208",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal",
                        old="        sums.add(x, (at.b, at.h, at.q_idx, at.kv_idx), ds, seen)\n",
                        new=_LAST,
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.gradient_terms",
                        old="tl.atomic_add(gradients + place, terms, mask=terms != 0.0, "
                        'sem="relaxed")',
                        new="tl.store(gradients + place, terms, mask=terms != 0.0)",
                    ),
                ),
            ),
        },
        named=("captured-not-summed",),
    ),
)
