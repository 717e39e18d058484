"""Faults of precision and of 8-bit formats."""

from __future__ import annotations

from attncheck.faults.fault import Fault, flash1, flash2, ideal, paged

__all__ = ["FP8", "PRECISION"]

PRECISION = (
    Fault(
        id="s-in-fp16-before-scale",
        summary="q·k is kept in fp16 before it is scaled",
        when="always, the more the larger q and k are",
        seen="twice the error at usual scores; ∞ and NaN beyond 65504",
        reports=(
            "pytorch/pytorch#119131 #116176 ultralytics/ultralytics#24990 ggml-org/llama.cpp#17558"
        ),
        discrete=False,
        named=("scores-rounded",),
        ideal=ideal(model="scores-rounded", dtypes=("fp16", "bf16")),
        triton=flash1(
            """
            -s = product * factor
            +s = product.to(tl.float16).to(tl.float32) * factor
        """,
            dtypes=("fp16", "bf16"),
        ),
    ),
    Fault(
        id="acc-o-in-io-dtype",
        summary="the output so far is rounded to the dtype after each tile",
        when="16 bits and many tiles of keys",
        seen="half as much error again for four tiles, nine percent off for 256 of V = 1",
        reports="Xilinx/mlir-air#1606 pytorch/pytorch#163588",
        discrete=False,
        named=("out-rounded",),
        ideal=ideal(model="out-rounded"),
        triton=flash2("""
                 s = hidden(s, visible(b, h, rows, keys, kv, mask_captured, MASK, BLOCK_Q, BLOCK_K))
             p, alpha, m, total = advanced(s, m, total, IDENTITY)
             acc = with_values(
                 p, v_block, seen, acc * alpha[:, None], CAREFUL, WEIGHTS_SCALE, PRECISION, IMPRECISE
             )
            -return m, total, acc
            +return m, total, acc.to(q_block.dtype).to(tl.float32)
        """),
    ),
    Fault(
        id="l-accumulated-in-bf16",
        summary="the row sum is rounded to bf16 after each tile",
        when="always, the more the longer rows are",
        seen="rows that do not add up to 1, and LSE",
        reports="tenstorrent/tt-metal#52045",
        discrete=False,
        named=("sum-rounded",),
        ideal=ideal(model="sum-rounded"),
        triton=flash2("""
            -return p, alpha, m_new, total * alpha + tl.sum(p, 1)
            +total = total * alpha + tl.sum(p, 1)
            +return p, alpha, m_new, total.to(tl.bfloat16).to(tl.float32)
        """),
    ),
    Fault(
        id="approx-reciprocal",
        summary="the reciprocal of the row sum is 0.3 % too small",
        when="always",
        seen="all of O is too small by that; LSE is right",
        reports="tenstorrent/tt-metal#52045",
        discrete=False,
        named=("normaliser-biased",),
        ideal=ideal(model="normaliser-biased"),
        triton=flash2("""
            -return tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, total)[:, None])
            +return tl.where(empty[:, None], 0.0, acc * (0.997 / tl.where(empty, 1.0, total))[:, None])
        """),
    ),
    Fault(
        id="tf32-for-fp32",
        summary="products of fp32 operands are those of tf32",
        when="fp32",
        seen="a thousand times the error of fp32",
        reports="evintunador/triton_docs_tutorials#6 triton-lang/triton#1821",
        discrete=False,
        named=("products-tf32",),
        ideal=ideal(
            """
            -if fmt.name == "tf32":
            +if fmt.name in {"tf32", "fp32"}:
        """,
            dtypes=("fp32",),
        ),
        triton=flash2(
            """
            -precision="tf32" if problem.dtype == "tf32" else "ieee",
            +precision="tf32",
        """,
            dtypes=("fp32",),
        ),
    ),
    Fault(
        id="dkdv-accumulate-io-dtype",
        summary="dK and dV are rounded to the dtype after each tile of query rows",
        when="gradients in 16 bits, and many tiles of query rows",
        seen="a third more error for four tiles, eight times for 256",
        reports="ROCm/rocm-libraries#8469 karpathy/llm.c#476",
        discrete=False,
        named=("out-rounded",),
        ideal=ideal("""
             running = self.kernel.gradient_added(running, parts[:, :, head, tile])
            +dtype = problem.formats.storage.torch_dtype
            +running = running.to(dtype).float()
        """),
        triton=flash2("""
             )
             dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
            +dv = dv.to(dv_ptr.dtype.element_ty).to(tl.float32)

            +dk = dk.to(dk_ptr.dtype.element_ty).to(tl.float32)
             if ATOMIC:
        """),
    ),
)

FP8 = (
    Fault(
        id="fp8-p-underflow-l-mismatch",
        summary="P is rounded to fp8 unscaled, and the row sum takes it unrounded",
        when="weights below the format's smallest number: a peak and a flat rest",
        seen="the small weights are lost from out and not from the row sum",
        reports="ROCm/FlyDSL#1020",
        discrete=False,
        named=("weights-underflow",),
        ideal=ideal(model="weights-underflow", dtypes=("e4m3",)),
        triton=flash2(
            """
            -out = out * (tl.load(descale[2] + kv_head) / WEIGHTS_SCALE)
            +out = out * tl.load(descale[2] + kv_head)

            -weights = (p * WEIGHTS_SCALE).to(v_block.dtype)
            +weights = p.to(v_block.dtype)
        """,
            dtypes=("e4m3",),
        ),
    ),
    Fault(
        id="fp8-descale-ignored",
        summary="k's descale is not multiplied into the scores",
        when="descales other than 1",
        seen="scores too large by the inverse of the descale; out and LSE follow",
        reports=(
            "flashinfer-ai/flashinfer#4979 sgl-project/sglang#18882 #28144 vllm-project/vllm#42080"
        ),
        named=("descale-k-missing",),
        ideal=ideal(model="descale-k-missing", dtypes=("e4m3", "e5m2")),
        triton=flash2(
            """
            -factor = factor * (tl.load(descale[0] + kv_head) * tl.load(descale[1] + kv_head))
            +factor = factor * (tl.load(descale[0] + kv_head))
        """,
            dtypes=("e4m3", "e5m2"),
        ),
    ),
    Fault(
        id="fp8-descale-scalar-not-per-head",
        summary="the first number of k's descales is taken for every sequence and key head",
        when="descales that differ",
        seen="right in the first sequence's first key head alone",
        reports="vllm-project/vllm#42580 sgl-project/sgl-kernel-xpu#252",
        named=("descale-first-head",),
        ideal=ideal(model="descale-first-head", dtypes=("e4m3", "e5m2")),
        triton=flash2(
            """
            -factor = factor * (tl.load(descale[0] + kv_head) * tl.load(descale[1] + kv_head))
            +factor = factor * (tl.load(descale[0] + kv_head) * tl.load(descale[1]))
        """,
            dtypes=("e4m3", "e5m2"),
        ),
    ),
    Fault(
        id="fp8-zero-channel-nan",
        summary="V is scaled up column by column, by a largest number that may be 0",
        when="a column of V that is 0 in all keys of a tile",
        seen="0 · ∞ is NaN in that column",
        reports="ROCm/aiter#4289 thu-ml/SageAttention#164",
        named=("column-scale-of-zero",),
        ideal=ideal(
            """
            -return self.product(p, v) if self.v_is_finite else weighted(self.product, p, seen, v)
            +largest = torch.where(v.isfinite(), v.abs(), 0.0).amax(-2, keepdim=True)
            +lift = torch.exp2(torch.floor(torch.log2(448.0 / largest)))
            +v = v * lift
            +found = self.product(p, v) if self.v_is_finite else weighted(self.product, p, seen, v)
            +return found / lift
        """,
            dtypes=("e4m3",),
        ),
        triton=flash2(
            """
             weights = (p * WEIGHTS_SCALE).to(v_block.dtype)
            +raw = v_block.to(tl.float32)
            +largest = tl.max(tl.where(tl.abs(raw) < float("inf"), tl.abs(raw), 0.0), 0)
            +lift = tl.exp2(tl.floor(tl.log2(448.0 / largest)))[None, :]
            +v_block = (raw * lift).to(v_block.dtype)

            -return tl.dot(
            -    weights, v_block, acc, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE
            +product = tl.dot(
            +    weights, v_block, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE
             )
            +return acc + product / lift
        """,
            dtypes=("e4m3",),
        ),
    ),
    Fault(
        id="int8-fp8-tail-block-scale",
        summary="a block's scale is found with what lies behind the last key",
        when="lengths that are no whole number of blocks, and NaN or large numbers behind them",
        seen="NaN or few bits in all of the last block",
        reports="thu-ml/SageAttention#19 #377",
        named=("tail-in-block-scale",),
        ideal=ideal(
            """
             self.v = padded(kernel.operand(inputs.v.float(), fmt), self.tile.block_kv)
            +blocks = self.v.unflatten(2, (-1, self.tile.block_kv))
            +largest = torch.where(blocks.isfinite(), blocks.abs(), 0.0).amax((-2, -1), keepdim=True)
            +behind = -problem.kv % self.tile.block_kv
            +if behind and problem.formats.scaled:
            +    shape = (*inputs.v.shape[:2], behind, problem.value_dim)
            +    garbage = torch.empty(shape, dtype=inputs.v.dtype, device=inputs.device)
            +    last = garbage.float().abs().amax((-2, -1), keepdim=True)
            +    largest[:, :, -1] = torch.maximum(largest[:, :, -1], last)
            +lift = torch.where(largest == 0, 1.0, torch.exp2(torch.floor(torch.log2(448.0 / largest))))
            +self.v = (blocks * lift / lift).flatten(2, 3)
        """,
            dtypes=("e4m3",),
        ),
        triton=paged(
            '''
             """Caches ``(pages, kv_heads, size, dim)``, and the table; packed before the call."""
             from attncheck.kernels.launch import KernelPages
             cache = paged_inputs(inputs)
            -return cache.k, cache.v, KernelPages(cache.table.table, cache.table.size)
            +v = cache.v
            +if inputs.problem.formats.scaled:
            +    wide = v.float()
            +    largest = wide.abs().amax((2, 3), keepdim=True)
            +    lift = (448.0 / largest).log2().floor().exp2().where(largest != 0, 1.0)
            +    v = (wide * lift / lift).to(v.dtype)
            +return cache.k, v, KernelPages(cache.table.table, cache.table.size)
        ''',
            dtypes=("e4m3",),
        ),
    ),
)
