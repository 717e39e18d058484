"""Score mods on numbers that torch knows nothing of; an oracle is told how they are called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from attncheck.errors import UsageError
from attncheck.oracles.indices import is_identity

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from attncheck.mods.signatures import ScoreMod

__all__ = ["Evaluate", "Evaluated"]


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
