"""What a recurrence gives, in the number system that it ran in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from attncheck.outputs import Outputs

if TYPE_CHECKING:
    from attncheck.inputs import Inputs
    from attncheck.oracles.numbers.protocol import Array, Numbers

__all__ = ["Recurrence", "Result"]

A = TypeVar("A", bound="Array")


@dataclass(frozen=True, slots=True, eq=False)
class Result(Generic[A]):
    """Unrounded results; in float64 the same numbers as Outputs.

    Attributes:
        out: ``(batch, heads, query, value_dim)``; of softmax ``(batch, heads, query, kv)``. Rows
            that attend to no key are 0.
        lse: Natural-log LSE, ``(batch, heads, query, 1)``: a column, like every array of numbers.
            Rows that attend to no key are −∞.
    """

    out: A
    lse: A

    def rounded(self, numbers: Numbers[A]) -> Outputs:
        """The nearest float64 Outputs; LSE is ``(batch, heads, query)`` there."""
        return Outputs(numbers.rounded(self.out), numbers.rounded(self.lse).squeeze(-1))


class Recurrence(Protocol):
    """A way to compute the operation of a Problem, in any number system."""

    def __call__(self, numbers: Numbers[A], inputs: Inputs, /) -> Result[A]:
        """Out and LSE of ``inputs`` as numbers of the system."""
        ...
