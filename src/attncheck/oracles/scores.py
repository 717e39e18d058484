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

__all__ = ["Scores", "Sloped"]

A = TypeVar("A", bound="Array")


@dataclass(frozen=True, slots=True, eq=False)
class Sloped(Generic[A]):
    """A tile of scores with what a backward needs of them, ``(batch, heads, query, kv)``.

    Attributes:
        scores: −∞ where not attended.
        attended: Bool.
        slopes: The score mod's derivative, 0 where not attended.
        products: What the score mod was given.
        indices: Where the tile lies.
    """

    scores: A
    attended: Tensor
    slopes: A
    products: A
    indices: Indices


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
        slopes = self.numbers.select(attended, slopes, 0.0)
        return Sloped(scores, attended, slopes, kept, indices)

    def captured(self, tile: Sloped[A], dz: A) -> A | None:
        """Gradients of the numbers that the score mod reads, by this tile; None if not asked for.

        Args:
            tile: As ``with_slopes`` gives it.
            dz: The loss's gradient with respect to its scores.
        """
        if not self.inputs.problem.dcaptured:
            return None
        attended = tile.attended.expand(tile.indices.shape)
        return self.numbers.captured(self.score_mod, tile.products, tile.indices, dz, attended)

    def _products(self, q: A, k: A) -> A:
        numbers = self.numbers
        return numbers.matmul(q, numbers.transpose(k)) * self.inputs.problem.scale

    def _after(self, products: A, indices: Indices) -> tuple[A, Tensor]:
        """After score mod and mask, and what is attended."""
        scores = self.numbers.score(self.score_mod, products, indices)
        attended = visible(self.mask_mod, indices) & ~self.numbers.is_minus_infinity(scores)
        return self.numbers.select(attended, scores, -math.inf), attended
