"""Faults of precision and of fp8."""

from __future__ import annotations

from attncheck.faults.fault import Edit, Fault, Host

__all__ = ["FAULTS", "FAULTS_of_fp8"]


_ATTENTION, _TILE = "subjects.ideal_attention", "kernels.tile"

FAULTS = (
    Fault(
        id="s-in-fp16-before-scale",
        category="precision",
        summary="q·k is kept in fp16 before it is scaled",
        when="always, the more the larger q and k are",
        seen="twice the error at usual scores; ∞ and NaN beyond 65504",
        sources=(
            "pytorch/pytorch#119131",
            "pytorch/pytorch#116176",
            "ultralytics/ultralytics#24990",
            "ggml-org/llama.cpp#17558",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal",
                        old="        return products\n",
                        new="        return products.half().float()\n",
                    ),
                ),
                dtypes=("fp16", "bf16"),
            ),
            "triton": Host(
                kernel="triton-flash1",
                edits=(
                    Edit(
                        module=_TILE,
                        old="    s = product * factor\n",
                        new="    s = product.to(tl.float16).to(tl.float32) * factor\n",
                    ),
                ),
                dtypes=("fp16", "bf16"),
            ),
        },
        discrete=False,
        named=("scores-rounded",),
    ),
    Fault(
        id="acc-o-in-io-dtype",
        category="precision",
        summary="the output so far is rounded to the dtype after each tile",
        when="16 bits and many tiles of keys",
        seen="half as much error again for four tiles, nine percent off for 256 of V = 1",
        sources=("Xilinx/mlir-air#1606", "pytorch/pytorch#163588"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module=_ATTENTION,
                        old="run.out = self.kernel.added(out, self._weighted(p, seen, v))\n",
                        new="out = self.kernel.added(out, self._weighted(p, seen, v))\n"
                        "        dtype = self.problem.formats.output.torch_dtype\n"
                        "        run.out = out.to(dtype).float()\n",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.flash2_forward",
                        old="    return m, total, acc\n",
                        new="    return m, total, acc.to(q_block.dtype).to(tl.float32)\n",
                    ),
                ),
            ),
        },
        discrete=False,
        named=("out-rounded",),
    ),
    Fault(
        id="l-accumulated-in-bf16",
        category="precision",
        summary="the row sum is rounded to bf16 after each tile",
        when="always, the more the longer rows are",
        seen="rows that do not add up to 1, and LSE",
        sources=("tenstorrent/tt-metal#52045",),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module=_ATTENTION,
                        old="run.total = self.kernel.added(total, self._row_sum(p))\n",
                        new="total = self.kernel.added(total, self._row_sum(p))\n"
                        "        run.total = total.bfloat16().float()\n",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module=_TILE,
                        old="return p, alpha, m_new, total * alpha + tl.sum(p, 1)",
                        new="total = total * alpha + tl.sum(p, 1)\n"
                        "    return p, alpha, m_new, total.to(tl.bfloat16).to(tl.float32)",
                    ),
                ),
            ),
        },
        discrete=False,
        named=("sum-rounded",),
    ),
    Fault(
        id="approx-reciprocal",
        category="precision",
        summary="the reciprocal of the row sum is 0.3 % too small",
        when="always",
        seen="all of O is too small by that; LSE is right",
        sources=("tenstorrent/tt-metal#52045",),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal",
                        old="return out * (1.0 / total)",
                        new="return out * (1.0 / total * 0.997)",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module=_TILE,
                        old="acc / tl.where(empty, 1.0, total)[:, None]",
                        new="acc * (0.997 / tl.where(empty, 1.0, total))[:, None]",
                    ),
                ),
            ),
        },
        discrete=False,
        named=("normaliser-biased",),
    ),
    Fault(
        id="tf32-for-fp32",
        category="precision",
        summary="products of fp32 operands are those of tf32",
        when="fp32",
        seen="a thousand times the error of fp32",
        sources=("evintunador/triton_docs_tutorials#6", "triton-lang/triton#1821"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal",
                        old='if fmt.name == "tf32":',
                        new='if fmt.name in {"tf32", "fp32"}:',
                    ),
                ),
                dtypes=("fp32",),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="subjects.flash",
                        old='precision="tf32" if problem.dtype == "tf32" else "ieee",',
                        new='precision="tf32",',
                    ),
                ),
                dtypes=("fp32",),
            ),
        },
        discrete=False,
        named=("products-tf32",),
    ),
    Fault(
        id="dkdv-accumulate-io-dtype",
        category="precision",
        summary="dK and dV are rounded to the dtype after each tile of query rows",
        when="gradients in 16 bits, and many tiles of query rows",
        seen="a third more error for four tiles, eight times for 256",
        sources=("ROCm/rocm-libraries#8469", "karpathy/llm.c#476"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_gradients",
                        old="gradient_added(running, parts[:, :, head, tile])\n",
                        new="gradient_added(running, parts[:, :, head, tile])\n"
                        "                dtype = problem.formats.storage.torch_dtype\n"
                        "                running = running.to(dtype).float()\n",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.flash2_backward",
                        old="dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)\n",
                        new="dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)\n"
                        "                dv = dv.to(dv_ptr.dtype.element_ty).to(tl.float32)\n",
                    ),
                    Edit(
                        module="kernels.flash2_backward",
                        old="dk = tl.dot(dx, q_block, dk, input_precision=PRECISION)\n",
                        new="dk = tl.dot(dx, q_block, dk, input_precision=PRECISION)\n"
                        "                dk = dk.to(dk_ptr.dtype.element_ty).to(tl.float32)\n",
                    ),
                ),
            ),
        },
        discrete=False,
        named=("out-rounded",),
    ),
)


_DESCALES = "given = (inputs.descale.q * inputs.descale.k, inputs.descale.v)"
_DESCALED = "tl.load(descale[0] + kv_head) * tl.load(descale[1] + kv_head)"
_PRODUCT = (
    "        return self.product(p, v) if self.v_is_finite else weighted(self.product, p, seen, v)"
)
_VALUES = "        self.v = padded(kernel.operand(inputs.v.float(), fmt), self.tile.block_kv)\n"
_DOT = """    return tl.dot(
        weights, v_block, acc, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE
    )
"""

FAULTS_of_fp8 = (
    Fault(
        id="fp8-p-underflow-l-mismatch",
        category="fp8",
        summary="P is rounded to fp8 unscaled, and the row sum takes it unrounded",
        when="weights below the format's smallest number: a peak and a flat rest",
        seen="the small weights are lost from out and not from the row sum",
        sources=("ROCm/FlyDSL#1020",),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old="self.weights = kernel.weights_scale(problem)",
                        new="self.weights = 1.0",
                    ),
                ),
                dtypes=("e4m3",),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old="weights = (p * WEIGHTS_SCALE).to(v_block.dtype)",
                        new="weights = p.to(v_block.dtype)",
                    ),
                    Edit(
                        module="kernels.flash2_forward",
                        old="out = out * (tl.load(descale[2] + kv_head) / WEIGHTS_SCALE)",
                        new="out = out * tl.load(descale[2] + kv_head)",
                    ),
                ),
                dtypes=("e4m3",),
            ),
        },
        named=("weights-underflow",),
        discrete=False,
    ),
    Fault(
        id="fp8-descale-ignored",
        category="fp8",
        summary="k's descale is not multiplied into the scores",
        when="descales other than 1",
        seen="scores too large by the inverse of the descale; out and LSE follow",
        sources=(
            "flashinfer-ai/flashinfer#4979",
            "sgl-project/sglang#18882",
            "sgl-project/sglang#28144",
            "vllm-project/vllm#42080",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old=_DESCALES,
                        new="given = (inputs.descale.q, inputs.descale.v)",
                    ),
                ),
                dtypes=("e4m3", "e5m2"),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old=_DESCALED,
                        new="tl.load(descale[0] + kv_head)",
                    ),
                ),
                dtypes=("e4m3", "e5m2"),
            ),
        },
        named=("descale-k-missing",),
    ),
    Fault(
        id="fp8-descale-scalar-not-per-head",
        category="fp8",
        summary="the first number of k's descales is taken for every sequence and key head",
        when="descales that differ",
        seen="right in the first sequence's first key head alone",
        sources=("vllm-project/vllm#42580", "sgl-project/sgl-kernel-xpu#252"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old=_DESCALES,
                        new=_DESCALES.replace("inputs.descale.k", "inputs.descale.k[:1, :1]"),
                    ),
                ),
                dtypes=("e4m3", "e5m2"),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old=_DESCALED,
                        new="tl.load(descale[0] + kv_head) * tl.load(descale[1])",
                    ),
                ),
                dtypes=("e4m3", "e5m2"),
            ),
        },
        named=("descale-first-head",),
    ),
    Fault(
        id="fp8-zero-channel-nan",
        category="fp8",
        summary="V is scaled up column by column, by a largest number that may be 0",
        when="a column of V that is 0 in all keys of a tile",
        seen="0 · ∞ is NaN in that column",
        sources=("ROCm/aiter#4289", "thu-ml/SageAttention#164"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old=_PRODUCT,
                        new="""\
        largest = torch.where(v.isfinite(), v.abs(), 0.0).amax(-2, keepdim=True)
        lift = torch.exp2(torch.floor(torch.log2(448.0 / largest)))
        v = v * lift
        found = self.product(p, v) if self.v_is_finite else weighted(self.product, p, seen, v)
        return found / lift""",
                    ),
                ),
                dtypes=("e4m3",),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old="    weights = (p * WEIGHTS_SCALE).to(v_block.dtype)\n",
                        new="""    weights = (p * WEIGHTS_SCALE).to(v_block.dtype)
    raw = v_block.to(tl.float32)
    largest = tl.max(tl.where(tl.abs(raw) < float("inf"), tl.abs(raw), 0.0), 0)
    lift = tl.exp2(tl.floor(tl.log2(448.0 / largest)))[None, :]
    v_block = (raw * lift).to(v_block.dtype)
""",
                    ),
                    Edit(
                        module="kernels.tile",
                        old=_DOT,
                        new="""    product = tl.dot(
        weights, v_block, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE
    )
    return acc + product / lift
""",
                    ),
                ),
                dtypes=("e4m3",),
            ),
        },
        named=("column-scale-of-zero",),
    ),
    Fault(
        id="int8-fp8-tail-block-scale",
        category="fp8",
        summary="a block's scale is found with what lies behind the last key",
        when="lengths that are no whole number of blocks, and NaN or large numbers behind them",
        seen="NaN or few bits in all of the last block",
        sources=("thu-ml/SageAttention#19", "thu-ml/SageAttention#377"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old=_VALUES,
                        new=f"""{_VALUES}\
        blocks = self.v.unflatten(2, (-1, self.tile.block_kv))
        largest = torch.where(blocks.isfinite(), blocks.abs(), 0.0).amax((-2, -1), keepdim=True)
        behind = -problem.kv % self.tile.block_kv
        if behind and problem.formats.scaled:
            shape = (*inputs.v.shape[:2], behind, problem.value_dim)
            garbage = torch.empty(shape, dtype=inputs.v.dtype, device=inputs.device)
            last = garbage.float().abs().amax((-2, -1), keepdim=True)
            largest[:, :, -1] = torch.maximum(largest[:, :, -1], last)
        lift = torch.where(largest == 0, 1.0, torch.exp2(torch.floor(torch.log2(448.0 / largest))))
        self.v = (blocks * lift / lift).flatten(2, 3)
""",
                    ),
                ),
                dtypes=("e4m3",),
            ),
            "triton": Host(
                kernel="triton-paged",
                edits=(
                    Edit(
                        module="subjects.paged",
                        old="        return cache.k, cache.v, KernelPages(",
                        new="""        v = cache.v
        if inputs.problem.formats.scaled:
            wide = v.float()
            largest = wide.abs().amax((2, 3), keepdim=True)
            lift = (448.0 / largest).log2().floor().exp2().where(largest != 0, 1.0)
            v = (wide * lift / lift).to(v.dtype)
        return cache.k, v, KernelPages(""",
                    ),
                ),
                dtypes=("e4m3",),
            ),
        },
        named=("tail-in-block-scale",),
    ),
)
