"""Attention over splits of the keys, each on its own, merged by LSE: over a number system."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from attncheck.errors import UsageError
from attncheck.oracles.result import Result
from attncheck.oracles.scores import Scores
from attncheck.oracles.sink import sink_of
from attncheck.oracles.softmax import safe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.inputs import Inputs
    from attncheck.oracles.numbers.protocol import Array, Numbers

__all__ = ["merged", "parts", "split_forward"]

A = TypeVar("A", bound="Array")


def split_forward(numbers: Numbers[A], inputs: Inputs, *, splits: int) -> Result[A]:
    """Dao et al., "Flash-Decoding" (2023): splits of the keys that know nothing of each other.

    Split i gives the attention of its own keys K_i and their LSE,

        LSE_i = ln Σ_{j ∈ K_i} e^{s_j},    O_i = Σ_{j ∈ K_i} e^{s_j − LSE_i} v_j,

    and ``merged`` makes of them that of all keys; a sink is a split of its own. It is the
    recurrence of split-KV decoding, of attention to a shared prefix ("cascade") and of ring
    attention.

    Args:
        numbers: The number system.
        inputs: As for ``dense_attention``, which this equals up to rounding.
        splits: How many, contiguous and as equal as can be; beyond the number of keys some are
            empty.

    Returns:
        Out ``(batch, heads, query, value_dim)`` and natural-log LSE ``(batch, heads, query, 1)``.

    Raises:
        UsageError: for fewer than one split.
    """
    problem = inputs.problem
    q, k, v = (numbers.exact(tensor) for tensor in inputs.promoted())
    k, v = (numbers.repeat_heads(array, problem.group) for array in (k, v))
    scores = Scores.of(numbers, inputs)
    rows = range(problem.query)

    def of(keys: range) -> Result[A]:
        if not keys:
            return _nothing(numbers, inputs)
        mine, values = (numbers.rows(array, keys.start, keys.stop) for array in (k, v))
        score, attended = scores(q, mine, rows, keys)
        weights, lse = safe(numbers, score, attended)
        return Result(numbers.weigh(weights, values, attended), lse)

    results = [of(keys) for keys in parts(problem.kv, splits)]
    sink = sink_of(numbers, inputs)
    if sink is not None:
        results.append(_sink(numbers, inputs, sink))
    return merged(numbers, results)


def parts(keys: int, splits: int) -> list[range]:
    """``splits`` contiguous ranges that together are all keys, in order; some may be empty.

    Raises:
        UsageError: for fewer than one.
    """
    if splits < 1:
        raise UsageError(f"splits={splits} must be at least 1.")
    cuts = [keys * number // splits for number in range(splits + 1)]
    return [range(start, stop) for start, stop in pairwise(cuts)]


def merged(numbers: Numbers[A], results: Sequence[Result[A]]) -> Result[A]:
    """Attention over the keys of all ``results``, one or more, no key in two of them.

    Σ_j e^{s_j} over all keys is the sum of the parts' own, e^{LSE_i}, so that with M = max LSE_i

        LSE = ln Σ_i e^{LSE_i} = M + ln Σ_i e^{LSE_i − M},

    and of the sum of values O = Σ_j e^{s_j − LSE} v_j part i has e^{LSE_i − LSE} O_i:

        O = Σ_i e^{LSE_i − M} O_i / Σ_i e^{LSE_i − M}.

    A part of which a row sees nothing has LSE −∞ and therefore weight 0. Where all are such, the
    row has out 0 and LSE −∞.
    """
    first, *others = results
    largest = first.lse
    for result in others:
        largest = numbers.maximum(largest, result.lse)
    alive = ~numbers.is_minus_infinity(largest)
    # A row that sees nothing in any part has no largest: −∞ − (−∞) would be NaN.
    reference = numbers.select(alive, largest, 0.0)
    total = numbers.exp(first.lse - reference)
    out = total * first.out
    for result in others:
        weight = numbers.exp(result.lse - reference)
        total = total + weight
        out = out + weight * result.out
    lse = numbers.select(alive, reference + numbers.log(total), -math.inf)
    return Result(out / numbers.select(alive, total, 1.0), lse)


def _nothing(numbers: Numbers[A], inputs: Inputs) -> Result[A]:
    """What no keys give to every row."""
    problem = inputs.problem
    rows = (problem.batch, problem.heads, problem.query)
    out = numbers.full((*rows, problem.value_dim), 0.0)
    return Result(out, numbers.full((*rows, 1), -math.inf))


def _sink(numbers: Numbers[A], inputs: Inputs, sink: A) -> Result[A]:
    """What the sink alone gives: its value is 0, its score the LSE."""
    nothing = _nothing(numbers, inputs)
    zeros = numbers.columns(nothing.out, 0, 1)
    return Result(nothing.out, zeros + sink)
