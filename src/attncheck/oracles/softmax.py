"""Three ways to turn rows of scores into weights, over a number system.

Each takes scores ``(batch, heads, query, kv)``, −∞ where a row does not attend to a key, and what
is attended (bool, of the same shape). It gives weights that add up to 1 in each row, of that shape,
and the natural-log LSE ``(batch, heads, query, 1)``. A row that attends to no key has weights 0 and
an LSE of −∞.

With a sink, a score of the head's own that every row has beside its keys, the weights of the keys
and the sink's together add up to 1, and LSE is of all of them: that of a row that attends to no key
is the sink.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol, TypeVar

from attncheck.oracles.sink import some, start

if TYPE_CHECKING:
    from torch import Tensor

    from attncheck.oracles.numbers.protocol import Array, Numbers

__all__ = ["SOFTMAXES", "Softmax", "naive", "online", "safe"]

A = TypeVar("A", bound="Array")


class Softmax(Protocol):
    """One of the three; arguments and results as the module says."""

    def __call__(
        self, numbers: Numbers[A], scores: A, attended: Tensor, sink: A | None = None, /
    ) -> tuple[A, A]:
        """Weights of the keys, and LSE; ``sink`` broadcasts to ``(batch, heads, query, 1)``."""
        ...


def naive(
    numbers: Numbers[A], scores: A, attended: Tensor, sink: A | None = None, /
) -> tuple[A, A]:
    """``exp(x) / Σ exp(x)``: the definition itself, with nothing subtracted.

    In float64 the sum is +∞ once a score passes 709.78 − ln(keys), and 0 where all are below
    −745.1: weights are NaN then, or LSE is infinite. That is left as it is; whoever asks for this
    softmax wants to see it.
    """
    alive = some(numbers, attended, sink)
    exponentials = numbers.exp(scores)
    total = numbers.rowsum(exponentials)
    if sink is not None:
        total = total + numbers.exp(sink)
    lse = numbers.select(alive, numbers.log(total), -math.inf)
    return exponentials / numbers.select(alive, total, 1.0), lse


def safe(numbers: Numbers[A], scores: A, attended: Tensor, sink: A | None = None, /) -> tuple[A, A]:
    """The row's maximum first, then ``exp(x − m) / Σ exp(x − m)``: nothing overflows."""
    alive = some(numbers, attended, sink)
    largest = numbers.rowmax(scores)
    if sink is not None:
        largest = numbers.maximum(largest, sink)
    largest = numbers.select(alive, largest, 0.0)
    exponentials = numbers.exp(scores - largest)
    total = numbers.rowsum(exponentials)
    if sink is not None:
        total = total + numbers.exp(sink - largest)
    lse = numbers.select(alive, largest + numbers.log(total), -math.inf)
    return exponentials / numbers.select(alive, total, 1.0), lse


def online(
    numbers: Numbers[A], scores: A, attended: Tensor, sink: A | None = None, /
) -> tuple[A, A]:
    """Milakov & Gimelshein, "Online normalizer calculation for softmax" (2018), Algorithm 3.

    One pass over the columns carries the maximum so far, m, and the sum of exponentials relative
    to it, d, which is rescaled whenever m rises; the weights follow from the last m and d. A sink
    comes before the first column.
    """
    alive = some(numbers, attended, sink)
    largest, total = start(numbers, (*attended.shape[:-1], 1), sink)  # m and d
    for column in range(attended.shape[-1]):
        score = numbers.columns(scores, column, column + 1)
        raised = numbers.maximum(largest, score)
        # A row that has not attended to a key has no maximum yet: −∞ − (−∞) would be NaN.
        reference = numbers.select(~numbers.is_minus_infinity(raised), raised, 0.0)
        total = total * numbers.exp(largest - reference) + numbers.exp(score - reference)
        largest = raised
    reference = numbers.select(alive, largest, 0.0)
    weights = numbers.exp(scores - reference) / numbers.select(alive, total, 1.0)
    return weights, numbers.select(alive, reference + numbers.log(total), -math.inf)


SOFTMAXES: dict[str, Softmax] = {"naive": naive, "safe": safe, "online": online}
