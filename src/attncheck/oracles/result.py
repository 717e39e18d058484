"""What a recurrence gives, in the number system that it ran in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from attncheck.outputs import Outputs

if TYPE_CHECKING:
    from attncheck.inputs import Inputs
    from attncheck.oracles.numbers.protocol import Array, Numbers

__all__ = ["Backward", "Gradients", "Recurrence", "Result"]

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


@dataclass(frozen=True, slots=True, eq=False)
class Gradients(Generic[A]):
    """Unrounded gradients of a loss, and the Result that they belong to.

    Attributes:
        result: Of the forward.
        dq: ``(batch, heads, query, head_dim)``; 0 of rows that attend to no key.
        dk: ``(batch, kv_heads, kv, head_dim)``; 0 of keys that no row attends to.
        dv: ``(batch, kv_heads, kv, value_dim)``; likewise.
        dsink: ``(1, heads, 1, 1)``, of a Problem with a sink.
        dcaptured: ``(1, 1, 1, numbers)``, of a Problem with dcaptured.
    """

    result: Result[A]
    dq: A
    dk: A
    dv: A
    dsink: A | None = None
    dcaptured: A | None = None

    def rounded(self, numbers: Numbers[A]) -> Outputs:
        """The nearest float64 Outputs, with out and LSE."""
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
        """Out and LSE of ``inputs`` as numbers of the system."""
        ...


class Backward(Protocol):
    """A way to compute a Problem's gradients, in any number system."""

    def __call__(self, numbers: Numbers[A], inputs: Inputs, /) -> Gradients[A]:
        """Gradients of ``inputs`` as numbers of the system; raises ProblemError without a loss."""
        ...
