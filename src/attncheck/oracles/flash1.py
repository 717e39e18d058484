"""The FlashAttention-1 forward recurrence, over a number system."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from attncheck.oracles.blocks import query_and_key_blocks
from attncheck.oracles.result import Result
from attncheck.oracles.scores import Scores
from attncheck.oracles.sink import sink_of, start

if TYPE_CHECKING:
    from torch import Tensor

    from attncheck.inputs import Inputs
    from attncheck.oracles.numbers.protocol import Array, Numbers

__all__ = ["flash1_forward"]

A = TypeVar("A", bound="Array")


def flash1_forward(
    numbers: Numbers[A], inputs: Inputs, *, block_query: int, block_kv: int
) -> Result[A]:
    """Dao et al., "FlashAttention" (2022), Algorithm 2: Algorithm 1 with a mask, without dropout.

    Key blocks are outermost. Inside, every query block is read with what it has come to so far,
    rescaled and written back: O is divided by l at every step, as in the paper. Blocks may have any
    size; no block is skipped: a mask only hides. A sink is in l and m before the first block.

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
    queries, all_keys = query_and_key_blocks(problem, block_query, block_kv)
    q, k, v = (numbers.exact(tensor) for tensor in inputs.promoted())
    k, v = (numbers.repeat_heads(array, problem.group) for array in (k, v))
    scores = Scores.of(numbers, inputs)
    written = [_SoFar.nothing(numbers, inputs, rows) for rows in queries]
    for keys in all_keys:
        k_block, v_block = (numbers.rows(array, keys.start, keys.stop) for array in (k, v))
        for number, rows in enumerate(queries):
            q_block = numbers.rows(q, rows.start, rows.stop)
            block, attended = scores(q_block, k_block, rows, keys)
            written[number] = written[number].with_keys(numbers, block, v_block, attended)
    out = numbers.join_rows([so_far.out for so_far in written])
    return Result(out, numbers.join_rows([so_far.lse(numbers) for so_far in written]))


@dataclass(frozen=True, slots=True, eq=False)
class _SoFar(Generic[A]):
    """What one query block has come to, after some key blocks.

    Attributes:
        out: The paper's O, attention over the keys so far: ``(batch, heads, rows, value_dim)``.
        total: Its l, the sum of exponentials relative to m: ``(batch, heads, rows, 1)``.
        largest: Its m, the largest score: ``(batch, heads, rows, 1)``.
    """

    out: A
    total: A
    largest: A

    @classmethod
    def nothing(cls, numbers: Numbers[A], inputs: Inputs, rows: range) -> _SoFar[A]:
        """Line 2 of the algorithm: O = 0, l = 0, m = −∞; with a sink l = 1 and m = sink."""
        shape = (inputs.problem.batch, inputs.problem.heads, len(rows))
        largest, total = start(numbers, (*shape, 1), sink_of(numbers, inputs))
        out = numbers.full((*shape, inputs.problem.value_dim), 0.0)
        return cls(out=out, total=total, largest=largest)

    def with_keys(self, numbers: Numbers[A], scores: A, values: A, attended: Tensor) -> _SoFar[A]:
        """Lines 10 to 13 of Algorithm 1: another block of keys and their scores."""
        of_block = numbers.rowmax(scores)
        relative = _reference(numbers, of_block)
        weights = numbers.exp(scores - relative)
        largest = numbers.maximum(self.largest, of_block)
        reference = _reference(numbers, largest)
        # A block in which a row attends to no key has weights 0 and counts for nothing.
        rescale = numbers.exp(self.largest - reference)
        rescale_block = numbers.exp(of_block - reference)
        total = rescale * self.total + rescale_block * numbers.rowsum(weights)
        weighed = numbers.weigh(weights, values, attended)
        # A row without keys has O = 0 and l = 0: 0/0 would be NaN.
        divisor = numbers.select(~numbers.is_minus_infinity(largest), total, 1.0)
        out = (self.total * rescale * self.out + rescale_block * weighed) / divisor
        return _SoFar(out, total, largest)

    def lse(self, numbers: Numbers[A]) -> A:
        """LSE = m + log l, and −∞ for rows that attended to no key."""
        alive = ~numbers.is_minus_infinity(self.largest)
        return numbers.select(alive, self.largest + numbers.log(self.total), -math.inf)


def _reference(numbers: Numbers[A], largest: A) -> A:
    """A maximum to subtract: a row that has not attended to a key has none, and gets 0."""
    return numbers.select(~numbers.is_minus_infinity(largest), largest, 0.0)
