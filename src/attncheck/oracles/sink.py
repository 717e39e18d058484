"""A head's own logit, which every row sees beside its keys, and which has no value.

Each softmax and recurrence starts with it in its own way: what they have in common is the number.
A sink of −∞ weighs nothing, as if there were none.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attncheck.inputs import Inputs
    from attncheck.oracles.numbers.protocol import Array, Numbers

__all__ = ["sink_of", "some", "start"]

A = TypeVar("A", bound="Array")


def sink_of(numbers: Numbers[A], inputs: Inputs) -> A | None:
    """Each head's sink, ``(1, heads, 1, 1)``: natural, as it is; None where there is none."""
    if inputs.sink is None:
        return None
    return numbers.exact(inputs.sink.double().view(1, -1, 1, 1))


def some(numbers: Numbers[A], attended: Tensor, sink: A | None) -> Tensor:
    """Which rows have anything to weigh, a key or a sink: bool ``(batch, heads, query, 1)``.

    Args:
        numbers: The number system.
        attended: Bool ``(batch, heads, query, kv)``.
        sink: As ``sink_of`` gives it.
    """
    any_key = attended.any(dim=-1, keepdim=True)
    return any_key if sink is None else any_key | ~numbers.is_minus_infinity(sink)


def start(numbers: Numbers[A], shape: Sequence[int], sink: A | None) -> tuple[A, A]:
    """The largest score and the sum of exponentials relative to it, before the first key.

    −∞ and 0; with a sink, which is a score like any, the sink and 1.

    Args:
        numbers: The number system.
        shape: ``(batch, heads, rows, 1)``, of both.
        sink: Broadcasts to it.
    """
    if sink is None:
        return numbers.full(shape, -math.inf), numbers.full(shape, 0.0)
    weighs = ~numbers.is_minus_infinity(sink)
    return numbers.full(shape, 0.0) + sink, numbers.select(weighs, numbers.full(shape, 1.0), 0.0)
