"""Faults: packed documents, prefixes and padding."""

from __future__ import annotations

from attncheck.faults.fault import Edit, Fault, Host

__all__ = ["FAULTS"]

_IDEAL = "subjects.ideal_attention"
_MASK = "        self.mask = problem.mask_mod(self.device)\n"
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


FAULTS = (
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
                        module="kernels.gradients_by_keys",
                        old="first = (b64 * heads + h64) * query\n",
                        new="first = (b64 * heads + h64) * (tl.cdiv(query, BLOCK_Q) * BLOCK_Q)\n",
                    ),
                    Edit(
                        module="kernels.gradients_by_keys",
                        old="lse = loaded_lse(lse_ptr + first, rows, query, IDENTITY)",
                        new="lse = loaded_lse(lse_ptr + first, rows, start + BLOCK_Q, IDENTITY)",
                    ),
                    Edit(
                        module="kernels.gradients_by_keys",
                        old="delta = loaded_rows(delta_ptr + first, rows, query)",
                        new="delta = loaded_rows(delta_ptr + first, rows, start + BLOCK_Q)",
                    ),
                    Edit(
                        module="kernels.gradients_by_keys",
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
