"""The gradients of a call in float64, dense, that can be bent like the forward."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from attncheck.hypotheses.given import product
from attncheck.mods.leaves import CapturedSums

if TYPE_CHECKING:
    from torch import Tensor

    from attncheck.hypotheses.given import Given
    from attncheck.outputs import Outputs

__all__ = ["Backward"]


class Backward:
    """Gradients of a Given with a loss, all of whose rows are there.

    Attributes:
        given: The call.
        dout, dlse: The loss's.
    """

    def __init__(self, given: Given) -> None:
        self.given = given
        self.dout, self.dlse = given.inputs.loss()

    @cached_property
    def delta(self) -> Tensor:
        """Σ dO·O."""
        return (self.dout * self.given.parts.out).sum(-1)

    @cached_property
    def dp(self) -> Tensor:
        """dO·v."""
        return self.dout @ self.given.v.mT

    @cached_property
    def slopes(self) -> Tensor:
        """The score mod's derivative."""
        return self.slopes_at(self.given.x)

    def slopes_at(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        """The same at other scores, or of other heads."""
        given = self.given
        if given.problem.score.name == "none":
            return torch.ones_like(x)
        x = x.clone().requires_grad_()
        with torch.enable_grad():
            s = given.modified(x, h=h)
            if not s.requires_grad:
                return torch.zeros_like(x)
            (found,) = torch.autograd.grad(s, x, torch.ones_like(s))
        return found

    def weights(
        self, *, s: Tensor | None = None, seen: Tensor | None = None, lse: Tensor | None = None
    ) -> Tensor:
        """P from LSE, 0 where hidden."""
        given = self.given
        lse = given.parts.lse if lse is None else lse
        base = torch.where(lse == -math.inf, 0.0, lse)[..., None]
        seen = given.seen if seen is None else seen
        return torch.where(seen, ((given.s if s is None else s) - base).exp(), 0.0)

    def gradients(  # noqa: PLR0913  # a place to bend each
        self,
        *,
        weights: Tensor | None = None,
        delta: Tensor | None = None,
        dlse: Tensor | None = None,
        dout: Tensor | None = None,
        dp: Tensor | None = None,
        slopes: Tensor | None = None,
        k: Tensor | None = None,
        q: Tensor | None = None,
        scale: float | None = None,
    ) -> Outputs:
        """Exact out and LSE with these gradients; each argument in place of the exact one."""
        given, problem = self.given, self.given.problem
        p = self.weights() if weights is None else weights
        dout = self.dout if dout is None else dout
        scale = given.scale if scale is None else scale
        off = (self.delta if delta is None else delta) - (self.dlse if dlse is None else dlse)
        dz = p * ((self.dp if dp is None else dp) - off[..., None])
        dx = torch.where(p == 0, 0.0, dz * (self.slopes if slopes is None else slopes))
        k, q = given.k if k is None else k, given.q if q is None else q
        dq = product_of(dx, k) * scale
        dk = product_of(dx.mT, q) * scale
        dv = product_of(p.mT, dout)
        dsink = None
        if given.sink is not None:
            of_sink = torch.exp(given.sink - given.parts.lse)
            dsink = torch.where(of_sink > 0, of_sink * -off, 0.0).sum((0, 2))
        return replace(
            given.parts.outputs,
            dq=dq,
            dk=summed(dk, problem.group),
            dv=summed(dv, problem.group),
            dsink=dsink,
            dcaptured=self.captured(dz) if problem.dcaptured else None,
        )

    def captured(self, dz: Tensor, where: Tensor | None = None) -> Tensor:
        """Of the numbers that the score mod reads: from gradients of the scores after it.

        Args:
            dz: Those, ``(batch, heads, query, kv)``.
            where: Which of them count; those that are seen unless told.
        """
        given = self.given
        sums = CapturedSums(given.score, "cpu")
        at = (given.b, given.h, given.i, given.j)
        sums.add(given.x, at, dz, given.seen if where is None else given.seen & where)
        return sums.sums


def product_of(weights: Tensor, values: Tensor) -> Tensor:
    """Weights · values of either sign, where a weight of 0 keeps what is not finite away."""
    if bool(values.isfinite().all()):
        return weights @ values
    return product(weights.clamp(min=0.0), values) - product((-weights).clamp(min=0.0), values)


def summed(of_heads: Tensor, group: int) -> Tensor:
    """Over the query heads that read one key head."""
    batch, heads, *rest = of_heads.shape
    return of_heads.view(batch, heads // group, group, *rest).sum(2)
