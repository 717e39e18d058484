"""Faults of head dims that are no power of two, or two that differ."""

from __future__ import annotations

from attncheck.faults.entries.strange_reads import edits_of_reads
from attncheck.faults.fault import Edit, Fault, Host

__all__ = ["FAULTS"]

_GRADIENTS = "subjects.ideal_gradients"
_WIDE = """\
def _wide(tensor):
    return _read(tensor, tensor.stride(), 1 << (tensor.shape[3] - 1).bit_length())
"""

FAULTS = (
    Fault(
        id="headdim-pad-not-masked",
        category="head dim",
        summary="the columns up to a power of two are read from memory, not taken for 0",
        when="a head dim that is no power of two",
        seen="scores with products of other rows in them, NaN, another result each time",
        sources=(
            "turboderp-org/exllamav3#316",
            "vllm-project/vllm#4128",
            "Dao-AILab/flash-attention#1214",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    *edits_of_reads(_WIDE, q="_wide(inputs.q)", k="_wide(inputs.k)"),
                    Edit(
                        module=_GRADIENTS,
                        old="dim=2)[:, :, : problem.query]",
                        new="dim=2)[:, :, : problem.query, : problem.head_dim]",
                    ),
                    Edit(
                        module=_GRADIENTS,
                        old="dk = self.dk[:, :, : problem.kv]",
                        new="dk = self.dk[:, :, : problem.kv, : problem.head_dim]",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash1",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old="mask=(i[:, None] < i_size) & (j[None, :] < j_size),",
                        new="mask=i[:, None] < i_size,",
                    ),
                    Edit(
                        module="kernels.tile",
                        old="mask=(cols[:, None] < head_dim) & (keys[None, :] < kv),",
                        new="mask=keys[None, :] < kv,",
                    ),
                ),
            ),
        },
        named=("head-dim-padding-read", "reads-beside-an-input"),
    ),
    Fault(
        id="dv-ne-d-extent",
        category="head dim",
        summary="the backward reads as many columns of V and dO as q has",
        when="gradients with a value dim that is not the head dim",
        seen="dQ and dK without the columns beyond, or with numbers that are no part of V",
        sources=(
            "XunhaoLai/native-sparse-attention-triton#27",
            "Dao-AILab/flash-attention#2552",
            "Dao-AILab/flash-attention#2368",
            "vllm-project/vllm#40705",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    *edits_of_reads(),
                    Edit(
                        module=_GRADIENTS,
                        old="import Index, Pass\n",
                        new="import Index, Pass, _read\n",
                    ),
                    Edit(
                        module=_GRADIENTS,
                        old="        self.all_finite = all(",
                        new="""\
        dim, width = self.problem.head_dim, 1 << (self.problem.value_dim - 1).bit_length()
        fmt = self.problem.formats.products
        read = [_read(x, x.stride(), min(dim, width)) for x in (inputs.v, inputs.dout)]
        blocks = (self.tile.block_kv, rows)
        self.v_there, self.dout_there = (
            padded(kernel.operand(x, fmt), block) for x, block in zip(read, blocks)
        )
        self.all_finite = all(""",
                    ),
                    Edit(
                        module=_GRADIENTS,
                        old="        v = self.expanded(self.v[:, :, keys])\n"
                        "        dp = self.product(self.dout[:, :, rows], v.mT)\n",
                        new="        v = self.expanded(self.v_there[:, :, keys])\n"
                        "        dp = self.product(self.dout_there[:, :, rows], v.mT)\n",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.gradients_by_rows",
                        old="dout_row, dout_col, query, value_dim)",
                        new="dout_row, dout_col, query, head_dim)",
                    ),
                    Edit(
                        module="kernels.gradients_by_rows",
                        old="loaded_keys(v_ptr, v_at, v_col, keys, kv, value_dim, BLOCK_V)",
                        new="loaded_keys(v_ptr, v_at, v_col, keys, kv, head_dim, BLOCK_V)",
                    ),
                ),
            ),
        },
        named=("backward-columns", "reads-beside-an-input"),
    ),
)
