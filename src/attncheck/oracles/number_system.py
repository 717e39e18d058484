"""Number systems: the operations of recurrences, and the evaluation of score mods on their numbers.

The recurrences are written once and run in any number system: ``float64_numbers``, ``mp_numbers``
(mpmath, many digits) and ``ball_numbers`` (Arb, which needs python-flint, an optional extra).

Arrays are ``(batch, heads, rows, columns)``. Conditions — masks, whether a row has seen a key — are
exact truth values in every number system and therefore always bool tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attncheck.core.errors import UsageError
from attncheck.mods.signatures import ScoreMod
from attncheck.oracles.mod_calls import Indices, is_identity


class Array(Protocol):
    """An array of numbers with four axes; operators are elementwise and broadcast."""

    def __add__(self, other: Self, /) -> Self: ...
    def __sub__(self, other: Self, /) -> Self: ...
    def __mul__(self, other: Self | float, /) -> Self: ...
    def __truediv__(self, other: Self, /) -> Self: ...


A = TypeVar("A", bound=Array)
Objects: TypeAlias = NDArray[np.object_]


class Numbers(Protocol[A]):
    """The operations of a number system that softmaxes and recurrences need."""

    def exact(self, values: Tensor) -> A:
        """Return float64 ``values`` as numbers of the system, without rounding."""

    def rounded(self, array: A) -> Tensor:
        """Return the nearest float64 tensor."""

    def full(self, shape: Sequence[int], value: float) -> A:
        """Return an array that holds ``value`` (0, 1 or −∞) everywhere."""

    def rows(self, array: A, start: int, stop: int) -> A:
        """Return rows ``start`` to ``stop`` of the third axis."""

    def columns(self, array: A, start: int, stop: int) -> A:
        """Return columns ``start`` to ``stop`` of the last axis."""

    def join_rows(self, blocks: Sequence[A]) -> A:
        """Return the blocks concatenated along the third axis."""

    def repeat_heads(self, array: A, times: int) -> A:
        """Return each head ``times`` times in a row, as grouped-query attention needs it."""

    def sum_heads(self, array: A, times: int) -> A:
        """Return sums over ``times`` consecutive heads: the gradient of ``repeat_heads``."""

    def sum_batch(self, array: A) -> A:
        """Return sums over the first axis, ``(1, …)``."""

    def transpose(self, array: A) -> A:
        """Return ``array`` with its last two axes exchanged."""

    def matmul(self, left: A, right: A) -> A:
        """Return the matrix products of the last two axes."""

    def weigh(self, weights: A, values: A, attended: Tensor) -> A:
        """Return ``weights @ values`` over the attended keys only.

        A key that a row does not attend to contributes nothing to it even if its values are NaN:
        0·NaN is not 0, so a weight of 0 is not enough.

        Args:
            weights: ``(batch, heads, query, kv)``, 0 where not attended.
            values: ``(batch, heads, kv, value_dim)``.
            attended: Bool, ``(batch, heads, query, kv)``.
        """

    def exp(self, array: A) -> A:
        """Return the natural exponential, 0 at −∞."""

    def log(self, array: A) -> A:
        """Return the natural logarithm, −∞ at 0."""

    def maximum(self, left: A, right: A) -> A:
        """Return the larger of two, elementwise; NaN where either is."""

    def rowmax(self, array: A) -> A:
        """Return the largest number of each row, ``(…, 1)``; NaN where the row holds one."""

    def rowsum(self, array: A) -> A:
        """Return the sum of each row, ``(…, 1)``."""

    def select(self, condition: Tensor, array: A, otherwise: float) -> A:
        """Return ``array`` where the condition holds, else ``otherwise``; both broadcast."""

    def is_minus_infinity(self, array: A) -> Tensor:
        """Return a bool tensor that is True where the array is −∞."""

    def score(self, score_mod: ScoreMod, scores: A, indices: Indices) -> A:
        """Return the scores after a score mod, a FlexAttention callable."""

    def score_slope(self, score_mod: ScoreMod, scores: A, indices: Indices) -> A:
        """Return the derivative of a score mod at ``scores``, its input; at a kink torch's."""

    def captured(
        self, score_mod: ScoreMod, scores: A, indices: Indices, factors: A, attended: Tensor
    ) -> A:
        """Return Σ ``factors`` · ∂ score_mod / ∂ number over scores that read a captured number.

        Args:
            scores: Inputs of the score mod, ``(batch, heads, query, kv)``.

        Returns:
            ``(1, 1, 1, numbers)``: captured tensors in order, each flattened row-major.
        """


class Evaluate(Protocol):
    """A way to evaluate a score mod, or its derivative, in a number system."""

    def __call__(self, score_mod: ScoreMod, context: Any, /) -> Callable[..., NDArray[np.object_]]:
        """Return a function ``(scores, b, h, q_idx, kv_idx) -> scores`` in a context's numbers.

        Args:
            context: Context of the numbers: the mpmath context, or the bits of a ball.

        Returns:
            A function of scores ``(batch, heads, query, kv)``, an object array, and of indices,
            int64 arrays that broadcast against it; its result broadcasts to the scores.
        """


class Reads(Protocol):
    """Reads of captured float tensors by a score mod, in a number system."""

    numbers: int  # total number of elements of the captured tensors

    def __call__(self, *arguments: NDArray[Any]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Yield for each read the index of the number read and the score mod's derivative by it.

        Args:
            *arguments: Scores and indices as for the function that ``Evaluate`` returns.
        """


class Captures(Protocol):
    """A way to evaluate the reads of a score mod in a number system."""

    def __call__(self, score_mod: ScoreMod, context: Any, /) -> Reads:
        """Return the reads; for the arguments see ``Evaluate``."""


class ObjectNumbers(ABC, Generic[A]):
    """Base of number systems of Python objects in numpy arrays; see ``Numbers`` for each method.

    torch cannot compute with such numbers. A score mod, which is written for tensors, can only be
    evaluated on them through its traced expression. Oracles do not depend on tracing, so three
    evaluators are passed in by the caller. One call of a recurrence evaluates the same score mod
    many times, so the last evaluator of each kind is cached.

    Args:
        evaluate: Evaluator of score mods; without one, only the identity works. Masks need none:
            they compare whole numbers and are called directly.
        slope: Evaluator of a score mod's derivative, which a backward needs.
        captures: Evaluator of a score mod's reads of float tensors, if those have gradients.
    """

    def __init__(
        self,
        context: Any,
        evaluate: Evaluate | None,
        slope: Evaluate | None,
        captures: Captures | None,
    ) -> None:
        self._context = context
        self._evaluators = {"evaluate": evaluate, "slope": slope, "captures": captures}
        # One entry per kind: a backward evaluates scores and slopes in turn.
        self._last: dict[str, tuple[ScoreMod, Any]] = {}

    @abstractmethod
    def _objects(self, array: A) -> Objects:
        """Return the objects of an array of the system."""

    @abstractmethod
    def _made(self, objects: Objects) -> A:
        """Return an array of the system that holds these objects."""

    @abstractmethod
    def _number(self, value: float) -> Any:
        """Return a float64 as a number of the system."""

    @abstractmethod
    def _sums(self, objects: Objects) -> Objects:
        """Return sums over the last axis, without that axis."""

    def _converted(self, objects: Objects) -> Objects:
        """Return an evaluator's results as numbers of the system."""
        return objects

    def full(self, shape: Sequence[int], value: float) -> A:
        """Return a new array."""
        return self._made(np.full(tuple(shape), self._number(value), dtype=object))

    def rows(self, array: A, start: int, stop: int) -> A:
        """Return a view."""
        return self._made(self._objects(array)[:, :, start:stop])

    def columns(self, array: A, start: int, stop: int) -> A:
        """Return a view."""
        return self._made(self._objects(array)[..., start:stop])

    def join_rows(self, blocks: Sequence[A]) -> A:
        """Return the concatenation along the third axis."""
        return self._made(np.concatenate([self._objects(block) for block in blocks], axis=2))

    def repeat_heads(self, array: A, times: int) -> A:
        """Return each head ``times`` times in a row."""
        return self._made(np.repeat(self._objects(array), times, axis=1))

    def sum_heads(self, array: A, times: int) -> A:
        """Return sums over ``times`` neighbouring heads."""
        objects = self._objects(array)
        batch, heads, rows, columns = objects.shape
        grouped = objects.reshape(batch, heads // times, times, rows, columns)
        return self._made(self._sums(np.moveaxis(grouped, 2, -1)))

    def sum_batch(self, array: A) -> A:
        """Return sums over the first axis."""
        return self._made(self._sums(np.moveaxis(self._objects(array), 0, -1))[None])

    def transpose(self, array: A) -> A:
        """Return a view."""
        return self._made(self._objects(array).swapaxes(-1, -2))

    def rowsum(self, array: A) -> A:
        """Return sums over the last axis."""
        return self._made(self._sums(self._objects(array))[..., None])

    def select(self, condition: Tensor, array: A, otherwise: float) -> A:
        """Select elementwise; numbers that are not selected do not matter, not even NaN."""
        other = np.full((), self._number(otherwise), dtype=object)
        return self._made(np.where(condition.numpy(), self._objects(array), other))

    def score(self, score_mod: ScoreMod, scores: A, indices: Indices) -> A:
        """Return the scores by ``evaluate``; raise UsageError if it is needed but missing."""
        after = self._evaluate("evaluate", score_mod, scores, indices)
        return scores if after is None else after

    def score_slope(self, score_mod: ScoreMod, scores: A, indices: Indices) -> A:
        """Return the slopes by ``slope``; raise UsageError if it is needed but missing."""
        slopes = self._evaluate("slope", score_mod, scores, indices)
        return self.full(self._objects(scores).shape, 1.0) if slopes is None else slopes

    def _captured_sums(
        self, score_mod: ScoreMod, scores: A, indices: Indices, factors: A, attended: Tensor
    ) -> Objects:
        """Return the sums of ``Numbers.captured``, ``(numbers,)``, at the current precision.

        Raises UsageError without ``captures``.
        """
        reads = self._evaluator("captures", score_mod)
        objects = self._objects(scores)
        # An object array, so that sums are numbers of the system.
        sums = np.zeros(reads.numbers, dtype=object)
        attended_scores = attended.expand(objects.shape).numpy()
        for places, slopes in reads(objects, *(axis.numpy() for axis in indices.axes)):
            terms = self._objects(factors) * np.broadcast_to(slopes, objects.shape)
            # Several scores may read one number, of which ``+=`` at an index would add only one.
            np.add.at(
                sums,
                np.broadcast_to(places, objects.shape)[attended_scores],
                terms[attended_scores],
            )
        return sums

    def _evaluate(self, word: str, score_mod: ScoreMod, scores: A, indices: Indices) -> A | None:
        """Return the evaluator's result for the scores; None for the identity."""
        function = self._evaluator(word, score_mod)
        if function is None:
            return None
        objects = self._objects(scores)
        result = self._converted(function(objects, *(axis.numpy() for axis in indices.axes)))
        return self._made(np.broadcast_to(result, objects.shape))

    def _evaluator(self, word: str, score_mod: ScoreMod) -> Any:
        """Return the evaluator ``word`` of this score mod; None for the identity."""
        # Compared by identity: callables that are equal may capture different tensors.
        if word not in self._last or self._last[word][0] is not score_mod:
            evaluator, reads = self._evaluators[word], word == "captures"
            # Reads are only evaluated if a mod has some, so it is not the identity.
            if not reads and is_identity(score_mod, "cpu"):
                self._last[word] = (score_mod, None)
            elif evaluator is None:
                needed = f"{type(self).__name__}'s `{word}`"
                raise UsageError(
                    f"gradients of what a score mod reads need {needed}."
                    if reads
                    else f"a score mod needs {needed}: only the identity does not."
                )
            else:
                self._last[word] = (score_mod, evaluator(score_mod, self._context))
        return self._last[word][1]
