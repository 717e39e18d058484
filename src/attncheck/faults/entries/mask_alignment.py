"""Faults of mask alignment: which key a row's own is, and whether a mask is applied at all."""

from __future__ import annotations

from attncheck.faults.fault import Edit, Fault, Host

__all__ = ["FAULTS"]

# Where the ideal kernel gets its mask, for both passes.
_MASK = "        self.mask = problem.mask_mod(self.device)\n"
# What of an ideal kernel's mask is shifted by ``{shift}`` keys, where it is causal.
_SHIFTED = """        mask = problem.mask_mod(self.device)
        if problem.mask.name in {{"causal", "causal_bottom_right"}}:
            self.mask = lambda b, h, q_idx, kv_idx: mask(b, h, q_idx, kv_idx {shift})
        else:
            self.mask = mask
"""
_VARLEN_SEEN = "seen = seen & (keys[None, :] <= rows[:, None] + diagonal)"
_DIAGONAL = (
    "    diagonal = 0\n    if BOTTOM_RIGHT:\n        diagonal = kv - query\n    return diagonal"
)


def _ideal_mask(new: str) -> Edit:
    """The ideal kernel with another mask."""
    return Edit(module="subjects.ideal_attention", old=_MASK, new=new)


def _varlen_diagonals(top_left: str, bottom_right: str) -> tuple[Edit, ...]:
    """The packed kernel, both passes, with other diagonals of its causal flag."""
    return (
        Edit(
            module="kernels.varlen_forward",
            old="    diagonal = 0  # of row i",
            new=f"    diagonal = {top_left}  # of row i",
        ),
        Edit(
            module="kernels.varlen_forward",
            old="    if BOTTOM_RIGHT:\n        diagonal = kv - query\n",
            new=f"    if BOTTOM_RIGHT:\n        diagonal = {bottom_right}\n",
        ),
        Edit(
            module="kernels.varlen_gradients",
            old=_DIAGONAL,
            new=f"    diagonal = {top_left}\n    if BOTTOM_RIGHT:\n"
            f"        diagonal = {bottom_right}\n    return diagonal",
        ),
    )


FAULTS = (
    Fault(
        id="causal-top-left-when-rect",
        category="mask alignment",
        summary="a causal mask that is to end at the last key begins at the first one",
        when="causal, with other numbers of rows than of keys",
        seen="rows that see other keys, in O and LSE alike; nothing where the lengths agree",
        sources=(
            "Dao-AILab/flash-attention#282",
            "Dao-AILab/flash-attention#402",
            "Dao-AILab/flash-attention#436",
            "Dao-AILab/flash-attention#517",
            "NVIDIA/cutlass#2336",
            "jax-ml/jax#24491",
            "gittensor-ai-lab/sparkinfer#3",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    _ideal_mask(
                        _MASK + '        if problem.mask.name == "causal_bottom_right":\n'
                        "            self.mask = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx\n"
                    ),
                ),
            ),
            "triton": Host(kernel="triton-varlen", edits=_varlen_diagonals("0", "0")),
        },
        named=("mask-top-left",),
    ),
    Fault(
        id="causal-strict-drops-diagonal",
        category="mask alignment",
        summary="a row does not see its own key: > in place of ≥",
        when="causal",
        seen="a first row of nothing, then errors as one over the number of keys seen",
        sources=("flashinfer-ai/flashinfer#348",),
        hosts={
            "ideal": Host(kernel="ideal", edits=(_ideal_mask(_SHIFTED.format(shift="+ 1")),)),
            "triton": Host(
                kernel="triton-varlen",
                edits=(
                    Edit(
                        module="kernels.varlen_forward",
                        old=_VARLEN_SEEN,
                        new=_VARLEN_SEEN.replace("<=", "<"),
                    ),
                    Edit(
                        module="kernels.varlen_forward",
                        old="first_row + 1 + diagonal",
                        new="first_row + diagonal",
                    ),
                    Edit(
                        module="kernels.varlen_gradients",
                        old="keys[None, :] <= rows[:, None] + diagonal",
                        new="keys[None, :] < rows[:, None] + diagonal",
                    ),
                    Edit(
                        module="kernels.varlen_gradients",
                        old="keys[:, None] <= rows[None, :] + diagonal",
                        new="keys[:, None] < rows[None, :] + diagonal",
                    ),
                ),
            ),
        },
        named=("mask-one-key-narrower",),
    ),
    Fault(
        id="causal-one-future-key",
        category="mask alignment",
        summary="a row sees the key after its own",
        when="causal",
        seen="errors as one over the number of keys seen; the first rows are the worst",
        sources=("flashinfer-ai/flashinfer#348", "huggingface/transformers#39408"),
        hosts={
            "ideal": Host(kernel="ideal", edits=(_ideal_mask(_SHIFTED.format(shift="- 1")),)),
            "triton": Host(kernel="triton-varlen", edits=_varlen_diagonals("1", "kv - query + 1")),
        },
        named=("mask-one-key-wider",),
    ),
    Fault(
        id="causal-loop-bound-floor",
        category="mask alignment",
        summary="the loop over tiles of keys ends with the last whole one below the diagonal",
        when="causal, where the diagonal leaves a block of rows inside a tile of keys",
        seen="a part of a tile of keys is missing from every row of the block",
        sources=("Dao-AILab/flash-attention#1778", "Dao-AILab/flash-attention#436"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old="            seen, at = self.seen(rows, keys)\n",
                        new="""            seen, at = self.seen(rows, keys)
            if self.problem.mask.name in {"causal", "causal_bottom_right"}:
                block_query, block_kv = self.tile.block_query, self.tile.block_kv
                row = torch.arange(rows.start, rows.stop, device=self.device)
                end = (row // block_query + 1) * block_query
                if self.problem.mask.name == "causal_bottom_right":
                    end = end + self.problem.kv - self.problem.query
                seen = seen & (keys.start < end // block_kv * block_kv)[:, None]
""",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-varlen",
                edits=(
                    Edit(
                        module="kernels.varlen_forward",
                        old="end = tl.minimum(kv, first_row + BLOCK_Q + diagonal)",
                        new="end = tl.minimum(kv, (first_row + BLOCK_Q + diagonal)"
                        " // BLOCK_K * BLOCK_K)",
                    ),
                ),
            ),
        },
        named=("last-tile-dropped",),
    ),
    Fault(
        id="bwd-ignores-causal-flag",
        category="mask alignment",
        summary="the backward is causal whatever the call says",
        when="gradients without a causal mask",
        seen="a right O, and dQ, dK and dV that are wrong throughout",
        sources=(
            "triton-lang/triton#4541",
            "triton-lang/triton#5660",
            "triton-lang/triton#4174",
            "triton-lang/triton#7216",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal",
                        old="        return self.visible(mask, at)\n",
                        new="        return self.visible(mask, at) & (at.kv_idx <= at.q_idx)\n",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-varlen",
                edits=(
                    Edit(
                        module="kernels.varlen_backward",
                        old='"CAUSAL": self.causal != ""',
                        new='"CAUSAL": True',
                    ),
                ),
            ),
        },
        named=("backward-causal-always",),
    ),
    Fault(
        id="mask-dropped-when-divisible",
        category="mask alignment",
        summary="no mask where both lengths are whole tiles: the path without bounds has none",
        when="rows and keys that fill their tiles, and a mask that hides something",
        seen="rows that see what their tiles hold",
        sources=("bledden/triton-msl#7",),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old="        seen = self.visible(self.mask, at) & inside\n",
                        new="        seen = self.visible(self.mask, at) & inside\n"
                        "        if not (problem.query % self.tile.block_query "
                        "or problem.kv % self.tile.block_kv):\n"
                        "            seen = torch.ones_like(seen)\n",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.flash2_forward",
                        old="= _may_hide(of_run, start, kv, LISTED, FREE, BLOCK_K)\n",
                        new="= _may_hide(of_run, start, kv, LISTED, FREE, BLOCK_K)\n"
                        "            partial = partial & "
                        "((query % BLOCK_Q != 0) | (kv % BLOCK_K != 0))\n",
                    ),
                ),
            ),
        },
        # Where every tile is visited and all are whole it is the mask that is ignored.
        named=("mask-dropped-in-whole-tiles", "mask-ignored"),
    ),
    Fault(
        id="causal-flag-ignored",
        category="mask alignment",
        summary="the causal flag is taken and has no effect",
        when="causal",
        seen="what the call without the flag gives, bit by bit",
        sources=("jax-ml/jax#19237",),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    _ideal_mask(
                        "        flagged = problem.mask.name in "
                        '{"causal", "causal_bottom_right"}\n'
                        "        asked = library.FULL if flagged else problem.mask\n"
                        "        self.mask = problem.replace(mask=asked).mask_mod(self.device)\n"
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-varlen",
                edits=(
                    Edit(
                        module="kernels.varlen_forward",
                        old='CAUSAL=causal != ""',
                        new="CAUSAL=False",
                    ),
                    Edit(
                        module="kernels.varlen_backward",
                        old='"CAUSAL": self.causal != ""',
                        new='"CAUSAL": False',
                    ),
                ),
            ),
        },
        named=("mask-ignored",),
    ),
    Fault(
        id="decode-offset-missing-in-mask-mod",
        category="mask alignment",
        summary="a mask of a few late rows is asked about rows counted from 0",
        when="decoding: fewer rows than keys, and a mask that reads the row",
        seen="rows that see what the first rows of the whole sequence would",
        sources=("pytorch/pytorch#163314", "meta-pytorch/gpt-fast#233"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    _ideal_mask(
                        _MASK + '        if problem.mask.name == "causal_bottom_right":\n'
                        "            self.mask = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx\n"
                        '        if problem.mask.name == "offset":\n'
                        "            part = problem.replace(mask=problem.mask.parts[0])\n"
                        "            self.mask = part.mask_mod(self.device)\n"
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-decode",
                edits=(
                    Edit(
                        module="subjects.traced",
                        old="    mod = asked.problem.mask_mod(asked.device)\n",
                        new="""    mask = asked.problem.mask
    if mask.name == "causal_bottom_right":
        mask = type(mask).of("causal")
    if mask.name == "offset":
        mask = mask.parts[0]
    mod = asked.problem.replace(mask=mask).mask_mod(asked.device)
""",
                    ),
                ),
            ),
        },
        named=("query-offset-missing", "mask-top-left"),
    ),
)
