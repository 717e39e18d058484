"""Number systems: the vocabulary of a recurrence, and score mods on numbers that torch lacks.

Arrays are ``(batch, heads, rows, columns)``. What only selects — masks, "has this row seen a key?"
— is an exact truth value in every number system and therefore always a bool tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import numpy as np

from attncheck.core.errors import UsageError
from attncheck.oracles.mod_calls import is_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from attncheck.mods.spec import ScoreMod
    from attncheck.oracles.mod_calls import Indices

__all__ = ["Array", "Captured", "Captures", "Evaluate", "Evaluated", "Numbers", "Reads"]


class Array(Protocol):
    """Numbers of a system in four axes; operators are elementwise and broadcast."""

    def __add__(self, other: Self, /) -> Self: ...
    def __sub__(self, other: Self, /) -> Self: ...
    def __mul__(self, other: Self | float, /) -> Self: ...
    def __truediv__(self, other: Self, /) -> Self: ...


A = TypeVar("A", bound=Array)


class Numbers(Protocol[A]):
    """A number system: what the softmaxes and recurrences need of one, and no more."""

    def exact(self, values: Tensor) -> A:
        """Float64 ``values`` as numbers of the system, without rounding."""
        ...

    def rounded(self, array: A) -> Tensor:
        """The nearest float64 tensor."""
        ...

    def full(self, shape: Sequence[int], value: float) -> A:
        """An array that holds ``value`` (0, 1 or −∞) everywhere."""
        ...

    def rows(self, array: A, start: int, stop: int) -> A:
        """Rows ``start`` to ``stop`` of the third axis."""
        ...

    def columns(self, array: A, start: int, stop: int) -> A:
        """Columns ``start`` to ``stop`` of the last axis."""
        ...

    def join_rows(self, blocks: Sequence[A]) -> A:
        """Blocks one after another along the third axis."""
        ...

    def repeat_heads(self, array: A, times: int) -> A:
        """Head h of the result is head h // ``times``: grouped-query attention's map."""
        ...

    def sum_heads(self, array: A, times: int) -> A:
        """Sums over ``times`` heads in a row: what ``repeat_heads`` is to a gradient."""
        ...

    def sum_batch(self, array: A) -> A:
        """Sums over the first axis, ``(1, …)``."""
        ...

    def transpose(self, array: A) -> A:
        """The last two axes exchanged."""
        ...

    def matmul(self, left: A, right: A) -> A:
        """Matrix products of the last two axes."""
        ...

    def weigh(self, weights: A, values: A, attended: Tensor) -> A:
        """``weights @ values`` over the attended keys only.

        A key that a row does not attend to contributes nothing to it whatever the key's values
        hold: 0·NaN is not 0, so a weight of 0 is not enough.

        Args:
            weights: ``(batch, heads, query, kv)``, 0 where not attended.
            values: ``(batch, heads, kv, value_dim)``.
            attended: Bool, ``(batch, heads, query, kv)``.
        """
        ...

    def exp(self, array: A) -> A:
        """Natural exponential, 0 at −∞."""
        ...

    def log(self, array: A) -> A:
        """Natural logarithm, −∞ at 0."""
        ...

    def maximum(self, left: A, right: A) -> A:
        """The larger of two, elementwise; NaN where either is."""
        ...

    def rowmax(self, array: A) -> A:
        """Largest of each row, ``(…, 1)``; NaN where the row holds one."""
        ...

    def rowsum(self, array: A) -> A:
        """Sum of each row, ``(…, 1)``."""
        ...

    def select(self, condition: Tensor, array: A, otherwise: float) -> A:
        """``array`` where the condition holds and ``otherwise`` elsewhere; both broadcast."""
        ...

    def is_minus_infinity(self, array: A) -> Tensor:
        """Where the array is −∞, as a bool tensor."""
        ...

    def score(self, score_mod: ScoreMod, scores: A, indices: Indices) -> A:
        """The scores after a score mod, a FlexAttention callable."""
        ...

    def score_slope(self, score_mod: ScoreMod, scores: A, indices: Indices) -> A:
        """The derivative of a score mod at the scores before it; at a kink torch's."""
        ...

    def captured(
        self, score_mod: ScoreMod, scores: A, indices: Indices, factors: A, attended: Tensor
    ) -> A:
        """Σ ``factors`` · ∂ score_mod / ∂ number over the scores that read a captured number.

        Args:
            score_mod: A FlexAttention callable that reads float tensors.
            scores: Before it, ``(batch, heads, query, kv)``.
            indices: Theirs.
            factors: Of that shape.
            attended: Bool, likewise: no other score is summed, NaN or not.

        Returns:
            ``(1, 1, 1, numbers)``: one tensor after the other, each flattened row-major.
        """
        ...


class Evaluate(Protocol):
    """How a score mod, or its derivative, is evaluated in a number system."""

    def __call__(self, score_mod: ScoreMod, context: Any, /) -> Callable[..., NDArray[np.object_]]:
        """A function ``(scores, b, h, q_idx, kv_idx) -> scores`` in a context's numbers.

        Args:
            score_mod: The original callable.
            context: What the scores are numbers of: the mpmath context, or the bits of a ball.

        Returns:
            What takes scores ``(batch, heads, query, kv)`` as an object array and the indices as
            int64 arrays that broadcast against it, and gives numbers that broadcast to it.
        """
        ...


class Reads(Protocol):
    """What a score mod reads of the float tensors that it captures, in a number system.

    Attributes:
        numbers: How many numbers they hold together.
    """

    numbers: int

    def __call__(self, *arguments: NDArray[Any]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Of each read which number it reads, and the score mod's derivative with respect to it.

        Args:
            *arguments: Scores and indices as what ``Evaluate`` gives takes them.
        """
        ...


class Captures(Protocol):
    """How those of a score mod are evaluated in a number system."""

    def __call__(self, score_mod: ScoreMod, context: Any, /) -> Reads:
        """Arguments as of ``Evaluate``."""
        ...


class Captured:
    """Sums over what the last score mod that was asked for reads.

    Args:
        system: The number system's name, for the error.
        captures: What evaluates it, if anything does.
        context: Handed to it.
    """

    def __init__(self, system: str, captures: Captures | None, context: Any) -> None:
        self._system, self._captures, self._context = system, captures, context
        self._last: tuple[ScoreMod, Reads] | None = None

    def sums(
        self,
        score_mod: ScoreMod,
        scores: NDArray[np.object_],
        indices: Indices,
        factors: NDArray[np.object_],
        attended: Tensor,
    ) -> NDArray[np.object_]:
        """What ``Numbers.captured`` gives, ``(numbers,)``, in the precision that is set.

        Raises UsageError where nothing evaluates what the score mod reads.
        """
        reads = self._of(score_mod)
        sums = np.zeros(reads.numbers, dtype=object)
        kept = attended.expand(scores.shape).numpy()
        for places, slopes in reads(scores, *(axis.numpy() for axis in indices.axes)):
            terms = factors * np.broadcast_to(slopes, scores.shape)
            np.add.at(sums, np.broadcast_to(places, scores.shape)[kept], terms[kept])
        return sums

    def _of(self, score_mod: ScoreMod) -> Reads:
        if self._last is None or self._last[0] is not score_mod:
            if self._captures is None:
                needed = f"{self._system}'s `captures`"
                raise UsageError(f"gradients of what a score mod reads need {needed}.")
            self._last = (score_mod, self._captures(score_mod, self._context))
        return self._last[1]


class Evaluated:
    """The last score mod that was asked for, evaluated: one call of a recurrence asks many times.

    Args:
        system: The number system's name, for the error.
        evaluate: What evaluates one that changes its score, if anything does.
        context: Handed to it.
        word: What ``evaluate`` is called there.
    """

    def __init__(
        self, system: str, evaluate: Evaluate | None, context: Any, word: str = "evaluate"
    ) -> None:
        self._system, self._evaluate, self._context = system, evaluate, context
        self._word = word
        self._last: tuple[ScoreMod, Callable[..., NDArray[np.object_]] | None] | None = None

    def of(self, score_mod: ScoreMod) -> Callable[..., NDArray[np.object_]] | None:
        """The score mod in the system's numbers; None for the identity.

        Raises:
            UsageError: for another score mod when there is nothing to evaluate it.
        """
        if self._last is None or self._last[0] is not score_mod:
            if is_identity(score_mod, "cpu"):
                self._last = (score_mod, None)
            elif self._evaluate is None:
                needed = f"{self._system}'s `{self._word}`"
                raise UsageError(f"a score mod needs {needed}: only the identity does not.")
            else:
                self._last = (score_mod, self._evaluate(score_mod, self._context))
        return self._last[1]
