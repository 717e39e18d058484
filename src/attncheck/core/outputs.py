"""Tensors that an oracle and a kernel both give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attncheck.core.tensor_names import AXES, GRADIENTS, TensorName

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """Results of one attention call, and where a Problem asks for them of its backward.

    Gradients are those of a loss, whose gradients with respect to out and LSE are Inputs.
    """

    out: torch.Tensor  # ``(batch, heads, query, value_dim)``. Rows that see no key are 0.
    # Natural-log log-sum-exp of the visible scores, ``(batch, heads, query)``; −inf for rows that
    # see no key. None where a kernel does not expose it.
    lse: torch.Tensor | None = None
    # ``(batch, heads, query, head_dim)``. None without a backward, as all that follow.
    dq: torch.Tensor | None = None
    # ``(batch, kv_heads, kv, head_dim)``: the sum over the heads that share a key head.
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None  # ``(batch, kv_heads, kv, value_dim)``; likewise
    dsink: torch.Tensor | None = None  # ``(heads,)``, of a Problem with a sink
    # ``(numbers,)``, of a Problem with dcaptured: of every number of the float tensors that the
    # score mod reads, one tensor after the other in the order of reading, each flattened
    # row-major.
    dcaptured: torch.Tensor | None = None

    def tensors(self) -> dict[TensorName, torch.Tensor]:
        """Return those that are not None, by name, in the order above."""
        # By AXES, which has the names that messages use, in their order.
        return {name: x for name in AXES if (x := getattr(self, name)) is not None}

    def gradients(self) -> dict[TensorName, torch.Tensor]:
        """Return the gradients among them."""
        return {name: one for name, one in self.tensors().items() if name in GRADIENTS}


def same_numbers(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one shape hold the same numbers; any NaN is NaN."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
