"""Faults of the softmax: the online recurrence, sentinels, empty rows, sinks."""

from __future__ import annotations

from attncheck.faults.fault import Edit, Fault, Host

__all__ = ["FAULTS", "FAULTS_of_fully_masked_rows", "FAULTS_of_sentinels", "FAULTS_of_sinks"]


_CLASSIC = ("a classic; no report known",)
_ADVANCED = "    p, alpha, m, total = advanced(s, m, total, IDENTITY)\n"
_M_NEW = "    m_new = tl.maximum(m, tl.max(s, 1))\n"

FAULTS = (
    Fault(
        id="missing-alpha-on-acc",
        category="online softmax",
        summary="the output so far is not rescaled when the running maximum rises",
        when="two tiles of keys or more",
        seen="errors as large as the output; none where all keys are in one tile",
        sources=_CLASSIC,
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old="out = self.kernel.rescaled(run.out, alpha[..., None])",
                        new="out = run.out",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.flash2_forward",
                        old="seen, acc * alpha[:, None], CAREFUL",
                        new="seen, acc, CAREFUL",
                    ),
                ),
            ),
        },
        named=("alpha-not-on-out",),
    ),
    Fault(
        id="missing-alpha-on-l",
        category="online softmax",
        summary="the row sum so far is not rescaled when the running maximum rises",
        when="two tiles of keys or more",
        seen="O too small and LSE too large; nothing where all keys are in one tile",
        sources=_CLASSIC,
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old="        total = self.kernel.rescaled(run.total, alpha)\n",
                        new="        total = run.total\n",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old="    return p, alpha, m_new, total * alpha + tl.sum(p, 1)\n",
                        new="    return p, alpha, m_new, total + tl.sum(p, 1)\n",
                    ),
                ),
            ),
        },
        named=("alpha-not-on-sum",),
    ),
    Fault(
        id="last-tile-no-max-subtraction",
        category="online softmax",
        summary="the last tile's weights are of its scores, not of what they are below the maximum",
        when="any; where there is but one tile, LSE alone",
        seen="a last tile of another weight than the others, ∞ where scores are high",
        sources=("tenstorrent/tt-metal#51278",),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old="                step(running, s, seen, "
                        "self.expanded(self.v[:, :, keys]))\n",
                        new="                self.last = keys.stop >= self.problem.kv\n"
                        "                step(running, s, seen, "
                        "self.expanded(self.v[:, :, keys]))\n",
                    ),
                    Edit(
                        module="subjects.ideal_attention",
                        old="        p = self._weights(s, maximum)\n",
                        new="        p = self._weights(s, torch.zeros_like(maximum) "
                        "if self.last else maximum)\n",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.flash2_forward",
                        old=_ADVANCED,
                        new="    before = total\n"
                        + _ADVANCED
                        + """    if start + BLOCK_K >= kv:
        p = power(s, IDENTITY)
        total = before * alpha + tl.sum(p, 1)
""",
                    ),
                    Edit(
                        module="kernels.flash2_forward",
                        old="    place,\n    run_of,\n",
                        new="    place,\n    power,\n    run_of,\n",
                    ),
                ),
            ),
        },
        named=("last-tile-without-maximum",),
    ),
    Fault(
        id="skip-rescale-fp8-saturation",
        category="online softmax",
        summary="a maximum may lag by 4 (in log2 units) while P is already scaled to fp8's range",
        when="fp8, and a maximum that rises by less than 4 from one tile to the next",
        seen="the largest weights are cut off at 448, the row sum is not: O too small",
        sources=(
            "Dao-AILab/flash-attention#2716",
            "Dao-AILab/flash-attention#2717",
            "Dao-AILab/flash-attention#2694",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old="        if not self.tile.lazy_rescale:\n            return new\n",
                        new="",
                    ),
                    Edit(
                        module="subjects.ideal_attention",
                        old="        stays = (growth <= self.tile.lazy_rescale) & ",
                        new="        stays = (growth <= 4.0) & ",
                    ),
                ),
                dtypes=("e4m3",),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old=_M_NEW,
                        new=_M_NEW
                        + """    lag = m_new - m
    if not IDENTITY:
        lag = lag * 1.4426950408889634
    m_new = tl.where(lag <= 4.0, m, m_new)  # not of a first tile: −inf lags by inf
""",
                    ),
                    Edit(
                        module="kernels.tile",
                        old="    weights = (p * WEIGHTS_SCALE).to(v_block.dtype)\n",
                        new="    # As a GPU's conversion to e4m3 has it.\n"
                        "    weights = tl.minimum(p * WEIGHTS_SCALE, 448.0).to(v_block.dtype)\n",
                    ),
                ),
                dtypes=("e4m3",),
            ),
        },
        discrete=False,
        named=("weights-saturated",),
    ),
    Fault(
        id="acc-fp16-overflow",
        category="online softmax",
        summary="the output that is not yet divided by the row sum is kept in fp16",
        when="long flat rows and large values: row sum times value above 65504",
        seen="∞ and NaN there, and a rounding a tile elsewhere",
        sources=(
            "ikawrakow/ik_llama.cpp#1196",
            "ggml-org/llama.cpp#13991",
            "ggml-org/llama.cpp#17558",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old="        run.out = self.kernel.added(out, self._weighted(p, seen, v))\n"
                        "        run.maximum = maximum\n",
                        new="        added = self.kernel.added(out, self._weighted(p, seen, v))\n"
                        "        run.out = added.half().float()\n"
                        "        run.maximum = maximum\n",
                    ),
                ),
                dtypes=("fp16",),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.flash2_forward",
                        old="    return m, total, acc\n",
                        new="    return m, total, acc.to(tl.float16).to(tl.float32)\n",
                    ),
                ),
                dtypes=("fp16",),
            ),
        },
        discrete=False,
        named=("out-rounded",),
    ),
    Fault(
        id="score-log2e-row-shift-asymmetric",
        category="online softmax",
        summary="weights are powers of 2, and what rescales them is a power of e",
        when="two tiles of keys or more",
        seen="what earlier tiles gave counts too little wherever the maximum rises",
        sources=("lightseekorg/tokenspeed#571",),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old="        exponent = (old - finite(new)) * self.factors.exponent\n",
                        new="        exponent = (old - finite(new)) * self.factors.exponent"
                        " * self.factors.log2_e\n",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old="    alpha = power(m - shift, IDENTITY)\n",
                        new="    alpha = tl.exp(m - shift)\n",
                    ),
                ),
            ),
        },
        named=("alpha-of-another-base",),
    ),
)


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

FAULTS_of_sentinels = (
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


_SHIFT = '    shift = tl.where(m_new == float("-inf"), 0.0, m_new)\n'

FAULTS_of_fully_masked_rows = (
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
                        module="kernels.tile",
                        old='    lse = tl.where(lse == float("-inf"), float("inf"), lse)\n',
                        new="",
                    ),
                    Edit(
                        module="kernels.tile",
                        old="    p = power(s - lse, IDENTITY)\n    if partial:\n",
                        new="    if partial:\n",
                    ),
                    Edit(
                        module="kernels.tile",
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


FAULTS_of_sinks = (
    Fault(
        id="sink-ignored-or-wrong-form",
        category="sinks",
        summary="the sink is taken and not added to the row sum",
        when="a sink that is not far below the scores",
        seen="out too large and LSE too small, by the sink's share",
        sources=(
            "modular/modular#6198",
            "huggingface/transformers#41083",
            "pytorch/torchtitan#2211",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old="        if self.sink is not None:\n            maximum =",
                        new="        if False:\n            maximum =",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.flash2_forward",
                        old='"SINK": sink is not None,',
                        new='"SINK": False,',
                    ),
                ),
            ),
        },
        named=("sink-ignored",),
    ),
)
