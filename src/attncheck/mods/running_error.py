"""Running error analysis of a score mod: what it makes of its score's error, and what it adds.

Operands are float64 tensors with a radius each, which may be anywhere within it. Results are radii
of the exact operation; what rounds is added by ``running_error``. A radius is infinite where
nothing can be said. Rules compute in float64 without outward rounding: see ``running_error.SLACK``.

Every value of the traced expression is computed as the oracle computes it, with the largest
distance that a kernel's may have from it (running error analysis: Higham, "Accuracy and Stability
of Numerical Algorithms", 2002, section 3.3). ``to_interval`` encloses an evaluation from outside,
number by number; this is for millions of scores, and knows the errors that come in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from attncheck.core.conditions import ScoreModError
from attncheck.core.formats import FORMATS, Format, spacing
from attncheck.mods.expression import LEAVES, OPERATIONS, node_dtypes
from attncheck.mods.interval_algebra import KERNEL_FP32

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from attncheck.mods.expression import Expression, Node
    from attncheck.mods.interval_algebra import Arithmetic

__all__ = [
    "JUMPS",
    "RADII",
    "SLACK",
    "SMALLEST",
    "WHOLE_QUOTIENT",
    "Around",
    "Roundings",
    "RunningError",
    "comparison_radius",
    "logical_radius",
    "read_radius",
    "where_radius",
]


SMALLEST = 2.0 ** FORMATS["fp32"].min_exponent
"""Below it a kernel may take fp32 numbers for 0."""

WHOLE_QUOTIENT = 2.0**22
"""Below it a floor_divide of fp32 numbers is exact: TRITON_ULP says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Around:
    """A value and how far from it a kernel's may lie; shapes that broadcast.

    Attributes:
        value: The oracle's, as torch computes it, of any dtype.
        radius: float64, how far a kernel's may be off; of a truth value 1 where it may be the other
            one.
        jump: bool, whether it may lie on the other side of a jump; the radius holds there too.
    """

    value: Tensor
    radius: Tensor
    jump: Tensor

    @property
    def real(self) -> Tensor:
        """The value in float64."""
        return self.value.double()

    @property
    def moves(self) -> Tensor:
        """Where it may be another value at all."""
        return self.radius > 0


def _sum(_result: Tensor, a: Around, b: Around) -> Tensor:
    return a.radius + b.radius


def _product(_result: Tensor, a: Around, b: Around) -> Tensor:
    return a.real.abs() * b.radius + b.real.abs() * a.radius + a.radius * b.radius


def _quotient(result: Tensor, a: Around, b: Around) -> Tensor:
    room = b.real.abs() - b.radius
    return _unknown_unless(room > 0, (a.radius + result.abs() * b.radius) / room)


def _own(_result: Tensor, a: Around) -> Tensor:
    return a.radius


def _smaller(_result: Tensor, a: Around, b: Around) -> Tensor:
    return _of_the_clear_one(a, b, b.real - a.real)


def _larger(_result: Tensor, a: Around, b: Around) -> Tensor:
    return _of_the_clear_one(a, b, a.real - b.real)


def _of_the_clear_one(a: Around, b: Around, ahead: Tensor) -> Tensor:
    """The radius of what is taken: of ``a`` where it is ``ahead`` by more than both radii."""
    either = torch.maximum(a.radius, b.radius)
    both = a.radius + b.radius
    return torch.where(ahead > both, a.radius, torch.where(-ahead > both, b.radius, either))


def _monotone(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Around], Tensor]:
    """The larger of the distances to the function's values at both ends."""

    def radius(result: Tensor, a: Around) -> Tensor:
        ends = (function(a.real - a.radius), function(a.real + a.radius))
        return torch.maximum(*(_apart(end, result) for end in ends))

    return radius


def _of_positive(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Around], Tensor]:
    """A monotone function of numbers of at least 0; its code may flush subnormal ones to 0."""
    ends = _monotone(function)

    def radius(result: Tensor, a: Around) -> Tensor:
        a = _flushed(a)
        return _unknown_unless(a.real - a.radius >= 0, ends(result, a))

    return radius


def _stepping(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Around], Tensor]:
    """A step function, whose code may flush subnormal numbers to 0."""
    ends = _monotone(function)
    return lambda result, a: ends(result, _flushed(a))


def _flushed(a: Around) -> Around:
    tiny = (a.real != 0) & (a.real.abs() < SMALLEST)
    return Around(a.value, torch.where(tiny, a.radius + SMALLEST, a.radius), a.jump)


def _wave(_result: Tensor, a: Around) -> Tensor:
    return _flushed(a).radius.clamp(max=2.0)


def _whole_quotient(result: Tensor, a: Around, b: Around) -> Tensor:
    exact = a.real / b.real
    slip = _quotient(exact, a, b)
    ends = (torch.floor(exact - slip), torch.floor(exact + slip))
    return torch.where(slip > 0, torch.maximum(*(_apart(e, result) for e in ends)), 0.0)


def _left_over(_result: Tensor, a: Around, b: Around) -> Tensor:
    whole = torch.floor(a.real / b.real)
    kept = a.radius + whole.abs() * b.radius
    size = b.real.abs()
    moved = torch.where(_whole_quotient(whole, a, b) > 0, size + b.radius, kept)
    return _unknown_unless((size > b.radius) | (b.radius == 0), moved)


def _apart(a: Tensor, b: Tensor) -> Tensor:
    """|a − b|, 0 of equal infinities."""
    return torch.where(a == b, 0.0, (a - b).abs())


def _unknown_unless(known: Tensor, radius: Tensor) -> Tensor:
    return torch.where(known, radius, torch.inf)


RADII: dict[str, Callable[..., Tensor]] = {
    "add": _sum,
    "sub": _sum,
    "mul": _product,
    "div": _quotient,
    "neg": _own,
    "abs": _own,
    "minimum": _smaller,
    "maximum": _larger,
    "floor_divide": _whole_quotient,
    "remainder": _left_over,
    "floor": _stepping(torch.floor),
    "ceil": _stepping(torch.ceil),
    "sign": _stepping(torch.sign),
    "tanh": _monotone(torch.tanh),
    "sigmoid": _monotone(torch.sigmoid),
    "exp": _monotone(torch.exp),
    "exp2": _monotone(torch.exp2),
    "log": _of_positive(torch.log),
    "log2": _of_positive(torch.log2),
    "sqrt": _of_positive(torch.sqrt),
    "rsqrt": _of_positive(torch.rsqrt),
    "sin": _wave,
    "cos": _wave,
}
"""(the operation's value, its operands) → radius; sums and products hold for whole numbers too."""

JUMPS = frozenset({"floor_divide", "remainder", "floor", "ceil", "sign"})
"""What moves by steps."""


def comparison_radius(a: Around, b: Around) -> Tensor:
    """The radius of a comparison's truth value: 1 where the operands may meet."""
    reach = a.radius + b.radius
    meet = (_apart(a.real, b.real) <= reach) | torch.isinf(reach)
    return ((reach > 0) & meet).double()


def logical_radius(op: str, *operands: Around) -> Tensor:
    """The radius of and, or, xor, not of truth values: 1 where one that may change decides."""
    if op == "not":
        return operands[0].radius
    a, b = operands
    if op == "xor":
        return torch.maximum(a.radius, b.radius)
    # What the other must be, or may be, for this one to decide: true for and, false for or.
    open_a, open_b = ((x.value == (op == "and")) | x.moves for x in operands)
    return ((a.moves & open_b) | (b.moves & open_a)).double()


def where_radius(condition: Around, first: Around, second: Around) -> tuple[Tensor, Tensor]:
    """Radius and jump of ``where``: within reach of both branches where the condition may change.

    It jumps there unless the branches meet, as those of a ReLU do.
    """
    holds, moves = condition.value, condition.moves
    radius, other_radius = _taken(holds, first.radius, second.radius)
    jump, other_jump = _taken(holds, first.jump, second.jump)
    gap = _apart(first.real, second.real)
    reach = torch.where(moves, torch.maximum(radius, gap + other_radius), radius)
    return reach, jump | (moves & (other_jump | (gap > radius + other_radius)))


def _taken(holds: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(holds, first, second), torch.where(holds, second, first)


def read_radius(table: Tensor, value: Tensor, places: Sequence[Around]) -> tuple[Tensor, Tensor]:
    """Radius of ``table[places]``, and where another element may be read.

    One index may be off by one, up or down: the farther neighbour counts. Beyond that nothing is
    said.

    Args:
        table: Any tensor.
        value: What is read of it at the indices as they are.
        places: One index a dimension.
    """
    moved = [place.radius for place in places]
    total = sum(moved[1:], start=moved[0])
    radius = torch.where(total > 1, torch.inf, 0.0).double()
    for axis, place in enumerate(places):
        if not bool(place.moves.any()):
            continue
        for step in (-1, 1):
            other = [p.value for p in places]
            size = table.shape[axis]
            other[axis] = (place.value + step).clamp(-size, size - 1)
            gap = (table[tuple(other)].double() - value.double()).abs()
            gap = torch.where(table[tuple(other)] == value, 0.0, gap).nan_to_num(nan=torch.inf)
            radius = torch.where(place.moves, torch.maximum(radius, gap), radius)
    return radius, total > 0


SLACK = 1 + 2.0**-16
"""Roundings of fp32, and radii that come in, are taken larger by this: 2^12 units of 2^-53 at
least, of the value that is rounded.

It covers float64's own errors, of the oracle's values and of the radii: a few such units wherever
fp32 rounds too, which grow on their way to the result as the radius does.
"""


class Roundings:
    """The roundings of one expression in one arithmetic.

    What the oracle itself computes in a narrower format than float64, because the mod asks for it,
    a kernel rounds as well, and not always to the same number: such errors count twice. In the
    oracle's own arithmetic they do not count: they belong to what the mod says.

    Args:
        expression: A score mod.
        arithmetic: Of ``to_interval``: the errors of each operation.
        tanh_error: Largest relative error of tanh, where it is larger than the table's.
    """

    def __init__(self, expression: Expression, arithmetic: Arithmetic, tanh_error: float) -> None:
        self._kinds = [node.kind for node in expression.structure.nodes]
        self._arithmetic, self._tanh_error = arithmetic, tanh_error
        self._widest = arithmetic.format
        exact = arithmetic.format.name == "fp64"
        given = FORMATS["fp64" if exact else "fp32"]
        self.formats = [self._format(dtype) for dtype in node_dtypes(expression, given.torch_dtype)]
        narrow = [dtype in _NARROW for dtype in node_dtypes(expression, torch.float64)]
        # In float64 the radii themselves are as rough as what they bound: so four times.
        often, once = (0, 4) if exact else (2, 1)
        self._times = [often if computed else once for computed in narrow]

    def _format(self, dtype: torch.dtype | None) -> Format | None:
        """What values of ``dtype`` are computed in; None for whole and for Python numbers."""
        if dtype is None or not dtype.is_floating_point:
            return None
        own = next(f for f in FORMATS.values() if f.torch_dtype == dtype)
        return own if own.significand < self._widest.significand else self._widest

    def belongs_to_the_mod(self, i: int) -> bool:
        """Whether the rounding of node ``i`` is no error: the oracle's own, in its arithmetic."""
        return not self._times[i]

    def result(self, i: int, op: str, real: Tensor, radius: Tensor) -> Tensor:
        """The radius of what operation ``op``, node ``i``, gives: its exact one and its rounding.

        Infinite where the result may be beyond the largest number.
        """
        ulps = self._arithmetic.ulps.get(op, 0.0)
        if not ulps or self.belongs_to_the_mod(i):
            return radius
        added = ulps * self._ulp(real, radius, self._widest)
        if op == "tanh":
            added = torch.maximum(added, self._tanh_error * (real.abs() + radius))
        if op == "floor_divide":
            added = torch.where(real.abs() + radius < WHOLE_QUOTIENT, 0.0, added)
        added = added * (self._times[i] * SLACK)
        smallest = 2.0**self._widest.min_exponent
        added = torch.where(real.abs() - radius < smallest, added + smallest, added)  # flushed
        exact = (radius == 0) & ((real == 0) | (self._held(real, self._widest) & (ulps <= 0.5)))
        found = torch.where(exact | real.isinf(), radius, radius + added)
        # To nearest what is up to half a unit beyond the largest number is rounded to it.
        reach = radius if ulps <= 0.5 else found
        beyond = (real.abs() + reach > _largest(self._widest)) & ~real.isinf()
        return torch.where(beyond, torch.inf, found)

    def argument(self, op: str, operand: Around) -> Around:
        """An operand that is rounded before the operation, as that of exp is."""
        ulps = self._arithmetic.argument_ulps.get(op, 0.0)
        if not ulps:
            return operand
        added = ulps * SLACK * self._ulp(operand.real, operand.radius, self._widest)
        return replace(operand, radius=operand.radius + added)

    def operands(self, i: int, positions: tuple[int, ...], operands: list[Around]) -> list[Around]:
        """Operands of node ``i`` in the format that it is computed in."""
        fmt, times = self.formats[i] or self._widest, self._times[i]
        pairs = zip(positions, operands, strict=True)
        return [self._operand(fmt, position, x, times) for position, x in pairs]

    def compared(self, positions: tuple[int, ...], operands: list[Around]) -> list[Around]:
        """Whole numbers as they are; others in the wider format, as ``to_interval`` has them."""
        if all(self._kinds[o] != "float" for o in positions):
            return operands
        found = [f for o in positions if (f := self.formats[o]) is not None]
        fmt = max(found, key=lambda f: f.significand, default=FORMATS["fp32"])
        pairs = zip(positions, operands, strict=True)
        return [self._operand(fmt, position, x, 2) for position, x in pairs]

    def _operand(self, fmt: Format, position: int, found: Around, times: int) -> Around:
        """An operand as ``fmt`` holds it: Python and whole numbers, and wider ones, are rounded."""
        own, kind = self.formats[position], self._kinds[position]
        if kind == "bool" or (own is not None and own.significand <= fmt.significand):
            return found
        if kind != "int":
            return self._rounded(fmt, found, times)
        exact = found.real.abs() + found.radius < 2.0**fmt.significand
        rounded = self._rounded(fmt, found, times)
        return replace(found, radius=torch.where(exact, found.radius, rounded.radius))

    def _rounded(self, fmt: Format, found: Around, times: int) -> Around:
        exact = (found.radius == 0) & self._held(found.real, fmt)
        half = times * 0.5 * SLACK * self._ulp(found.real, found.radius, fmt)
        return replace(found, radius=found.radius + torch.where(exact, 0.0, half))

    @staticmethod
    def _held(real: Tensor, fmt: Format) -> Tensor:
        """Where ``fmt`` holds a number exactly."""
        return real == real.to(fmt.torch_dtype).double()

    @staticmethod
    def _ulp(real: Tensor, radius: Tensor, fmt: Format) -> Tensor:
        """A unit in the last place of the largest number within reach."""
        return spacing((real.abs() + radius).nan_to_num(nan=0.0, posinf=fmt.max), fmt)


def _largest(fmt: Format) -> float:
    """Half a unit beyond the largest number; of fp64 that is infinite."""
    return fmt.max + math.ldexp(1.0, math.frexp(fmt.max)[1] - 1 - fmt.significand)


_NARROW = frozenset({torch.float32, torch.float16, torch.bfloat16})


class RunningError:
    """The analysis of one traced score mod.

    Args:
        expression: The score mod, its captured tensors on the device of the scores.
        tanh_error: Largest relative error of a kernel's tanh, where it is larger than that of
            ``arithmetic``.
        arithmetic: How an implementation computes the mod; ``TORCH_FP64`` for the oracle itself.
    """

    def __init__(
        self,
        expression: Expression,
        tanh_error: float = 0.0,
        *,
        arithmetic: Arithmetic = KERNEL_FP32,
    ) -> None:
        self._expression = expression
        self._roundings = Roundings(expression, arithmetic, tanh_error)
        nodes = expression.structure.nodes
        self._last_use = {o: i for i, node in enumerate(nodes) for o in node.operands}

    def at(
        self, products: Tensor, radius: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> ScoreModError:
        """The errors at some scores, each ``(heads, rows, kv)``.

        Args:
            products: The exact scores that come in, float64 ``(heads, rows, kv)``.
            radius: How far a kernel's may be off, of that shape.
            b: Sequence of each; index tensors broadcast to that shape.
            h: Head.
            q_idx: Query row.
            kv_idx: Key.
        """
        given = (products, b, h, q_idx, kv_idx)
        total = _Evaluation(self._expression, self._roundings, self._last_use, given).run(
            radius * SLACK
        )
        own = _Evaluation(self._expression, self._roundings, self._last_use, given).run(
            torch.zeros((), dtype=torch.float64, device=products.device)
        )
        return ScoreModError(
            radius=total.radius.expand(products.shape).contiguous(),
            own=own.radius.expand(products.shape).contiguous(),
            jump=total.jump.expand(products.shape).contiguous(),
        )


class _Evaluation:
    """One walk over the nodes; of each its value as torch has it, and where a kernel's lies."""

    def __init__(
        self,
        expression: Expression,
        roundings: Roundings,
        last_use: dict[int, int],
        given: Sequence[Tensor],
    ) -> None:
        self._nodes = expression.structure.nodes
        self._captured = expression.captured
        self._given = dict(zip(expression.structure.inputs, given, strict=True))
        self._roundings, self._last_use = roundings, last_use
        self._device = given[0].device
        self._never = torch.zeros((), dtype=torch.bool, device=self._device)
        self._zero = torch.zeros((), dtype=torch.float64, device=self._device)
        self._raw: dict[int, Any] = {}
        self._known: dict[int, Around] = {}

    def run(self, radius: Tensor) -> Around:
        """The last node, of a score with ``radius``."""
        for i, node in enumerate(self._nodes):
            if node.op in LEAVES:
                self._raw[i] = self._leaf(node)
                score = node.op == "input" and node.name == "score"
                value = self._tensor(self._raw[i])  # captured numbers are fp32 numbers: see trace
                self._known[i] = Around(value, radius if score else self._zero, self._never)
            else:
                self._raw[i] = OPERATIONS[node.op](node, *(self._raw[o] for o in node.operands))
                self._known[i] = self._value(i, node, [self._known[o] for o in node.operands])
            for o in set(node.operands):
                if self._last_use[o] == i:  # many gigabytes on a GPU
                    del self._raw[o], self._known[o]
        return self._known[len(self._nodes) - 1]

    def _leaf(self, node: Node) -> Any:
        """As ``Expression.evaluate`` takes it: a Python number stays one, for torch's promotion."""
        if node.op == "input":
            return self._given[node.name]
        if node.op in {"true", "false"}:
            return torch.tensor(node.op == "true", device=self._device)
        value = self._captured[node.slot]
        if node.op == "number" and node.name:
            dtype = getattr(torch, node.name)
            return torch.tensor(value, dtype=dtype, device=self._device).reshape((1,) * node.rank)
        return value.to(self._device) if isinstance(value, torch.Tensor) else value

    def _tensor(self, raw: Any) -> Tensor:
        if isinstance(raw, torch.Tensor):
            return raw
        kind = torch.float64 if isinstance(raw, float) else None
        return torch.tensor(raw, dtype=kind, device=self._device)

    def _value(self, i: int, node: Node, operands: list[Around]) -> Around:
        value = self._tensor(self._raw[i])
        if node.op == "index":
            radius, another = read_radius(operands[0].value, value, operands[1:])
            return Around(value, radius, another)
        if node.op == "where":
            return Around(value, *self._where(i, node, operands))
        if node.kind == "bool":
            # A truth value that may be the other one says so by its radius alone.
            return Around(value, self._truth(node, operands), self._never)
        jump = self._jumps(node, operands)
        if node.op == "cast":
            radius = self._cast(i, node, value, operands[0])
            cut = node.kind == "int"
            return Around(value, radius, jump | (radius > 0) if cut else jump)
        if node.kind == "float":
            return self._rounded(i, node, value, operands, jump)
        radius = _on_whole(node.op, value, operands)
        if node.op in JUMPS or node.op not in RADII:
            jump = jump | (radius > 0)
        return Around(value, radius, jump)

    def _jumps(self, node: Node, operands: list[Around]) -> Tensor:
        """Where an operand does, or is a truth value that is counted and may be the other one."""
        jump = self._never
        for position, operand in zip(node.operands, operands, strict=True):
            counted = self._nodes[position].kind == "bool"
            jump = jump | (operand.moves if counted else operand.jump)
        return jump

    def _where(self, i: int, node: Node, operands: list[Around]) -> tuple[Tensor, Tensor]:
        condition, *branches = operands
        if node.kind == "float":
            branches = self._roundings.operands(i, node.operands[1:], branches)
        return where_radius(condition, *branches)

    def _truth(self, node: Node, operands: list[Around]) -> Tensor:
        if node.op in {"and", "or", "xor", "not"}:
            return logical_radius(node.op, *operands)
        if node.op == "cast":
            return comparison_radius(operands[0], Around(self._zero, self._zero, self._never))
        if node.operands[0] == node.operands[1]:
            return self._zero  # torch.isnan
        return comparison_radius(*self._roundings.compared(node.operands, operands))

    def _cast(self, i: int, node: Node, value: Tensor, operand: Around) -> Tensor:
        """To a real number it is rounded, by the oracle too perhaps; to a whole one it is cut."""
        if node.kind == "float":
            (held,) = self._roundings.operands(i, node.operands, [operand])
            if self._roundings.belongs_to_the_mod(i):
                return held.radius
            return held.radius + (value.double() - operand.real).nan_to_num(nan=0.0).abs()
        if self._nodes[node.operands[0]].kind != "float":
            return operand.radius
        ends = (torch.trunc(operand.real + sign * operand.radius) for sign in (-1, 1))
        radius = torch.maximum(*((end - value.double()).abs() for end in ends))
        return _or_unknown(torch.where(operand.moves, radius, 0.0))

    def _rounded(
        self, i: int, node: Node, value: Tensor, operands: list[Around], jump: Tensor
    ) -> Around:
        """A real operation: the exact one's radius, and what its arithmetic adds."""
        real = value.double()
        if value.dtype != torch.float64:  # rounded by the oracle: not a part of the exact radius
            real = OPERATIONS[node.op](node, *(x.real for x in operands))
        operands = self._roundings.operands(i, node.operands, operands)
        operands = [self._roundings.argument(node.op, operand) for operand in operands]
        radius = _or_unknown(RADII[node.op](real, *operands))
        radius = torch.where(real.isinf() & radius.isfinite(), 0.0, radius)
        if node.op in JUMPS:
            # A remainder moves with its operands, and by its whole divisor where it jumps.
            least = operands[1].real.abs() if node.op == "remainder" else self._zero
            jump = jump | ((radius > 0) & (radius >= least) & _move(operands))
        return Around(value, self._roundings.result(i, node.op, real, radius), jump)


def _on_whole(op: str, value: Tensor, operands: list[Around]) -> Tensor:
    """Whole numbers are exact; of bits that may change nothing is said."""
    if op in RADII:
        return _or_unknown(RADII[op](value.double(), *operands))
    return torch.where(_move(operands), torch.inf, 0.0).double()


def _move(operands: list[Around]) -> Tensor:
    moves = operands[0].moves
    for operand in operands[1:]:
        moves = moves | operand.moves
    return moves


def _or_unknown(radius: Tensor) -> Tensor:
    return torch.nan_to_num(radius, nan=math.inf, posinf=math.inf)
