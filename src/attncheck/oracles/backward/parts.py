"""What the dense and the FlashAttention-2 backward have in common: the loss, and sums over rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from attncheck.inputs import Inputs
    from attncheck.oracles.numbers.protocol import Array, Numbers

__all__ = ["dsink_of", "loss_of", "row_terms"]

A = TypeVar("A", bound="Array")


def loss_of(numbers: Numbers[A], inputs: Inputs) -> tuple[A, A]:
    """The loss's gradients: dO ``(batch, heads, query, value_dim)``, dLSE as a column.

    Raises ProblemError for Inputs without a loss.
    """
    dout, dlse = inputs.loss()
    return numbers.exact(dout), numbers.exact(dlse[..., None])


def row_terms(numbers: Numbers[A], out: A, dout: A, dlse: A, keys: Tensor) -> A:
    """``dLSE − Σ dO·O`` of each row, ``(batch, heads, query, 1)``.

    A row that attends to no key has an out of 0 whatever dO holds, NaN too.

    Args:
        numbers: The number system.
        out: ``(batch, heads, query, value_dim)``, as ``dout``.
        dout: The loss's gradient with respect to it.
        dlse: And to LSE, a column.
        keys: Whether the row attends to any, a column.
    """
    delta = numbers.select(keys, numbers.rowsum(dout * out), 0.0)
    return dlse - delta


def dsink_of(numbers: Numbers[A], sink: A | None, lse: A, rows: A) -> A | None:
    """``Σ P_sink (dLSE − delta)`` over rows and sequences, ``(1, heads, 1, 1)``.

    Args:
        numbers: The number system.
        sink: ``(1, heads, 1, 1)``, or None.
        lse: ``(batch, heads, query, 1)``.
        rows: As ``row_terms`` gives them.
    """
    if sink is None:
        return None
    # A sink of −∞ weighs nothing, also in a row whose LSE is −∞.
    weighs = ~numbers.is_minus_infinity(sink)
    shift = numbers.select(weighs, sink - lse, 0.0)
    weights = numbers.select(weighs, numbers.exp(shift), 0.0)
    return numbers.sum_batch(numbers.rowsum(numbers.transpose(weights * rows)))
