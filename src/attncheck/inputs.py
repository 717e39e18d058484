"""Problem → tensors: drawn once, quantised once, here and nowhere else.

What a kernel reads is bit for bit what an oracle reads, promoted without loss.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck import distributions
from attncheck.distributions import Sizes
from attncheck.errors import ProblemError
from attncheck.formats import Format, round_to

if TYPE_CHECKING:
    from attncheck.problem import Problem

__all__ = ["Inputs", "draw"]

# Rounding needs about ten float64 temporaries; 2**18 elements make that 20 MB.
_CHUNK = 1 << 18


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Inputs:
    """The tensors of one Problem, in its storage dtype.

    Attributes:
        problem: What they are inputs of.
        q: ``(batch, heads, query, head_dim)``.
        k: ``(batch, kv_heads, kv, head_dim)``.
        v: ``(batch, kv_heads, kv, value_dim)``.

    Raises:
        ProblemError: for a tensor whose shape or dtype is not the Problem's.
    """

    problem: Problem
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def __post_init__(self) -> None:
        sizes, dtype = _sizes(self.problem), self.problem.formats.storage.torch_dtype
        for name in ("q", "k", "v"):
            tensor: torch.Tensor = getattr(self, name)
            shape = getattr(sizes, name)
            if tuple(tensor.shape) != shape:
                raise ProblemError(f"{name}.shape={tuple(tensor.shape)}, but should be {shape}.")
            if tensor.dtype != dtype:
                raise ProblemError(f"{name}.dtype={tensor.dtype}, but should be {dtype}.")

    def to(self, device: str | torch.device) -> Inputs:
        """The same numbers on another device."""
        return self.replace(q=self.q.to(device), k=self.k.to(device), v=self.v.to(device))

    def replace(
        self,
        *,
        problem: Problem | None = None,
        q: torch.Tensor | None = None,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
    ) -> Inputs:
        """These Inputs with other tensors, or of another Problem; checked like any."""
        return Inputs(
            problem=problem or self.problem,
            q=self.q if q is None else q,
            k=self.k if k is None else k,
            v=self.v if v is None else v,
        )

    def promoted(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The float64 q, k and v; every number is the same, since float64 holds all formats."""
        return self.q.double(), self.k.double(), self.v.double()


def draw(problem: Problem, device: str | torch.device = "cpu") -> Inputs:
    """Draw the Inputs of ``problem``, with the same bits on every machine and device.

    Each float64 number of its distribution is rounded once, to nearest, ties to even.
    """
    fmt = problem.formats.storage
    drawn = list(distributions.draw(problem.distribution, _sizes(problem), problem.seed))
    # Popped one at a time, so that the float64 of one tensor is freed before the next is rounded.
    q, k, v = (_stored(torch.from_numpy(drawn.pop(0)), fmt).to(device) for _ in range(3))
    return Inputs(problem=problem, q=q, k=k, v=v)


def _sizes(problem: Problem) -> Sizes:
    names = (field.name for field in dataclasses.fields(Sizes))
    return Sizes(**{name: getattr(problem, name) for name in names})


def _stored(values: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Float64 ``values`` rounded once to ``fmt``, in its storage dtype."""
    out = torch.empty(values.shape, dtype=fmt.torch_dtype)
    stored, exact = out.view(-1), values.view(-1)
    for start in range(0, exact.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        stored[part] = round_to(exact[part], fmt)  # the cast is exact: the numbers are fmt's
    return out
