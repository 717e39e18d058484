"""Faults of masks: alignment, sliding windows, block lists, documents."""

from __future__ import annotations

from attncheck.faults.fault import Edit, Fault, Host

__all__ = ["FAULTS", "FAULTS_of_block_mask", "FAULTS_of_documents", "FAULTS_of_sliding_window"]


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
            module="kernels.varlen_backward",
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
                        module="kernels.varlen_backward",
                        old="keys[None, :] <= rows[:, None] + diagonal",
                        new="keys[None, :] < rows[:, None] + diagonal",
                    ),
                    Edit(
                        module="kernels.varlen_backward",
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


_WIDER = """        problem, device = inputs.problem, inputs.device.type
        if problem.mask.name == "sliding_window":
            window = problem.mask.values["window"] + 1
            problem = problem.replace(mask=type(problem.mask).of("sliding_window", window=window))
"""
_ASKED = "        problem, device = inputs.problem, inputs.device.type\n"

FAULTS_of_sliding_window = (
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
                        old="if not launch.free and needs_careful_launch(again):",
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


_IDEAL = "subjects.ideal_attention"
_SEEN = "        seen = self.visible(self.mask, at) & inside\n        return seen.expand("
_WHOLE = "(problem.batch, problem.heads, len(row), len(key))"
_VISITED = """            seen, at = self.seen(rows, keys)
            if bool(seen.any()):
                s = self.modified("""

FAULTS_of_block_mask = (
    Fault(
        id="blockmask-partial-as-full",
        category="block mask",
        summary="a tile of which more than half is visible counts as full: its mask is not applied",
        when="tiles with a few hidden places",
        seen="hidden keys count",
        sources=("pytorch/pytorch#143534", "pytorch/pytorch#141126"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module=_IDEAL,
                        old=_SEEN,
                        new=f"""        seen = (self.visible(self.mask, at) & inside).expand{_WHOLE}
        tiles = seen.unflatten(2, (-1, self.tile.block_query))
        full = tiles.double().mean((-2, -1), keepdim=True) > 0.5
        seen = (tiles | full).flatten(2, 3)
        return seen.expand(""",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="mods.block_mask",
                        old="+ pad(every, beyond).view(shape).amin(-1)",
                        new="+ (pad(every, beyond).view(shape).double().mean(-1) > 0.5).byte()",
                    ),
                ),
            ),
        },
        named=("tile-mostly-seen-as-full", "mask-one-key-wider", "tail-unmasked"),
    ),
    Fault(
        id="blockmask-wrong-block-size",
        category="block mask",
        summary="the list is of tiles twice as wide as those that the kernel walks over",
        when="a mask that hides something, and several tiles of keys",
        seen="listed tiles are taken for others; the later half of the keys is never visited",
        sources=(
            "kuleshov-group/bd3lms#23",
            "pytorch/pytorch#182593",
            "pytorch/pytorch#133562",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module=_IDEAL,
                        old=_VISITED,
                        new="""            seen, at = self.seen(rows, keys)
            listed = self.problem.mask == library.FULL
            listed |= bool(self.seen(rows, slice(2 * keys.start, 2 * keys.stop))[0].any())
            if listed and bool(seen.any()):
                s = self.modified(""",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="subjects.visits",
                        old="        block_kv=block_kv,\n        device=device,",
                        new="        block_kv=block_kv if by_keys else 2 * block_kv,\n"
                        "        device=device,",
                    ),
                ),
            ),
        },
        # The later half that is never visited is the last of two splits, too.
        named=("last-tile-dropped", "tile-skipped", "split-dropped"),
    ),
    Fault(
        id="blockmask-larger-than-seq",
        category="block mask",
        summary="a list made for a longer sequence is used, and nobody looks at its length",
        when="lengths that end within a tile that is full in the longer sequence",
        seen="what lies behind the last key counts",
        sources=(
            "pytorch/pytorch#136232",
            "pytorch/pytorch#141625",
            "meta-pytorch/attention-gym#31",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module=_IDEAL,
                        old=_SEEN,
                        new=f"""        seen = self.visible(self.mask, at).expand{_WHOLE}
        tiles = seen.unflatten(2, (-1, self.tile.block_query))
        full = tiles.all(-1, keepdim=True).all(-2, keepdim=True)
        full = full & (self.problem.mask != library.FULL)
        seen = (tiles & (inside[:, :, None] | full)).flatten(2, 3)
        return seen.expand(""",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="subjects.visits",
                        old="        problem.mask_mod(device),\n        problem.dimensions,\n",
                        new="""\
        (longer := _longer(problem, block_query, block_kv)).mask_mod(device),
        longer.dimensions,
""",
                    ),
                    Edit(
                        module="subjects.visits",
                        old="_kept = lru_cache(maxsize=_KEPT)(_visits)",
                        new="""def _longer(problem, block_query, block_kv):
    plain = {"causal", "sliding_window", "prefix_lm", "padding", "and", "or", "not"}
    if any(part.name not in plain for part in problem.mask.walk()):
        return problem
    rows, keys = -problem.query % block_query, -problem.kv % block_kv
    return problem.replace(query=problem.query + rows, kv=problem.kv + keys)


_kept = lru_cache(maxsize=_KEPT)(_visits)""",
                    ),
                ),
            ),
        },
        named=("full-tile-beyond-the-end", "tail-unmasked"),
    ),
)


_LAST = "def _in_nats(problem: Problem) -> bool:\n"
_TRACED = "    mod = asked.problem.mask_mod(asked.device)\n"
_KEPT = "_kept_mask = functools.lru_cache(maxsize=_KEPT)(_mask)\n"

_WITHOUT_DOCUMENTS = """def _read(problem):
    from attncheck.subjects.conventions.packing import packed

    found = packed(problem)
    if found is None or not any(part.name.startswith("document") for part in problem.mask.walk()):
        return problem
    return problem.replace(mask=found.rest)


"""
_SHORTER_PREFIX = """def _read(problem):
    def shorter(spec):
        less = spec.name == "prefix_lm"
        given = tuple((n, max(0, value - 1) if less else value) for n, value in spec.arguments)
        return type(spec)(spec.name, given, tuple(shorter(part) for part in spec.parts))

    return problem.replace(mask=shorter(problem.mask))


"""
_PADDING_IN_PREFIX = """def _read(problem):
    from attncheck.mods.spec import Spec

    mask = problem.mask
    parts = {part.name: part for part in mask.walk()}
    if {"prefix_lm", "padding"} <= set(parts):
        mask = Spec.of("or", mask, Spec.of("not", parts["padding"]))
    return problem.replace(mask=mask)


"""


def _ideal(read: str) -> Host:
    """The ideal kernel with the mask of another Problem, as ``_read`` has it."""
    edits = (
        Edit(module=_IDEAL, old=_MASK, new=_MASK.replace("problem.", "_read(problem).")),
        Edit(module=_IDEAL, old=_LAST, new=read + _LAST),
    )
    return Host(kernel="ideal", edits=edits)


def _flash1(read: str) -> Host:
    """FlashAttention-1, which asks its mask in every tile, with the mask of another Problem."""
    mask = _TRACED.replace("asked.problem", "_read(asked.problem)")
    edits = (
        Edit(module="subjects.traced", old=_TRACED, new=mask),
        Edit(module="subjects.traced", old=_KEPT, new=read + _KEPT),
    )
    return Host(kernel="triton-flash1", edits=edits)


FAULTS_of_documents = (
    Fault(
        id="doc-mask-ignored",
        category="documents",
        summary="packed documents attend to one another",
        when="two documents or more in a sequence",
        seen="rows are averages over all documents; a model learns all the same",
        sources=(
            "huggingface/transformers#46634",
            "axolotl-ai-cloud/axolotl#3796",
            "fla-org/flash-linear-attention#842",
        ),
        hosts={
            "ideal": _ideal(_WITHOUT_DOCUMENTS),
            "triton": Host(
                kernel="triton-varlen",
                edits=(
                    Edit(
                        module="subjects.varlen",
                        old="    return found\n\n\ndef _alone(",
                        new="""\
    whole = [[tuple(map(sum, zip(*parts, strict=True)))] for parts in found.segments]
    return replace(found, segments=whole)


def _alone(""",
                    ),
                ),
            ),
        },
        named=("document-ignored",),
    ),
    Fault(
        id="lse-delta-padding-nan",
        category="documents",
        summary="LSE and delta are padded with memory that nobody wrote, and read without a mask",
        when="gradients where the rows are no whole number of blocks",
        seen="NaN in dK and dV, if the memory holds it",
        sources=("tile-ai/tilelang#2461", "fla-org/flash-linear-attention#892"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_gradients",
                        old="        self.lse = padded(outputs.lse[..., None], rows)[..., 0]\n",
                        new="""        behind = (*outputs.lse.shape[:2], -self.problem.query % rows)
        self.lse = torch.cat((outputs.lse, outputs.lse.new_empty(behind)), 2)
""",
                    ),
                    Edit(
                        module="subjects.ideal_gradients",
                        old="            seen = seen & there\n",
                        new="",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.flash2_backward",
                        old="        dk, dv = _by_keys(known, keys, by_keys, dq32)\n",
                        new="""        behind = (*lse.shape[:2], -query % keys.block_query)
        longer = [torch.cat((x, x.new_empty(behind)), 2) for x in (lse, delta)]
        padded = _Known(q, k, v, dout, *longer, scale, mask, score, slope)
        dk, dv = _by_keys(padded, keys, by_keys, dq32)
""",
                    ),
                    Edit(
                        module="kernels.flash2_backward",
                        old="first = (b64 * heads + h64) * query\n",
                        new="first = (b64 * heads + h64) * (tl.cdiv(query, BLOCK_Q) * BLOCK_Q)\n",
                    ),
                    Edit(
                        module="kernels.flash2_backward",
                        old="            lse = loaded_lse(lse_ptr + first, rows, query, IDENTITY)",
                        new="            lse = loaded_lse(lse_ptr + first, rows, start + BLOCK_Q, IDENTITY)",
                    ),
                    Edit(
                        module="kernels.flash2_backward",
                        old="            delta = loaded_rows(delta_ptr + first, rows, query)",
                        new="            delta = loaded_rows(delta_ptr + first, rows, start + BLOCK_Q)",
                    ),
                    Edit(
                        module="kernels.flash2_backward",
                        old="keys[:, None], query, kv, lse[None, :],",
                        new="keys[:, None], start + BLOCK_Q, kv, lse[None, :],",
                    ),
                ),
            ),
        },
        # Memory that nobody wrote holds something else another time, on a GPU mostly.
        named=("backward-rows-behind", "not-the-same-again"),
    ),
    Fault(
        id="prefix-lost-in-causal-tile-skip",
        category="documents",
        summary="tiles above the diagonal are skipped, though a prefix is visible to all rows",
        when="a prefix longer than a block of rows",
        seen="the first rows see a part of the prefix alone",
        sources=(
            "vllm-project/vllm#47217",
            "vllm-project/vllm#40106",
            "huggingface/transformers#39389",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module=_IDEAL,
                        old="        seen = self.visible(self.mask, at) & inside\n",
                        new="""        seen = self.visible(self.mask, at) & inside
        if any(part.name == "prefix_lm" for part in problem.mask.walk()):
            size = self.tile.block_kv
            seen = seen & (keys.start < (row // size + 1) * size)[:, None]
""",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash1",
                edits=(
                    Edit(
                        module="subjects.flash",
                        old='return mask.name in {"causal", "sliding_window"}',
                        new='return mask.name in {"causal", "sliding_window", "prefix_lm"}',
                    ),
                ),
            ),
        },
        named=("prefix-ignored", "tiles-above-diagonal-skipped", "last-tile-dropped"),
    ),
    Fault(
        id="prefix-boundary-off-by-one",
        category="documents",
        summary="the prefix is one key shorter than it should be",
        when="a prefix, for rows before its last key",
        seen="about one key in as many as a row sees",
        sources=("bigscience-workshop/Megatron-DeepSpeed#167",),
        hosts={"ideal": _ideal(_SHORTER_PREFIX), "triton": _flash1(_SHORTER_PREFIX)},
        named=("prefix-one-narrower",),
    ),
    Fault(
        id="pad-tokens-treated-as-prefix",
        category="documents",
        summary="padding has the token type of the prefix, and all rows see it",
        when="a prefix and padding in one mask",
        seen="what stands in padding reaches out",
        sources=("huggingface/transformers#30993",),
        hosts={"ideal": _ideal(_PADDING_IN_PREFIX), "triton": _flash1(_PADDING_IN_PREFIX)},
        named=("padding-as-prefix",),
    ),
)
