"""Do a mod's whole numbers mean what they say? Asked at every index there is.

A kernel that is given an index outside a captured tensor reads somebody else's memory, and one that
computes a number beyond 32 bits another number; torch refuses to divide a whole number by 0.

A range for every whole number comes first: it costs nothing, and settles most mods (a document's
table, a clamped distance). Where it cannot, the number is computed at every place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from attncheck.errors import ProblemError
from attncheck.mods.every_place import (
    INT32,
    Found,
    Range,
    depends_on_the_score,
    over_a_range,
    search,
)
from attncheck.mods.expression import LEAVES, Expression, Structure
from attncheck.mods.known_ranges import ANY, bounds

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.mods.expression import Node
    from attncheck.mods.spec import Dimensions

__all__ = ["check_index_ranges"]

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
        found = ANY
        if node.op == "index":
            self._check_indices(node)
        elif node.kind == "int" and node.op in {"floor_divide", "remainder"}:
            self._check_divisor(position, node.operands[1])
        if node.kind != "float":
            found = bounds(self.expression, position, self.ranges, self.dimensions)
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
            return ANY if wraps else known
        looked_at = node.operands[0] if cast else position
        found = self._look(looked_at, _outside(*INT32))
        if found.value is None:
            low, high = (min(max(bound, INT32[0]), INT32[1]) for bound in found.range)
            return int(low), int(high)
        raise ProblemError(
            f"{self.name} computes {self._text(looked_at)} = {found.value} at {_at(found)}: "
            "kernels compute whole numbers in 32 bits, −2147483648 … 2147483647."
        )

    def _look(self, position: int, wrong: Callable[[torch.Tensor], torch.Tensor]) -> Found:
        within = over_a_range(self.expression, position, self.ranges, wrong)
        if within is not None:
            return Found(range=within)
        return search(self.expression, position, self.dimensions, wrong)

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


def _at(found: Found) -> str:
    return f"(b, h, q_idx, kv_idx) = {found.place}"
