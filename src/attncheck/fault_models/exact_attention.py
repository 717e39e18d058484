"""Exact attention of one call in float64, dense, with every step open to change.

A stranger to oracles and kernels: written once more, for small problems, with a name for each place
where something may go wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from attncheck.core.outputs import Outputs

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attncheck.inputs.input_tensors import Inputs
    from attncheck.mods.spec import MaskMod, ScoreMod

__all__ = ["TILES", "ExactAttention", "SoftmaxParts", "weighted_sum"]

TILES = (16, 32, 64, 128)
"""Keys of a tile that are tried where a kernel declares none."""

_NOT_BROADCAST = (RuntimeError, IndexError, TypeError, ValueError)


@dataclass(frozen=True, slots=True, eq=False)
class SoftmaxParts:
    """A softmax before it is put together, ``(batch, heads, rows[, kv or value_dim])``.

    Attributes:
        maximum: Largest score of a row, −∞ of one that sees no key and has no sink.
        weights: exp(score − maximum), 0 where hidden.
        total: Their sum, and the sink's.
        values: weights · v.
    """

    maximum: Tensor
    weights: Tensor
    total: Tensor
    values: Tensor

    @property
    def dead(self) -> Tensor:
        """Rows that weigh nothing."""
        return self.total == 0

    @property
    def out(self) -> Tensor:
        """What they give: 0 of a row that weighs nothing."""
        safe = torch.where(self.dead, 1.0, self.total)[..., None]
        return torch.where(self.dead[..., None], 0.0, self.values / safe)

    @property
    def lse(self) -> Tensor:
        """Natural; −∞ of a row that weighs nothing."""
        return torch.where(self.dead, -math.inf, self.maximum + self.total.log())

    @property
    def outputs(self) -> Outputs:
        """Both."""
        return Outputs(self.out, self.lse)


class ExactAttention:
    """The numbers of one call, float64 on the CPU, and the exact attention of some of its rows.

    Axes are (batch, heads, rows, kv): k and v are repeated for each query head that reads them. Of
    a softmax the scores are the products, and v is the unit matrix.

    Attributes:
        inputs: What the kernel read.
        problem: Of them.
        rows: Indices of the query rows that are predicted, in order.
        tiles: (query rows, keys) of a tile: the declared one alone, or what is tried.
        b, h, i, j: Indices that broadcast.
        q, k, v: As read.
        scale: Of q·k.
    """

    def __init__(
        self,
        inputs: Inputs,
        *,
        rows: Tensor | None = None,
        tile: tuple[int, int] | None = None,
    ) -> None:
        self.inputs = inputs = inputs.to("cpu")
        self.problem = problem = inputs.problem
        self.rows = torch.arange(problem.query) if rows is None else rows
        self.tiles = (tile,) if tile else tuple((size, size) for size in TILES)
        self.b = torch.arange(problem.batch).view(-1, 1, 1, 1)
        self.h = torch.arange(problem.heads).view(1, -1, 1, 1)
        self.i = self.rows.view(1, 1, -1, 1)
        self.j = torch.arange(problem.kv).view(1, 1, 1, -1)
        self.scale = problem.scale
        if problem.operation == "softmax":
            self.v = torch.eye(problem.kv, dtype=torch.float64).expand(1, 1, -1, -1)
            return
        q, k, v = inputs.promoted()
        self.q = q[:, :, self.rows]
        self.k, self.v = self.by_query_head(k), self.by_query_head(v)

    @property
    def whole(self) -> bool:
        """Whether every row is predicted, as gradients need it."""
        return len(self.rows) == self.problem.query

    @property
    def key_tiles(self) -> tuple[int, ...]:
        """Keys of a tile; of sizes that hold all keys the smallest alone."""
        sizes = sorted({size for _, size in self.tiles})
        small = [size for size in sizes if size < self.problem.kv]
        return tuple(small + sizes[len(small) : len(small) + 1])

    @property
    def tilings(self) -> tuple[tuple[int, int], ...]:
        """Tiles whose keys are some of all."""
        return tuple((rows, keys) for rows, keys in self.tiles if keys < self.problem.kv)

    def by_query_head(self, tensor: Tensor) -> Tensor:
        """A tensor of key heads, each repeated for the query heads that read it."""
        return tensor.repeat_interleave(self.problem.group, dim=1)

    @cached_property
    def sink(self) -> Tensor | None:
        """Each head's, ``(1, heads, 1)``."""
        sink = self.inputs.sink
        return None if sink is None else sink.double().view(1, -1, 1)

    @cached_property
    def qk(self) -> Tensor:
        """q·k, or the scores of a softmax."""
        if self.problem.operation == "softmax":
            return self.inputs.scores()[:, :, self.rows]
        return self.q @ self.k.mT

    @cached_property
    def x(self) -> Tensor:
        """What the score mod gets."""
        return self.qk * self.scale

    @cached_property
    def mask(self) -> MaskMod:
        """The Problem's."""
        return self.problem.mask_mod("cpu")

    @cached_property
    def score(self) -> ScoreMod:
        """The Problem's."""
        return self.problem.score_mod("cpu")

    @cached_property
    def s(self) -> Tensor:
        """After the score mod."""
        return self.modified(self.x)

    @cached_property
    def seen(self) -> Tensor:
        """Which keys a row sees, bool, in full."""
        found = self.visible(self.mask)
        return found & (self.s != -math.inf)

    @cached_property
    def z(self) -> Tensor:
        """After the mask."""
        return torch.where(self.seen, self.s, -math.inf)

    @cached_property
    def parts(self) -> SoftmaxParts:
        """The exact softmax."""
        return self.softmax(self.z, sink=self.sink)

    def visible(
        self, mask: MaskMod, *, b: Tensor | None = None, h: Tensor | None = None, i: int = 0
    ) -> Tensor:
        """What a mask shows, bool in full; of other sequences or heads, or of ``i`` rows later."""
        at = (self.b if b is None else b, self.h if h is None else h, self.i + i, self.j)
        try:
            found = torch.as_tensor(mask(*at))
        except _NOT_BROADCAST:
            last = self.problem.query - 1
            found = _mapped(mask, 0, (at[0], at[1], at[2].clamp(0, last), at[3]))
        return found.to(torch.bool).expand(self.shape)

    def modified(
        self,
        x: Tensor,
        score: ScoreMod | None = None,
        *,
        b: Tensor | None = None,
        h: Tensor | None = None,
        i: int = 0,
    ) -> Tensor:
        """``x`` after a score mod, the Problem's unless another; indices as of ``visible``."""
        score = score or self.score
        at = (self.b if b is None else b, self.h if h is None else h, self.i + i, self.j)
        try:
            found = score(x.clone(), *at)
        except _NOT_BROADCAST:
            found = _mapped(score, 1, at, x)
        return found.to(torch.float64).expand(x.shape)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, rows, kv)."""
        problem = self.problem
        return problem.batch, problem.heads, len(self.rows), problem.kv

    def softmax(self, z: Tensor, v: Tensor | None = None, *, sink: Tensor | None) -> SoftmaxParts:
        """The softmax of scores that are −∞ where hidden.

        Args:
            z: Them, ``(batch, heads, rows, any number of keys)``.
            v: Their values; the call's own by default.
            sink: Natural logits that broadcast to rows; None for none.
        """
        maximum = z.amax(-1)
        if sink is not None:
            maximum = torch.maximum(maximum, sink.expand(maximum.shape))
        base = torch.where(maximum == -math.inf, 0.0, maximum)
        weights = (z - base[..., None]).exp()
        total = weights.sum(-1)
        if sink is not None:
            total = total + (sink - base).exp()
        return SoftmaxParts(
            maximum, weights, total, weighted_sum(weights, self.v if v is None else v)
        )

    def attend(
        self,
        *,
        x: Tensor | None = None,
        s: Tensor | None = None,
        seen: Tensor | None = None,
        v: Tensor | None = None,
        hidden: float = -math.inf,
    ) -> Outputs:
        """Out and LSE of the call with something else in one place.

        Args:
            x: Scores before the score mod.
            s: Scores after it.
            seen: Which keys a row sees.
            v: Values, ``(batch, heads, kv, value_dim)``.
            hidden: The score of a hidden key.
        """
        if s is None:
            s = self.s if x is None else self.modified(x)
        if seen is None:
            seen = self.seen
        return self.softmax(torch.where(seen, s, hidden), v, sink=self.sink).outputs

    def scored(self, change: Callable[[Tensor], Tensor]) -> Outputs:
        """With ``change`` done to the scores before the score mod."""
        return self.attend(x=change(self.x))


def weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Weights · values, where a weight of 0 keeps what is not finite away."""
    finite = values.isfinite()
    if bool(finite.all()):
        return weights @ values
    found = weights @ torch.where(finite, values, 0.0)
    touched = (weights > 0).double() @ (~finite).double()
    return torch.where(touched > 0, math.nan, found)


def _mapped(
    mod: Callable[..., Tensor], scores: int, at: tuple[Tensor, ...], *leading: Tensor
) -> Tensor:
    """A mod of 0-d arguments, over all four axes."""
    for axis in (3, 2, 1, 0):
        of_indices = tuple(0 if other == axis else None for other in range(4))
        mod = torch.vmap(mod, in_dims=(0,) * scores + of_indices)
    return mod(*leading, *(axis.flatten() for axis in at))
