"""The FlashAttention-2 backward, over a number system."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from attncheck.oracles.backward.parts import dsink_of, loss_of, row_terms
from attncheck.oracles.blocks import query_and_key_blocks
from attncheck.oracles.flash2 import flash2_forward
from attncheck.oracles.result import Gradients
from attncheck.oracles.scores import Scores
from attncheck.oracles.sink import sink_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attncheck.inputs import Inputs
    from attncheck.oracles.numbers.protocol import Array, Numbers
    from attncheck.oracles.result import Result

__all__ = ["flash2_backward"]

A = TypeVar("A", bound="Array")


def flash2_backward(
    numbers: Numbers[A], inputs: Inputs, *, block_query: int, block_kv: int
) -> Gradients[A]:
    """Dao, "FlashAttention-2" (2023), Algorithm 2: key blocks outside, query blocks inside.

    P is computed again, from the LSE of the same paper's forward, and delta (the paper's D) before
    all blocks; dLSE is a part of it. No block is skipped: a mask only hides.

    Args:
        numbers: The number system.
        inputs: As for ``dense_backward``, which this equals up to rounding.
        block_query: Rows of a query block (the paper's B_r).
        block_kv: Keys of a key block (the paper's B_c).

    Returns:
        As ``dense_backward``.

    Raises:
        ProblemError: without a loss.
        UsageError: for a block size below 1.
    """
    problem = inputs.problem
    queries, keys = query_and_key_blocks(problem, block_query, block_kv)
    dout, dlse = loss_of(numbers, inputs)
    result = flash2_forward(numbers, inputs, block_query=block_query, block_kv=block_kv)
    blocks = _query_blocks(numbers, inputs, result, (dout, dlse), queries)
    k, v = (numbers.exact(tensor) for tensor in inputs.promoted()[1:])
    k, v = (numbers.repeat_heads(array, problem.group) for array in (k, v))
    scores, of_keys = Scores.of(numbers, inputs), []
    for block in keys:
        mine = [numbers.rows(array, block.start, block.stop) for array in (k, v)]
        heads = (problem.batch, problem.heads, len(block))
        sums = [numbers.full((*heads, n), 0.0) for n in (problem.head_dim, problem.value_dim)]
        for rows in blocks:
            found = rows.add(numbers, scores, mine, block)
            sums = [total + part for total, part in zip(sums, found, strict=True)]
        of_keys.append(sums)
    dk, dv = (
        numbers.sum_heads(numbers.join_rows(parts), problem.group)
        for parts in zip(*of_keys, strict=True)
    )
    dq = numbers.join_rows([rows.dq for rows in blocks])
    attends = torch.cat([rows.attends for rows in blocks], dim=2)
    rows_of_all = row_terms(numbers, result.out, dout, dlse, attends)
    dsink = dsink_of(numbers, sink_of(numbers, inputs), result.lse, rows_of_all)
    dcaptured = functools.reduce(_added, [rows.captured for rows in blocks])
    return Gradients(result, dq * problem.scale, dk * problem.scale, dv, dsink, dcaptured)


def _added(one: A | None, other: A | None) -> A | None:
    return one if other is None else other if one is None else one + other


def _query_blocks(
    numbers: Numbers[A],
    inputs: Inputs,
    result: Result[A],
    loss: tuple[A, A],
    queries: Sequence[range],
) -> list[_QueryBlock[A]]:
    """Lines 1 to 4 of the algorithm: what each query block brings to every key block."""
    q, (dout, dlse) = numbers.exact(inputs.promoted()[0]), loss
    alive = ~numbers.is_minus_infinity(result.lse)
    lse = numbers.select(alive, result.lse, 0.0)  # −∞ − (−∞) would be NaN
    terms = row_terms(numbers, result.out, dout, dlse, alive)
    problem = inputs.problem
    nothing = (problem.batch, problem.heads)
    return [
        _QueryBlock(
            at=at,
            q=numbers.rows(q, at.start, at.stop),
            dout=numbers.rows(dout, at.start, at.stop),
            lse=numbers.rows(lse, at.start, at.stop),
            terms=numbers.rows(terms, at.start, at.stop),
            dq=numbers.full((*nothing, len(at), problem.head_dim), 0.0),
            attends=torch.zeros_like(alive[:, :, at.start : at.stop]),
        )
        for at in queries
    ]


@dataclass(slots=True, eq=False, kw_only=True)
class _QueryBlock(Generic[A]):
    """Rows of a query block.

    Attributes:
        at: Which.
        q: ``(batch, heads, rows, head_dim)``.
        dout: ``(batch, heads, rows, value_dim)``.
        lse: A column, 0 for rows that attend to nothing.
        terms: A column: dLSE − delta.
        dq: Of the key blocks so far, without the scale.
        attends: Whether a row attends to any of their keys; a bool column.
        captured: Of the numbers that the score mod reads, where they are asked for.
    """

    at: range
    q: A
    dout: A
    lse: A
    terms: A
    dq: A
    attends: Tensor
    captured: A | None = None

    def add(
        self, numbers: Numbers[A], scores: Scores[A], mine: Sequence[A], block: range
    ) -> tuple[A, A]:
        """Lines 10 to 16: adds to dq, and gives what is added to the key block's dk and dv."""
        k, v = mine
        tile = scores.with_slopes(self.q, k, self.at, block)
        attended = tile.attended
        # A row that attends to NaN has an LSE of NaN: no matter to keys it does not attend to.
        weights = numbers.select(attended, numbers.exp(tile.scores - self.lse), 0.0)
        dp = numbers.matmul(self.dout, numbers.transpose(v))
        dz = weights * (dp + self.terms)
        dx = numbers.select(attended, dz * tile.slopes, 0.0)
        self.dq = self.dq + numbers.weigh(dx, k, attended)
        self.attends = self.attends | attended.any(dim=-1, keepdim=True)
        self.captured = _added(self.captured, scores.captured(tile, dz))
        dk = numbers.weigh(numbers.transpose(dx), self.q, attended.mT)
        return dk, numbers.weigh(numbers.transpose(weights), self.dout, attended.mT)
