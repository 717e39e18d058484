"""Check a mod's whole numbers at every index: reads inside its tensors, no division by 0, 32 bits.

A kernel that is given an index outside a captured tensor reads somebody else's memory, and one that
computes a number beyond 32 bits another number; torch refuses to divide a whole number by 0.

A range for every whole number comes first: it costs nothing, and settles most mods (a document's
table, a clamped distance). Where it cannot, the number is computed at every place.
"""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from attncheck.core.errors import ProblemError
from attncheck.mods.expression import LEAVES, OPERATIONS, Expression, Structure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attncheck.mods.expression import Node
    from attncheck.mods.spec import Dimensions

__all__ = [
    "ANY_NUMBER",
    "AXES",
    "INT32",
    "Range",
    "SearchResult",
    "bound_node",
    "check_index_ranges",
    "depends_on_the_score",
    "find_wrong_value",
    "range_through_one_number",
]


AXES = ("b", "h", "q_idx", "kv_idx")
_AT_A_TIME = 2**22  # places: 32 MB for each int64 value of the expression

Range: TypeAlias = tuple[float, float]
"""The smallest and the largest value: whole numbers, or infinite where unknown."""

INT32: Range = (-(2**31), 2**31 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a node's values are.

    Attributes:
        range: Their extremes, as far as they were looked at.
        value: The first wrong one; None where there is none.
        place: Where that is, (b, h, q_idx, kv_idx); an index that the node does not read is 0.
    """

    range: Range
    value: float | None = None
    place: tuple[int, ...] = ()


def find_wrong_value(
    expression: Expression,
    position: int,
    dimensions: Dimensions,
    wrong: Callable[[torch.Tensor], torch.Tensor],
) -> SearchResult:
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
            return SearchResult(
                range=(low, high), value=values[bad].flatten()[0].item(), place=place
            )
    return SearchResult(range=(low, high))


def range_through_one_number(
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


ANY_NUMBER: Range = (-math.inf, math.inf)


def bound_node(
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
        return ANY_NUMBER
    if node.op == "input":
        counts = (dimensions.batch, dimensions.heads, dimensions.query, dimensions.kv)
        return 0, dict(zip(AXES, counts, strict=True))[node.name] - 1
    if node.op == "number":
        value: Any = expression.captured[node.slot]
        return value, value
    if node.op == "index":
        return _extremes_of_known_ranges(expression.captured[nodes[node.operands[0]].slot])
    assert node.op not in LEAVES
    return _of_operation(node, [ranges[i] for i in node.operands])


def _extremes_of_known_ranges(table: Any) -> Range:
    if table.is_floating_point() or table.numel() == 0:
        return ANY_NUMBER
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
        found = ANY_NUMBER
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
        return ANY_NUMBER
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


_LONGEST = 60  # characters of a formula in a message


def check_index_ranges(
    expression: Expression, dimensions: Dimensions, name: str = "the mod"
) -> None:
    """Every whole number of a mod is what kernels compute, for all b, h, q_idx and kv_idx.

    * Every index of a captured tensor is inside it. A negative index down to −size counts from the
      end, as in torch.
    * No whole number is divided by 0.
    * The result of every operation on whole numbers fits in 32 bits, also of one that a ``where``
      leaves out. Elements of captured tensors need not: they are read in full. What depends on the
      score is not known here, and not refused.

    Args:
        expression: A mask or score mod.
        dimensions: b < batch, h < heads, q_idx < query, kv_idx < kv.
        name: What an error calls the mod.

    Raises:
        ProblemError: for the first number that is not so, with the place; and for an index or a
            divisor that depends on the score, unless it is clamped.
    """
    check = _Check(expression, dimensions, name)
    for position in range(len(expression.structure.nodes)):
        check.add(position)


@dataclass(slots=True)
class _Check:
    """Goes through an expression once; what comes before a node was found to be right."""

    expression: Expression
    dimensions: Dimensions
    name: str
    ranges: list[Range] = field(default_factory=list)

    def add(self, position: int) -> None:
        """Refuse node ``position``, or note its range."""
        node = self.expression.structure.nodes[position]
        found = ANY_NUMBER
        if node.op == "index":
            self._check_indices(node)
        elif node.kind == "int" and node.op in {"floor_divide", "remainder"}:
            self._check_divisor(position, node.operands[1])
        if node.kind != "float":
            found = bound_node(self.expression, position, self.ranges, self.dimensions)
        if node.kind == "int" and node.op not in LEAVES and node.op != "index":
            found = self._in_32_bits(position, found)
        self.ranges.append(found)

    def _check_indices(self, node: Node) -> None:
        nodes = self.expression.structure.nodes
        table = self.expression.captured[nodes[node.operands[0]].slot]
        assert isinstance(table, torch.Tensor)
        for axis, operand in enumerate(node.operands[1:]):
            size = table.shape[axis]
            low, high = self.ranges[operand]
            if -size <= low <= high < size:
                continue
            what = f"{self.name} indexes axis {axis} of its tensor of shape {tuple(table.shape)}"
            if depends_on_the_score(self.expression, operand):
                raise ProblemError(
                    f"{what} at a place that depends on the score: clamp it to 0 … {size - 1} "
                    "as a whole number, after the cast (NaN passes a clamp of real numbers)."
                )
            found = self._look(operand, _outside(-size, size - 1))
            if found.value is not None:
                raise ProblemError(
                    f"{what} with {int(found.value)} at {_at(found)}: allowed is "
                    f"−{size} … {size - 1}."
                )

    def _check_divisor(self, position: int, divisor: int) -> None:
        low, high = self.ranges[divisor]
        if low > 0 or high < 0:
            return
        what = f"{self.name} divides whole numbers, {self._text(position)},"
        if depends_on_the_score(self.expression, divisor):
            raise ProblemError(f"{what} by what depends on the score: clamp that to 1 or more.")
        found = self._look(divisor, lambda values: values == 0)
        if found.value is not None:
            raise ProblemError(f"{what} by 0 at {_at(found)}: torch refuses that; clamp it.")

    def _in_32_bits(self, position: int, known: Range) -> Range:
        """The range of a whole number, which fits; all there are where it is the score's."""
        node = self.expression.structure.nodes[position]
        cast = node.op == "cast"
        before = self.ranges[node.operands[0]]  # a kernel does not wrap where torch's cast does
        if _fits(known) and (not cast or _fits(before)):
            return known
        if depends_on_the_score(self.expression, position):
            wraps = any(abs(bound) > -INT32[0] for bound in known if abs(bound) < math.inf)
            return ANY_NUMBER if wraps else known
        looked_at = node.operands[0] if cast else position
        found = self._look(looked_at, _outside(*INT32))
        if found.value is None:
            low, high = (min(max(bound, INT32[0]), INT32[1]) for bound in found.range)
            return int(low), int(high)
        raise ProblemError(
            f"{self.name} computes {self._text(looked_at)} = {found.value} at {_at(found)}: "
            "kernels compute whole numbers in 32 bits, −2147483648 … 2147483647."
        )

    def _look(self, position: int, wrong: Callable[[torch.Tensor], torch.Tensor]) -> SearchResult:
        within = range_through_one_number(self.expression, position, self.ranges, wrong)
        if within is not None:
            return SearchResult(range=within)
        return find_wrong_value(self.expression, position, self.dimensions, wrong)

    def _text(self, position: int) -> str:
        """Node ``position`` as a formula."""
        structure = self.expression.structure
        part = Structure(structure.inputs, structure.nodes[: position + 1])
        text = str(Expression(part, self.expression.captured))
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _fits(known: Range) -> bool:
    return INT32[0] <= known[0] <= known[1] <= INT32[1]


def _outside(low: float, high: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Of real numbers: what they are cast to; ±∞ and NaN are cast to nothing in particular."""

    def outside(values: torch.Tensor) -> torch.Tensor:
        if values.is_floating_point():
            values = values.double().trunc()
            return values.isfinite() & ((values < low) | (values > high))
        return (values < low) | (values > high)

    return outside


def _at(found: SearchResult) -> str:
    return f"(b, h, q_idx, kv_idx) = {found.place}"
