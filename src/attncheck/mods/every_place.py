"""The values of a node of an expression at every (b, h, q_idx, kv_idx) there is."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from attncheck.mods.expression import LEAVES, OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attncheck.mods.expression import Expression, Node
    from attncheck.mods.spec import Dimensions

__all__ = ["AXES", "INT32", "Found", "Range", "depends_on_the_score", "over_a_range", "search"]

AXES = ("b", "h", "q_idx", "kv_idx")
_AT_A_TIME = 2**22  # places: 32 MB for each int64 value of the expression

Range: TypeAlias = tuple[float, float]
"""The smallest and the largest value: whole numbers, or infinite where unknown."""

INT32: Range = (-(2**31), 2**31 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a node's values are.

    Attributes:
        range: Their extremes, as far as they were looked at.
        value: The first wrong one; None where there is none.
        place: Where that is, (b, h, q_idx, kv_idx); an index that the node does not read is 0.
    """

    range: Range
    value: float | None = None
    place: tuple[int, ...] = ()


def search(
    expression: Expression,
    position: int,
    dimensions: Dimensions,
    wrong: Callable[[torch.Tensor], torch.Tensor],
) -> Found:
    """The first place where ``wrong`` is true of node ``position``, which reads no score."""
    used = _used(expression, position)
    names = [node.name for node in used.values() if node.op == "input"]
    low, high = math.inf, -math.inf
    for strip in _strips(names, dimensions):
        values = torch.as_tensor(_values(expression, used, strip)[position])
        least, most = _extremes(values)
        low, high = min(low, least), max(high, most)
        bad = wrong(values)
        if bool(bad.any()):
            at = tuple(int(i) for i in bad.nonzero()[0])
            starts = [int(axis.flatten()[0]) for axis in strip.values()]
            at = (*([0] * (4 - len(at))), *at)
            place = tuple(start + i for start, i in zip(starts, at, strict=True))
            return Found(range=(low, high), value=values[bad].flatten()[0].item(), place=place)
    return Found(range=(low, high))


def over_a_range(
    expression: Expression,
    position: int,
    ranges: list[Range],
    wrong: Callable[[torch.Tensor], torch.Tensor],
) -> Range | None:
    """Bounds of a node that depends on one whole number, as a distance, whose range is known.

    That number may take fewer values than its range holds, so that nothing follows from a wrong
    one: None, as where there is no such number.
    """
    nodes = expression.structure.nodes
    for through in sorted(_used(expression, position).keys() - {position}):
        low, high = ranges[through]
        if nodes[through].kind != "int" or not high - low < _AT_A_TIME:
            continue
        used = _used(expression, position, through)
        if any(node.op == "input" for i, node in used.items() if i != through):
            continue
        given = {through: torch.arange(int(low), int(high) + 1)}
        try:
            values = torch.as_tensor(_values(expression, used, {}, given)[position])
        except (IndexError, RuntimeError):  # at a number that does not occur
            continue
        if not bool(wrong(values).any()):
            return _extremes(values)
    return None


def depends_on_the_score(expression: Expression, position: int) -> bool:
    """Whether node ``position`` is computed from the score."""
    return any(n.op == "input" and n.name == "score" for n in _used(expression, position).values())


def _used(expression: Expression, last: int, through: int = -1) -> dict[int, Node]:
    """The nodes that node ``last`` is computed from, itself included, in order.

    What node ``through`` is computed from is left out.
    """
    nodes = expression.structure.nodes
    found, waiting = {last}, [last]
    while waiting:
        position = waiting.pop()
        for i in nodes[position].operands if position != through else ():
            if i not in found:
                found.add(i)
                waiting.append(i)
    return {i: nodes[i] for i in sorted(found)}


def _strips(inputs: list[str], dimensions: Dimensions) -> Iterator[dict[str, torch.Tensor]]:
    """The indices on axes of their own, a bounded number of places at a time.

    An axis that is not among ``inputs`` is 0 only.
    """
    whole = (dimensions.batch, dimensions.heads, dimensions.query, dimensions.kv)
    sizes = [size if name in inputs else 1 for name, size in zip(AXES, whole, strict=True)]
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
        for axis, (name, part) in enumerate(zip(AXES, parts, strict=True)):
            shape = [1] * 4
            shape[axis] = len(part)
            strip[name] = torch.arange(part.start, part.stop).view(shape)
        yield strip


def _values(
    expression: Expression,
    used: dict[int, Node],
    inputs: dict[str, torch.Tensor],
    given: dict[int, torch.Tensor] | None = None,
) -> dict[int, Any]:
    """Each used node's value; what could fail on the way was found not to before.

    Args:
        expression: The mod.
        used: Its nodes to compute, in order.
        inputs: The indices.
        given: Values of nodes that are not to be computed.
    """
    values: dict[int, Any] = dict(given or {})
    for i, node in used.items():
        if i in values:
            continue
        if node.op not in LEAVES:
            operands = [values[o] for o in node.operands]
            if node.op == "cast" and node.kind == "int":
                operands = [_saturated(operands[0])]
            values[i] = OPERATIONS[node.op](node, *operands)
        elif node.op == "input":
            values[i] = inputs[node.name]
        elif node.op in {"true", "false"}:
            values[i] = torch.tensor(node.op == "true")
        else:
            values[i] = _captured(expression.captured[node.slot], node)
    return values


def _captured(value: Any, node: Node) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if node.name:
        return torch.tensor(value, dtype=getattr(torch, node.name)).reshape((1,) * node.rank)
    return value


def _extremes(values: torch.Tensor) -> Range:
    """NaN counts as −∞, as ``_saturated`` takes it."""
    if values.is_floating_point():
        values = torch.where(values.isnan(), -math.inf, values.double())
    return values.min().item(), values.max().item()


def _saturated(value: Any) -> Any:
    """±∞ as int32's limits: log(0) is cast in many a bucket that a ``where`` then leaves out."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    low, high = INT32
    return torch.where(value.isfinite(), value.double(), torch.where(value > 0, high, low))
