"""Which keys rows see according to the mask's callable, evaluated for some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from attncheck.inputs.problem import Problem

_PAIRS_AT_A_TIME = 1 << 22
_CACHED_PROBLEMS = 64  # Each is asked several times whether a relation applies.


def visible_keys(
    problem: Problem, rows: Sequence[int], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return which keys ``rows`` see: bool, broadcasts to ``(batch, heads, len(rows), kv)``.

    The first two axes are 1 where the mask reads no b or no h.
    """
    b, h, kv = (
        torch.arange(size, device=device) for size in (problem.batch, problem.heads, problem.kv)
    )
    q = torch.tensor(list(rows), device=device)
    mask = problem.mask_mod(str(device))
    visible = mask(b[:, None, None, None], h[:, None, None], q[:, None], kv)
    visible = visible.view((1,) * (4 - visible.ndim) + visible.shape)
    return visible.expand(-1, -1, len(rows), problem.kv)


def visible_blocks(
    problem: Problem, device: torch.device | str = "cpu"
) -> Iterator[tuple[range, torch.Tensor]]:
    """Yield blocks of rows with their ``visible_keys``, until all rows are through."""
    step = max(1, _PAIRS_AT_A_TIME // (problem.batch * problem.heads * problem.kv))
    for start in range(0, problem.query, step):
        rows = range(start, min(start + step, problem.query))
        yield rows, visible_keys(problem, rows, device)


def keys_hidden_from(
    problem: Problem, row: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return keys hidden from ``row`` in all heads that read them: ``(batch, kv_heads, kv)``."""
    hidden = _hidden_in_group(problem, visible_keys(problem, [row], device))[:, :, 0]
    return hidden.expand(problem.batch, problem.kv_heads, -1)


@lru_cache(_CACHED_PROBLEMS)
def rows_with_hidden_keys(problem: Problem) -> tuple[int, ...]:
    """Return the rows for which ``keys_hidden_from`` has a key, in any sequence and key head."""
    rows: list[int] = []
    for block, visible in visible_blocks(problem):
        hidden_anywhere = _hidden_in_group(problem, visible).any(-1).flatten(0, 1).any(0)
        rows += [block.start + row for row in hidden_anywhere.nonzero().flatten().tolist()]
    return tuple(rows)


@lru_cache(_CACHED_PROBLEMS)
def rows_without_keys(problem: Problem) -> torch.Tensor:
    """Return which rows see no key: bool ``(batch, heads, query)``, on the CPU."""
    shape = (problem.batch, problem.heads, -1)
    blocks = visible_blocks(problem)
    return torch.cat([~visible.any(-1).expand(shape) for _, visible in blocks], dim=2)


def _hidden_in_group(problem: Problem, visible: torch.Tensor) -> torch.Tensor:
    """Return bool ``(batch or 1, kv_heads or 1, rows, kv)``: hidden in all heads of the group."""
    if visible.shape[1] == 1:
        return ~visible
    batch, _, rows, kv = visible.shape
    return ~visible.reshape(batch, problem.kv_heads, problem.group, rows, kv).any(2)
