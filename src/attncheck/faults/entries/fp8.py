"""Faults: descales and ranges of 8-bit formats."""

from __future__ import annotations

from attncheck.faults.fault import Edit, Fault, Host

__all__ = ["FAULTS"]

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

FAULTS = (
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
