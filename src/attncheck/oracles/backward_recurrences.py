"""Gradients in any number system: by their definition, and by FlashAttention-2's backward."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from attncheck.inputs.input_tensors import Inputs
from attncheck.oracles.forward_recurrences import attention_inputs, flash2_forward
from attncheck.oracles.number_system import Array, Numbers
from attncheck.oracles.recurrence_steps import (
    Gradients,
    Result,
    Scores,
    query_and_key_blocks,
    safe,
    sink_of,
)

A = TypeVar("A", bound="Array")


def loss_of(numbers: Numbers[A], inputs: Inputs) -> tuple[A, A]:
    """Return the loss's gradients: dO ``(batch, heads, query, value_dim)`` and dLSE, a column.

    Raises ProblemError for Inputs without a loss.
    """
    dout, dlse = inputs.loss()
    return numbers.exact(dout), numbers.exact(dlse[..., None])


def row_terms(numbers: Numbers[A], out: A, dout: A, dlse: A, keys: Tensor) -> A:
    """Return ``dLSE − Σ dO·O`` of each row, ``(batch, heads, query, 1)``.

    A row that attends to no key has out 0, so its sum is 0 even if dO holds NaN.

    Args:
        out: ``(batch, heads, query, value_dim)``.
        dout: The loss's gradient with respect to ``out``, same shape.
        dlse: The loss's gradient with respect to LSE, a column.
        keys: Whether a row attends to any key, a bool column.
    """
    delta = numbers.select(keys, numbers.rowsum(dout * out), 0.0)
    return dlse - delta


def dsink_of(numbers: Numbers[A], sink: A | None, lse: A, rows: A) -> A | None:
    """Return ``Σ P_sink (dLSE − delta)`` over rows and sequences, ``(1, heads, 1, 1)``.

    Args:
        sink: ``(1, heads, 1, 1)``, or None.
        lse: ``(batch, heads, query, 1)``.
        rows: The result of ``row_terms``.
    """
    if sink is None:
        return None
    # A sink of −∞ has weight 0 even in a row whose LSE is −∞.
    weighs = ~numbers.is_minus_infinity(sink)
    shift = numbers.select(weighs, sink - lse, 0.0)
    weights = numbers.select(weighs, numbers.exp(shift), 0.0)
    return numbers.sum_batch(numbers.rowsum(numbers.transpose(weights * rows)))


def dense_backward(numbers: Numbers[A], inputs: Inputs) -> Gradients[A]:
    """Return all gradients with the whole score matrix at once, and P by the safe softmax.

    Keys that no row attends to, and rows that attend to no key, may hold NaN without effect.

    Args:
        inputs: With a loss; raises ProblemError without one.

    Returns:
        dq ``(batch, heads, query, head_dim)``, dk and dv with kv_heads, and the forward's Result.
    """
    problem = inputs.problem
    dout, dlse = loss_of(numbers, inputs)
    q, k, v, scores = attention_inputs(numbers, inputs)
    tile = scores.with_slopes(q, k, range(problem.query), range(problem.kv))
    attended = tile.attended
    sink = sink_of(numbers, inputs)
    weights, lse = safe(numbers, tile.scores, attended, sink)
    # A row that attends to NaN is NaN throughout, which must not reach keys that it does not see.
    weights = numbers.select(attended, weights, 0.0)
    out = numbers.weigh(weights, v, attended)
    rows = row_terms(numbers, out, dout, dlse, attended.any(dim=-1, keepdim=True))
    dp = numbers.matmul(dout, numbers.transpose(v))
    # The sum over a row's keys in the softmax's derivative is δ − dLSE, the same for all keys.
    dz = weights * (dp + rows)
    dx = numbers.select(attended, dz * tile.slopes, 0.0)
    by_key = attended.mT
    dq = numbers.weigh(dx, k, attended) * problem.scale
    dk = numbers.weigh(numbers.transpose(dx), q, by_key) * problem.scale
    dv = numbers.weigh(numbers.transpose(weights), dout, by_key)
    dk, dv = (numbers.sum_heads(array, problem.group) for array in (dk, dv))
    dsink = dsink_of(numbers, sink, lse, rows)
    return Gradients(Result(out, lse), dq, dk, dv, dsink, scores.captured(tile, dz))


def flash2_backward(
    numbers: Numbers[A], inputs: Inputs, *, block_query: int, block_kv: int
) -> Gradients[A]:
    """Dao, "FlashAttention-2" (2023), Algorithm 2: key blocks outside, query blocks inside.

    P is recomputed from the LSE of the same paper's forward. Delta (the paper's D), which includes
    dLSE, is computed before all blocks. No block is skipped: a mask only hides scores.

    Args:
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
    _, k, v, scores = attention_inputs(numbers, inputs)
    of_keys = []
    for block in keys:
        keys_and_values = [numbers.rows(array, block.start, block.stop) for array in (k, v)]
        heads = (problem.batch, problem.heads, len(block))
        sums = [numbers.full((*heads, n), 0.0) for n in (problem.head_dim, problem.value_dim)]
        for rows in blocks:
            parts = rows.add(numbers, scores, keys_and_values, block)
            sums = [total + part for total, part in zip(sums, parts, strict=True)]
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
    """Return the query blocks with their row quantities: lines 1 to 4 of the algorithm."""
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
    """Rows of a query block."""

    at: range
    q: A  # ``(batch, heads, rows, head_dim)``
    dout: A  # ``(batch, heads, rows, value_dim)``
    lse: A  # a column, 0 for rows that attend to no key
    terms: A  # a column: dLSE − delta
    dq: A  # sum over the key blocks so far, without the scale
    attends: Tensor  # whether a row attends to any key of these blocks; a bool column
    captured: A | None = None  # gradients of the captured numbers so far; None without dcaptured

    def add(
        self, numbers: Numbers[A], scores: Scores[A], keys_and_values: Sequence[A], block: range
    ) -> tuple[A, A]:
        """Add to dq and return the addends of the key block's dk and dv: lines 10 to 16."""
        k, v = keys_and_values
        tile = scores.with_slopes(self.q, k, self.at, block)
        attended = tile.attended
        # A row that attends to NaN has an LSE of NaN, which must not reach keys it does not see.
        weights = numbers.select(attended, numbers.exp(tile.scores - self.lse), 0.0)
        dp = numbers.matmul(self.dout, numbers.transpose(v))
        dz = weights * (dp + self.terms)
        dx = numbers.select(attended, dz * tile.slopes, 0.0)
        self.dq = self.dq + numbers.weigh(dx, k, attended)
        self.attends = self.attends | attended.any(dim=-1, keepdim=True)
        self.captured = _added(self.captured, scores.captured(tile, dz))
        # The scale is multiplied in once at the end, by the caller.
        dk = numbers.weigh(numbers.transpose(dx), self.q, attended.mT)
        return dk, numbers.weigh(numbers.transpose(weights), self.dout, attended.mT)
