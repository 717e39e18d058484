"""Inputs from which one number of a kernel's arithmetic can be read; ``docs/fingerprint.md``.

Logits are in log2 units throughout: the Problem's scale is ln 2, rounded to fp32, whose product
with log2 e rounds to 1 exactly. q·k of a whole number is a weight that is a power of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.errors import ProblemError
from attncheck.formats import dtype_named, fp32, round_to
from attncheck.inputs import Descale, Inputs
from attncheck.mods import library
from attncheck.problem import Problem

if TYPE_CHECKING:
    from attncheck.mods.spec import Spec

__all__ = ["DIM", "GROUP", "KEYS", "LN2", "ROWS", "Scene", "blank", "every", "scene"]

LN2 = fp32(math.log(2.0))
ROWS, KEYS, DIM = 128, 128, 64
GROUP = 16
"""Keys after which a pattern begins anew: no kernel's tile is smaller, and each has its maximum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Numbers of one call.

    Attributes:
        problem: What is asked.
        q: Float64 ``(heads, query, dim)``, alike in every sequence; k and v so too.
        k: ``(heads, kv, dim)``.
        v: ``(heads, kv, dim)``.
    """

    problem: Problem
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def inputs(self, device: str = "cpu") -> Inputs:
        """As a kernel reads them; raises ProblemError where the dtype does not hold them."""
        fmt = self.problem.formats.storage
        tensors, scales = {}, {}
        for name in ("q", "k", "v"):
            values = getattr(self, name)
            if self.problem.formats.scaled:
                scale = _descale(values, fmt.max)
                values = values / scale[:, None, None]
                scales[name] = scale.float().expand(self.problem.batch, -1).contiguous()
            if not torch.equal(round_to(values, fmt), values):
                raise ProblemError(f"{name} of this scene are not numbers of {fmt.name}.")
            held = values.expand(self.problem.batch, -1, -1, -1)
            tensors[name] = held.to(fmt.torch_dtype).contiguous()
        made = Inputs(
            problem=self.problem, **tensors, descale=Descale(**scales) if scales else None
        )
        return made.to(device)


def scene(  # q, k and v, and what a Problem has besides
    dtype: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Spec = library.FULL,
    scale: float = LN2,
    batch: int = 1,
) -> Scene:
    """A Scene of float64 ``(heads, length, dim)``; raises ProblemError for what cannot be."""
    problem = Problem(
        batch=batch,
        heads=q.shape[0],
        query=q.shape[1],
        kv=k.shape[1],
        head_dim=q.shape[2],
        value_dim=v.shape[2],
        dtype=dtype_named(dtype).name,
        mask=mask,
        scale=scale,
    )
    return Scene(problem=problem, q=q, k=k, v=v)


def blank(
    heads: int = 1, kv: int = KEYS, query: int = ROWS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Zeros for q, k and v."""
    shapes = ((heads, query, DIM), (heads, kv, DIM), (heads, kv, DIM))
    q, k, v = (torch.zeros(shape, dtype=torch.float64) for shape in shapes)
    return q, k, v


def every(offset: int, kv: int = KEYS) -> list[int]:
    """The keys at ``offset`` of each group."""
    return list(range(offset, kv, GROUP))


def _descale(values: torch.Tensor, top: float) -> torch.Tensor:
    """Powers of two ``(heads,)`` that bring the largest number to the format's largest binade."""
    largest = values.abs().amax((1, 2))
    _, exponent = torch.frexp(torch.where(largest == 0, 1.0, largest))
    scale = torch.pow(2.0, (exponent - 1 - math.floor(math.log2(top))).double())
    return torch.where(largest / scale > top, 2 * scale, scale)  # e4m3 ends at 1.75 · 2^8
