"""Which dtype torch gives every value of an expression, found without computing one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attncheck.mods.expression import LEAVES, OPERATIONS

if TYPE_CHECKING:
    from attncheck.mods.expression import Captured, Expression, Node

__all__ = ["dtypes"]


def dtypes(
    expression: Expression, score: torch.dtype = torch.float64
) -> tuple[torch.dtype | None, ...]:
    """The dtype of each node, in order; None for a Python number, which has none of its own.

    torch itself promotes, on its meta device, where tensors have a dtype and a shape only. Indices
    are int64.

    Args:
        expression: A mask or score mod.
        score: The dtype of the score that comes in.

    Raises:
        Whatever torch raises for operands that it does not take.
    """
    values: list[Any] = []
    for node in expression.structure.nodes:
        if node.op in LEAVES:
            values.append(_leaf(node, expression.captured, score))
        else:
            values.append(OPERATIONS[node.op](node, *(values[i] for i in node.operands)))
    return tuple(v.dtype if isinstance(v, torch.Tensor) else None for v in values)


def _leaf(node: Node, captured: tuple[Captured, ...], score: torch.dtype) -> Any:
    if node.op == "input":
        return _meta((1,), score if node.name == "score" else torch.int64)
    if node.op in {"true", "false"}:
        return _meta((), torch.bool)
    if node.op == "number" and not node.name:
        return captured[node.slot]
    if node.op == "number":
        return _meta((1,) * node.rank, getattr(torch, node.name))
    tensor = captured[node.slot]
    assert isinstance(tensor, torch.Tensor)
    return _meta(tuple(tensor.shape), tensor.dtype)


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
