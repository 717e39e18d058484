"""Gradients by their definition, over a number system."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from attncheck.oracles.backward.parts import dsink_of, loss_of, row_terms
from attncheck.oracles.result import Gradients, Result
from attncheck.oracles.scores import Scores
from attncheck.oracles.sink import sink_of
from attncheck.oracles.softmax import safe

if TYPE_CHECKING:
    from attncheck.inputs import Inputs
    from attncheck.oracles.numbers.protocol import Array, Numbers

__all__ = ["dense_backward"]

A = TypeVar("A", bound="Array")


def dense_backward(numbers: Numbers[A], inputs: Inputs) -> Gradients[A]:
    """All of the formulas with the whole score matrix at once, P by the safe softmax.

    What a key or row that no one attends to holds, NaN too, has no part in anything.

    Args:
        numbers: The number system.
        inputs: With a loss; raises ProblemError without one.

    Returns:
        dq ``(batch, heads, query, head_dim)``, dk and dv with kv_heads, and the forward's Result.
    """
    problem = inputs.problem
    dout, dlse = loss_of(numbers, inputs)
    q, k, v = (numbers.exact(tensor) for tensor in inputs.promoted())
    k, v = (numbers.repeat_heads(array, problem.group) for array in (k, v))
    every = range(problem.query), range(problem.kv)
    scores = Scores.of(numbers, inputs)
    tile = scores.with_slopes(q, k, *every)
    attended = tile.attended
    sink = sink_of(numbers, inputs)
    weights, lse = safe(numbers, tile.scores, attended, sink)
    # A row that attends to NaN is NaN throughout: no matter to keys it does not attend to.
    weights = numbers.select(attended, weights, 0.0)
    out = numbers.weigh(weights, v, attended)
    rows = row_terms(numbers, out, dout, dlse, attended.any(dim=-1, keepdim=True))
    dp = numbers.matmul(dout, numbers.transpose(v))
    dz = weights * (dp + rows)
    dx = numbers.select(attended, dz * tile.slopes, 0.0)
    by_key = attended.mT
    dq = numbers.weigh(dx, k, attended) * problem.scale
    dk = numbers.weigh(numbers.transpose(dx), q, by_key) * problem.scale
    dv = numbers.weigh(numbers.transpose(weights), dout, by_key)
    dk, dv = (numbers.sum_heads(array, problem.group) for array in (dk, dv))
    dsink = dsink_of(numbers, sink, lse, rows)
    return Gradients(Result(out, lse), dq, dk, dv, dsink, scores.captured(tile, dz))
