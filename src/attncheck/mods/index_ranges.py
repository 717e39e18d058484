"""Does a mod read only inside the tensors that it captures? Asked at every index there is.

A range for every whole number comes first: it costs nothing, and shows most mods (a document's
table, a clamped distance) to stay inside. Where it cannot, the index is computed at every place.
"""

from __future__ import annotations

import itertools
import math
import operator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from attncheck.errors import ProblemError
from attncheck.mods.expression import LEAVES, OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attncheck.mods.expression import Expression, Node
    from attncheck.mods.spec import Dimensions

__all__ = ["check_index_ranges"]

_AXES = ("b", "h", "q_idx", "kv_idx")
_AT_A_TIME = 2**22  # places: 32 MB for each int64 value of the expression

Range: TypeAlias = tuple[float, float]
"""The smallest and the largest value: whole numbers, or infinite where unknown."""

_ANY: Range = (-math.inf, math.inf)


def check_index_ranges(
    expression: Expression, dimensions: Dimensions, name: str = "the mod"
) -> None:
    """Every index of a captured tensor is inside it, for all b, h, q_idx and kv_idx.

    A negative index down to −size counts from the end, as in torch.

    Args:
        expression: A mask or score mod.
        dimensions: b < batch, h < heads, q_idx < query, kv_idx < kv.
        name: What an error calls the mod.

    Raises:
        ProblemError: for the first index that is outside, with the place; and for one that
            depends on the score, unless it is clamped into the tensor: scores are not known here.
    """
    nodes = expression.structure.nodes
    ranges = _ranges(expression, dimensions)
    for node in nodes:
        if node.op != "index":
            continue
        table = expression.captured[nodes[node.operands[0]].slot]
        assert isinstance(table, torch.Tensor)
        for axis, operand in enumerate(node.operands[1:]):
            size = table.shape[axis]
            known = ranges[operand]
            if not -size <= known[0] <= known[1] < size:
                what = f"{name} indexes axis {axis} of its tensor of shape {tuple(table.shape)}"
                _check_everywhere(expression, operand, size, dimensions, what)


def _check_everywhere(
    expression: Expression, operand: int, size: int, dimensions: Dimensions, what: str
) -> None:
    used = _used(expression, operand)
    inputs = [node.name for node in used.values() if node.op == "input"]
    if "score" in inputs:
        raise ProblemError(
            f"{what} at a place that depends on the score: clamp it to 0 … {size - 1}."
        )
    for strip in _strips(inputs, dimensions):
        index = _values(expression, used, strip)[operand]
        index = torch.as_tensor(index)
        outside = (index < -size) | (index >= size)
        if bool(outside.any()):
            at = tuple(int(i) for i in outside.nonzero()[0])
            starts = [int(axis.flatten()[0]) for axis in strip.values()]
            at = (*([0] * (4 - len(at))), *at)
            place = tuple(start + i for start, i in zip(starts, at, strict=True))
            value = int(index[outside].flatten()[0])
            raise ProblemError(
                f"{what} with {value} at (b, h, q_idx, kv_idx) = {place}: "
                f"allowed is −{size} … {size - 1}."
            )


def _used(expression: Expression, last: int) -> dict[int, Node]:
    """The nodes that node ``last`` is computed from, itself included, in order."""
    nodes = expression.structure.nodes
    found, waiting = {last}, [last]
    while waiting:
        for i in nodes[waiting.pop()].operands:
            if i not in found:
                found.add(i)
                waiting.append(i)
    return {i: nodes[i] for i in sorted(found)}


def _strips(inputs: list[str], dimensions: Dimensions) -> Iterator[dict[str, torch.Tensor]]:
    """The indices on axes of their own, a bounded number of places at a time.

    An axis that is not among ``inputs`` is 0 only.
    """
    whole = (dimensions.batch, dimensions.heads, dimensions.query, dimensions.kv)
    sizes = [size if name in inputs else 1 for name, size in zip(_AXES, whole, strict=True)]
    steps, room = [1] * 4, _AT_A_TIME
    for axis in (3, 2, 1, 0):
        steps[axis] = max(1, min(sizes[axis], room))
        room //= steps[axis]
    cuts = [
        [range(start, min(start + step, size)) for start in range(0, size, step)]
        for size, step in zip(sizes, steps, strict=True)
    ]
    for parts in itertools.product(*cuts):
        strip = {}
        for axis, (name, part) in enumerate(zip(_AXES, parts, strict=True)):
            shape = [1] * 4
            shape[axis] = len(part)
            strip[name] = torch.arange(part.start, part.stop).view(shape)
        yield strip


def _values(
    expression: Expression, used: dict[int, Node], inputs: dict[str, torch.Tensor]
) -> dict[int, Any]:
    """Each used node's value; indices of tensors on the way were found to be inside before."""
    values: dict[int, Any] = {}
    for i, node in used.items():
        if node.op not in LEAVES:
            values[i] = OPERATIONS[node.op](node, *(values[o] for o in node.operands))
        elif node.op == "input":
            values[i] = inputs[node.name]
        elif node.op in {"true", "false"}:
            values[i] = torch.tensor(node.op == "true")
        else:
            value = expression.captured[node.slot]
            if isinstance(value, torch.Tensor):
                value = value.cpu()
            elif node.name:
                shape = (1,) * node.rank
                value = torch.tensor(value, dtype=getattr(torch, node.name)).reshape(shape)
            values[i] = value
    return values


def _ranges(expression: Expression, dimensions: Dimensions) -> list[Range]:
    """Bounds of each node that is a whole number or a truth value; ``_ANY`` where none is known."""
    counts = (dimensions.batch, dimensions.heads, dimensions.query, dimensions.kv)
    sizes = dict(zip(_AXES, counts, strict=True))
    nodes, ranges = expression.structure.nodes, list[Range]()
    for node in nodes:
        found = _ANY
        if node.kind == "bool":
            found = (0, 1)
        elif node.op == "input":
            found = (0, sizes[node.name] - 1) if node.name in sizes else _ANY
        elif node.op == "index":
            found = _extremes(expression.captured[nodes[node.operands[0]].slot])
        elif node.op == "number":
            value: Any = expression.captured[node.slot]
            found = (value, value)
        elif node.op not in LEAVES:
            found = _of_operation(node, [ranges[i] for i in node.operands])
        # Beyond 31 bits something may have wrapped around; real numbers are no index.
        finite = [abs(bound) for bound in found if abs(bound) < math.inf]
        wraps = any(bound >= 2**31 for bound in finite)
        ranges.append(_ANY if node.kind == "float" or wraps else found)
    return ranges


def _extremes(table: Any) -> Range:
    if table.is_floating_point() or table.numel() == 0:
        return _ANY
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
    elif not known:  # it may wrap around
        found = _ANY
    elif node.op == "cast":
        found = operands[0]
    elif node.op == "remainder" and lows[1] > 0:
        found = 0, highs[1] - 1
    elif node.op in _CORNERS and not (node.op == "floor_divide" and lows[1] <= 0):
        corners = [_CORNERS[node.op](*corner) for corner in itertools.product(*operands)]
        found = min(corners), max(corners)
    else:
        found = _ANY
    return found


_CORNERS: dict[str, Callable[..., float]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    "floor_divide": operator.floordiv,
}
