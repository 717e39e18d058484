"""Faults of execution: splits of the keys, races and launches, and the backward."""

from __future__ import annotations

from attncheck.faults.entries.shared_patches import ATOMIC_DQ, IN_SPLITS, KNOWN_CALLS
from attncheck.faults.fault import Fault, decode, flash2, ideal

__all__ = ["BACKWARD", "DETERMINISM", "SPLIT_KV"]

SPLIT_KV = (
    Fault(
        id="empty-split-nan",
        summary="the merge subtracts a largest LSE of −∞ from one of −∞",
        when="rows that see no key in any split",
        seen="NaN rows",
        reports=(
            "tile-ai/tilelang#328 pegainfer-project/pegainfer#21 vllm-project/vllm#39148 #28181 "
            "flashinfer-ai/flashinfer#4051"
        ),
        named=("empty-rows-nan",),
        ideal=ideal(
            IN_SPLITS,
            """
            -shift = finite(largest)
            +shift = largest
        """,
        ),
        triton=decode("""
            -shift = tl.where(largest == float("-inf"), 0.0, largest)
            +shift = largest
        """),
    ),
    Fault(
        id="merge-base-mismatch",
        summary="natural LSEs of splits are merged with powers of 2",
        when="splits of unequal mass",
        seen="weights of splits nearer to one another than they are; LSE too",
        reports="sgl-project/sglang#40903 #35045",
        named=("split-merge-base",),
        ideal=ideal(
            IN_SPLITS,
            """
            -weights = torch.exp(lses - shift)
            +weights = torch.exp2(lses - shift)
        """,
        ),
        triton=decode("""
            -weight = power(lse - shift, False)
            +weight = tl.exp2(lse - shift)
        """),
    ),
    Fault(
        id="combine-plain-average",
        summary="out is the mean of what the splits give, each with the same weight",
        when="splits of unequal mass",
        seen="out off by up to its own size; LSE right",
        reports="a classic; no report known",
        named=("splits-averaged",),
        ideal=ideal(
            IN_SPLITS,
            """
            -out = (weights[..., None] * outs).sum(0) / torch.where(dead, 1.0, total)[..., None]
            +out = outs.sum(0) / (~torch.isneginf(lses)).sum(0).clamp(min=1)[..., None]
        """,
        ),
        triton=decode("""
            -acc += weight[:, None] * part
            +acc += part

            -normalised(acc, total).to(out_ptr.dtype.element_ty),
            +(acc / splits).to(out_ptr.dtype.element_ty),
        """),
    ),
    Fault(
        id="lse-not-combined",
        summary="the LSE returned is that of the first split",
        when="two splits or more, and LSE is read",
        seen="out right; LSE too small",
        reports="flashinfer-ai/flashinfer#50 #58 vllm-project/flash-attention#87",
        named=("lse-of-one-split",),
        ideal=ideal(
            IN_SPLITS,
            """
            -lse = torch.where(dead, -math.inf, shift + torch.log(total))
            +lse = lses[0]
        """,
        ),
        triton=decode("""
            -tl.store(lse_ptr + row, log_sum(shift, total, False), mask=here)
            +tl.store(lse_ptr + row, tl.load(part_lse_ptr + row, mask=here), mask=here)
        """),
    ),
    Fault(
        id="sink-counted-per-split",
        summary="the sink is added once in every split",
        when="a sink, and two splits or more",
        seen="out too small and LSE too large where the sink matters",
        reports="ROCm/rocm-libraries#12229 #12227",
        named=("sink-twice",),
        ideal=ideal(
            IN_SPLITS,
            """
            -q, tiles, sinks = self.q[:, :, rows], self.key_tiles(), (self.sink, None)
            +q, tiles, sinks = self.q[:, :, rows], self.key_tiles(), (self.sink, self.sink)
        """,
        ),
        triton=decode("""
            -total = total * power(own - shift, False)
            +total = splits * total * power(own - shift, False)
        """),
    ),
    Fault(
        id="splitkv-wrong-seqlen",
        summary="splits reckon with the padded length in place of the number of keys",
        when="splits, and a number of keys that is not a whole number of blocks",
        seen="padding counts with a score of 0 and a value of 0",
        reports="Dao-AILab/flash-attention#1455",
        named=("tail-unmasked",),
        ideal=ideal(
            IN_SPLITS,
            """
            -inside = self.kernel.inside(key, problem.kv).view(1, 1, 1, -1)
            +split = self.k.shape[2] > self.tile.block_kv
            +length = self.k.shape[2] if split else problem.kv
            +inside = self.kernel.inside(key, length).view(1, 1, 1, -1)
        """,
        ),
        triton=decode("""
             if MASKED:
            -    seen = visible(b, h, rows, keys, kv, mask_captured, MASK, BLOCK_Q, BLOCK_K)
            +    length = tl.where(tl.num_programs(0) > 1, tl.cdiv(kv, BLOCK_K) * BLOCK_K, kv)
            +    seen = visible(b, h, rows, keys, length, mask_captured, MASK, BLOCK_Q, BLOCK_K)
        """),
    ),
)

DETERMINISM = (
    Fault(
        id="missing-barrier",
        summary="memory that programs share is written again before all have read it",
        when="many warps or programs, and short products",
        seen="a few wrong rows, now and then",
        reports="ggml-org/llama.cpp#13438 Dao-AILab/flash-attention#359 pengcuo/FlashMLA-ETAP#1",
        named=("not-the-same-again",),
        ideal=ideal("""
            +# No threads here: every seventeenth tile of values is late, whatever the call.
            +late = next(_TURNS) % 17 == 16 and self.staged is not None
            +v, self.staged = (self.staged if late else v), v
             p = self.kernel.operand(p * self.factors.weights, self.problem.formats.weights)

             self.problem = problem = inputs.problem
            +self.staged = None

            +import itertools
            +_TURNS = itertools.count()
        """),
        triton=flash2(
            """
            +pairs = (again.numel() + 1) // 2
            +wide = block_dim(head_dim, q.dtype)
            +scratch = torch.empty((pairs, launch.block_query, wide), dtype=q.dtype, device=q.device)
             given = (
            -    q, k, v, out, lse, again, *q.stride(), *k.stride(), *v.stride(), *out.stride(), *grid,
            +    q, k, v, out, lse, again, scratch, *q.stride(), *k.stride(), *v.stride(), *out.stride(), *grid,

            -q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, again_ptr, q_batch, q_head, q_row, q_col, k_batch,
            +q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, again_ptr, scratch_ptr, q_batch, q_head, q_row, q_col, k_batch,

            -block, bh, again_ptr + number, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, q_batch,
            +block, bh, scratch_ptr + number // 2 * BLOCK_Q * BLOCK_D,
            +again_ptr + number, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, q_batch,

            -block, bh, again, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, q_batch, q_head, q_row, q_col, k_batch,
            +block, bh, scratch, again, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, q_batch, q_head, q_row, q_col, k_batch,

            +row_starts = tl.arange(0, BLOCK_Q)[:, None] * BLOCK_D
            +across = row_starts + tl.arange(0, BLOCK_D)[None, :]
            +tl.store(scratch + across, q_block)
             k_ptr += (h64 // group) * k_head

            +q_block = tl.load(scratch + across)
             partial = _may_hide(of_run, start, kv, LISTED, FREE, BLOCK_K)
        """,
            needs="cuda",
        ),
    ),
    Fault(
        id="dq-nonatomic-accumulate",
        summary="programs add to dQ in memory by a load, a sum and a store",
        when="several programs that add to the same rows",
        seen="parts of dQ are lost, others in each run",
        reports="triton-lang/triton#1558 Dao-AILab/flash-attention#429 hao-ai-lab/FastVideo#735",
        named=("dq-tile-dropped",),
        ideal=ideal("""
            -dq = self.kernel.gradient_added(dq, self._seen_product(dx, seen, k))
            +# No threads here: every seventh part is lost, whatever the call.
            +if next(_TURNS) % 7 != 6:
            +    dq = self.kernel.gradient_added(dq, self._seen_product(dx, seen, k))

            +import itertools
            +_TURNS = itertools.count()
        """),
        triton=flash2(
            ATOMIC_DQ,
            """
            -tl.atomic_add(dq[0] + at, of_rows, mask=there, sem="relaxed")
            +before = tl.load(dq[0] + at, mask=there)
            +tl.store(dq[0] + at, before + of_rows, mask=there)
        """,
            needs="cuda",
        ),
    ),
    Fault(
        id="split-count-depends-on-batch",
        summary="into how many parts the keys are cut depends on the other sequences",
        when="a sequence alone and in a batch",
        seen="other bits, within rounding",
        reports=(
            "Dao-AILab/flash-attention#1897 #2450 flashinfer-ai/flashinfer#1675 "
            "pytorch/pytorch#176905 vllm-project/vllm#58131"
        ),
        named=("depends-on-the-batch",),
        ideal=ideal("""
            -del problem, device
            -return self._tiling
            +del device
            +size = self._tiling.block_kv
            +return self._tiling if problem.batch == 1 else replace(self._tiling, block_kv=size // 2)
        """),
        triton=decode("""
            -promises = frozenset({"repeat", "layout", "hidden"})
            +promises = frozenset({"repeat", "layout", "hidden", "batch"})

            -splits=self._splits or splits_of(problem.kv, chosen.block_kv, device),
            +splits=self._splits
            +or max(1, splits_of(problem.kv, chosen.block_kv, device) // problem.batch),
        """),
    ),
    Fault(
        id="autotune-reruns-accumulating-kernel",
        summary="the tuner runs a kernel that adds to dQ several times, and nobody clears it",
        when="the first call of each shape",
        seen="the first dQ is a multiple of what it should be",
        reports="triton-lang/triton#5339 #3755 #3004",
        named=("gradient-added-again", "not-the-same-again"),
        ideal=ideal(
            KNOWN_CALLS,
            """
            -return _BackwardPass(kernel, inputs, outputs).gradients()
            +found = _BackwardPass(kernel, inputs, outputs).gradients()
            +tuned = _known(inputs.q, inputs.k)
            +return found if tuned else dataclasses.replace(found, dq=found.dq + found.dq)
        """,
        ),
        triton=flash2(
            KNOWN_CALLS,
            """
             dk, dv = _by_keys(known, keys, by_keys, dq32)
            +if not _known(q, k):
            +    dk, dv = _by_keys(known, keys, by_keys, dq32)
        """,
            ATOMIC_DQ,
        ),
    ),
    Fault(
        id="autotune-partial-writes-mask-each-other",
        summary="each configuration writes a part of out: together, while tuning, they write all",
        when="calls after the first of each shape",
        seen="the other part is what the memory held",
        reports="intel/intel-xpu-backend-for-triton#5773",
        named=("half-unwritten",),
        ideal=ideal(
            KNOWN_CALLS,
            """
            -return Pass(kernel, inputs).outputs()
            +found = Pass(kernel, inputs).outputs()
            +if not _known(inputs.q, inputs.k, inputs.v):
            +    return found
            +out, half = torch.empty_like(found.out), inputs.problem.query // 2
            +out[:, :, half:] = found.out[:, :, half:]
            +return Outputs(out, found.lse)
        """,
        ),
        triton=flash2(
            KNOWN_CALLS,
            """
             grid = (triton.cdiv(query, launch.block_query), batch * heads)
            -again = torch.empty(grid, dtype=torch.int32, device=q.device)
            +again = torch.zeros(grid, dtype=torch.int32, device=q.device)
            +part = (max(1, grid[0] // 2), grid[1]) if _known(q, k, v) else grid

            -_forward[grid](*given, **options, CAREFUL=False, num_stages=launch.stages, **most)
            +_forward[part](*given, **options, CAREFUL=False, num_stages=launch.stages, **most)
        """,
        ),
    ),
)

BACKWARD = (
    Fault(
        id="dropout-seed-bwd-mismatch",
        summary="the backward draws another dropout mask than the forward",
        when="dropout, and gradients",
        seen="gradients off by their own size",
        reports="pytorch/pytorch#197563 #196586",
        unplanted="no kernel of ours has dropout, and no Problem asks for it",
    ),
    Fault(
        id="dropout-constant-seed",
        summary="every call draws the same dropout mask",
        when="dropout, in two calls",
        seen="nothing in one call; the same keys are dropped in each",
        reports="Dao-AILab/flash-attention#2088",
        unplanted="no kernel of ours has dropout, and no Problem asks for it",
    ),
    Fault(
        id="dlse-ignored",
        summary="the gradient of LSE is dropped",
        when="a loss that reads LSE",
        seen="dQ and dK lack that part; all else right",
        reports="Dao-AILab/flash-attention#1817 #889 #1137 #141 pytorch/pytorch#189784",
        named=("dlse-ignored",),
        ideal=ideal(model="dlse-ignored"),
        triton=flash2("""
            -delta -= loaded_rows(dlse[0] + first, rows, query)
            +pass
        """),
    ),
    Fault(
        id="delta-missing",
        summary="dS is P · dP: delta is not taken off",
        when="every gradient",
        seen="dQ and dK off by about a third of their size; dV right",
        reports="a classic; no report known",
        named=("delta-missing",),
        ideal=ideal(model="delta-missing"),
        triton=flash2("""
            -dx = p * (dp - delta)
            +dx = p * dp
        """),
    ),
)
