"""Axes in which a kernel takes q, k and v and gives out and LSE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from attncheck.problem import Problem

    Change = Callable[[Tensor], Tensor]
    Shapes = Mapping[tuple[int, ...], Change]

__all__ = ["Layout", "bhsd", "bshd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How tensors in attncheck's axes become a kernel's, and come back, for one Problem.

    Attributes:
        queries: q ``(batch, heads, query, head_dim)`` → the kernel's.
        keys: k or v ``(batch, kv_heads, kv, dim)`` → the kernel's.
        out: By the shape that its out may have, what brings it to ``(batch, heads, query,
            value_dim)``; empty where it has these axes.
        out_axes: Names of its axes.
        lse: By the shape that its LSE may have, what brings it to ``(batch, heads, query)``.
        lse_axes: Names of its axes.
        texts: For a script, expressions of ``q``, ``k``, ``v``, ``out`` and ``lse`` by these names.
    """

    queries: Change
    keys: Change
    out: Shapes
    out_axes: str
    lse: Shapes
    lse_axes: str
    texts: Mapping[str, str]


def bhsd(problem: Problem) -> Layout:
    """``(batch, heads, query, dim)``, attncheck's own."""
    del problem
    return Layout(
        queries=_same,
        keys=_same,
        out={},
        out_axes="batch, heads, query, dim",
        lse={},
        lse_axes="batch, heads, query",
        texts={name: name for name in ("q", "k", "v", "out", "lse")},
    )


def bshd(problem: Problem) -> Layout:
    """``(batch, query, heads, dim)``, with LSE ``(batch, heads, query)``."""
    batch, heads, query = problem.batch, problem.heads, problem.query
    return Layout(
        queries=_heads_inside,
        keys=_heads_inside,
        out={(batch, query, heads, problem.value_dim): _heads_outside},
        out_axes="batch, query, heads, dim",
        lse={(batch, heads, query): _same},
        lse_axes="batch, heads, query",
        texts={name: f"{name}.transpose(1, 2).contiguous()" for name in ("q", "k", "v")}
        | {"out": "out.transpose(1, 2)", "lse": "lse"},
    )


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _heads_inside(tensor: Tensor) -> Tensor:
    """Contiguous where the tensor was, as a caller's would be; else a view with its strides."""
    turned = tensor.transpose(1, 2)
    return turned.contiguous() if tensor.is_contiguous() else turned


def _heads_outside(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2)
