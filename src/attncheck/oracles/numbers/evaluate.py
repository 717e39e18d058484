"""Score mods on numbers that torch knows nothing of; an oracle is told how they are called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from attncheck.errors import UsageError
from attncheck.oracles.indices import is_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    from attncheck.mods.signatures import ScoreMod
    from attncheck.oracles.indices import Indices

__all__ = ["Captured", "Captures", "Evaluate", "Evaluated", "Reads"]


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
