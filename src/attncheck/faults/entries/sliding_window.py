"""Faults of sliding windows: how far back a row sees, and in which tile that begins."""

from __future__ import annotations

from attncheck.faults.fault import Edit, Fault, Host

__all__ = ["FAULTS"]

_WIDER = """        problem, device = inputs.problem, inputs.device.type
        if problem.mask.name == "sliding_window":
            window = problem.mask.values["window"] + 1
            problem = problem.replace(mask=type(problem.mask).of("sliding_window", window=window))
"""
_ASKED = "        problem, device = inputs.problem, inputs.device.type\n"

FAULTS = (
    Fault(
        id="window-left-off-by-one",
        category="sliding window",
        summary="a window of w keys is one of w + 1: its left end is taken in",
        when="any window that does not reach beyond the first key",
        seen="errors as one over the window, in O and LSE alike",
        sources=(
            "huggingface/transformers#39408",
            "huggingface/transformers#29176",
            "huggingface/transformers#29623",
            "zml/zml#763",
            "Dao-AILab/flash-attention#1133",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old="        self.mask = problem.mask_mod(self.device)\n",
                        new="""        asked = problem
        if problem.mask.name == "sliding_window":
            window = problem.mask.values["window"] + 1
            asked = problem.replace(mask=type(problem.mask).of("sliding_window", window=window))
        self.mask = asked.mask_mod(self.device)
""",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(module="subjects.flash", old=_ASKED, new=_WIDER),
                    Edit(module="subjects.flash2", old=_ASKED, new=_WIDER),
                ),
            ),
        },
        named=("window-one-wider",),
    ),
    Fault(
        id="window-loop-start-ceil",
        category="sliding window",
        summary="the loop begins with the first tile that is whole in the window",
        when="a window that begins inside a tile of keys",
        seen="up to a tile of each row's oldest keys is missing",
        sources=("vllm-project/vllm#24390", "vllm-project/vllm#44584"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old="            seen, at = self.seen(rows, keys)\n",
                        new="""            seen, at = self.seen(rows, keys)
            if self.problem.mask.name == "sliding_window":
                block_query, block_kv = self.tile.block_query, self.tile.block_kv
                row = torch.arange(rows.start, rows.stop, device=self.device)
                of_block = row // block_query * block_query
                start = (of_block - self.problem.mask.values["window"] + 1).clamp(min=0)
                begin = (start + block_kv - 1) // block_kv * block_kv
                seen = seen & (keys.start >= begin)[:, None]
""",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="mods.block_mask",
                        old="    return pad(some, beyond).view(shape).amax(-1) "
                        "+ pad(every, beyond).view(shape).amin(-1)\n",
                        new="""    start = (some.argmax(-1) + block_kv - 1) // block_kv
    listed = torch.arange(shape[-2], device=some.device) >= start[..., None]
    kinds = pad(some, beyond).view(shape).amax(-1) + pad(every, beyond).view(shape).amin(-1)
    return kinds * listed
""",
                    ),
                ),
            ),
        },
        named=("first-tile-dropped",),
    ),
    Fault(
        id="window-garbage-v-outside",
        category="sliding window",
        summary="scores outside the window are masked, values there are multiplied by weights of 0",
        when="keys that the mask hides hold what is not finite: freed or never written pages",
        seen="NaN in every row whose tile holds one",
        sources=("vllm-project/vllm#30887",),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old="return self.product(p, v) if self.v_is_finite else "
                        "weighted(self.product, p, seen, v)",
                        new="return self.product(p, v)",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.flash2_forward",
                        old="if not launch.free and careful_asked(again):",
                        new="if False:",
                    ),
                ),
            ),
        },
        named=("hidden-values-leak",),
    ),
    Fault(
        id="bwd-window-ignored",
        category="sliding window",
        summary="the backward is causal and has no window",
        when="gradients with a window",
        seen="a right O, and dQ, dK and dV that are wrong throughout",
        sources=(
            "Dao-AILab/flash-attention#2199",
            "Dao-AILab/flash-attention#580",
            "triton-lang/triton#4541",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_gradients",
                        old="        return self.kernel.visible_again(mask, at)\n",
                        new="""        if self.problem.mask.name == "sliding_window":
            return at.kv_idx <= at.q_idx
        return self.kernel.visible_again(mask, at)
""",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="subjects.flash2",
                        old=_ASKED,
                        new=_ASKED + '        if problem.mask.name == "sliding_window":\n'
                        "            problem = problem.replace("
                        'mask=type(problem.mask).of("causal"))\n',
                    ),
                ),
            ),
        },
        named=("backward-window-ignored",),
    ),
)
