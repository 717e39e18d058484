"""Faults of strides: a layout that a kernel takes for another."""

from __future__ import annotations

from attncheck.faults.entries.strange_reads import CONTIGUOUS, edits_of_reads
from attncheck.faults.fault import Edit, Fault, Host

__all__ = ["FAULTS"]

_KEPT_STRIDES = """\
_STRIDES: dict[object, tuple[int, ...]] = {}


def _strides(tensor):
    return _STRIDES.setdefault((tuple(tensor.shape), tensor.dtype), tensor.stride())
"""

FAULTS = (
    Fault(
        id="non-contig-assumed-contig",
        category="strides",
        summary="where a row of q lies is computed from its shape, not from its strides",
        when="q as a transposed or sliced view",
        seen="other rows, or numbers that are no part of q",
        sources=(
            "pytorch/pytorch#112577",
            "torch-spyre/torch-spyre#4331",
            "BobMcDear/attorch#14",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=edits_of_reads(CONTIGUOUS, q="_read(inputs.q, _strides(inputs.q))"),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.flash2_forward",
                        old="q, k, v, out, lse, again, *q.stride(),",
                        new="q, k, v, out, lse, again, heads * query * head_dim,\n"
                        "        query * head_dim, head_dim, 1,",
                    ),
                ),
            ),
        },
        named=("contiguous-assumed", "strides-not-taken"),
    ),
    Fault(
        id="dout-stride-assumed-out",
        category="strides",
        summary="dO is read with the strides of O",
        when="gradients, and a dO that is transposed or expanded: that of a sum",
        seen="all gradients are wrong",
        sources=("Dao-AILab/flash-attention#355", "pytorch/pytorch#133671"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    *edits_of_reads(CONTIGUOUS),
                    Edit(
                        module="subjects.ideal_gradients",
                        old="import Index, Pass\n",
                        new="import Index, Pass, _read, _strides\n",
                    ),
                    Edit(
                        module="subjects.ideal_gradients",
                        old="padded(kernel.operand(inputs.dout.float(),",
                        new="padded(kernel.operand(_read(inputs.dout, _strides(outputs.out)),",
                    ),
                    Edit(
                        module="subjects.ideal_gradients",
                        old="kernel.delta(inputs.dout.float(),",
                        new="kernel.delta(_read(inputs.dout, _strides(outputs.out)),",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.flash2_backward",
                        old="*self.v.stride(), *self.dout.stride())",
                        new="*self.v.stride(),\n"
                        "            *torch.empty(self.dout.shape, device='meta').stride())",
                    ),
                    Edit(
                        module="kernels.delta",
                        old="*out.stride(), *dout.stride(),",
                        new="*out.stride(), *out.stride(),",
                    ),
                ),
            ),
        },
        named=("dout-strides", "strides-not-taken"),
    ),
    Fault(
        id="v-uses-k-strides",
        category="strides",
        summary="V is read with the strides of K",
        when="V laid out otherwise than K, or with another dim",
        seen="values of other keys, or numbers that are no part of V",
        sources=("triton-lang/triton#2059",),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=edits_of_reads(v="_read(inputs.v, inputs.k.stride())"),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.flash2_forward",
                        old="*k.stride(), *v.stride(), *out.stride()",
                        new="*k.stride(), *k.stride(), *out.stride()",
                    ),
                ),
            ),
        },
        named=("values-of-keys-strides", "reads-beside-an-input"),
    ),
    Fault(
        id="graph-cache-key-omits-strides",
        category="strides",
        summary="strides of q are kept by shape and dtype: of the first call for all later ones",
        when="a second call of one shape with another layout",
        seen="the second call reads other rows",
        sources=("flashinfer-ai/flashinfer#4270",),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=edits_of_reads(_KEPT_STRIDES, q="_read(inputs.q, _strides(inputs.q))"),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.flash2_forward",
                        old="_HOISTED_DIM = 128\n",
                        new=f"_HOISTED_DIM = 128\n{_KEPT_STRIDES}",
                    ),
                    Edit(
                        module="kernels.flash2_forward",
                        old="q, k, v, out, lse, again, *q.stride(),",
                        new="q, k, v, out, lse, again, *_strides(q),",
                    ),
                ),
            ),
        },
        named=("contiguous-assumed", "strides-not-taken"),
    ),
)
