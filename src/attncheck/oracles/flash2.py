"""The FlashAttention-2 forward recurrence, over a number system."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

from attncheck.oracles.blocks import query_and_key_blocks
from attncheck.oracles.result import Result
from attncheck.oracles.scores import Scores

if TYPE_CHECKING:
    from attncheck.inputs import Inputs
    from attncheck.oracles.numbers.protocol import Array, Numbers

__all__ = ["flash2_forward"]

A = TypeVar("A", bound="Array")


def flash2_forward(
    numbers: Numbers[A], inputs: Inputs, *, block_query: int, block_kv: int
) -> Result[A]:
    """Dao, "FlashAttention-2" (2023), Algorithm 1: query blocks outside, key blocks inside.

    Blocks may have any size; the last of either kind is as short as it must be. No block is
    skipped: a mask only hides.

    Args:
        numbers: The number system.
        inputs: As for ``dense_attention``, which this equals up to rounding.
        block_query: Rows of a query block (the paper's B_r).
        block_kv: Keys of a key block (the paper's B_c).

    Returns:
        Out ``(batch, heads, query, value_dim)`` and natural-log LSE ``(batch, heads, query, 1)``.

    Raises:
        UsageError: for a block size below 1.
    """
    problem = inputs.problem
    queries, keys = query_and_key_blocks(problem, block_query, block_kv)
    q, k, v = (numbers.exact(tensor) for tensor in inputs.promoted())
    k, v = (numbers.repeat_heads(array, problem.group) for array in (k, v))
    scores = Scores.of(numbers, inputs)
    blocks = [
        _query_block(scores, numbers.rows(q, rows.start, rows.stop), (k, v), rows, keys)
        for rows in queries
    ]
    out, lse = (numbers.join_rows(part) for part in zip(*blocks, strict=True))
    return Result(out, lse)


def _query_block(
    scores: Scores[A], q: A, kv: tuple[A, A], rows: range, key_blocks: list[range]
) -> tuple[A, A]:
    """Out and LSE of the rows ``rows``: lines 4 to 15 of the algorithm."""
    numbers, problem = scores.numbers, scores.inputs.problem
    shape = (problem.batch, problem.heads, len(rows))
    out = numbers.full((*shape, problem.value_dim), 0.0)  # O, not yet divided by l
    total = numbers.full((*shape, 1), 0.0)  # l
    largest = numbers.full((*shape, 1), -math.inf)  # m
    for keys in key_blocks:
        k, v = (numbers.rows(array, keys.start, keys.stop) for array in kv)
        block, attended = scores(q, k, rows, keys)
        raised = numbers.maximum(largest, numbers.rowmax(block))
        # A row that has not attended to a key has no maximum yet: −∞ − (−∞) would be NaN.
        reference = numbers.select(~numbers.is_minus_infinity(raised), raised, 0.0)
        weights = numbers.exp(block - reference)
        rescale = numbers.exp(largest - reference)
        total = rescale * total + numbers.rowsum(weights)
        out = rescale * out + numbers.weigh(weights, v, attended)
        largest = raised
    alive = ~numbers.is_minus_infinity(largest)
    lse = numbers.select(alive, largest + numbers.log(total), -math.inf)
    return out / numbers.select(alive, total, 1.0), lse
