"""The score of a row for a key, by definition; all recurrences share it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from attncheck.oracles.indices import Indices, visible

if TYPE_CHECKING:
    from torch import Tensor

    from attncheck.inputs import Inputs
    from attncheck.mods.signatures import MaskMod, ScoreMod
    from attncheck.oracles.numbers.protocol import Array, Numbers

__all__ = ["Scores"]

A = TypeVar("A", bound="Array")


@dataclass(frozen=True, slots=True, eq=False)
class Scores(Generic[A]):
    """Scores of one Inputs, any rows and keys of it.

    Attributes:
        numbers: The number system.
        inputs: Their mask, score mod and scale are used; the tensors are passed.
        mask_mod: The original mask.
        score_mod: The original score mod.
    """

    numbers: Numbers[A]
    inputs: Inputs
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
            query: Their query indices.
            kv: Their key indices.
        """
        problem = self.inputs.problem
        b, h = range(problem.batch), range(problem.heads)
        return self.at(q, k, Indices.of(b, h, query, kv, self.inputs.q.device))

    def at(self, q: A, k: A, indices: Indices) -> tuple[A, Tensor]:
        """The same for any heads, rows and keys: those of ``indices``, each with its own key head.

        Args:
            q: ``(batch, heads, query, head_dim)`` of the sizes of ``indices``.
            k: ``(batch, heads, kv, head_dim)``.
            indices: Where they lie.
        """
        numbers, problem = self.numbers, self.inputs.problem
        products = numbers.matmul(q, numbers.transpose(k))
        scores = numbers.score(self.score_mod, products * problem.scale, indices)
        attended = visible(self.mask_mod, indices) & ~numbers.is_minus_infinity(scores)
        return numbers.select(attended, scores, -math.inf), attended
