"""Faults of precision: what is kept in fewer bits than it needs."""

from __future__ import annotations

from attncheck.faults.fault import Edit, Fault, Host

__all__ = ["FAULTS"]

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
                        module="kernels.gradients_by_keys",
                        old="dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)\n",
                        new="dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)\n"
                        "                dv = dv.to(dv_ptr.dtype.element_ty).to(tl.float32)\n",
                    ),
                    Edit(
                        module="kernels.gradients_by_keys",
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
