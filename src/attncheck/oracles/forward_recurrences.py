"""Forward attention over a number system: dense, FlashAttention-1 and -2, split keys, one head."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

import torch
from torch import Tensor

from attncheck.core.errors import UsageError
from attncheck.inputs.input_tensors import Inputs
from attncheck.oracles.mod_calls import Indices
from attncheck.oracles.number_system import Array, Numbers
from attncheck.oracles.recurrence_steps import (
    Result,
    Scores,
    Softmax,
    initial_maximum_and_sum,
    query_and_key_blocks,
    safe,
    sink_of,
)

A = TypeVar("A", bound="Array")

_SCORES = 2**17  # Scores of one block: balls take some hundred bytes each, in half a dozen arrays.


def attention_inputs(numbers: Numbers[A], inputs: Inputs) -> tuple[A, A, A, Scores[A]]:
    """Return q, k and v as numbers, k and v repeated for each query head, and the Scores."""
    q, k, v = (numbers.exact(tensor) for tensor in inputs.promoted())
    k, v = (numbers.repeat_heads(array, inputs.problem.group) for array in (k, v))
    return q, k, v, Scores.of(numbers, inputs)


def dense_attention(numbers: Numbers[A], inputs: Inputs, softmax: Softmax = safe) -> Result[A]:
    """Return ``softmax(score) · v`` with the whole score matrix at once.

    A row that attends to no key has out 0 and an LSE of −∞, or of its head's sink.

    Args:
        inputs: q ``(batch, heads, query, head_dim)``; k and v with kv_heads, head h reads head
            h // (heads / kv_heads).
        softmax: One of ``recurrence_steps.SOFTMAXES``.

    Returns:
        Out ``(batch, heads, query, value_dim)`` and natural-log LSE ``(batch, heads, query, 1)``.
    """
    problem = inputs.problem
    q, k, v, all_scores = attention_inputs(numbers, inputs)
    scores, attended = all_scores(q, k, range(problem.query), range(problem.kv))
    weights, lse = softmax(numbers, scores, attended, sink_of(numbers, inputs))
    return Result(numbers.weigh(weights, v, attended), lse)


def dense_softmax(numbers: Numbers[A], inputs: Inputs, softmax: Softmax = safe) -> Result[A]:
    """Return the softmax of ``inputs.scores()`` over their last axis; −∞ has weight 0.

    Args:
        inputs: Of a Problem whose operation is softmax; raises ProblemError for attention.
        softmax: One of ``recurrence_steps.SOFTMAXES``.

    Returns:
        Out ``(batch, heads, query, kv)`` and natural-log LSE ``(batch, heads, query, 1)``: 0 and
        −∞ for a row that is −∞ throughout.
    """
    scores = numbers.exact(inputs.scores())
    out, lse = softmax(numbers, scores, ~numbers.is_minus_infinity(scores))
    return Result(out, lse)


def flash1_forward(
    numbers: Numbers[A], inputs: Inputs, *, block_query: int, block_kv: int
) -> Result[A]:
    """Dao et al., "FlashAttention" (2022), Algorithm 2: Algorithm 1 with a mask, without dropout.

    Key blocks are the outer loop. In the inner one every query block is read with its O, l and m so
    far, rescaled and written back; O is divided by l at every step, as in the paper. Blocks may
    have any size, and none is skipped: a mask only hides scores. A sink starts l and m.

    Args:
        inputs: As for ``dense_attention``, which this equals up to rounding.
        block_query: Rows of a query block (the paper's B_r).
        block_kv: Keys of a key block (the paper's B_c).

    Raises:
        UsageError: for a block size below 1.
    """
    problem = inputs.problem
    queries, all_keys = query_and_key_blocks(problem, block_query, block_kv)
    q, k, v, scores = attention_inputs(numbers, inputs)
    # The paper's arrays in slow memory, one entry for each query block.
    block_results = [_Block.nothing(numbers, inputs, rows) for rows in queries]
    for keys in all_keys:
        k_block, v_block = (numbers.rows(array, keys.start, keys.stop) for array in (k, v))
        for number, rows in enumerate(queries):
            q_block = numbers.rows(q, rows.start, rows.stop)
            block, attended = scores(q_block, k_block, rows, keys)
            block_results[number] = block_results[number].with_keys(
                numbers, block, v_block, attended
            )
    out = numbers.join_rows([so_far.out for so_far in block_results])
    return Result(out, numbers.join_rows([so_far.lse(numbers) for so_far in block_results]))


@dataclass(frozen=True, slots=True, eq=False)
class _Block(Generic[A]):
    """Results of one query block after some key blocks."""

    out: A  # the paper's O, attention over the keys so far: ``(batch, heads, rows, value_dim)``
    total: A  # its l, the sum of exponentials relative to m: ``(batch, heads, rows, 1)``
    largest: A  # its m, the largest score: ``(batch, heads, rows, 1)``

    @classmethod
    def nothing(cls, numbers: Numbers[A], inputs: Inputs, rows: range) -> _Block[A]:
        """Return line 2 of the algorithm: O = 0, l = 0, m = −∞; with a sink l = 1, m = sink."""
        shape = (inputs.problem.batch, inputs.problem.heads, len(rows))
        largest, total = initial_maximum_and_sum(numbers, (*shape, 1), sink_of(numbers, inputs))
        out = numbers.full((*shape, inputs.problem.value_dim), 0.0)
        return cls(out=out, total=total, largest=largest)

    def with_keys(self, numbers: Numbers[A], scores: A, values: A, attended: Tensor) -> _Block[A]:
        """Return the results with another block of keys: lines 10 to 13 of Algorithm 1."""
        of_block = numbers.rowmax(scores)
        relative = _reference(numbers, of_block)
        weights = numbers.exp(scores - relative)
        largest = numbers.maximum(self.largest, of_block)
        reference = _reference(numbers, largest)
        # In a block without attended keys all weights are 0, so its factor does not matter.
        rescale = numbers.exp(self.largest - reference)
        rescale_block = numbers.exp(of_block - reference)
        total = rescale * self.total + rescale_block * numbers.rowsum(weights)
        weighed = numbers.weigh(weights, values, attended)
        # A row without keys has O = 0 and l = 0, and 0/0 would be NaN.
        divisor = numbers.select(~numbers.is_minus_infinity(largest), total, 1.0)
        out = (self.total * rescale * self.out + rescale_block * weighed) / divisor
        return _Block(out, total, largest)

    def lse(self, numbers: Numbers[A]) -> A:
        """Return LSE = m + log l, and −∞ for rows that attended to no key."""
        alive = ~numbers.is_minus_infinity(self.largest)
        return numbers.select(alive, self.largest + numbers.log(self.total), -math.inf)


def _reference(numbers: Numbers[A], largest: A) -> A:
    """Return the maximum to subtract: 0 for a row that has not attended to a key."""
    return numbers.select(~numbers.is_minus_infinity(largest), largest, 0.0)


def flash2_forward(
    numbers: Numbers[A], inputs: Inputs, *, block_query: int, block_kv: int
) -> Result[A]:
    """Dao, "FlashAttention-2" (2023), Algorithm 1: query blocks outside, key blocks inside.

    Blocks may have any size; the last of either kind may be shorter. No block is skipped: a mask
    only hides scores. A sink starts l and m.

    Args:
        inputs: As for ``dense_attention``, which this equals up to rounding.
        block_query: Rows of a query block (the paper's B_r).
        block_kv: Keys of a key block (the paper's B_c).

    Raises:
        UsageError: for a block size below 1.
    """
    problem = inputs.problem
    queries, keys = query_and_key_blocks(problem, block_query, block_kv)
    q, k, v, scores = attention_inputs(numbers, inputs)

    def blocks(rows: range) -> Iterator[tuple[A, Tensor, A]]:
        q_block = numbers.rows(q, rows.start, rows.stop)
        for block in keys:
            k_block, v_block = (numbers.rows(array, block.start, block.stop) for array in (k, v))
            yield *scores(q_block, k_block, rows, block), v_block

    sink, shape = sink_of(numbers, inputs), (problem.batch, problem.heads)
    results = [
        flash2_rows(numbers, blocks(rows), (*shape, len(rows), problem.value_dim), sink)
        for rows in queries
    ]
    out, lse = (numbers.join_rows(part) for part in zip(*results, strict=True))
    return Result(out, lse)


def flash2_rows(
    numbers: Numbers[A],
    blocks: Iterable[tuple[A, Tensor, A]],
    shape: tuple[int, int, int, int],
    sink: A | None = None,
) -> tuple[A, A]:
    """Return out and LSE of some rows, from their key blocks: lines 4 to 15 of the algorithm.

    Args:
        blocks: For each block of keys, scores ``(batch, heads, rows, keys)``, a bool of that shape
            for attended keys, and values ``(batch, heads, keys, value_dim)``.
        shape: Shape of out, ``(batch, heads, rows, value_dim)``.
        sink: These heads' sinks, ``(1, heads, 1, 1)``; None without sinks.

    Returns:
        Out and natural-log LSE ``(batch, heads, rows, 1)``.
    """
    out = numbers.full(shape, 0.0)  # O, not yet divided by l
    largest, total = initial_maximum_and_sum(numbers, (*shape[:3], 1), sink)  # m and l
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


def split_forward(numbers: Numbers[A], inputs: Inputs, *, splits: int) -> Result[A]:
    """Dao et al., "Flash-Decoding" (2023): independent splits of the keys.

    Split i returns the attention over its own keys K_i and their LSE,

        LSE_i = ln Σ_{j ∈ K_i} e^{s_j},    O_i = Σ_{j ∈ K_i} e^{s_j − LSE_i} v_j,

    and ``merge_splits`` combines them to attention over all keys; a sink is a split of its own.
    This is the recurrence of split-KV decoding, of attention to a shared prefix ("cascade") and of
    ring attention.

    Args:
        inputs: As for ``dense_attention``, which this equals up to rounding.
        splits: Number of splits, contiguous and as equal as possible; some are empty if there are
            more splits than keys.

    Raises:
        UsageError: for fewer than one split.
    """
    problem = inputs.problem
    q, k, v, scores = attention_inputs(numbers, inputs)
    rows = range(problem.query)
    shape = (problem.batch, problem.heads, problem.query)
    no_keys = numbers.full((*shape, problem.value_dim), 0.0)

    def of(keys: range) -> Result[A]:
        if not keys:
            return Result(no_keys, numbers.full((*shape, 1), -math.inf))
        mine, values = (numbers.rows(array, keys.start, keys.stop) for array in (k, v))
        score, attended = scores(q, mine, rows, keys)
        weights, lse = safe(numbers, score, attended)
        return Result(numbers.weigh(weights, values, attended), lse)

    results = [of(keys) for keys in key_splits(problem.kv, splits)]
    sink = sink_of(numbers, inputs)
    if sink is not None:  # like a split with value 0 and the sink as its LSE
        results.append(Result(no_keys, numbers.full((*shape, 1), 0.0) + sink))
    return merge_splits(numbers, results)


def key_splits(keys: int, splits: int) -> list[range]:
    """Return ``splits`` contiguous ranges that cover all keys in order; some may be empty.

    Raises:
        UsageError: for fewer than one.
    """
    if splits < 1:
        raise UsageError(f"splits={splits} must be at least 1.")
    cuts = [keys * number // splits for number in range(splits + 1)]
    return [range(start, stop) for start, stop in pairwise(cuts)]


def merge_splits(numbers: Numbers[A], results: Sequence[Result[A]]) -> Result[A]:
    """Return attention over the keys of all ``results``, at least one; no key may be in two.

    Σ_j e^{s_j} over all keys is the sum of the parts' e^{LSE_i}, so that with M = max LSE_i

        LSE = ln Σ_i e^{LSE_i} = M + ln Σ_i e^{LSE_i − M},

    and part i contributes e^{LSE_i − LSE} O_i to the sum of values O = Σ_j e^{s_j − LSE} v_j:

        O = Σ_i e^{LSE_i − M} O_i / Σ_i e^{LSE_i − M}.

    A part of which a row sees no key has LSE −∞ and therefore weight 0. A row that sees no key of
    any part has out 0 and LSE −∞.
    """
    first, *others = results
    largest = first.lse
    for result in others:
        largest = numbers.maximum(largest, result.lse)
    alive = ~numbers.is_minus_infinity(largest)
    # A row that sees no key in any part has no maximum: −∞ − (−∞) would be NaN.
    reference = numbers.select(alive, largest, 0.0)
    total = numbers.exp(first.lse - reference)
    out = total * first.out
    for result in others:
        weight = numbers.exp(result.lse - reference)
        total = total + weight
        out = out + weight * result.out
    lse = numbers.select(alive, reference + numbers.log(total), -math.inf)
    return Result(out / numbers.select(alive, total, 1.0), lse)


def one_head(numbers: Numbers[A], inputs: Inputs, head: int, query: Tensor) -> Result[A]:
    """Return rows ``query`` of one (batch, head) pair, by FlashAttention-2's recurrence.

    Args:
        head: batch · heads + head.

    Returns:
        Out ``(1, 1, rows, value_dim)`` and natural-log LSE ``(1, 1, rows, 1)``.
    """
    problem = inputs.problem
    if problem.operation == "softmax":
        x = inputs.scores().flatten(0, 1)[None, head : head + 1, query]
        scores = numbers.exact(x)
        return Result(*safe(numbers, scores, ~numbers.is_minus_infinity(scores)))
    key_head = head // problem.group  # batch · kv_heads + kv head
    # Only this head's tensors are promoted: a certificate needs a few rows of many heads.
    sink, shape = None, (1, 1, len(query), problem.value_dim)
    if inputs.sink is not None:
        sink = numbers.exact(inputs.sink[head % problem.heads].double().view(1, 1, 1, 1))
    q, k, v = (
        tensor.flatten(0, 1)[None, at : at + 1].double()
        for tensor, at in ((inputs.q, head), (inputs.k, key_head), (inputs.v, key_head))
    )
    if inputs.descale is not None:
        scales = (inputs.descale.q, inputs.descale.k, inputs.descale.v)
        of_q, of_k, of_v = (scale.flatten()[key_head].double() for scale in scales)
        q, k, v = q * of_q, k * of_k, v * of_v

    def key_blocks() -> Iterator[tuple[A, Tensor, A]]:
        scores, rows, device = Scores.of(numbers, inputs), numbers.exact(q[:, :, query]), q.device
        # In blocks of keys, so that memory does not grow with their number.
        step = max(1, _SCORES // len(query))
        for first in range(0, problem.kv, step):
            last = min(first + step, problem.kv)
            indices = Indices(
                b=torch.full((1, 1, 1, 1), head // problem.heads, device=device),
                h=torch.full((1, 1, 1, 1), head % problem.heads, device=device),
                q_idx=query.view(1, 1, -1, 1),
                kv_idx=torch.arange(first, last, device=device).view(1, 1, 1, -1),
            )
            keys, values = (numbers.exact(x[:, :, first:last]) for x in (k, v))
            yield *scores.at(rows, keys, indices), values

    return Result(*flash2_rows(numbers, key_blocks(), shape, sink))
