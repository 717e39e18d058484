"""Faults of the online softmax: what is rescaled when the maximum moves, and what is kept."""

from __future__ import annotations

from attncheck.faults.fault import Edit, Fault, Host

__all__ = ["FAULTS"]

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
                        old="    normalised,\n    run_of,\n",
                        new="    normalised,\n    power,\n    run_of,\n",
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
