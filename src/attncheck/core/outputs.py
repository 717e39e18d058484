"""The output tensors of an oracle or a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attncheck.core.tensor_names import AXES, GRADIENTS, TensorName

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """Results of one attention call, including gradients if the Problem asks for a backward.

    The loss is defined by its gradients with respect to out and LSE, which are Inputs.
    """

    out: torch.Tensor  # ``(batch, heads, query, value_dim)``; rows that see no key are 0.
    # Natural-log log-sum-exp of the visible scores, ``(batch, heads, query)``; −inf for rows that
    # see no key; None if the kernel does not return it.
    lse: torch.Tensor | None = None
    # ``(batch, heads, query, head_dim)``; like all following ones None without a backward.
    dq: torch.Tensor | None = None
    # ``(batch, kv_heads, kv, head_dim)``: the sum over the heads that share a key head.
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None  # ``(batch, kv_heads, kv, value_dim)``; summed like dk.
    dsink: torch.Tensor | None = None  # ``(heads,)``, for a Problem with a sink.
    # ``(numbers,)``, for a Problem with dcaptured: gradients of all numbers in the float tensors
    # that the score mod reads, concatenated in the order of reading, each flattened row-major.
    dcaptured: torch.Tensor | None = None

    def tensors(self) -> dict[TensorName, torch.Tensor]:
        """Return the tensors that are not None, by name, in the order above."""
        return {name: x for name in AXES if (x := getattr(self, name)) is not None}

    def gradients(self) -> dict[TensorName, torch.Tensor]:
        """Return the gradients among them."""
        return {name: one for name, one in self.tensors().items() if name in GRADIENTS}


def same_numbers(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one shape have equal numbers; all NaNs are equal."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
