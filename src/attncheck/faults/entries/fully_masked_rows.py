"""Faults of rows that see no key: what they give, and what their −∞ does further on."""

from __future__ import annotations

from attncheck.faults.fault import Edit, Fault, Host

__all__ = ["FAULTS"]

_SHIFT = '    shift = tl.where(m_new == float("-inf"), 0.0, m_new)\n'

FAULTS = (
    Fault(
        id="fully-masked-nan",
        category="fully masked rows",
        summary="nothing stands in for the maximum of a row that has seen no key: −∞ − −∞",
        when="rows of a visited tile that see no key of it",
        seen="NaN in those rows",
        sources=(
            "tracel-ai/burn#4694",
            "tracel-ai/burn#4697",
            "pytorch/pytorch#131060",
            "pytorch/pytorch#41508",
            "pytorch/pytorch#103749",
            "pytorch/pytorch#103963",
            "iree-org/iree#24175",
            "huggingface/transformers#31035",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_steps",
                        old="    return torch.where(torch.isneginf(maximum), 0.0, maximum)\n",
                        new="    return maximum\n",
                    ),
                    Edit(
                        module="subjects.ideal_steps",
                        old="    return torch.where(torch.isneginf(score), 0.0, exp2(exponent))\n",
                        new="    return exp2(exponent)\n",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(Edit(module="kernels.tile", old=_SHIFT, new="    shift = m_new\n"),),
            ),
        },
        named=("empty-rows-nan",),
    ),
    Fault(
        id="safe-max-clobbers-running-max",
        category="fully masked rows",
        summary="the 0 that stands in for a maximum of −∞ is kept as the maximum",
        when="rows that see nothing in their first visited tile and low scores later",
        seen="weights relative to 0: of less precision in 16 bits, 0 where they underflow",
        sources=("Dao-AILab/flash-attention#2082", "Dao-AILab/flash-attention#2174"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old="        run.out = self.kernel.added(out, self._weighted(p, seen, v))\n"
                        "        run.maximum = maximum\n",
                        new="        run.out = self.kernel.added(out, self._weighted(p, seen, v))\n"
                        "        run.maximum = finite(maximum)\n",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old="    return p, alpha, m_new, total * alpha + tl.sum(p, 1)\n",
                        new="    return p, alpha, shift, total * alpha + tl.sum(p, 1)\n",
                    ),
                ),
            ),
        },
        named=("maximum-from-zero",),
    ),
    Fault(
        id="fully-masked-row-uniform",
        category="fully masked rows",
        summary="hidden keys get a finite score: a row of nothing else has a weight for each",
        when="rows that see no key in a visited tile",
        seen="the mean of values, and a finite LSE, in place of 0 and −∞",
        sources=("pytorch/pytorch#131060", "ml-explore/mlx#2626"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal",
                        old="    hidden_score = -math.inf\n",
                        new="    hidden_score = -1.0e6\n",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old='    return tl.where(seen, s, float("-inf"))\n',
                        new="    return tl.where(seen, s, -1.0e6)\n",
                    ),
                ),
            ),
        },
        named=("empty-rows-mean", "sentinel-finite"),
    ),
    Fault(
        id="lse-plus-inf-for-empty",
        category="fully masked rows",
        summary="LSE is +∞ where a row has seen no key",
        when="rows that see no key",
        seen="LSE alone; what merges by it later is not finite",
        sources=("Dao-AILab/flash-attention#978", "vllm-project/vllm#39148"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old="        lse = torch.where(dead, -math.inf, ",
                        new="        lse = torch.where(dead, math.inf, ",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old='    return tl.where(empty, float("-inf"), lse)\n',
                        new='    return tl.where(empty, float("inf"), lse)\n',
                    ),
                ),
            ),
        },
        named=("lse-plus-infinity-of-empty",),
    ),
    Fault(
        id="bwd-empty-row-lse-inf",
        category="fully masked rows",
        summary="the backward subtracts an LSE of −∞ from masked scores",
        when="gradients with rows that see no key in a visited tile",
        seen="NaN in dK and dV of every key of the tile",
        sources=(
            "NVIDIA/cudnn-frontend#262",
            "NVIDIA/cudnn-frontend#160",
            "Dao-AILab/flash-attention#443",
            "Dao-AILab/flash-attention#978",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_gradients",
                        old="        base, c = finite(lse)[..., None], ",
                        new="        base, c = lse[..., None], ",
                    ),
                    Edit(
                        module="subjects.ideal_gradients",
                        old="return power_of_two(self.kernel.exp2, (s - base) * c, s)",
                        new="return self.kernel.exp2((s - base) * c)",
                    ),
                    Edit(
                        module="subjects.ideal_gradients",
                        old="        return power_of_two(self.kernel.exp2, exponent, s)\n",
                        new="        return self.kernel.exp2(exponent)\n",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.gradient_tile",
                        old='    lse = tl.where(lse == float("-inf"), float("inf"), lse)\n',
                        new="",
                    ),
                    Edit(
                        module="kernels.gradient_tile",
                        old="    p = power(s - lse, IDENTITY)\n    if partial:\n",
                        new="    if partial:\n",
                    ),
                    Edit(
                        module="kernels.gradient_tile",
                        old="        p = tl.where(seen, p, 0.0)\n    return p\n",
                        new='        s = tl.where(seen, s, float("-inf"))\n'
                        "    return power(s - lse, IDENTITY)\n",
                    ),
                ),
            ),
        },
        named=("backward-empty-rows-nan",),
    ),
    Fault(
        id="masked-tile-skip-leaves-uninit",
        category="fully masked rows",
        summary="a block of rows with no tile to visit is left before it is written",
        when="blocks of rows that see no key",
        seen="O and LSE there are what was in memory",
        sources=("flashinfer-ai/flashinfer#1533", "ROCm/aotriton#235"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old="        return Outputs("
                        "out.to(self.problem.formats.output.torch_dtype), lse)\n",
                        new="""        out = out.to(self.problem.formats.output.torch_dtype)
        blocks = dead.unflatten(2, (-1, self.tile.block_query))
        left = blocks.all(-1, keepdim=True).expand_as(blocks).flatten(2)
        out = torch.where(left[..., None], torch.empty_like(out), out)
        return Outputs(out, torch.where(left, torch.empty_like(lse), lse))
""",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.flash2_forward",
                        old="mask=(rows[:, None] < query) & (value_cols[None, :] < value_dim),",
                        new="mask=(rows[:, None] < query) & (value_cols[None, :] < value_dim)"
                        " & (runs > 0),",
                    ),
                    Edit(
                        module="kernels.flash2_forward",
                        old="        mask=rows < query,\n",
                        new="        mask=(rows < query) & (runs > 0),\n",
                    ),
                ),
            ),
        },
        named=("rows-unwritten",),
    ),
)
