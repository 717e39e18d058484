"""Bounds of an expression's whole numbers from the bounds of what they are computed from."""

from __future__ import annotations

import itertools
import math
import operator
from typing import TYPE_CHECKING, Any

import torch

from attncheck.mods.every_place import AXES
from attncheck.mods.expression import LEAVES

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.mods.every_place import Range
    from attncheck.mods.expression import Expression, Node
    from attncheck.mods.spec import Dimensions

__all__ = ["ANY", "bounds"]

ANY: Range = (-math.inf, math.inf)


def bounds(
    expression: Expression, position: int, ranges: list[Range], dimensions: Dimensions
) -> Range:
    """Bounds of node ``position``, as an unbounded whole number or a truth value, from ``ranges``.

    Args:
        expression: The mod.
        position: Which node; ``ANY`` where it is a real number, or nothing is known.
        ranges: The bounds of all nodes before it.
        dimensions: The index ranges.
    """
    nodes = expression.structure.nodes
    node = nodes[position]
    if node.kind == "bool":
        return 0, 1
    if node.kind == "float" or node.op == "tensor":
        return ANY
    if node.op == "input":
        counts = (dimensions.batch, dimensions.heads, dimensions.query, dimensions.kv)
        return 0, dict(zip(AXES, counts, strict=True))[node.name] - 1
    if node.op == "number":
        value: Any = expression.captured[node.slot]
        return value, value
    if node.op == "index":
        return _extremes(expression.captured[nodes[node.operands[0]].slot])
    assert node.op not in LEAVES
    return _of_operation(node, [ranges[i] for i in node.operands])


def _extremes(table: Any) -> Range:
    if table.is_floating_point() or table.numel() == 0:
        return ANY
    low, high = torch.aminmax(table)
    return int(low), int(high)


def _of_operation(node: Node, operands: list[Range]) -> Range:
    """The bounds of what is monotone in each operand, or bounded by one of them."""
    lows, highs = zip(*operands, strict=True)
    known = not any(abs(bound) == math.inf for bound in (*lows, *highs))
    if node.op in {"minimum", "maximum"}:
        choose = min if node.op == "minimum" else max
        found = choose(lows), choose(highs)
    elif node.op == "where":
        found = min(lows[1:]), max(highs[1:])
    elif node.op == "sign":
        found = -1, 1
    elif node.op == "and" and max(lows) >= 0:
        found = 0, min(high for low, high in operands if low >= 0)
    elif node.op == "remainder" and lows[1] > 0 and highs[1] < math.inf:
        found = 0, highs[1] - 1
    elif not known:
        found = ANY
    elif node.op == "cast":
        found = operands[0]
    elif node.op == "abs":
        sizes = abs(lows[0]), abs(highs[0])
        found = (0 if lows[0] <= 0 <= highs[0] else min(sizes)), max(sizes)
    elif node.op in {"or", "xor"} and min(lows) >= 0:
        found = 0, 2 ** int(max(highs)).bit_length() - 1
    else:
        found = _of_corners(node.op, operands)
    return found


def _of_corners(op: str, operands: list[Range]) -> Range:
    divides = op == "floor_divide"
    shifts = op in {"left_shift", "right_shift"}
    if (
        op not in _CORNERS
        or (divides and operands[1][0] <= 0 <= operands[1][1])
        or (shifts and not 0 <= operands[1][0] <= operands[1][1] < _WORD)
    ):
        return ANY
    corners = [_CORNERS[op](*corner) for corner in itertools.product(*operands)]
    return min(corners), max(corners)


_WORD = 32  # bits: a kernel's shift by more is another number than torch's

_CORNERS: dict[str, Callable[..., float]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    "not": operator.invert,
    "floor_divide": operator.floordiv,
    "left_shift": operator.lshift,
    "right_shift": operator.rshift,
}
