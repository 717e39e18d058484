"""Faults of where numbers are read and written: grouped heads, strides, pages."""

from __future__ import annotations

from attncheck.faults.entries.shared_patches import IN_PAGES, READ_BY_STRIDES
from attncheck.faults.fault import Fault, flash2, ideal, paged

__all__ = ["GQA", "PAGED_KV", "STRIDES"]

GQA = (
    Fault(
        id="gqa-interleave-map",
        summary="the backward splits a head's number by the number of key heads, not of sharers",
        when="gradients, several key heads, and another number of heads that share one",
        seen="dK and dV have other heads' contributions, some twice and some never",
        reports="XunhaoLai/native-sparse-attention-triton#27",
        named=("group-other-heads",),
        ideal=ideal(model="group-other-heads"),
        triton=flash2("""
            -h = kv_head * group + member
            +h = (kv_head * (heads // group) + member) % heads
             h64 = h.to(tl.int64)
             first = (b64 * heads + h64) * query
        """),
    ),
    Fault(
        id="gqa-dkv-not-summed",
        summary="heads that share a key head write its dK and dV one over the other",
        when="gradients, and heads that share a key head",
        seen="dK and dV of the last of them",
        reports="marin-community/levanter#449 fla-org/flash-linear-attention#384",
        named=("group-last-head",),
        ideal=ideal(model="group-last-head"),
        triton=flash2("""
            +dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
            +dv = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
             h64 = h.to(tl.int64)
             first = (b64 * heads + h64) * query
        """),
    ),
    Fault(
        id="gqa-dkv-sum-low-precision",
        summary="dK and dV of each head are rounded to the dtype, and then summed in it",
        when="gradients in 16 bits, the more heads share a key head",
        seen="half as much error again for eight heads, three times for many",
        reports="xlite-dev/ffpa-attn#301 NVIDIA/TransformerEngine#821",
        discrete=False,
        named=("out-rounded",),
        ideal=ideal("""
            -for tile in self._in_order(list(range(tiles.shape[2]))):
            -    for head in range(parts.shape[2]):
            -        running = self.kernel.gradient_added(running, parts[:, :, head, tile])
            +dtype = problem.formats.storage.torch_dtype
            +for head in range(problem.group):
            +    own = torch.zeros_like(running)
            +    for tile in self._in_order(list(range(tiles.shape[2]))):
            +        own = self.kernel.gradient_added(own, parts[:, :, head, tile])
            +    running = (running + own.to(dtype).float()).to(dtype).float()
        """),
        triton=flash2("""
             ragged = (block + 1) * BLOCK_K > kv
             dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
             dv = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
            +all_dk = dk
            +all_dv = dv
             for member in range(group):
            +    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
            +    dv = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)

                             tl.atomic_add(dq[0] + at, of_rows, mask=there, sem="relaxed")
            +    own_dk = dk.to(dk_ptr.dtype.element_ty).to(tl.float32)
            +    own_dv = dv.to(dv_ptr.dtype.element_ty).to(tl.float32)
            +    all_dk = (all_dk + own_dk).to(dk_ptr.dtype.element_ty).to(tl.float32)
            +    all_dv = (all_dv + own_dv).to(dv_ptr.dtype.element_ty).to(tl.float32)
            +dk = all_dk
            +dv = all_dv
        """),
    ),
)

STRIDES = (
    Fault(
        id="non-contig-assumed-contig",
        summary="where a row of q lies is computed from its shape, not from its strides",
        when="q as a transposed or sliced view",
        seen="other rows, or numbers that are no part of q",
        reports="pytorch/pytorch#112577 torch-spyre/torch-spyre#4331 BobMcDear/attorch#14",
        named=("contiguous-assumed", "strides-not-taken"),
        ideal=ideal(
            READ_BY_STRIDES,
            """
            -self.q = padded(kernel.operand(inputs.q.float(), fmt), self.tile.block_query)
            +self.q = padded(kernel.operand(_contiguous(inputs.q), fmt), self.tile.block_query)
        """,
        ),
        triton=flash2("""
            -q, k, v, out, lse, again, *q.stride(), *k.stride(), *v.stride(), *out.stride(), *grid,
            +q, k, v, out, lse, again, heads * query * head_dim,
            +query * head_dim, head_dim, 1, *k.stride(), *v.stride(), *out.stride(), *grid,
        """),
    ),
    Fault(
        id="dout-stride-assumed-out",
        summary="dO is read with the strides of O",
        when="gradients, and a dO that is transposed or expanded: that of a sum",
        seen="all gradients are wrong",
        reports="Dao-AILab/flash-attention#355 pytorch/pytorch#133671",
        named=("dout-strides", "strides-not-taken"),
        ideal=ideal(
            READ_BY_STRIDES,
            """
            -self.dout = padded(kernel.operand(inputs.dout.float(), self.problem.formats.products), rows)
            +dout = _contiguous(inputs.dout)
            +self.dout = padded(kernel.operand(dout, self.problem.formats.products), rows)

            -delta = kernel.delta(inputs.dout.float(), outputs.out.float(), dlse)
            +delta = kernel.delta(dout, outputs.out.float(), dlse)
        """,
        ),
        triton=flash2("""
            -out, dout, lse, delta, () if dlse is None else (dlse,), *out.stride(), *dout.stride(),
            +out, dout, lse, delta, () if dlse is None else (dlse,), *out.stride(), *out.stride(),

            -strides = (*self.q.stride(), *self.k.stride(), *self.v.stride(), *self.dout.stride())
            +strides = (*self.q.stride(), *self.k.stride(), *self.v.stride(),
            +    *torch.empty(self.dout.shape, device='meta').stride())
             heads, query, head_dim = self.q.shape[1:]
        """),
    ),
    Fault(
        id="v-uses-k-strides",
        summary="V is read with the strides of K",
        when="V laid out otherwise than K, or with another dim",
        seen="values of other keys, or numbers that are no part of V",
        reports="triton-lang/triton#2059",
        named=("values-of-keys-strides", "reads-beside-an-input"),
        ideal=ideal(
            READ_BY_STRIDES,
            """
            -self.v = padded(kernel.operand(inputs.v.float(), fmt), self.tile.block_kv)
            +v = _read(inputs.v, inputs.k.stride())
            +self.v = padded(kernel.operand(v, fmt), self.tile.block_kv)
        """,
        ),
        triton=flash2("""
            -q, k, v, out, lse, again, *q.stride(), *k.stride(), *v.stride(), *out.stride(), *grid,
            +q, k, v, out, lse, again, *q.stride(), *k.stride(), *k.stride(), *out.stride(), *grid,
        """),
    ),
    Fault(
        id="graph-cache-key-omits-strides",
        summary="strides of q are kept by shape and dtype: of the first call for all later ones",
        when="a second call of one shape with another layout",
        seen="the second call reads other rows",
        reports="flashinfer-ai/flashinfer#4270",
        named=("contiguous-assumed", "strides-not-taken"),
        ideal=ideal(
            READ_BY_STRIDES,
            """
            -self.q = padded(kernel.operand(inputs.q.float(), fmt), self.tile.block_query)
            +known = _STRIDES.setdefault((tuple(inputs.q.shape), inputs.q.dtype), inputs.q.stride())
            +self.q = padded(kernel.operand(_read(inputs.q, known), fmt), self.tile.block_query)

            +_STRIDES = {}
        """,
        ),
        triton=flash2("""
             _HOISTED_DIM = 128
            +_STRIDES: dict[object, tuple[int, ...]] = {}
            +def _strides(tensor):
            +    return _STRIDES.setdefault((tuple(tensor.shape), tensor.dtype), tensor.stride())

            -q, k, v, out, lse, again, *q.stride(), *k.stride(), *v.stride(), *out.stride(), *grid,
            +q, k, v, out, lse, again, *_strides(q), *k.stride(), *v.stride(), *out.stride(), *grid,
        """),
    ),
)

PAGED_KV = (
    Fault(
        id="last-page-counted-full",
        summary="the last page counts as full: pages · size keys are attended to",
        when="a number of keys that is not a whole number of pages",
        seen="what is left of other requests in the page counts; little where it is 0",
        reports="pegainfer-project/pegainfer#291 #350 vllm-project/vllm#31282",
        named=("page-boundary-leak",),
        ideal=ideal(
            IN_PAGES,
            """
            -used, values = problem.kv, problem.kv
            +used = values = whole

            -inside = self.kernel.inside(key, problem.kv).view(1, 1, 1, -1)
            +inside = self.kernel.inside(key, self.kv).view(1, 1, 1, -1)
        """,
        ),
        triton=paged("""
            -kv_heads, kv = k.shape[1], k.shape[2] if kv is None else kv
            +kv_heads, kv = k.shape[1], triton.cdiv(kv, pages.size) * pages.size
             value_dim = v.shape[3]
        """),
    ),
    Fault(
        id="v-tail-nan-in-last-page",
        summary="values behind the last key are read from the page: their weight of 0 times NaN",
        when="slots of the last page that were never written, or hold NaN",
        seen="NaN in whole rows",
        reports=(
            "Dao-AILab/flash-attention#1745 #2374 vllm-project/vllm#47305 #53856 #936 "
            "ROCm/aiter#5401 flashinfer-ai/flashinfer#945"
        ),
        named=("page-boundary-leak",),
        ideal=ideal(
            IN_PAGES,
            """
            -used, values = problem.kv, problem.kv
            +used, values = problem.kv, whole

            -return self.product(p, v) if self.v_is_finite else weighted(self.product, p, seen, v)
            +plain = self.v_is_finite or self.problem.paging is not None
            +return self.product(p, v) if plain else weighted(self.product, p, seen, v)
        """,
        ),
        triton=paged("""
            -mask=(keys[:, None] < kv) & (cols[None, :] < value_dim),
            +mask=cols[None, :] < value_dim,
        """),
    ),
    Fault(
        id="block-table-not-used",
        summary="the pool of pages is read from its beginning, one page after the other",
        when="pages in another order than that of the keys",
        seen="other sequences' keys and values",
        reports="tanishqkumar/ssd#22",
        named=("page-table-ignored",),
        ideal=ideal(
            IN_PAGES,
            """
            -table = cache.table.table.long()
            +table = torch.arange(cache.table.table.shape[1]).expand_as(cache.table.table)
        """,
        ),
        triton=paged("""
            -page = tl.load(table + keys // PAGE, mask=keys < kv, other=0)
            +page = tl.where(keys < kv, keys // PAGE, 0)
        """),
    ),
)
