"""Faults of finite numbers that stand for −∞, and of masks that are added."""

from __future__ import annotations

from attncheck.faults.fault import Edit, Fault, Host

__all__ = ["FAULTS"]

_HIDDEN = '    return tl.where(seen, s, float("-inf"))\n'
_WHERE = "        return torch.where(seen, s, self.kernel.hidden_score)\n"
# Whoever masks by a finite number expects no maximum of −∞.
_NO_GUARD = (
    Edit(
        module="kernels.tile",
        old='    shift = tl.where(m_new == float("-inf"), 0.0, m_new)\n',
        new="    shift = m_new\n",
    ),
)
_NO_IDEAL_GUARD = (
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
)

FAULTS = (
    Fault(
        id="finite-sentinel-1e4",
        category="sentinels",
        summary="hidden keys get the score −1e4",
        when="rows that see no key in a visited tile, or only scores below −1e4",
        seen="hidden values in O, with all the weight where seen scores are lower",
        sources=("ohdearquant/lattice#361", "ohdearquant/lattice#373"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal",
                        old="    hidden_score = -math.inf\n",
                        new="    hidden_score = -1.0e4\n",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old=_HIDDEN,
                        new="    return tl.where(seen, s, -1.0e4)\n",
                    ),
                ),
            ),
        },
        named=("sentinel-finite", "empty-rows-mean"),
    ),
    Fault(
        id="running-max-init-zero",
        category="sentinels",
        summary="the running maximum begins as 0",
        when="rows whose scores are all below 0",
        seen="weights relative to 0: of less precision in 16 bits, none below −88",
        sources=("bytedance/lightseq#74", "Dao-AILab/flash-attention#2082"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal",
                        old="    first_maximum = -math.inf\n",
                        new="    first_maximum = 0.0\n",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old='        m = tl.full([BLOCK_Q], float("-inf"), tl.float32)\n',
                        new="        m = tl.zeros([BLOCK_Q], tl.float32)\n",
                    ),
                ),
            ),
        },
        named=("maximum-from-zero",),
    ),
    Fault(
        id="double-mask-add-overflow",
        category="sentinels",
        summary="two masks, of the most negative number each, are added to the scores",
        when="keys that two masks hide, in rows that see no key",
        seen="−∞ where both hide and a finite score where one does: means of values, or NaN",
        sources=("NVIDIA-NeMo/Automodel#2658",),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old="inside = self.kernel.inside(key, problem.kv).view(1, 1, 1, -1)\n",
                        new="inside = self.kernel.inside(key, problem.kv).view(1, 1, 1, -1)\n"
                        "        self.planes = [inside, *self._planes(at)]\n",
                    ),
                    Edit(
                        module="subjects.ideal_attention",
                        old=_WHERE,
                        new="""        lowest = torch.finfo(torch.float32).min
        for plane in self.planes:
            s = s + torch.where(plane, 0.0, lowest)
        return s

    def _planes(self, at):
        mask = self.problem.mask
        for part in mask.parts if mask.name == "and" else (mask,):
            yield self.visible(self.problem.replace(mask=part).mask_mod(self.device), at)
""",
                    ),
                    *_NO_IDEAL_GUARD,
                ),
            ),
            "triton": Host(
                kernel="triton-varlen",
                edits=(
                    Edit(
                        module="kernels.varlen_forward",
                        old="        s = hidden(s, seen)\n",
                        new="""        lowest = -3.4028234663852886e38
        s = s + tl.where((keys < kv)[None, :], 0.0, lowest)
        if CAUSAL:
            s = s + tl.where(keys[None, :] <= rows[:, None] + diagonal, 0.0, lowest)
        if not ALL:
            s = s + tl.where(seen, 0.0, lowest)
""",
                    ),
                    *_NO_GUARD,
                ),
            ),
        },
        named=("empty-rows-mean", "empty-rows-nan", "backward-empty-rows-nan"),
    ),
    Fault(
        id="fp16-sentinel-overflow",
        category="sentinels",
        summary="hidden keys get −1e9, rounded to the inputs' format: −∞ in fp16",
        when="fp16, and rows that see no key in a visited tile",
        seen="NaN in those rows, for nothing expects a maximum of −∞",
        sources=("ahrefs/ocannl#548", "tatp22/linformer-pytorch#19", "google/flax#982"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old=_WHERE,
                        new="        fill = torch.tensor(-1.0e9, device=self.device)\n"
                        "        fill = fill.to(self.problem.formats.storage.torch_dtype).float()\n"
                        "        return torch.where(seen, s, fill)\n",
                    ),
                    *_NO_IDEAL_GUARD,
                ),
                dtypes=("fp16",),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.flash2_forward",
                        old="        s = hidden(s, seen)\n",
                        new="        s = tl.where(seen, s, fill)\n",
                    ),
                    Edit(
                        module="kernels.flash2_forward",
                        old="s = hidden(s, visible(b, h, rows, keys, kv, mask_captured, MASK,"
                        " BLOCK_Q, BLOCK_K))\n",
                        new="shown = visible(b, h, rows, keys, kv, mask_captured, MASK,"
                        " BLOCK_Q, BLOCK_K)\n"
                        "        s = tl.where(shown, s, fill)\n",
                    ),
                    Edit(
                        module="kernels.flash2_forward",
                        old="    seen = tl.full([BLOCK_Q, BLOCK_K], True, tl.int1)\n",
                        new="    seen = tl.full([BLOCK_Q, BLOCK_K], True, tl.int1)\n"
                        "    fill = tl.full([BLOCK_Q, BLOCK_K], -1.0e9, tl.float32)\n"
                        "    fill = fill.to(q_block.dtype).to(tl.float32)\n",
                    ),
                    *_NO_GUARD,
                ),
                dtypes=("fp16",),
            ),
        },
        named=("empty-rows-nan",),
    ),
    Fault(
        id="zero-times-inf-mask",
        category="sentinels",
        summary="a mask of truth values times −∞ is added to the scores: 0 · −∞",
        when="tiles that are masked",
        seen="NaN for what is seen",
        sources=("ml-explore/mlx#1725",),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old=_WHERE,
                        new="        return s + (1.0 - seen.float()) * self.kernel.hidden_score\n",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old=_HIDDEN,
                        new='    return s + (1.0 - seen.to(tl.float32)) * float("-inf")\n',
                    ),
                ),
            ),
        },
        named=("mask-times-infinity",),
    ),
)
