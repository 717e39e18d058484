"""Attention by its definition, over a number system."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

from attncheck.oracles.scores import Scores
from attncheck.outputs import Outputs

if TYPE_CHECKING:
    from attncheck.inputs import Inputs
    from attncheck.oracles.numbers.protocol import Array, Numbers

__all__ = ["dense_attention"]

A = TypeVar("A", bound="Array")


def dense_attention(numbers: Numbers[A], inputs: Inputs) -> Outputs:
    """``softmax(score) · v`` with the whole score matrix at once.

    The softmax is the safe one: each row's maximum is subtracted first, so that no exponential
    overflows. A row that attends to no key gives 0 and an LSE of −∞.

    Args:
        numbers: The number system.
        inputs: q ``(batch, heads, query, head_dim)``; k and v with kv_heads, head h reads head
            h // (heads / kv_heads).

    Returns:
        Float64 out ``(batch, heads, query, value_dim)`` and natural-log LSE
        ``(batch, heads, query)``.
    """
    problem = inputs.problem
    q, k, v = (numbers.exact(tensor) for tensor in inputs.promoted())
    k, v = (numbers.repeat_heads(array, problem.group) for array in (k, v))
    scores, attended = Scores.of(numbers, inputs)(q, k, range(problem.query), range(problem.kv))
    alive = attended.any(dim=-1, keepdim=True)
    largest = numbers.select(alive, numbers.rowmax(scores), 0.0)
    weights = numbers.exp(scores - largest)
    total = numbers.rowsum(weights)
    out = numbers.weigh(weights, v, attended) / numbers.select(alive, total, 1.0)
    lse = numbers.select(alive, largest + numbers.log(total), -math.inf)
    return Outputs(numbers.rounded(out), numbers.rounded(lse).squeeze(-1))
