"""Faults of execution: splits of the keys, determinism, the backward."""

from __future__ import annotations

from attncheck.faults.fault import Edit, Fault, Host

__all__ = ["FAULTS", "FAULTS_of_backward", "FAULTS_of_determinism", "in_splits"]


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


_IDEAL = "subjects.ideal_attention"
_GRADIENTS = "subjects.ideal_gradients"
_FORWARD = "kernels.flash2_forward"
_BACKWARD = "kernels.flash2_backward"

# dQ added up in memory, as ``triton-flash2-atomic`` does, which promises no bits.
_ATOMIC = Edit(
    module="subjects.flash2",
    old="    captured = True\n    atomic = False\n",
    new="    captured = True\n    atomic = True\n    promises = frozenset()\n",
)

_KNOWN_SHAPES = """
_TUNED = set()


def _known(*tensors):
    shapes = tuple((tuple(x.shape), x.dtype) for x in tensors)
    known = shapes in _TUNED
    _TUNED.add(shapes)
    return known


"""

FAULTS_of_determinism = (
    Fault(
        id="missing-barrier",
        category="determinism",
        summary="memory that programs share is written again before all have read it",
        when="many warps or programs, and short products",
        seen="a few wrong rows, now and then",
        sources=(
            "ggml-org/llama.cpp#13438",
            "Dao-AILab/flash-attention#359",
            "pengcuo/FlashMLA-ETAP#1",
        ),
        hosts={
            # No threads here: every seventeenth tile of values is late, whatever the call.
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module=_IDEAL,
                        old="import math\nfrom dataclasses",
                        new="import itertools\nimport math\nfrom dataclasses",
                    ),
                    Edit(
                        module=_IDEAL,
                        old="_SCORES_AT_A_TIME = 2**22\n",
                        new="_SCORES_AT_A_TIME = 2**22\n_TURNS = itertools.count()\n",
                    ),
                    Edit(
                        module=_IDEAL,
                        old="        self.problem = problem = inputs.problem\n",
                        new="        self.problem = problem = inputs.problem\n"
                        "        self.staged = None\n",
                    ),
                    Edit(
                        module=_IDEAL,
                        old="        p = self.kernel.operand(p * self.factors.weights,",
                        new="""        late = next(_TURNS) % 17 == 16 and self.staged is not None
        v, self.staged = (self.staged if late else v), v
        p = self.kernel.operand(p * self.factors.weights,""",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module=_FORWARD,
                        old="    again = torch.empty(grid, dtype=torch.int32, device=q.device)\n",
                        new="""    again = torch.empty(grid, dtype=torch.int32, device=q.device)
    pairs = (again.numel() + 1) // 2
    wide = block_dim(head_dim, q.dtype)
    scratch = torch.empty((pairs, launch.block_query, wide), dtype=q.dtype, device=q.device)
""",
                    ),
                    Edit(
                        module=_FORWARD,
                        old="        q, k, v, out, lse, again, *q.stride(),",
                        new="        q, k, v, out, lse, again, scratch, *q.stride(),",
                    ),
                    Edit(
                        module=_FORWARD,
                        old="out_ptr, lse_ptr, again_ptr, q_batch,",
                        new="out_ptr, lse_ptr, again_ptr, scratch_ptr, q_batch,",
                    ),
                    Edit(
                        module=_FORWARD,
                        old="block, bh, again_ptr + number, q_ptr,",
                        new="block, bh, scratch_ptr + number // 2 * BLOCK_Q * BLOCK_D,\n"
                        "                again_ptr + number, q_ptr,",
                    ),
                    Edit(
                        module=_FORWARD,
                        old="    block, bh, again, q_ptr, k_ptr,",
                        new="    block, bh, scratch, again, q_ptr, k_ptr,",
                    ),
                    Edit(
                        module=_FORWARD,
                        old="    k_ptr += (h64 // group) * k_head\n",
                        new="""    row_starts = tl.arange(0, BLOCK_Q)[:, None] * BLOCK_D
    across = row_starts + tl.arange(0, BLOCK_D)[None, :]
    tl.store(scratch + across, q_block)
    k_ptr += (h64 // group) * k_head
""",
                    ),
                    Edit(
                        module=_FORWARD,
                        old="            start = tile * BLOCK_K\n",
                        new="            start = tile * BLOCK_K\n"
                        "            q_block = tl.load(scratch + across)\n",
                    ),
                ),
                needs="cuda",
            ),
        },
        named=("not-the-same-again",),
    ),
    Fault(
        id="dq-nonatomic-accumulate",
        category="determinism",
        summary="programs add to dQ in memory by a load, a sum and a store",
        when="several programs that add to the same rows",
        seen="parts of dQ are lost, others in each run",
        sources=(
            "triton-lang/triton#1558",
            "Dao-AILab/flash-attention#429",
            "hao-ai-lab/FastVideo#735",
        ),
        hosts={
            # No threads here: every seventh part is lost, whatever the call.
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module=_GRADIENTS,
                        old="import dataclasses\n",
                        new="import dataclasses\nimport itertools\n",
                    ),
                    Edit(
                        module=_GRADIENTS,
                        old='Part = TypeVar("Part")\n',
                        new='Part = TypeVar("Part")\n_TURNS = itertools.count()\n',
                    ),
                    Edit(
                        module=_GRADIENTS,
                        old="            dq = self.kernel.gradient_added(dq,",
                        new="            if next(_TURNS) % 7 != 6:\n"
                        "                dq = self.kernel.gradient_added(dq,",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    _ATOMIC,
                    Edit(
                        module="kernels.flash2_backward",
                        old='tl.atomic_add(dq[0] + at, of_rows, mask=there, sem="relaxed")',
                        new="before = tl.load(dq[0] + at, mask=there)\n"
                        "                    tl.store(dq[0] + at, before + of_rows, mask=there)",
                    ),
                ),
                needs="cuda",
            ),
        },
        named=("dq-tile-dropped",),
    ),
    Fault(
        id="split-count-depends-on-batch",
        category="determinism",
        summary="into how many parts the keys are cut depends on the other sequences",
        when="a sequence alone and in a batch",
        seen="other bits, within rounding",
        sources=(
            "Dao-AILab/flash-attention#1897",
            "Dao-AILab/flash-attention#2450",
            "flashinfer-ai/flashinfer#1675",
            "pytorch/pytorch#176905",
            "vllm-project/vllm#58131",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal",
                        old="        del problem, device\n        return self._tiling\n",
                        new="""        del device
        size = self._tiling.block_kv
        return self._tiling if problem.batch == 1 else replace(self._tiling, block_kv=size // 2)
""",
                    ),
                ),
            ),
            # It promises what the kernels of the reports do, and what it keeps without the fault.
            "triton": Host(
                kernel="triton-decode",
                edits=(
                    Edit(
                        module="subjects.decode",
                        old='frozenset({"repeat", "layout", "hidden"})',
                        new='frozenset({"repeat", "layout", "hidden", "batch"})',
                    ),
                    Edit(
                        module="subjects.decode",
                        old="self._splits or splits_of(problem.kv, chosen.block_kv, device),",
                        new="self._splits\n"
                        "            or max(1, splits_of(problem.kv, chosen.block_kv, device) "
                        "// problem.batch),",
                    ),
                ),
            ),
        },
        named=("depends-on-the-batch",),
    ),
    Fault(
        id="autotune-reruns-accumulating-kernel",
        category="determinism",
        summary="the tuner runs a kernel that adds to dQ several times, and nobody clears it",
        when="the first call of each shape",
        seen="the first dQ is a multiple of what it should be",
        sources=("triton-lang/triton#5339", "triton-lang/triton#3755", "triton-lang/triton#3004"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module=_GRADIENTS,
                        old="    return _BackwardPass(kernel, inputs, outputs).gradients()\n",
                        new="""    found = _BackwardPass(kernel, inputs, outputs).gradients()
    tuned = _known(inputs.q, inputs.k)
    return found if tuned else dataclasses.replace(found, dq=found.dq + found.dq)
""",
                    ),
                    Edit(
                        module=_GRADIENTS,
                        old='Part = TypeVar("Part")\n',
                        new='Part = TypeVar("Part")\n' + _KNOWN_SHAPES,
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    _ATOMIC,
                    Edit(
                        module=_BACKWARD,
                        old="        dk, dv = _by_keys(known, keys, by_keys, dq32)\n",
                        new="""        dk, dv = _by_keys(known, keys, by_keys, dq32)
        if not _known(q, k):
            dk, dv = _by_keys(known, keys, by_keys, dq32)
""",
                    ),
                    Edit(
                        module=_BACKWARD,
                        old="def flash2_backward(\n",
                        new=_KNOWN_SHAPES + "def flash2_backward(\n",
                    ),
                ),
            ),
        },
        named=("gradient-added-again", "not-the-same-again"),
    ),
    Fault(
        id="autotune-partial-writes-mask-each-other",
        category="determinism",
        summary="each configuration writes a part of out: together, while tuning, they write all",
        when="calls after the first of each shape",
        seen="the other part is what the memory held",
        sources=("intel/intel-xpu-backend-for-triton#5773",),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module=_IDEAL,
                        old="    return Pass(kernel, inputs).outputs()\n",
                        new="""    found = Pass(kernel, inputs).outputs()
    if not _known(inputs.q, inputs.k, inputs.v):
        return found
    out, half = torch.empty_like(found.out), inputs.problem.query // 2
    out[:, :, half:] = found.out[:, :, half:]
    return Outputs(out, found.lse)
""",
                    ),
                    Edit(
                        module=_IDEAL,
                        old="_SCORES_AT_A_TIME = 2**22\n",
                        new="_SCORES_AT_A_TIME = 2**22\n" + _KNOWN_SHAPES,
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module=_FORWARD,
                        old="    again = torch.empty(grid, dtype=torch.int32, device=q.device)\n",
                        new="""    again = torch.zeros(grid, dtype=torch.int32, device=q.device)
    part = (max(1, grid[0] // 2), grid[1]) if _known(q, k, v) else grid
""",
                    ),
                    Edit(
                        module=_FORWARD,
                        old="        _forward[grid](*given,",
                        new="        _forward[part](*given,",
                    ),
                    Edit(
                        module=_FORWARD,
                        old="def hoisted(k: torch.Tensor,",
                        new=_KNOWN_SHAPES + "def hoisted(k: torch.Tensor,",
                    ),
                ),
            ),
        },
        named=("half-unwritten",),
    ),
)


_NO_DROPOUT = "no kernel of ours has dropout, and no Problem asks for it"

FAULTS_of_backward = (
    Fault(
        id="dropout-seed-bwd-mismatch",
        category="backward",
        summary="the backward draws another dropout mask than the forward",
        when="dropout, and gradients",
        seen="gradients off by their own size",
        sources=("pytorch/pytorch#197563", "pytorch/pytorch#196586"),
        unplanted=_NO_DROPOUT,
    ),
    Fault(
        id="dropout-constant-seed",
        category="backward",
        summary="every call draws the same dropout mask",
        when="dropout, in two calls",
        seen="nothing in one call; the same keys are dropped in each",
        sources=("Dao-AILab/flash-attention#2088",),
        unplanted=_NO_DROPOUT,
    ),
    Fault(
        id="dlse-ignored",
        category="backward",
        summary="the gradient of LSE is dropped",
        when="a loss that reads LSE",
        seen="dQ and dK lack that part; all else right",
        sources=(
            "Dao-AILab/flash-attention#1817",
            "Dao-AILab/flash-attention#889",
            "Dao-AILab/flash-attention#1137",
            "Dao-AILab/flash-attention#141",
            "pytorch/pytorch#189784",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal",
                        old="return delta if dlse is None else delta - dlse",
                        new="return delta",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.gradient_terms",
                        old="        delta -= loaded_rows(dlse[0] + first, rows, query)\n",
                        new="        pass\n",
                    ),
                ),
            ),
        },
        named=("dlse-ignored",),
    ),
    Fault(
        id="delta-missing",
        category="backward",
        summary="dS is P · dP: delta is not taken off",
        when="every gradient",
        seen="dQ and dK off by about a third of their size; dV right",
        sources=("a classic; no report known",),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal", old="return p * (dp - delta)", new="return p * dp"
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old="dx = p * (dp - delta)",
                        new="dx = p * dp",
                    ),
                ),
            ),
        },
        named=("delta-missing",),
    ),
)
