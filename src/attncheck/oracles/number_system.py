"""Number systems: the vocabulary that a recurrence is written in, and score mods on their numbers.

The recurrences are written once and run in any number system: ``float64_numbers``, ``mp_numbers``
(mpmath, many digits) and ``ball_numbers`` (Arb, which needs python-flint, an optional extra).

Arrays are ``(batch, heads, rows, columns)``. What only selects — masks, "has this row seen a key?"
— is an exact truth value in every number system and therefore always a bool tensor.
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
    """Numbers of a system in four axes; operators are elementwise and broadcast."""

    def __add__(self, other: Self, /) -> Self: ...
    def __sub__(self, other: Self, /) -> Self: ...
    def __mul__(self, other: Self | float, /) -> Self: ...
    def __truediv__(self, other: Self, /) -> Self: ...


A = TypeVar("A", bound=Array)
Objects: TypeAlias = NDArray[np.object_]


class Numbers(Protocol[A]):
    """A number system: what the softmaxes and recurrences need of one, and no more."""

    def exact(self, values: Tensor) -> A:
        """Float64 ``values`` as numbers of the system, without rounding."""

    def rounded(self, array: A) -> Tensor:
        """The nearest float64 tensor."""

    def full(self, shape: Sequence[int], value: float) -> A:
        """An array that holds ``value`` (0, 1 or −∞) everywhere."""

    def rows(self, array: A, start: int, stop: int) -> A:
        """Rows ``start`` to ``stop`` of the third axis."""

    def columns(self, array: A, start: int, stop: int) -> A:
        """Columns ``start`` to ``stop`` of the last axis."""

    def join_rows(self, blocks: Sequence[A]) -> A:
        """Blocks one after another along the third axis."""

    def repeat_heads(self, array: A, times: int) -> A:
        """Head h of the result is head h // ``times``: grouped-query attention's map."""

    def sum_heads(self, array: A, times: int) -> A:
        """Sums over ``times`` heads in a row: what ``repeat_heads`` is to a gradient."""

    def sum_batch(self, array: A) -> A:
        """Sums over the first axis, ``(1, …)``."""

    def transpose(self, array: A) -> A:
        """The last two axes exchanged."""

    def matmul(self, left: A, right: A) -> A:
        """Matrix products of the last two axes."""

    def weigh(self, weights: A, values: A, attended: Tensor) -> A:
        """``weights @ values`` over the attended keys only.

        A key that a row does not attend to contributes nothing to it whatever the key's values
        hold: 0·NaN is not 0, so a weight of 0 is not enough.

        Args:
            weights: ``(batch, heads, query, kv)``, 0 where not attended.
            values: ``(batch, heads, kv, value_dim)``.
            attended: Bool, ``(batch, heads, query, kv)``.
        """

    def exp(self, array: A) -> A:
        """Natural exponential, 0 at −∞."""

    def log(self, array: A) -> A:
        """Natural logarithm, −∞ at 0."""

    def maximum(self, left: A, right: A) -> A:
        """The larger of two, elementwise; NaN where either is."""

    def rowmax(self, array: A) -> A:
        """Largest of each row, ``(…, 1)``; NaN where the row holds one."""

    def rowsum(self, array: A) -> A:
        """Sum of each row, ``(…, 1)``."""

    def select(self, condition: Tensor, array: A, otherwise: float) -> A:
        """``array`` where the condition holds and ``otherwise`` elsewhere; both broadcast."""

    def is_minus_infinity(self, array: A) -> Tensor:
        """A bool tensor that is True where the array is −∞."""

    def score(self, score_mod: ScoreMod, scores: A, indices: Indices) -> A:
        """The scores after a score mod, a FlexAttention callable."""

    def score_slope(self, score_mod: ScoreMod, scores: A, indices: Indices) -> A:
        """The derivative of a score mod at the scores before it; at a kink torch's."""

    def captured(
        self, score_mod: ScoreMod, scores: A, indices: Indices, factors: A, attended: Tensor
    ) -> A:
        """Σ ``factors`` · ∂ score_mod / ∂ number over the scores that read a captured number.

        Args:
            scores: Before it, ``(batch, heads, query, kv)``.

        Returns:
            ``(1, 1, 1, numbers)``: one tensor after the other, each flattened row-major.
        """


class Evaluate(Protocol):
    """A way to evaluate a score mod, or its derivative, in a number system."""

    def __call__(self, score_mod: ScoreMod, context: Any, /) -> Callable[..., NDArray[np.object_]]:
        """Return a function ``(scores, b, h, q_idx, kv_idx) -> scores`` in a context's numbers.

        Args:
            context: What the scores are numbers of: the mpmath context, or the bits of a ball.

        Returns:
            What takes scores ``(batch, heads, query, kv)`` as an object array and the indices as
            int64 arrays that broadcast against it, and gives numbers that broadcast to it.
        """


class Reads(Protocol):
    """Reads of captured float tensors by a score mod, in a number system."""

    numbers: int  # how many numbers they hold together

    def __call__(self, *arguments: NDArray[Any]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Yield of each read which number it reads, and the score mod's derivative by it.

        Args:
            *arguments: Scores and indices as what ``Evaluate`` gives takes them.
        """


class Captures(Protocol):
    """A way to evaluate the reads of a score mod in a number system."""

    def __call__(self, score_mod: ScoreMod, context: Any, /) -> Reads:
        """Return the reads; arguments as of ``Evaluate``."""


class ObjectNumbers(ABC, Generic[A]):
    """What number systems of Python objects in numpy arrays share; see ``Numbers`` for each word.

    torch knows nothing of such numbers. A score mod, which is written for tensors, can only be
    evaluated on them through its traced expression, and an oracle never sees one: the three ways to
    evaluate it are injected, and whoever joins the two rooms answers for them. One call of a
    recurrence evaluates the same score mod many times, so the last one of each kind is kept.

    Args:
        evaluate: What evaluates a score mod that changes its score, if anything does. Masks decide
            by whole numbers and are called as they are.
        slope: The same of its derivative, which a backward needs.
        captures: The same of what it reads of float tensors, where those have gradients.
    """

    def __init__(
        self,
        context: Any,
        evaluate: Evaluate | None,
        slope: Evaluate | None,
        captures: Captures | None,
    ) -> None:
        self._context = context
        self._ways = {"evaluate": evaluate, "slope": slope, "captures": captures}
        # One a kind: a backward evaluates scores and slopes in turn, and would throw either out.
        self._last: dict[str, tuple[ScoreMod, Any]] = {}

    @abstractmethod
    def _objects(self, array: A) -> Objects:
        """The objects of an array of the system."""

    @abstractmethod
    def _made(self, objects: Objects) -> A:
        """The array of the system that holds these objects."""

    @abstractmethod
    def _number(self, value: float) -> Any:
        """A float64 as a number of the system."""

    @abstractmethod
    def _sums(self, objects: Objects) -> Objects:
        """Sums over the last axis, which is gone then."""

    def _converted(self, objects: Objects) -> Objects:
        """What was evaluated, as numbers of the system."""
        return objects

    def full(self, shape: Sequence[int], value: float) -> A:
        """A new array."""
        return self._made(np.full(tuple(shape), self._number(value), dtype=object))

    def rows(self, array: A, start: int, stop: int) -> A:
        """A view."""
        return self._made(self._objects(array)[:, :, start:stop])

    def columns(self, array: A, start: int, stop: int) -> A:
        """A view."""
        return self._made(self._objects(array)[..., start:stop])

    def join_rows(self, blocks: Sequence[A]) -> A:
        """Concatenation along the third axis."""
        return self._made(np.concatenate([self._objects(block) for block in blocks], axis=2))

    def repeat_heads(self, array: A, times: int) -> A:
        """Each head ``times`` times in a row."""
        return self._made(np.repeat(self._objects(array), times, axis=1))

    def sum_heads(self, array: A, times: int) -> A:
        """Over neighbours."""
        objects = self._objects(array)
        batch, heads, rows, columns = objects.shape
        grouped = objects.reshape(batch, heads // times, times, rows, columns)
        return self._made(self._sums(np.moveaxis(grouped, 2, -1)))

    def sum_batch(self, array: A) -> A:
        """Over the first axis."""
        return self._made(self._sums(np.moveaxis(self._objects(array), 0, -1))[None])

    def transpose(self, array: A) -> A:
        """A view."""
        return self._made(self._objects(array).swapaxes(-1, -2))

    def rowsum(self, array: A) -> A:
        """Over the last axis."""
        return self._made(self._sums(self._objects(array))[..., None])

    def select(self, condition: Tensor, array: A, otherwise: float) -> A:
        """Elementwise; what is not selected does not matter, NaN included."""
        other = np.full((), self._number(otherwise), dtype=object)
        return self._made(np.where(condition.numpy(), self._objects(array), other))

    def score(self, score_mod: ScoreMod, scores: A, indices: Indices) -> A:
        """Through ``evaluate``; raises UsageError where there is none and one is needed."""
        after = self._evaluated("evaluate", score_mod, scores, indices)
        return scores if after is None else after

    def score_slope(self, score_mod: ScoreMod, scores: A, indices: Indices) -> A:
        """Through ``slope``; raises UsageError where there is none and one is needed."""
        slopes = self._evaluated("slope", score_mod, scores, indices)
        return self.full(self._objects(scores).shape, 1.0) if slopes is None else slopes

    def _captured_sums(
        self, score_mod: ScoreMod, scores: A, indices: Indices, factors: A, attended: Tensor
    ) -> Objects:
        """Sums as ``Numbers.captured`` gives them, ``(numbers,)``, in the precision that is set.

        Raises UsageError where nothing evaluates what the score mod reads.
        """
        reads = self._way("captures", score_mod)
        objects = self._objects(scores)
        # Object zeros: sums stay in the system's own numbers.
        sums = np.zeros(reads.numbers, dtype=object)
        kept = attended.expand(objects.shape).numpy()
        for places, slopes in reads(objects, *(axis.numpy() for axis in indices.axes)):
            terms = self._objects(factors) * np.broadcast_to(slopes, objects.shape)
            # Several scores may read one number: ``+=`` at an index would keep the last alone.
            np.add.at(sums, np.broadcast_to(places, objects.shape)[kept], terms[kept])
        return sums

    def _evaluated(self, word: str, score_mod: ScoreMod, scores: A, indices: Indices) -> A | None:
        """What a way gives of the scores; None of the identity."""
        function = self._way(word, score_mod)
        if function is None:
            return None
        objects = self._objects(scores)
        result = self._converted(function(objects, *(axis.numpy() for axis in indices.axes)))
        return self._made(np.broadcast_to(result, objects.shape))

    def _way(self, word: str, score_mod: ScoreMod) -> Any:
        """The way called ``word`` made for this score mod; None of the identity's scores."""
        # By identity: equality of callables says nothing of what they capture.
        if word not in self._last or self._last[word][0] is not score_mod:
            way, reads = self._ways[word], word == "captures"
            # What a mod reads is asked for only where it reads something: never of the identity.
            if not reads and is_identity(score_mod, "cpu"):
                self._last[word] = (score_mod, None)
            elif way is None:
                needed = f"{type(self).__name__}'s `{word}`"
                raise UsageError(
                    f"gradients of what a score mod reads need {needed}."
                    if reads
                    else f"a score mod needs {needed}: only the identity does not."
                )
            else:
                self._last[word] = (score_mod, way(score_mod, self._context))
        return self._last[word][1]
