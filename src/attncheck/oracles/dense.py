"""Attention and softmax by their definition, over a number system, with any of three softmaxes."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from attncheck.oracles.result import Result
from attncheck.oracles.scores import Scores
from attncheck.oracles.sink import sink_of
from attncheck.oracles.softmax import safe

if TYPE_CHECKING:
    from attncheck.inputs import Inputs
    from attncheck.oracles.numbers.protocol import Array, Numbers
    from attncheck.oracles.softmax import Softmax

__all__ = ["dense_attention", "dense_softmax"]

A = TypeVar("A", bound="Array")


def dense_attention(numbers: Numbers[A], inputs: Inputs, softmax: Softmax = safe) -> Result[A]:
    """``softmax(score) · v`` with the whole score matrix at once.

    A row that attends to no key gives 0 and an LSE of −∞, or its head's sink where there are sinks.

    Args:
        numbers: The number system.
        inputs: q ``(batch, heads, query, head_dim)``; k and v with kv_heads, head h reads head
            h // (heads / kv_heads).
        softmax: One of ``softmax.SOFTMAXES``.

    Returns:
        Out ``(batch, heads, query, value_dim)`` and natural-log LSE ``(batch, heads, query, 1)``.
    """
    problem = inputs.problem
    q, k, v = (numbers.exact(tensor) for tensor in inputs.promoted())
    k, v = (numbers.repeat_heads(array, problem.group) for array in (k, v))
    scores, attended = Scores.of(numbers, inputs)(q, k, range(problem.query), range(problem.kv))
    weights, lse = softmax(numbers, scores, attended, sink_of(numbers, inputs))
    return Result(numbers.weigh(weights, v, attended), lse)


def dense_softmax(numbers: Numbers[A], inputs: Inputs, softmax: Softmax = safe) -> Result[A]:
    """The softmax of ``inputs.scores()`` over their last axis; a score of −∞ has weight 0.

    Args:
        numbers: The number system.
        inputs: Of a Problem whose operation is softmax; raises ProblemError for attention.
        softmax: One of ``softmax.SOFTMAXES``.

    Returns:
        Out ``(batch, heads, query, kv)`` and natural-log LSE ``(batch, heads, query, 1)``: 0 and
        −∞ for a row that is −∞ throughout.
    """
    scores = numbers.exact(inputs.scores())
    out, lse = softmax(numbers, scores, ~numbers.is_minus_infinity(scores))
    return Result(out, lse)
