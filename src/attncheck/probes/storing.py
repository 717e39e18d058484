"""Whole numbers as a kernel reads them: exact in every format, also where fp8 has descales."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attncheck.errors import ProblemError
from attncheck.formats import round_to
from attncheck.inputs import Descale, Inputs

if TYPE_CHECKING:
    from attncheck.problem import Problem

__all__ = ["fill_apart", "stored"]

_KINDS = 4
"""Different descales: the largest number comes to fp8's largest power of two, or to 2^-3 of it."""


def fill_apart(q: torch.Tensor, k: torch.Tensor, first: int) -> None:
    """Write to columns from ``first`` on what adds nothing to q·k: where q is not 0, k is.

    q takes the even ones and k the odd ones, with signs and sizes that change along the rows: a
    column or row read in place of another multiplies what should not meet. Sizes are those of
    what the tensors hold already.
    """
    for parity, tensor in enumerate((q, k)):
        columns = torch.arange(tensor.shape[-1])
        here = (columns >= first) & (columns % 2 == (first + parity) % 2)
        size = _power_of_two(tensor.abs().amax()) if bool(tensor.any()) else 1.0
        rows = torch.arange(tensor.shape[2])[:, None] + columns
        pattern = torch.where(rows % 3 == 0, -1.0, 1.0) * torch.where(rows % 2 == 0, 1.0, 0.5)
        tensor.add_(torch.where(here, size * pattern.to(tensor.dtype), 0.0))


def stored(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, exact: bool = True
) -> Inputs:
    """Inputs that mean float64 ``q``, ``k`` and ``v``, on the CPU.

    In fp8 each batch and key head has descales of its own, powers of two.

    Args:
        problem: What they are inputs of.
        q: ``(batch, heads, query, head_dim)``.
        k: ``(batch, kv_heads, kv, head_dim)``.
        v: ``(batch, kv_heads, kv, value_dim)``.
        exact: Whether they must be the format's numbers; otherwise they are rounded once.

    Raises:
        ProblemError: where they must be and are not.
    """
    fmt = problem.formats.storage
    tensors, scales = {}, {}
    for turn, (name, values) in enumerate((("q", q), ("k", k), ("v", v))):
        held = values
        if problem.formats.scaled:
            scales[name] = scale = _descale(problem, values, turn)
            each = scale.double().repeat_interleave(values.shape[1] // problem.kv_heads, dim=1)
            held = values / each[..., None, None]
        tensors[name] = round_to(held, fmt)
        if exact and not torch.equal(tensors[name], held):
            raise ProblemError(f"{name} of this probe are not numbers of {fmt.name}: {problem}.")
    return Inputs(
        problem=problem,
        **{name: values.to(fmt.torch_dtype) for name, values in tensors.items()},
        descale=Descale(**scales) if scales else None,
    )


def _descale(problem: Problem, values: torch.Tensor, turn: int) -> torch.Tensor:
    """fp32 powers of two ``(batch, kv_heads)``, unlike those of the neighbours."""
    top = math.floor(math.log2(problem.formats.storage.max))
    largest = values.reshape(problem.batch, problem.kv_heads, -1).abs().amax(-1)
    _, exponent = torch.frexp(torch.where(largest == 0, 1.0, largest))
    pair = torch.arange(problem.batch)[:, None] + torch.arange(problem.kv_heads)
    return torch.pow(2.0, (exponent - top + (pair + turn) % _KINDS).float())


def _power_of_two(value: torch.Tensor) -> float:
    return 2.0 ** math.floor(math.log2(float(value)))
