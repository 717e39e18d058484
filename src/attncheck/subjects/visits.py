"""The tiles that our FlashAttention-2 kernels visit, from a Problem's block mask."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from attncheck.mods import library
from attncheck.mods.block_mask import block_mask, visit_list

if TYPE_CHECKING:
    from attncheck.kernels.launch import VisitList
    from attncheck.problem import Problem

__all__ = ["visits", "visits_by_keys"]

# A relation asks for the same mask in several runs, and its tiles cost more than a small kernel.
_KEPT = 64


def visits(problem: Problem, block_query: int, block_kv: int, device: str) -> VisitList:
    """The tiles of ``problem`` that its mask does not hide wholly, for blocks of these sizes.

    Found by calling the mask itself, on ``device``, at every index.
    """
    return _found(problem, block_query, block_kv, device)


def visits_by_keys(problem: Problem, block_query: int, block_kv: int, device: str) -> VisitList:
    """The same tiles by blocks of keys: which blocks of query rows each of them has to visit."""
    return _found(problem, block_query, block_kv, device, by_keys=True)


def _found(
    problem: Problem, block_query: int, block_kv: int, device: str, *, by_keys: bool = False
) -> VisitList:
    lasting = all(part.name in library.BUILT_IN for part in problem.mask.walk())
    find = _kept if lasting else _visits
    return find(_only_the_mask(problem), block_query, block_kv, device, by_keys=by_keys)


def _only_the_mask(problem: Problem) -> Problem:
    """One Problem for all of a mask at the same lengths."""
    return problem.replace(
        score=library.NONE, seed=0, distribution="normal", head_dim=1, value_dim=1, scale=1.0,
        sink=False, paging=None, backward=False, dlse=False, dcaptured=False,
    )  # fmt: skip


def _visits(
    problem: Problem, block_query: int, block_kv: int, device: str, *, by_keys: bool
) -> VisitList:
    from attncheck.kernels.launch import VisitList

    found = block_mask(
        problem.mask_mod(device),
        problem.dimensions,
        block_query=block_query,
        block_kv=block_kv,
        device=device,
    )
    return VisitList(*visit_list(found.transposed() if by_keys else found))


_kept = lru_cache(maxsize=_KEPT)(_visits)
