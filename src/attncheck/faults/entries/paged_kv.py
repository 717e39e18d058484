"""Faults: keys and values in pages behind a table."""

from __future__ import annotations

from attncheck.faults.fault import Edit, Fault, Host

__all__ = ["FAULTS"]

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


FAULTS = (
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
