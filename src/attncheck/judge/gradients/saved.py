"""What a backward reads of its own forward, and how far that is off."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from attncheck.conditions import GradientConditions

__all__ = ["Saved", "kept"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Saved:
    """Errors of a kernel's own out and LSE in some rows, float64.

    Attributes:
        out_error: ``(heads, rows, value_dim)``. ``measured``: what the kernel gave less what is
            exact, with its sign. Otherwise a bound of its magnitude.
        lse_error: ``(heads, rows)``, likewise, its sign not used; of a kernel that does not expose
            LSE the forward's bound.
        measured: Whether ``out_error`` is the error itself.
    """

    out_error: torch.Tensor
    lse_error: torch.Tensor
    measured: bool = True

    def delta_shift(self, known: GradientConditions) -> torch.Tensor:
        """What the error of out makes of delta, ``(heads, rows, 1)``; 0 where not measured."""
        if not self.measured:
            return torch.zeros_like(known.delta)[..., None]
        return (known.dout * self.out_error).sum(-1, keepdim=True)

    def delta_error(self, known: GradientConditions) -> torch.Tensor:
        """What it makes of delta at most where it is not measured, ``(heads, rows, 1)``; else 0."""
        if self.measured:
            return torch.zeros_like(known.delta)[..., None]
        return (known.dout * self.out_error).abs().sum(-1, keepdim=True)


def kept(
    known: GradientConditions, saved: Saved, rows: torch.Tensor
) -> tuple[GradientConditions, Saved]:
    """Both with 0 in all but ``rows``: nothing is NaN where no key is seen or nothing is known."""

    def of(x: torch.Tensor) -> torch.Tensor:
        return torch.where(rows[..., None] if x.dim() > rows.dim() else rows, x, 0.0)

    names = ("dout", "dlse", "delta", "value_products", "slope", "dx")
    known = replace(
        known,
        known=replace(known.known, q=of(known.known.q), out=of(known.known.out)),
        **{name: of(getattr(known, name)) for name in names},
    )
    return known, replace(saved, out_error=of(saved.out_error), lse_error=of(saved.lse_error))
