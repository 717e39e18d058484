"""Our Triton FlashAttention-2 forward on keys and values in pages, as a subject."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.subjects.flash2 import Flash2
from attncheck.subjects.pages import cached

if TYPE_CHECKING:
    import torch

    from attncheck.inputs import Inputs
    from attncheck.kernels.launch import KernelPages
    from attncheck.problem import Problem

__all__ = ["Paged"]


class Paged(Flash2):
    """``triton-flash2`` behind a page table: prefill and decoding, any mask and score mod.

    Its tiles of keys are logical: a tile may be of several pages, and a page of several tiles. It
    is given kv, and the mask says where a sequence ends.
    """

    name = "triton-paged"
    summary = "triton-flash2 on keys and values in pages, behind a page table"
    backward = False

    def concerns(self, problem: Problem) -> bool:
        """Attention with pages, and no other."""
        return problem.paging is not None and super().concerns(problem.replace(paging=None))

    def stored(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, KernelPages | None]:
        """Caches ``(pages, kv_heads, size, dim)``, and the table; packed before the call."""
        from attncheck.kernels.launch import KernelPages

        cache = cached(inputs)
        return cache.k, cache.v, KernelPages(cache.table.table, cache.table.size)
