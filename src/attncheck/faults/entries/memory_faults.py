"""Faults of memory: strides, grouped heads, pages."""

from __future__ import annotations

from attncheck.faults.entries.shape_faults import CONTIGUOUS, edits_of_reads
from attncheck.faults.fault import Edit, Fault, Host

__all__ = ["FAULTS", "FAULTS_of_gqa", "FAULTS_of_paged_kv"]


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
                        module="kernels.gradient_terms",
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


_GRADIENTS, _BY_KEYS = "subjects.ideal_gradients", "kernels.flash2_backward"
_EACH_HEAD = """\
        for tile in self._in_order(list(range(tiles.shape[2]))):
            for head in range(problem.group):
                running = self.kernel.gradient_added(running, parts[:, :, head, tile])
"""

FAULTS_of_gqa = (
    Fault(
        id="gqa-interleave-map",
        category="gqa",
        summary="the backward splits a head's number by the number of key heads, not of sharers",
        when="gradients, several key heads, and another number of heads that share one",
        seen="dK and dV have other heads' contributions, some twice and some never",
        sources=("XunhaoLai/native-sparse-attention-triton#27",),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module=_GRADIENTS,
                        old="parts = part.view(problem.batch, problem.kv_heads, problem.group, "
                        "*part.shape[2:])",
                        new="""\
kv_heads = torch.arange(problem.kv_heads, device=part.device)[:, None]
        members = torch.arange(problem.group, device=part.device)
        parts = part[:, (kv_heads * problem.kv_heads + members) % problem.heads]""",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module=_BY_KEYS,
                        old="h = kv_head * group + member",
                        new="h = (kv_head * (heads // group) + member) % heads",
                    ),
                ),
            ),
        },
        named=("group-other-heads",),
    ),
    Fault(
        id="gqa-dkv-not-summed",
        category="gqa",
        summary="heads that share a key head write its dK and dV one over the other",
        when="gradients, and heads that share a key head",
        seen="dK and dV of the last of them",
        sources=("marin-community/levanter#449", "fla-org/flash-linear-attention#384"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module=_GRADIENTS,
                        old="for head in range(problem.group):",
                        new="for head in (problem.group - 1,):",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module=_BY_KEYS,
                        old="        h = kv_head * group + member\n",
                        new="        h = kv_head * group + member\n"
                        "        dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)\n"
                        "        dv = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)\n",
                    ),
                ),
            ),
        },
        named=("group-last-head",),
    ),
    Fault(
        id="gqa-dkv-sum-low-precision",
        category="gqa",
        summary="dK and dV of each head are rounded to the dtype, and then summed in it",
        when="gradients in 16 bits, the more heads share a key head",
        seen="half as much error again for eight heads, three times for many",
        sources=("xlite-dev/ffpa-attn#301", "NVIDIA/TransformerEngine#821"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module=_GRADIENTS,
                        old=_EACH_HEAD,
                        new="""\
        dtype = problem.formats.storage.torch_dtype
        for head in range(problem.group):
            own = torch.zeros_like(running)
            for tile in self._in_order(list(range(tiles.shape[2]))):
                own = self.kernel.gradient_added(own, parts[:, :, head, tile])
            running = (running + own.to(dtype).float()).to(dtype).float()
""",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module=_BY_KEYS,
                        old="    for member in range(group):\n",
                        new="    all_dk = dk\n    all_dv = dv\n    for member in range(group):\n"
                        "        dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)\n"
                        "        dv = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)\n",
                    ),
                    Edit(
                        module=_BY_KEYS,
                        old="    # Keys lie one after the other in dK and dV.\n",
                        new="""\
        own_dk = dk.to(dk_ptr.dtype.element_ty).to(tl.float32)
        own_dv = dv.to(dv_ptr.dtype.element_ty).to(tl.float32)
        all_dk = (all_dk + own_dk).to(dk_ptr.dtype.element_ty).to(tl.float32)
        all_dv = (all_dv + own_dv).to(dv_ptr.dtype.element_ty).to(tl.float32)
    dk = all_dk
    dv = all_dv
    # Keys lie one after the other in dK and dV.
""",
                    ),
                ),
            ),
        },
        discrete=False,
        named=("out-rounded",),
    ),
)


_IDEAL = "subjects.ideal_attention"
_KEPT = """        self.k = padded(kernel.operand(inputs.k.float(), fmt), self.tile.block_kv)
        self.v = padded(kernel.operand(inputs.v.float(), fmt), self.tile.block_kv)
"""
_PAGED = """        k, v, self.kv = _in_pages(inputs)
        self.k = padded(kernel.operand(k, fmt), self.tile.block_kv)
        self.v = padded(kernel.operand(v, fmt), self.tile.block_kv)
"""
_LAST = "def _in_nats(problem: Problem) -> bool:\n"
_IN_PAGES = """def _in_pages(inputs):
    problem = inputs.problem
    if problem.paging is None:
        return inputs.k.float(), inputs.v.float(), problem.kv
    from attncheck.subjects.pages import cached

    cache = cached(inputs)
    table, used = cache.table.table.long(), problem.kv
    whole = -(-problem.kv // cache.table.size) * cache.table.size
    k, v = (x.float()[table].transpose(1, 2).flatten(2, 3) for x in (cache.k, cache.v))
    return k[:, :, :used], v[:, :, :used], used


"""


def _ideal(old: str, new: str, *more: Edit) -> Host:
    """The ideal kernel with keys and values read from their pages, ``new`` for ``old`` there."""
    assert old in _IN_PAGES, f"{old!r} is not in what reads pages"
    read = Edit(module=_IDEAL, old=_KEPT, new=_PAGED)
    pages = Edit(module=_IDEAL, old=_LAST, new=_IN_PAGES.replace(old, new) + _LAST)
    return Host(kernel="ideal", edits=(read, pages, *more))


FAULTS_of_paged_kv = (
    Fault(
        id="last-page-counted-full",
        category="paged kv",
        summary="the last page counts as full: pages · size keys are attended to",
        when="a number of keys that is not a whole number of pages",
        seen="what is left of other requests in the page counts; little where it is 0",
        sources=(
            "pegainfer-project/pegainfer#291",
            "pegainfer-project/pegainfer#350",
            "vllm-project/vllm#31282",
        ),
        hosts={
            "ideal": _ideal(
                "used = cache.table.table.long(), problem.kv",
                "used = cache.table.table.long(), -(-problem.kv // cache.table.size) "
                "* cache.table.size",
                Edit(
                    module=_IDEAL,
                    old="inside = self.kernel.inside(key, problem.kv)",
                    new="inside = self.kernel.inside(key, self.kv)",
                ),
            ),
            "triton": Host(
                kernel="triton-paged",
                edits=(
                    Edit(
                        module="kernels.flash2_forward",
                        old="k.shape[1], k.shape[2] if kv is None else kv",
                        new="k.shape[1], triton.cdiv(kv, pages.size) * pages.size",
                    ),
                ),
            ),
        },
        named=("page-boundary-leak",),
    ),
    Fault(
        id="v-tail-nan-in-last-page",
        category="paged kv",
        summary="values behind the last key are read from the page: their weight of 0 times NaN",
        when="slots of the last page that were never written, or hold NaN",
        seen="NaN in whole rows",
        sources=(
            "Dao-AILab/flash-attention#1745",
            "Dao-AILab/flash-attention#2374",
            "vllm-project/vllm#47305",
            "vllm-project/vllm#53856",
            "vllm-project/vllm#936",
            "ROCm/aiter#5401",
            "flashinfer-ai/flashinfer#945",
        ),
        hosts={
            "ideal": _ideal(
                "v[:, :, :used], used",
                "v[:, :, :whole], used",
                Edit(
                    module=_IDEAL,
                    old="return self.product(p, v) if self.v_is_finite else weighted(",
                    new="plain = self.v_is_finite or self.problem.paging is not None\n"
                    "        return self.product(p, v) if plain else weighted(",
                ),
            ),
            "triton": Host(
                kernel="triton-paged",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old="mask=(keys[:, None] < kv) & (cols[None, :] < value_dim),",
                        new="mask=cols[None, :] < value_dim,",
                    ),
                ),
            ),
        },
        named=("page-boundary-leak",),
    ),
    Fault(
        id="block-table-not-used",
        category="paged kv",
        summary="the pool of pages is read from its beginning, one page after the other",
        when="pages in another order than that of the keys",
        seen="other sequences' keys and values",
        sources=("tanishqkumar/ssd#22",),
        hosts={
            "ideal": _ideal(
                "    whole =",
                "    table = torch.arange(table.shape[1]).expand_as(table)\n    whole =",
            ),
            "triton": Host(
                kernel="triton-paged",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old="page = tl.load(table + keys // PAGE, mask=keys < kv, other=0)",
                        new="page = tl.where(keys < kv, keys // PAGE, 0)",
                    ),
                ),
            ),
        },
        named=("page-table-ignored",),
    ),
)
