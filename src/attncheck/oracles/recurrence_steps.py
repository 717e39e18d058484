"""Steps that all recurrences share: results, blocks, a head's sink, three softmaxes, and scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from attncheck.core.errors import UsageError
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Problem
from attncheck.mods.signatures import MaskMod, ScoreMod
from attncheck.oracles.mod_calls import Indices, call_mask
from attncheck.oracles.number_system import Array, Numbers

A = TypeVar("A", bound="Array")


@dataclass(frozen=True, slots=True, eq=False)
class Result(Generic[A]):
    """Unrounded results; in float64 the same numbers as Outputs."""

    # ``(batch, heads, query, value_dim)``; of softmax ``(batch, heads, query, kv)``. Rows that
    # attend to no key are 0.
    out: A
    # Natural-log LSE, ``(batch, heads, query, 1)``: a column, like every array of numbers. Rows
    # that attend to no key are −∞.
    lse: A

    def rounded(self, numbers: Numbers[A]) -> Outputs:
        """The nearest float64 Outputs; LSE is ``(batch, heads, query)`` there."""
        return Outputs(numbers.rounded(self.out), numbers.rounded(self.lse).squeeze(-1))


@dataclass(frozen=True, slots=True, eq=False)
class Gradients(Generic[A]):
    """Unrounded gradients of a loss, and the Result that they belong to."""

    result: Result[A]  # of the forward
    dq: A  # ``(batch, heads, query, head_dim)``; 0 of rows that attend to no key
    dk: A  # ``(batch, kv_heads, kv, head_dim)``; 0 of keys that no row attends to
    dv: A  # ``(batch, kv_heads, kv, value_dim)``; likewise
    dsink: A | None = None  # ``(1, heads, 1, 1)``, of a Problem with a sink
    dcaptured: A | None = None  # ``(1, 1, 1, numbers)``, of a Problem with dcaptured

    def rounded(self, numbers: Numbers[A]) -> Outputs:
        """The nearest float64 Outputs, with out and LSE."""
        forward = self.result.rounded(numbers)
        dq, dk, dv = (numbers.rounded(array) for array in (self.dq, self.dk, self.dv))
        dsink, dcaptured = (
            None if array is None else numbers.rounded(array).flatten()
            for array in (self.dsink, self.dcaptured)
        )
        return Outputs(forward.out, forward.lse, dq, dk, dv, dsink, dcaptured)


class Recurrence(Protocol):
    """A way to compute the operation of a Problem, in any number system."""

    def __call__(self, numbers: Numbers[A], inputs: Inputs, /) -> Result[A]:
        """Out and LSE of ``inputs`` as numbers of the system."""


class Backward(Protocol):
    """A way to compute a Problem's gradients, in any number system."""

    def __call__(self, numbers: Numbers[A], inputs: Inputs, /) -> Gradients[A]:
        """Gradients of ``inputs`` as numbers of the system; raises ProblemError without a loss."""


def query_and_key_blocks(
    problem: Problem, block_query: int, block_kv: int
) -> tuple[list[range], list[range]]:
    """Ranges of query rows and of keys; the last of either kind is as short as it must be.

    Raises:
        UsageError: for a block size below 1.
    """
    for name, size in (("block_query", block_query), ("block_kv", block_kv)):
        if size < 1:
            raise UsageError(f"{name}={size} must be at least 1.")
    return _cut(problem.query, block_query), _cut(problem.kv, block_kv)


def _cut(length: int, size: int) -> list[range]:
    return [range(start, min(start + size, length)) for start in range(0, length, size)]


def sink_of(numbers: Numbers[A], inputs: Inputs) -> A | None:
    """Each head's sink, ``(1, heads, 1, 1)``: natural, as it is; None where there is none."""
    if inputs.sink is None:
        return None
    return numbers.exact(inputs.sink.double().view(1, -1, 1, 1))


def rows_with_weight(numbers: Numbers[A], attended: Tensor, sink: A | None) -> Tensor:
    """Mark the rows that have anything to weigh: bool ``(batch, heads, query, 1)``.

    Args:
        attended: Bool ``(batch, heads, query, kv)``.
        sink: As ``sink_of`` gives it.
    """
    any_key = attended.any(dim=-1, keepdim=True)
    return any_key if sink is None else any_key | ~numbers.is_minus_infinity(sink)


def initial_maximum_and_sum(
    numbers: Numbers[A], shape: Sequence[int], sink: A | None
) -> tuple[A, A]:
    """The largest score and the sum of exponentials relative to it, before the first key.

    −∞ and 0; with a sink, which is a score like any, the sink and 1.

    Args:
        shape: ``(batch, heads, rows, 1)``, of both.
        sink: Broadcasts to it.
    """
    if sink is None:
        return numbers.full(shape, -math.inf), numbers.full(shape, 0.0)
    # exp(−∞ − (−∞)) would be NaN: such a sink starts as if there were none.
    weighs = ~numbers.is_minus_infinity(sink)
    return numbers.full(shape, 0.0) + sink, numbers.select(weighs, numbers.full(shape, 1.0), 0.0)


class Softmax(Protocol):
    """One of the three; arguments and results as the module says."""

    def __call__(
        self, numbers: Numbers[A], scores: A, attended: Tensor, sink: A | None = None, /
    ) -> tuple[A, A]:
        """Weights of the keys, and LSE; ``sink`` broadcasts to ``(batch, heads, query, 1)``."""


def naive(
    numbers: Numbers[A], scores: A, attended: Tensor, sink: A | None = None, /
) -> tuple[A, A]:
    """``exp(x) / Σ exp(x)``: the definition itself, with nothing subtracted.

    In float64 the sum is +∞ once a score passes 709.78 − ln(keys), and 0 where all are below
    −745.1: weights are NaN then, or LSE is infinite. That is left as it is; whoever asks for this
    softmax wants to see it.
    """
    # Nothing is subtracted, on purpose: this is the definition.
    alive = rows_with_weight(numbers, attended, sink)
    exponentials = numbers.exp(scores)
    total = numbers.rowsum(exponentials)
    if sink is not None:
        total = total + numbers.exp(sink)
    lse = numbers.select(alive, numbers.log(total), -math.inf)
    return exponentials / numbers.select(alive, total, 1.0), lse


def safe(numbers: Numbers[A], scores: A, attended: Tensor, sink: A | None = None, /) -> tuple[A, A]:
    """The row's maximum first, then ``exp(x − m) / Σ exp(x − m)``: nothing overflows."""
    alive = rows_with_weight(numbers, attended, sink)
    largest = numbers.rowmax(scores)
    if sink is not None:
        largest = numbers.maximum(largest, sink)
    largest = numbers.select(alive, largest, 0.0)
    # No exponent is above 0 now: exp cannot overflow, and one term is exactly 1.
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
    alive = rows_with_weight(numbers, attended, sink)
    largest, total = initial_maximum_and_sum(numbers, (*attended.shape[:-1], 1), sink)  # m and d
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


@dataclass(frozen=True, slots=True, eq=False)
class Sloped(Generic[A]):
    """A tile of scores with what a backward needs of them, ``(batch, heads, query, kv)``."""

    scores: A  # −∞ where not attended
    attended: Tensor  # bool
    slopes: A  # the score mod's derivative, 0 where not attended
    products: A  # what the score mod was given
    indices: Indices  # where the tile lies


@dataclass(frozen=True, slots=True, eq=False)
class Scores(Generic[A]):
    """Scores of one Inputs, any rows and keys of it."""

    numbers: Numbers[A]
    inputs: Inputs  # their mask, score mod and scale are used; the tensors are passed
    mask_mod: MaskMod
    score_mod: ScoreMod

    @classmethod
    def of(cls, numbers: Numbers[A], inputs: Inputs) -> Scores[A]:
        """With the mods on the inputs' device."""
        device = str(inputs.q.device)
        problem = inputs.problem
        return cls(numbers, inputs, problem.mask_mod(device), problem.score_mod(device))

    def __call__(self, q: A, k: A, query: range, kv: range) -> tuple[A, Tensor]:
        """Scores ``score_mod(scale · q·kᵀ)``, −∞ where not attended, and what is attended.

        The mask comes after the score mod. A score mod's −∞ hides a key as a mask does.

        Args:
            q: ``(batch, heads, query, head_dim)``, the rows of ``query``.
            k: ``(batch, heads, kv, head_dim)``, the rows of ``kv``, repeated for each head.
        """
        problem = self.inputs.problem
        b, h = range(problem.batch), range(problem.heads)
        return self.at(q, k, Indices.of(b, h, query, kv, self.inputs.q.device))

    def at(self, q: A, k: A, indices: Indices) -> tuple[A, Tensor]:
        """The same for any heads, rows and keys: those of ``indices``, each with its own key head.

        Args:
            q: ``(batch, heads, query, head_dim)`` of the sizes of ``indices``.
            k: ``(batch, heads, kv, head_dim)``.
        """
        return self._after(self._products(q, k), indices)

    def with_slopes(self, q: A, k: A, query: range, kv: range) -> Sloped[A]:
        """The same as a call, and the score mod's derivative."""
        problem = self.inputs.problem
        b, h = range(problem.batch), range(problem.heads)
        indices = Indices.of(b, h, query, kv, self.inputs.q.device)
        products = self._products(q, k)
        # Before the scores: a score mod may write to what it is given.
        slopes = self.numbers.score_slope(self.score_mod, products, indices)
        kept = self._products(q, k) if problem.dcaptured else products
        scores, attended = self._after(products, indices)
        # Hidden slopes may be NaN, which no product with 0 removes.
        slopes = self.numbers.select(attended, slopes, 0.0)
        return Sloped(scores, attended, slopes, kept, indices)

    def captured(self, tile: Sloped[A], dz: A) -> A | None:
        """Gradients of the numbers that the score mod reads, by this tile; None without dcaptured.

        Args:
            dz: The loss's gradient with respect to its scores.
        """
        if not self.inputs.problem.dcaptured:
            return None
        # A mask may broadcast: sums need every score of the tile.
        attended = tile.attended.expand(tile.indices.shape)
        return self.numbers.captured(self.score_mod, tile.products, tile.indices, dz, attended)

    def _products(self, q: A, k: A) -> A:
        numbers = self.numbers
        return numbers.matmul(q, numbers.transpose(k)) * self.inputs.problem.scale

    def _after(self, products: A, indices: Indices) -> tuple[A, Tensor]:
        """After score mod and mask, and what is attended."""
        # The original callable, never its traced expression: kernels use that one.
        scores = self.numbers.score(self.score_mod, products, indices)
        # A score mod's −∞ hides its key as a mask does: both are asked.
        attended = call_mask(self.mask_mod, indices) & ~self.numbers.is_minus_infinity(scores)
        return self.numbers.select(attended, scores, -math.inf), attended
