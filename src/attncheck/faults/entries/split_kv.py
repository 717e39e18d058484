"""Faults: keys in splits that are merged through LSE."""

from __future__ import annotations

from attncheck.faults.fault import Edit, Fault, Host

__all__ = ["FAULTS", "in_splits"]

_LOOP = """        q = self.q[:, :, rows]
        running = self._start(q)
        for keys in self.key_tiles():
"""
_STEP = """                step(running, s, seen, self.expanded(self.v[:, :, keys]))
        return self._finish(running)
"""
_FINISH = "        return self._finish(running)\n"
_FINISH_PART = """        found = self._finish(running)
        return found.out, found.lse
"""
_SPLIT = """        q, tiles = self.q[:, :, rows], self.key_tiles()
        given = ((tiles[:1], self.sink), (tiles[1:], None))
        parts = [self._part(rows, q, *each) for each in given]
        outs, lses = (torch.stack(each) for each in zip(*parts, strict=True))
        largest = lses.amax(0)
        shift = finite(largest)
        weights = torch.exp(lses - shift)
        total = weights.sum(0)
        dead = total == 0
        out = (weights[..., None] * outs).sum(0) / torch.where(dead, 1.0, total)[..., None]
        lse = torch.where(dead, -math.inf, shift + torch.log(total))
        return Outputs(out.to(self.problem.formats.output.torch_dtype), lse)

    def _part(self, rows, q, tiles, sink):
        whole, self.sink = self.sink, sink
        running = self._start(q)
        self.sink = whole
        for keys in tiles:
"""
_MERGE = "kernels.decode_forward"


def in_splits(old: str = "", new: str = "") -> tuple[Edit, ...]:
    """The ideal kernel in two splits, its first tile of keys and the others, merged through LSE.

    With ``new`` in place of ``old`` in what merges them; without either it is right.
    """
    assert old in _SPLIT, f"{old!r} is not in what merges splits"
    ideal = "subjects.ideal_attention"
    return (
        Edit(module=ideal, old=_LOOP, new=_SPLIT.replace(old, new) if old else _SPLIT),
        Edit(module=ideal, old=_STEP, new=_STEP.replace(_FINISH, _FINISH_PART)),
        Edit(
            module=ideal,
            old="Outputs(out.to(self.problem.formats.output.torch_dtype), lse)\n\n    def exp",
            new="Outputs(out, lse)\n\n    def exp",
        ),
        Edit(
            module="subjects.ideal",
            old="            lazy_rescale=self._tiling.lazy_rescale,\n",
            new="            lazy_rescale=self._tiling.lazy_rescale,\n            splits=2,\n",
        ),
    )


def _ideal(old: str, new: str) -> Host:
    return Host(kernel="ideal", edits=in_splits(old, new))


def _decode(old: str, new: str) -> Host:
    edit = Edit(module="kernels.decode_forward", old=old, new=new)
    return Host(kernel="triton-decode", edits=(edit,))


FAULTS = (
    Fault(
        id="empty-split-nan",
        category="split kv",
        summary="the merge subtracts a largest LSE of −∞ from one of −∞",
        when="rows that see no key in any split",
        seen="NaN rows",
        sources=(
            "tile-ai/tilelang#328",
            "pegainfer-project/pegainfer#21",
            "vllm-project/vllm#39148",
            "vllm-project/vllm#28181",
            "flashinfer-ai/flashinfer#4051",
        ),
        hosts={
            "ideal": _ideal("shift = finite(largest)", "shift = largest"),
            "triton": _decode(
                'shift = tl.where(largest == float("-inf"), 0.0, largest)', "shift = largest"
            ),
        },
        named=("empty-rows-nan",),
    ),
    Fault(
        id="merge-base-mismatch",
        category="split kv",
        summary="natural LSEs of splits are merged with powers of 2",
        when="splits of unequal mass",
        seen="weights of splits nearer to one another than they are; LSE too",
        sources=("sgl-project/sglang#40903", "sgl-project/sglang#35045"),
        hosts={
            "ideal": _ideal("torch.exp(lses - shift)", "torch.exp2(lses - shift)"),
            "triton": _decode(
                "weight = power(lse - shift, False)", "weight = tl.exp2(lse - shift)"
            ),
        },
        named=("split-merge-base",),
    ),
    Fault(
        id="combine-plain-average",
        category="split kv",
        summary="out is the mean of what the splits give, each with the same weight",
        when="splits of unequal mass",
        seen="out off by up to its own size; LSE right",
        sources=("a classic; no report known",),
        hosts={
            "ideal": _ideal(
                "(weights[..., None] * outs).sum(0) / torch.where(dead, 1.0, total)[..., None]",
                "outs.sum(0) / (~torch.isneginf(lses)).sum(0).clamp(min=1)[..., None]",
            ),
            "triton": Host(
                kernel="triton-decode",
                edits=(
                    Edit(
                        module="kernels.decode_forward",
                        old="acc += weight[:, None] * part",
                        new="acc += part",
                    ),
                    Edit(
                        module="kernels.decode_forward",
                        old="normalised(acc, total).to(out_ptr.dtype.element_ty)",
                        new="(acc / splits).to(out_ptr.dtype.element_ty)",
                    ),
                ),
            ),
        },
        named=("splits-averaged",),
    ),
    Fault(
        id="lse-not-combined",
        category="split kv",
        summary="the LSE returned is that of the first split",
        when="two splits or more, and LSE is read",
        seen="out right; LSE too small",
        sources=(
            "flashinfer-ai/flashinfer#50",
            "flashinfer-ai/flashinfer#58",
            "vllm-project/flash-attention#87",
        ),
        hosts={
            "ideal": _ideal(
                "lse = torch.where(dead, -math.inf, shift + torch.log(total))", "lse = lses[0]"
            ),
            "triton": _decode(
                "tl.store(lse_ptr + row, log_sum(shift, total, False), mask=here)",
                "tl.store(lse_ptr + row, tl.load(part_lse_ptr + row, mask=here), mask=here)",
            ),
        },
        named=("lse-of-one-split",),
    ),
    Fault(
        id="sink-counted-per-split",
        category="split kv",
        summary="the sink is added once in every split",
        when="a sink, and two splits or more",
        seen="out too small and LSE too large where the sink matters",
        sources=("ROCm/rocm-libraries#12229", "ROCm/rocm-libraries#12227"),
        hosts={
            "ideal": _ideal("(tiles[1:], None)", "(tiles[1:], self.sink)"),
            "triton": _decode(
                "total = total * power(own - shift, False)",
                "total = splits * total * power(own - shift, False)",
            ),
        },
        named=("sink-twice",),
    ),
    Fault(
        id="splitkv-wrong-seqlen",
        category="split kv",
        summary="splits reckon with the padded length in place of the number of keys",
        when="splits, and a number of keys that is not a whole number of blocks",
        seen="padding counts with a score of 0 and a value of 0",
        sources=("Dao-AILab/flash-attention#1455",),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    *in_splits(),
                    Edit(
                        module="subjects.ideal_attention",
                        old="inside = self.kernel.inside(key, problem.kv).view(1, 1, 1, -1)",
                        new="""split = self.k.shape[2] > self.tile.block_kv
        length = self.k.shape[2] if split else problem.kv
        inside = self.kernel.inside(key, length).view(1, 1, 1, -1)""",
                    ),
                ),
            ),
            "triton": _decode(
                "seen = visible(b, h, rows, keys, kv, mask_captured, MASK, BLOCK_Q, BLOCK_K)",
                """length = tl.where(tl.num_programs(0) > 1, tl.cdiv(kv, BLOCK_K) * BLOCK_K, kv)
        seen = visible(b, h, rows, keys, length, mask_captured, MASK, BLOCK_Q, BLOCK_K)""",
            ),
        },
        named=("tail-unmasked",),
    ),
)
