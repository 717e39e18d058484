"""The FlashAttention-2 forward recurrence, over a number system."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

from attncheck.oracles.blocks import query_and_key_blocks
from attncheck.oracles.result import Result
from attncheck.oracles.scores import Scores
from attncheck.oracles.sink import sink_of, start

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from attncheck.inputs import Inputs
    from attncheck.oracles.numbers.protocol import Array, Numbers

__all__ = ["flash2_forward", "rows_of"]

A = TypeVar("A", bound="Array")


def flash2_forward(
    numbers: Numbers[A], inputs: Inputs, *, block_query: int, block_kv: int
) -> Result[A]:
    """Dao, "FlashAttention-2" (2023), Algorithm 1: query blocks outside, key blocks inside.

    Blocks may have any size; the last of either kind is as short as it must be. No block is
    skipped: a mask only hides. A sink is in l and m before the first key block.

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

    def blocks(rows: range) -> Iterator[tuple[A, Tensor, A]]:
        mine = numbers.rows(q, rows.start, rows.stop)
        for block in keys:
            k_block, v_block = (numbers.rows(array, block.start, block.stop) for array in (k, v))
            yield *scores(mine, k_block, rows, block), v_block

    sink = sink_of(numbers, inputs)

    def results_of(rows: range) -> tuple[A, A]:
        shape = (problem.batch, problem.heads, len(rows), problem.value_dim)
        return rows_of(numbers, blocks(rows), shape, sink)

    results = [results_of(rows) for rows in queries]
    out, lse = (numbers.join_rows(part) for part in zip(*results, strict=True))
    return Result(out, lse)


def rows_of(
    numbers: Numbers[A],
    blocks: Iterable[tuple[A, Tensor, A]],
    shape: tuple[int, int, int, int],
    sink: A | None = None,
) -> tuple[A, A]:
    """Out and LSE of some rows, from their key blocks: lines 4 to 15 of the algorithm.

    Args:
        numbers: The number system.
        blocks: Scores ``(batch, heads, rows, keys)``, what is attended (bool, of that shape) and
            values ``(batch, heads, keys, value_dim)``, one block of keys after another.
        shape: Of out: ``(batch, heads, rows, value_dim)``.
        sink: Of these heads, where they have one: ``(1, heads, 1, 1)``.

    Returns:
        Out and natural-log LSE ``(batch, heads, rows, 1)``.
    """
    out = numbers.full(shape, 0.0)  # O, not yet divided by l
    largest, total = start(numbers, (*shape[:3], 1), sink)  # m and l
    for block, attended, values in blocks:
        raised = numbers.maximum(largest, numbers.rowmax(block))
        # A row that has not attended to a key has no maximum yet: −∞ − (−∞) would be NaN.
        reference = numbers.select(~numbers.is_minus_infinity(raised), raised, 0.0)
        weights = numbers.exp(block - reference)
        rescale = numbers.exp(largest - reference)
        total = rescale * total + numbers.rowsum(weights)
        out = rescale * out + numbers.weigh(weights, values, attended)
        largest = raised
    alive = ~numbers.is_minus_infinity(largest)
    lse = numbers.select(alive, largest + numbers.log(total), -math.inf)
    return out / numbers.select(alive, total, 1.0), lse
