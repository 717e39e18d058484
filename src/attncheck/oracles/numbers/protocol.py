"""The vocabulary that a recurrence is written in.

Arrays are ``(batch, heads, rows, columns)``. What only selects — masks, "has this row seen a key?"
— is an exact truth value in every number system and therefore always a bool tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attncheck.mods.signatures import ScoreMod
    from attncheck.oracles.indices import Indices

__all__ = ["Array", "Numbers"]


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
