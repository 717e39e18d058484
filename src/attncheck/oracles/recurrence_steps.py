"""Steps that all recurrences share: results, blocks, sinks, three softmaxes, and scores."""

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
    """Results as numbers of a system, not rounded to float64."""

    # ``(batch, heads, query, value_dim)``; of softmax ``(batch, heads, query, kv)``. Rows that
    # attend to no key are 0.
    out: A
    # Natural-log LSE, ``(batch, heads, query, 1)``: a column, like every array of numbers. Rows
    # that attend to no key are −∞.
    lse: A

    def rounded(self, numbers: Numbers[A]) -> Outputs:
        """Return the nearest float64 Outputs, with LSE as ``(batch, heads, query)``."""
        return Outputs(numbers.rounded(self.out), numbers.rounded(self.lse).squeeze(-1))


@dataclass(frozen=True, slots=True, eq=False)
class Gradients(Generic[A]):
    """Gradients of a loss as numbers of a system, not rounded to float64, with the Result."""

    result: Result[A]  # of the forward
    dq: A  # ``(batch, heads, query, head_dim)``; 0 in rows that attend to no key
    dk: A  # ``(batch, kv_heads, kv, head_dim)``; 0 for keys that no row attends to
    dv: A  # ``(batch, kv_heads, kv, value_dim)``; 0 for keys that no row attends to
    dsink: A | None = None  # ``(1, heads, 1, 1)``, of a Problem with a sink
    dcaptured: A | None = None  # ``(1, 1, 1, numbers)``, of a Problem with dcaptured

    def rounded(self, numbers: Numbers[A]) -> Outputs:
        """Return the nearest float64 Outputs, with out and LSE."""
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
        """Return out and LSE of ``inputs`` as numbers of the system."""


class Backward(Protocol):
    """A way to compute a Problem's gradients, in any number system."""

    def __call__(self, numbers: Numbers[A], inputs: Inputs, /) -> Gradients[A]:
        """Return the gradients as numbers of the system; raise ProblemError without a loss."""


def query_and_key_blocks(
    problem: Problem, block_query: int, block_kv: int
) -> tuple[list[range], list[range]]:
    """Return ranges of query rows and of keys; the last of either may be shorter.

    Raises:
        UsageError: for a block size below 1.
    """
    for name, size in (("block_query", block_query), ("block_kv", block_kv)):
        if size < 1:
            raise UsageError(f"{name}={size} must be at least 1.")
    return _split_range(problem.query, block_query), _split_range(problem.kv, block_kv)


def _split_range(length: int, size: int) -> list[range]:
    return [range(start, min(start + size, length)) for start in range(0, length, size)]


def sink_of(numbers: Numbers[A], inputs: Inputs) -> A | None:
    """Return each head's sink, a natural logit, ``(1, heads, 1, 1)``; None without sinks."""
    if inputs.sink is None:
        return None
    return numbers.exact(inputs.sink.double().view(1, -1, 1, 1))


def rows_with_weight(numbers: Numbers[A], attended: Tensor, sink: A | None) -> Tensor:
    """Return which rows have a key or sink of positive weight: bool ``(batch, heads, query, 1)``.

    Args:
        attended: Bool ``(batch, heads, query, kv)``.
        sink: The result of ``sink_of``.
    """
    any_key = attended.any(dim=-1, keepdim=True)
    return any_key if sink is None else any_key | ~numbers.is_minus_infinity(sink)


def initial_maximum_and_sum(
    numbers: Numbers[A], shape: Sequence[int], sink: A | None
) -> tuple[A, A]:
    """Return the largest score and the sum of exponentials relative to it, before the first key.

    They are −∞ and 0, or the sink, which is a score itself, and 1.

    Args:
        shape: Shape of both, ``(batch, heads, rows, 1)``.
        sink: Broadcasts to ``shape``.
    """
    if sink is None:
        return numbers.full(shape, -math.inf), numbers.full(shape, 0.0)
    # exp(−∞ − (−∞)) would be NaN, so a sink of −∞ starts as if there were none.
    weighs = ~numbers.is_minus_infinity(sink)
    return numbers.full(shape, 0.0) + sink, numbers.select(weighs, numbers.full(shape, 1.0), 0.0)


class Softmax(Protocol):
    """One of the three softmaxes below."""

    def __call__(
        self, numbers: Numbers[A], scores: A, attended: Tensor, sink: A | None = None, /
    ) -> tuple[A, A]:
        """Return weights and LSE; ``sink`` broadcasts to ``(batch, heads, query, 1)``."""


def naive(
    numbers: Numbers[A], scores: A, attended: Tensor, sink: A | None = None, /
) -> tuple[A, A]:
    """Return ``exp(x) / Σ exp(x)``: the definition itself, with nothing subtracted.

    In float64 the sum is +∞ if a score exceeds 709.78 − ln(keys), and 0 if all are below −745.1:
    then weights are NaN, or LSE is infinite. This is intended: the softmax shows what happens
    without subtraction.
    """
    alive = rows_with_weight(numbers, attended, sink)
    exponentials = numbers.exp(scores)
    total = numbers.rowsum(exponentials)
    if sink is not None:
        total = total + numbers.exp(sink)
    lse = numbers.select(alive, numbers.log(total), -math.inf)
    return exponentials / numbers.select(alive, total, 1.0), lse


def safe(numbers: Numbers[A], scores: A, attended: Tensor, sink: A | None = None, /) -> tuple[A, A]:
    """Return ``exp(x − m) / Σ exp(x − m)`` with the row's maximum m: nothing overflows."""
    alive = rows_with_weight(numbers, attended, sink)
    largest = numbers.rowmax(scores)
    if sink is not None:
        largest = numbers.maximum(largest, sink)
    largest = numbers.select(alive, largest, 0.0)
    # No exponent is above 0, so exp cannot overflow, and one term is exactly 1.
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
    """A tile of scores and the quantities of a backward, ``(batch, heads, query, kv)``."""

    scores: A  # −∞ where not attended
    attended: Tensor  # bool
    slopes: A  # the score mod's derivative, 0 where not attended
    products: A  # inputs of the score mod
    indices: Indices  # position of the tile


@dataclass(frozen=True, slots=True, eq=False)
class Scores(Generic[A]):
    """Function that computes the scores of any rows and keys of one Inputs."""

    numbers: Numbers[A]
    inputs: Inputs  # only the mask, score mod and scale are used; tensors are arguments
    mask_mod: MaskMod
    score_mod: ScoreMod

    @classmethod
    def of(cls, numbers: Numbers[A], inputs: Inputs) -> Scores[A]:
        """Return the Scores of ``inputs``, with the mods on the inputs' device."""
        device = str(inputs.q.device)
        problem = inputs.problem
        return cls(numbers, inputs, problem.mask_mod(device), problem.score_mod(device))

    def __call__(self, q: A, k: A, query: range, kv: range) -> tuple[A, Tensor]:
        """Return scores ``score_mod(scale · q·kᵀ)``, −∞ where not attended, and ``attended``.

        The mask comes after the score mod. A score mod's −∞ hides a key as a mask does.

        Args:
            q: ``(batch, heads, query, head_dim)``, the rows of ``query``.
            k: ``(batch, heads, kv, head_dim)``, the rows of ``kv``, repeated for each head.
        """
        problem = self.inputs.problem
        b, h = range(problem.batch), range(problem.heads)
        return self.at(q, k, Indices.of(b, h, query, kv, self.inputs.q.device))

    def at(self, q: A, k: A, indices: Indices) -> tuple[A, Tensor]:
        """Return scores and ``attended`` for any ``indices``; each head has its own key head.

        Args:
            q: ``(batch, heads, query, head_dim)`` of the sizes of ``indices``.
            k: ``(batch, heads, kv, head_dim)``.
        """
        return self._score_and_mask(self._products(q, k), indices)

    def with_slopes(self, q: A, k: A, query: range, kv: range) -> Sloped[A]:
        """Return scores as a call does, and the score mod's derivative."""
        problem = self.inputs.problem
        b, h = range(problem.batch), range(problem.heads)
        indices = Indices.of(b, h, query, kv, self.inputs.q.device)
        products = self._products(q, k)
        # Slopes come first, since a score mod may write to its argument.
        slopes = self.numbers.score_slope(self.score_mod, products, indices)
        mod_inputs = self._products(q, k) if problem.dcaptured else products
        scores, attended = self._score_and_mask(products, indices)
        # Slopes of hidden keys may be NaN, which a product with 0 would not remove.
        slopes = self.numbers.select(attended, slopes, 0.0)
        return Sloped(scores, attended, slopes, mod_inputs, indices)

    def captured(self, tile: Sloped[A], dz: A) -> A | None:
        """Return this tile's part of the captured tensors' gradients; None without dcaptured.

        Args:
            dz: The loss's gradient with respect to the tile's scores.
        """
        if not self.inputs.problem.dcaptured:
            return None
        # A mask may have axes of size 1, but sums need every score of the tile.
        attended = tile.attended.expand(tile.indices.shape)
        return self.numbers.captured(self.score_mod, tile.products, tile.indices, dz, attended)

    def _products(self, q: A, k: A) -> A:
        numbers = self.numbers
        return numbers.matmul(q, numbers.transpose(k)) * self.inputs.problem.scale

    def _score_and_mask(self, products: A, indices: Indices) -> tuple[A, Tensor]:
        """Return the scores after score mod and mask, and ``attended``."""
        # The original callable, since kernels use its traced expression.
        scores = self.numbers.score(self.score_mod, products, indices)
        # A score of −∞ from a score mod hides its key as a mask does.
        attended = call_mask(self.mask_mod, indices) & ~self.numbers.is_minus_infinity(scores)
        return self.numbers.select(attended, scores, -math.inf), attended
