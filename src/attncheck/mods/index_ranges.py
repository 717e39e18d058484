"""Check a mod's whole numbers at every index: reads inside its tensors, no division by 0, 32 bits.

A kernel that is given an index outside a captured tensor reads foreign memory, and whole numbers
beyond 32 bits wrap around in kernels; torch refuses to divide a whole number by 0.

First a range is derived for every whole number, which costs nothing and is enough for most mods (a
document's table, a clamped distance). Otherwise the number is computed at every index.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attncheck.core.errors import ProblemError
from attncheck.core.mod_spec import Dimensions
from attncheck.mods.expression import (
    INDICES,
    Algebra,
    Expression,
    Node,
    Structure,
    evaluate,
    evaluate_nodes,
    torch_algebra,
)

Range: TypeAlias = tuple[float, float]
"""The smallest and the largest value: whole numbers, or infinite where unknown."""

_ANY: Range = (-math.inf, math.inf)
_INT32 = (-(2**31), 2**31 - 1)
_WORD_BITS = 32  # Bits of kernels' whole numbers; shifts by so many or more differ from torch's.
_CHUNK = 2**22  # Indices evaluated at once: 32 MB per int64 value of the expression.
_LONGEST = 60  # Most characters of a formula in a message.


def check_index_ranges(
    expression: Expression, dimensions: Dimensions, name: str = "the mod"
) -> None:
    """Raise ProblemError unless kernels compute every whole number of a mod correctly.

    For all b, h, q_idx and kv_idx:

    * Every index of a captured tensor is inside it. A negative index down to −size counts from the
      end, as in torch.
    * No whole number is divided by 0.
    * The result of every operation on whole numbers fits in 32 bits, also in a branch that a
      ``where`` does not take. Elements of captured tensors need not: they are read in full. Numbers
      that depend on the score are not known here, and not refused.

    Args:
        dimensions: b < batch, h < heads, q_idx < query, kv_idx < kv.
        name: The mod's name in errors.

    Raises:
        ProblemError: for the first violation, with its index; and for an index or a divisor that
            depends on the score, unless it is clamped.
    """
    check = _Check(expression, dimensions, name)
    sizes = (dimensions.batch, dimensions.heads, dimensions.query, dimensions.kv)
    inputs = dict(zip(INDICES, ((0, size - 1) for size in sizes), strict=True)) | {"score": _ANY}
    # An algebra of ranges; the nodes before a node have been checked.
    algebra = Algebra.of(check.leaf, check.operation, {})
    input_ranges = [inputs[argument] for argument in expression.structure.inputs]
    for bounds in evaluate_nodes(expression, algebra, input_ranges):
        check.ranges.append(bounds)


class _Check:
    """The ranges of an expression's whole numbers, each checked when it is computed."""

    def __init__(self, expression: Expression, dimensions: Dimensions, name: str) -> None:
        self.expression, self.dimensions, self.name = expression, dimensions, name
        self.ranges: list[Range] = []

    def leaf(self, node: Node, value: Any) -> Range:
        """Return the range of an input, a number or a truth value."""
        if node.op == "input":
            known: Range = value
            return known
        if node.kind == "bool":
            return 0, 1
        return (value, value) if node.op == "number" and node.kind == "int" else _ANY

    def operation(self, node: Node, *operands: Range) -> Range:
        """Return the range of an operation's result; raise ProblemError if it is not allowed."""
        if node.op == "index":
            return self._read(node, operands[1:])
        if node.kind == "int" and node.op in {"floor_divide", "remainder"}:
            self._check_divisor(node, operands[1])
        if node.kind == "float":
            return _ANY
        if node.kind == "bool":
            return 0, 1
        return self._in_32_bits(node, operands, _bounds(node.op, operands))

    def _read(self, node: Node, indices: tuple[Range, ...]) -> Range:
        nodes = self.expression.structure.nodes
        table = self.expression.captured[nodes[node.operands[0]].slot]
        assert isinstance(table, torch.Tensor)
        for axis, (position, (low, high)) in enumerate(
            zip(node.operands[1:], indices, strict=True)
        ):
            size = table.shape[axis]
            if -size <= low <= high < size:
                continue  # surely inside
            what = f"{self.name} indexes axis {axis} of its tensor of shape {tuple(table.shape)}"
            part = self.expression.part(position)
            if part.reads("score"):
                raise ProblemError(
                    f"{what} at a place that depends on the score: clamp it to 0 … {size - 1} "
                    "as a whole number, after the cast (NaN passes a clamp of real numbers)."
                )
            result = self._search(position, _outside(-size, size - 1))
            if result.value is not None:
                raise ProblemError(
                    f"{what} with {int(result.value)} at {result}: allowed is −{size} … {size - 1}."
                )
        if node.kind == "bool":
            return 0, 1
        if node.kind == "float" or table.numel() == 0:
            return _ANY
        least, most = torch.aminmax(table)
        return int(least), int(most)

    def _check_divisor(self, node: Node, divisor: Range) -> None:
        if divisor[0] > 0 or divisor[1] < 0:
            return
        formula = self._formula(self.expression.structure.nodes.index(node))
        what = f"{self.name} divides whole numbers, {formula},"
        position = node.operands[1]
        if self.expression.part(position).reads("score"):
            raise ProblemError(f"{what} by what depends on the score: clamp that to 1 or more.")
        result = self._search(position, lambda values: values == 0)
        if result.value is not None:
            raise ProblemError(f"{what} by 0 at {result}: torch refuses that; clamp it.")

    def _in_32_bits(self, node: Node, operands: tuple[Range, ...], bounds: Range) -> Range:
        """Return the range of a whole number, or raise; _ANY if it may wrap through the score."""
        # Kernels' casts do not wrap around as torch's do: the operand of a cast must fit too.
        cast = node.op == "cast"
        if _fits(bounds) and (not cast or _fits(operands[0])):
            return bounds
        position = self.expression.structure.nodes.index(node)
        if self.expression.part(position).reads("score"):
            wraps = any(abs(bound) > -_INT32[0] for bound in bounds if abs(bound) < math.inf)
            return _ANY if wraps else bounds
        searched = node.operands[0] if cast else position
        result = self._search(searched, _outside(*_INT32))
        if result.value is None:
            low, high = (min(max(bound, _INT32[0]), _INT32[1]) for bound in result.range)
            return int(low), int(high)
        raise ProblemError(
            f"{self.name} computes {self._formula(searched)} = {result.value} at {result}: "
            "kernels compute whole numbers in 32 bits, −2147483648 … 2147483647."
        )

    def _search(self, position: int, wrong: Callable[[Tensor], Tensor]) -> _Result:
        bounds = self._through_one_number(position, wrong)
        if bounds is not None:
            return _Result(bounds)
        return _search_everywhere(self.expression.part(position), self.dimensions, wrong)

    def _through_one_number(self, position: int, wrong: Callable[[Tensor], Tensor]) -> Range | None:
        """Return bounds of a node that depends only on one whole number in a small range.

        The number may take fewer values than its range holds, so a wrong value proves nothing: None
        then, and also where there is no such number.
        """
        nodes, captured = self.expression.structure.nodes, self.expression.captured
        for through, (low, high) in enumerate(self.ranges[:position]):
            if nodes[through].kind != "int" or not high - low < _CHUNK:
                continue
            number = Node("input", "int", (), "number")
            replaced = (*nodes[:through], number, *nodes[through + 1 :])
            part = Expression(Structure(("number",), replaced), captured).part(position)
            inputs = {node.name for node in part.structure.nodes if node.op == "input"}
            if inputs != {"number"}:
                continue
            try:
                values = _values(part, torch.arange(int(low), int(high) + 1))
            except (IndexError, RuntimeError):  # at a number of the range, which may not occur
                continue
            # What holds for all numbers of the range holds for those that occur.
            if not bool(wrong(values).any()):
                return _extremes(values)
        return None

    def _formula(self, position: int) -> str:
        text = str(self.expression.part(position))
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _fits(bounds: Range) -> bool:
    return _INT32[0] <= bounds[0] <= bounds[1] <= _INT32[1]


def _outside(low: float, high: float) -> Callable[[Tensor], Tensor]:
    """Return a predicate: values outside of a range once cast. Casts of ±∞ and NaN are ignored."""

    def outside(values: Tensor) -> Tensor:
        if values.is_floating_point():
            values = values.double().trunc()
            return values.isfinite() & ((values < low) | (values > high))
        return (values < low) | (values > high)

    return outside


# --- ranges of results ------------------------------------------------------------------------


def _bounds(op: str, operands: tuple[Range, ...]) -> Range:  # noqa: C901, PLR0911  (a table of rules)
    """Return the range of a whole number that is monotone in, or bounded by, its operands."""
    lows, highs = zip(*operands, strict=True)
    known = not any(abs(bound) == math.inf for bound in (*lows, *highs))
    if op in {"minimum", "maximum"}:
        choose = min if op == "minimum" else max
        return choose(lows), choose(highs)
    if op == "where":
        return min(lows[1:]), max(highs[1:])
    if op == "sign":
        return -1, 1
    if op == "and" and max(lows) >= 0:
        return 0, min(high for low, high in operands if low >= 0)
    if op == "remainder" and lows[1] > 0 and highs[1] < math.inf:
        return 0, highs[1] - 1
    if not known:
        return _ANY
    if op == "cast":
        return operands[0]
    if op == "abs":
        sizes = abs(lows[0]), abs(highs[0])
        return (0 if lows[0] <= 0 <= highs[0] else min(sizes)), max(sizes)
    if op in {"or", "xor"} and min(lows) >= 0:
        return 0, 2 ** int(max(highs)).bit_length() - 1
    divides_by_0 = op == "floor_divide" and lows[1] <= 0 <= highs[1]
    shifts_out = op in {"left_shift", "right_shift"} and not 0 <= lows[1] <= highs[1] < _WORD_BITS
    if op not in _CORNERS or divides_by_0 or shifts_out:
        return _ANY
    corners = [_CORNERS[op](*corner) for corner in itertools.product(*operands)]
    return min(corners), max(corners)


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


# --- values at every index --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Result:
    """The outcome of a search."""

    range: Range  # the extremes of the values that were computed
    value: float | None = None  # the first wrong value; None if there is none
    # Its (b, h, q_idx, kv_idx); an index that the node does not read is 0.
    place: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"(b, h, q_idx, kv_idx) = {self.place}"


def _search_everywhere(
    part: Expression, dimensions: Dimensions, wrong: Callable[[Tensor], Tensor]
) -> _Result:
    """Search all indices for the first where ``wrong`` holds; ``part`` must not read the score."""
    low, high = math.inf, -math.inf
    counts = (dimensions.batch, dimensions.heads, dimensions.query, dimensions.kv)
    # An index that the expression does not read is only 0.
    ranges = [
        range(count if part.reads(name) else 1) for name, count in zip(INDICES, counts, strict=True)
    ]
    score = [None] if "score" in part.structure.inputs else []
    for strip in index_parts(ranges, _CHUNK):
        axes = (
            torch.arange(r.start, r.stop).view([-1 if i == axis else 1 for i in range(4)])
            for axis, r in enumerate(strip)
        )
        values = _values(part, *score, *axes)
        least, most = _extremes(values)
        low, high = min(low, least), max(high, most)
        bad = wrong(values)
        if bool(bad.any()):
            first = [int(i) for i in bad.nonzero()[0]]
            steps = [0] * (4 - len(first)) + first
            place = tuple(r.start + step for r, step in zip(strip, steps, strict=True))
            return _Result((low, high), values[bad].flatten()[0].item(), place)
    return _Result((low, high))


def index_parts(ranges: Sequence[range], most: int) -> Iterator[tuple[range, ...]]:
    """Yield the product of several index ranges in parts of at most ``most`` tuples each."""
    room, cuts = most, []
    for whole in reversed(ranges):
        size = min(len(whole), room)
        room //= size
        cuts.append([whole[i : i + size] for i in range(0, len(whole), size)])
    return itertools.product(*reversed(cuts))


def _values(part: Expression, *inputs: Any) -> Tensor:
    """Return the values of an expression whose earlier nodes have been checked."""
    value = evaluate(part, _SATURATING, *inputs)
    return torch.as_tensor(value)


def _extremes(values: Tensor) -> Range:
    """Return the smallest and largest value; NaN counts as −∞, as in ``_cast``."""
    if values.is_floating_point():
        values = torch.where(values.isnan(), -math.inf, values.double())
    return values.min().item(), values.max().item()


def _cast(node: Node, value: Any) -> Tensor:
    """Cast ±∞ to int32's limits: many bucket functions cast log(0), and a ``where`` drops it."""
    if node.kind == "int" and isinstance(value, torch.Tensor) and value.is_floating_point():
        low, high = _INT32
        value = torch.where(value.isfinite(), value.double(), torch.where(value > 0, high, low))
    result: Tensor = value.to(getattr(torch, node.name))
    return result


_ON_CPU = torch_algebra("cpu")
_SATURATING = replace(_ON_CPU, operations={**_ON_CPU.operations, "cast": _cast})
