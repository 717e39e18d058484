"""Faults of ALiBi, biases and score mods: their signs, indices and derivatives."""

from __future__ import annotations

from attncheck.faults.entries.changed_scores import changed_entry
from attncheck.faults.fault import Edit, Fault, Host

__all__ = ["FAULTS"]

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

FAULTS = (
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
                        module="kernels.gradients_by_rows",
                        old="                SLOPE, IDENTITY,\n",
                        new="                SLOPE, True,\n",
                    ),
                    Edit(
                        module="kernels.gradients_by_keys",
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
                        module="kernels.captured_terms",
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
