"""Faults: races, call order, and sums that depend on the batch."""

from __future__ import annotations

from attncheck.faults.fault import Edit, Fault, Host

__all__ = ["FAULTS"]

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

FAULTS = (
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
                        module="kernels.gradients_by_keys",
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
