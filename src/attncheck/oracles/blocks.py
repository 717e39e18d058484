"""How the FlashAttention recurrences cut query rows and keys: into blocks of any size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.errors import UsageError

if TYPE_CHECKING:
    from attncheck.problem import Problem

__all__ = ["query_and_key_blocks"]


def query_and_key_blocks(
    problem: Problem, block_query: int, block_kv: int
) -> tuple[list[range], list[range]]:
    """Ranges of query rows and of keys; the last of either kind is as short as it must be.

    Raises:
        UsageError: for a block size below 1.
    """
    for name, size in (("block_query", block_query), ("block_kv", block_kv)):
        if size < 1:
            raise UsageError(f"{name}={size} must be at least 1.")
    return _cut(problem.query, block_query), _cut(problem.kv, block_kv)


def _cut(length: int, size: int) -> list[range]:
    return [range(start, min(start + size, length)) for start in range(0, length, size)]
