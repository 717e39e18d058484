"""Faults of offsets and grids beyond what their integers hold."""

from __future__ import annotations

from attncheck.faults.entries.strange_reads import edits_of_reads
from attncheck.faults.fault import Edit, Fault, Host

__all__ = ["FAULTS"]

_WRAPPED = """\
def _wrapped(at):
    return at.to(torch.int32).to(torch.int64)
"""
_UNLAUNCHED = "        # A grid of more is refused, and nobody asks whether it was.\n"

FAULTS = (
    Fault(
        id="int32-row-offset",
        category="integer overflow",
        summary="a row's number times the stride between rows is a 32-bit integer",
        when="an element that is 2³¹ or more behind the first: a view with a large stride",
        seen="the last rows are others, or the program is stopped",
        sources=(
            "thu-ml/SageAttention#386",
            "thu-ml/SageAttention#387",
            "fla-org/flash-linear-attention#1080",
            "fla-org/flash-linear-attention#1082",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=edits_of_reads(
                    _WRAPPED,
                    **{
                        name: f"_read(inputs.{name}, inputs.{name}.stride(), kept=_wrapped)"
                        for name in "qkv"
                    },
                ),
            ),
            "triton": Host(
                kernel="triton-flash1",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old="pointer + i[:, None].to(tl.int64) * i_stride +",
                        new="pointer + i[:, None] * i_stride +",
                    ),
                    Edit(
                        module="kernels.tile",
                        old="at = keys.to(tl.int64) * row_stride\n",
                        new="at = keys * row_stride\n",
                    ),
                ),
            ),
        },
        named=("offsets-of-32-bits", "far-offsets-wrap"),
    ),
    Fault(
        id="mask-offset-overflow",
        category="integer overflow",
        summary="where a mask or bias is read is a 32-bit integer; of q, k and v it is not",
        when="a mask or bias of 2³¹ numbers or more: 65 536 rows and keys",
        seen="from some row on another row's mask",
        sources=(
            "ggml-org/llama.cpp#23610",
            "ggml-org/llama.cpp#24912",
            "pytorch/pytorch#162588",
        ),
        unplanted="our kernels have it: they compute in 32 bits where a mod reads, so that a "
        "Problem with a bias of 2³¹ numbers is refused",
    ),
    Fault(
        id="grid-z-65535",
        category="integer overflow",
        summary="batch · heads is an axis of the grid that has 65 535 places; no launch, no error",
        when="more sequences and heads than that together",
        seen="what was in the memory of O before",
        sources=(
            "pytorch/pytorch#142228",
            "pytorch/pytorch#146704",
            "pytorch/pytorch#176096",
            "facebookresearch/xformers#845",
            "flashinfer-ai/flashinfer#3125",
            "SandAI-org/MagiAttention#40",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old="        parts = [self._rows(rows) for rows in self.row_blocks()]\n",
                        new=f"""\
{_UNLAUNCHED}        if problem.batch * problem.heads > 65_535:
            shape = (problem.batch, problem.heads, problem.query)
            out = torch.empty((*shape, problem.value_dim), device=self.device)
            lse = torch.empty(shape, device=self.device)
            return Outputs(out.to(problem.formats.output.torch_dtype), lse)
        parts = [self._rows(rows) for rows in self.row_blocks()]
""",
                    ),
                ),
                needs="cuda",
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="subjects.flash",
                        old="_MOST_TOGETHER = 65_535\n",
                        new="_MOST_TOGETHER = 2**31 - 1\n",
                    ),
                    Edit(
                        module="kernels.flash2_forward",
                        old="    again = torch.empty(grid,",
                        new=f"{_UNLAUNCHED[4:]}    if grid[1] > 65_535:\n        return out, lse\n"
                        "    again = torch.empty(grid,",
                    ),
                ),
                needs="cuda",
            ),
        },
        named=("grid-axis-exceeded",),
    ),
)
