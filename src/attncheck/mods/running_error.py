"""Running error analysis of a score mod: how it amplifies its score's error, and what it adds.

Every value of the traced expression is computed as the oracle computes it, together with a radius:
the largest distance of a kernel's value from it (Higham, "Accuracy and Stability of Numerical
Algorithms", 2002, section 3.3). A comparison may flip where its operands may meet.

Radii are infinite where no bound is known. They are computed in float64 without outward rounding,
which ``SLACK`` covers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attncheck.core.conditions import ScoreModError
from attncheck.core.formats import FORMATS, Format, spacing
from attncheck.mods.expression import (
    OPERATIONS,
    Algebra,
    Expression,
    Node,
    evaluate,
    node_dtypes,
    torch_algebra,
)
from attncheck.mods.operation_errors import KERNEL_FP32, TORCH_FP64, Arithmetic

SLACK = 1 + 2.0**-16
"""Factor by which fp32 roundings and incoming radii are enlarged: by at least 2^12 units of 2^-53
of the rounded value.

It covers float64's own errors in the oracle's values and in the radii: a few such units wherever
fp32 rounds too, which grow on their way to the result as the radius does.
"""

_SMALLEST = 2.0 ** FORMATS["fp32"].min_exponent  # Kernels may flush smaller fp32 numbers to 0.
_WHOLE_QUOTIENT = 2.0**22  # Smaller floor_divide results in fp32 are exact: see TRITON_ULP.
_NARROW = frozenset({torch.float32, torch.float16, torch.bfloat16})


class RunningError:
    """The analysis of one traced score mod.

    Args:
        expression: The score mod, its captured tensors on the device of the scores.
        tanh_error: Largest relative error of a kernel's tanh, where it is larger than that of
            ``arithmetic``.
        arithmetic: How an implementation computes the mod; ``TORCH_FP64`` for the oracle itself.
        of_reals: Whether to bound the oracle's distance from the mod on real numbers. Roundings to
            narrower formats that the mod asks for then count as errors.
    """

    def __init__(
        self,
        expression: Expression,
        tanh_error: float = 0.0,
        *,
        arithmetic: Arithmetic = KERNEL_FP32,
        of_reals: bool = False,
    ) -> None:
        self._expression = expression
        self._roundings = _Roundings(expression, arithmetic, tanh_error, of_reals=of_reals)

    def at(
        self, products: Tensor, radius: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> ScoreModError:
        """Return the errors at some scores, each ``(heads, rows, kv)``.

        Args:
            products: The exact incoming scores, float64 ``(heads, rows, kv)``.
            radius: The error bounds of a kernel's incoming scores, of that shape.
            b: Sequence indices; index tensors broadcast to that shape.
        """
        arguments = (products, b, h, q_idx, kv_idx)
        nothing = torch.zeros((), dtype=torch.float64, device=products.device)
        # Two walks rather than one with two radii, since on a GPU values fill the memory.
        total, own = (
            evaluate(
                self._expression,
                _RunningErrors(self._roundings, start).algebra(),
                *arguments,
            )
            for start in (radius * SLACK, nothing)
        )
        return ScoreModError(
            radius=total.radius.expand(products.shape).contiguous(),
            own=own.radius.expand(products.shape).contiguous(),
            jump=total.jump.expand(products.shape).contiguous(),
        )


def undecided(expression: Expression, *indices: Tensor) -> Tensor:
    """Return where a kernel's mask may differ from the oracle's: bool, as the indices broadcast.

    Args:
        expression: The mask, its captured tensors on the device of the indices.
        indices: b, h, q_idx and kv_idx.
    """
    nothing = torch.zeros((), dtype=torch.float64, device=indices[0].device)
    roundings = _Roundings(expression, KERNEL_FP32)
    return evaluate(expression, _RunningErrors(roundings, nothing).algebra(), *indices).moves


@dataclass(frozen=True, slots=True, eq=False)
class _Approx:
    """A value with the radius within which a kernel's value lies; shapes broadcast."""

    raw: Any  # the oracle's value from torch; Python numbers stay such, for torch's promotion
    value: Tensor  # ``raw`` as a tensor, of any dtype
    radius: Tensor  # float64, bound on a kernel's error; 1 where a truth value may flip
    jump: Tensor  # bool, whether it may lie on the other side of a jump; the radius holds there too
    format: Format | None = None  # its number format; None for whole and Python numbers

    @property
    def real(self) -> Tensor:
        """The value in float64."""
        return self.value.double()

    @property
    def moves(self) -> Tensor:
        """True where a kernel's value may differ at all."""
        return self.radius > 0

    @property
    def is_truth(self) -> bool:
        """True for truth values."""
        return self.value.dtype is torch.bool


class _RunningErrors:
    """The algebra of one walk: torch's values, with the radii of a kernel's."""

    def __init__(self, roundings: _Roundings, radius: Tensor) -> None:
        self._roundings, self._radius, self._device = roundings, radius, radius.device
        self._torch = torch_algebra(radius.device)
        self._never = torch.zeros((), dtype=torch.bool, device=self._device)
        self._zero = torch.zeros((), dtype=torch.float64, device=self._device)

    def algebra(self) -> Algebra[_Approx]:
        special: dict[str, Callable[..., _Approx]] = {
            "index": self._index,
            "where": self._where,
            "cast": self._cast,
            **dict.fromkeys(("ge", "gt", "le", "lt", "eq", "ne"), self._compare),
        }
        return Algebra.of(self._leaf, self._apply, special)

    def _approx(self, node: Node, raw: Any, radius: Tensor, jump: Tensor) -> _Approx:
        value = raw
        if not isinstance(raw, torch.Tensor):
            kind = torch.float64 if isinstance(raw, float) else None
            value = torch.tensor(raw, dtype=kind, device=self._device)
        return _Approx(raw, value, radius, jump, self._roundings.formats[node])

    def _computed(self, node: Node, operands: Sequence[_Approx]) -> Any:
        return self._torch.operations[node.op](node, *(operand.raw for operand in operands))

    def _leaf(self, node: Node, value: Any) -> _Approx:
        # The trace admits captured numbers only if they are fp32 numbers: no radius.
        score = node.op == "input" and node.name == "score"
        radius = self._radius if score else self._zero
        return self._approx(node, self._torch.leaf(node, value), radius, self._never)

    def _jumps(self, operands: Sequence[_Approx]) -> Tensor:
        """Return where an operand jumps, or is a truth value used as a number that may flip."""
        jump = self._never
        for operand in operands:
            jump = jump | (operand.moves if operand.is_truth else operand.jump)
        return jump

    def _index(self, node: Node, *operands: _Approx) -> _Approx:
        table, *places = operands
        raw = self._computed(node, operands)
        return self._approx(node, raw, *_read_radius(table.value, raw, places))

    def _where(self, node: Node, condition: _Approx, *branches: _Approx) -> _Approx:
        """Reach both branches where the condition may flip.

        The result jumps there unless the branches meet, as those of a ReLU do.
        """
        raw = self._computed(node, (condition, *branches))
        if node.kind == "float":
            branches = tuple(self._roundings.operands(node, branches))
        first, second = branches
        holds, moves = condition.value, condition.moves
        radius, other_radius = _split_branches(holds, first.radius, second.radius)
        jump, other_jump = _split_branches(holds, first.jump, second.jump)
        gap = _distance(first.real, second.real)
        reach = torch.where(moves, torch.maximum(radius, gap + other_radius), radius)
        jump = jump | (moves & (other_jump | (gap > radius + other_radius)))
        return self._approx(node, raw, reach, jump)

    def _compare(self, node: Node, a: _Approx, b: _Approx) -> _Approx:
        raw = self._computed(node, (a, b))
        # x != x is torch.isnan, which rounding does not change.
        isnan = node.operands[0] == node.operands[1]
        radius = self._zero if isnan else _may_meet(*self._roundings.compared([a, b]))
        return self._truth(node, raw, radius)

    def _truth(self, node: Node, raw: Any, radius: Tensor) -> _Approx:
        """Return a truth value; where it may flip only its radius is set, not its jump."""
        return self._approx(node, raw, radius, self._never)

    def _cast(self, node: Node, operand: _Approx) -> _Approx:
        """Round to a real dtype, perhaps in the oracle too; truncate to a whole one."""
        raw: Tensor = self._computed(node, [operand])
        if node.kind == "bool":
            zero = _Approx(0, self._zero, self._zero, self._never)
            return self._truth(node, raw, _may_meet(operand, zero))
        jump = self._jumps([operand])
        if node.kind == "float":
            (held,) = self._roundings.operands(node, [operand])
            radius = held.radius
            if not self._roundings.belongs_to_the_mod(node):
                radius = radius + (raw.double() - operand.real).nan_to_num(nan=0.0).abs()
            return self._approx(node, raw, radius, jump)
        radius = operand.radius
        if operand.value.is_floating_point():
            ends = (torch.trunc(operand.real + sign * radius) for sign in (-1, 1))
            cut = torch.maximum(*((end - raw.double()).abs() for end in ends))
            radius = _nan_to_infinite(torch.where(operand.moves, cut, 0.0))
        return self._approx(node, raw, radius, jump | (radius > 0))

    def _apply(self, node: Node, *operands: _Approx) -> _Approx:
        raw = self._computed(node, operands)
        if node.kind == "bool":
            return self._truth(node, raw, _logical_radius(node.op, *operands))
        jump = self._jumps(operands)
        if node.kind == "float":
            return self._rounded(node, raw, operands, jump)
        if node.op in RADII:  # operations on whole numbers are exact
            value = raw if isinstance(raw, torch.Tensor) else torch.tensor(raw, device=self._device)
            radius = _nan_to_infinite(RADII[node.op](value.double(), *operands))
        else:  # no bound is known for bitwise operations on numbers that may change
            radius = torch.where(_any_moves(operands), torch.inf, 0.0).double()
        if node.op in _JUMPS or node.op not in RADII:
            jump = jump | (radius > 0)
        return self._approx(node, raw, radius, jump)

    def _rounded(self, node: Node, raw: Any, operands: Sequence[_Approx], jump: Tensor) -> _Approx:
        """Return a real operation's value; its radius is the exact one's plus the rounding."""
        result = self._approx(node, raw, self._zero, jump)
        real = result.real
        if result.value.dtype != torch.float64:  # without the oracle's rounding
            real = OPERATIONS[node.op].torch(*(operand.real for operand in operands))
        operands = self._roundings.operands(node, operands)
        operands = [self._roundings.argument(node.op, operand) for operand in operands]
        radius = _nan_to_infinite(RADII[node.op](real, *operands))
        radius = torch.where(real.isinf() & radius.isfinite(), 0.0, radius)
        if node.op in _JUMPS:
            # A remainder changes with its operands, and by its whole divisor where it jumps.
            least = operands[1].real.abs() if node.op == "remainder" else self._zero
            jump = jump | ((radius > 0) & (radius >= least) & _any_moves(operands))
        return replace(result, radius=self._roundings.result(node, real, radius), jump=jump)


# --- roundings --------------------------------------------------------------------------------


class _Roundings:
    """The roundings of one expression in one arithmetic: of results, operands and stored values.

    Where the mod makes the oracle compute in a narrower format than float64, a kernel rounds too,
    and not always to the same number: such errors count twice. In the oracle's own arithmetic
    they do not count, being part of the mod's definition, unless ``of_reals`` is set.
    """

    def __init__(
        self,
        expression: Expression,
        arithmetic: Arithmetic,
        tanh_error: float = 0.0,
        *,
        of_reals: bool = False,
    ) -> None:
        self._arithmetic, self._tanh_error = arithmetic, tanh_error
        self._widest, self._of_reals = arithmetic.format, of_reals and arithmetic is TORCH_FP64
        nodes, exact = expression.structure.nodes, arithmetic.format.name == "fp64"
        scores = FORMATS["fp64" if exact else "fp32"].torch_dtype
        # Equal nodes are the same value, of one dtype.
        dtypes = node_dtypes(expression, scores)
        # The format of each node; None for whole and Python numbers.
        self.formats = dict(zip(nodes, map(arithmetic.format_of, dtypes), strict=True))
        # How often each node's rounding counts. In float64 four times, since radii, computed in
        # float64 too, are as inaccurate as the values that they bound.
        often, once = (4 * of_reals, 4) if exact else (2, 1)
        computed = [dtype in _NARROW for dtype in node_dtypes(expression, torch.float64)]
        self._times = dict(zip(nodes, (often if n else once for n in computed), strict=True))

    def belongs_to_the_mod(self, node: Node) -> bool:
        """Return whether a node's rounding is part of the mod's definition, and so no error."""
        return not self._times[node]

    def result(self, node: Node, real: Tensor, radius: Tensor) -> Tensor:
        """Return the radius of a rounded result, from the ``radius`` of the exact one.

        Infinite where the result may be beyond the largest number.
        """
        op, fmt = node.op, self.formats[node] or self._widest
        ulps = self._arithmetic.ulps.get(op, 0.0)
        if not ulps or self.belongs_to_the_mod(node):
            return radius
        added = ulps * _ulp(real, radius, fmt)
        if op == "tanh":
            added = torch.maximum(added, self._tanh_error * (real.abs() + radius))
        if op == "floor_divide":
            added = torch.where(real.abs() + radius < _WHOLE_QUOTIENT, 0.0, added)
        added = added * (self._times[node] * SLACK)
        smallest = 2.0**fmt.min_exponent
        added = torch.where(real.abs() - radius < smallest, added + smallest, added)  # flushed
        # With ``of_reals`` ``real`` itself may be rounded to float64: being held proves nothing.
        held = _is_held(real, fmt) & (ulps <= 0.5) & (not self._of_reals)
        exact = (radius == 0) & ((real == 0) | held)
        total = torch.where(exact | real.isinf(), radius, radius + added)
        # Rounding to nearest maps up to half a unit beyond the largest number to this number.
        reach = radius if ulps <= 0.5 else total
        # Half a unit beyond the largest number; infinite for fp64.
        largest = fmt.max + math.ldexp(1.0, math.frexp(fmt.max)[1] - 1 - fmt.significand)
        beyond = (real.abs() + reach > largest) & ~real.isinf()
        return torch.where(beyond, torch.inf, total)

    def argument(self, op: str, operand: _Approx) -> _Approx:
        """Return an operand that is rounded before the operation, as that of exp is."""
        ulps = self._arithmetic.argument_ulps.get(op, 0.0)
        if not ulps:
            return operand
        added = ulps * SLACK * _ulp(operand.real, operand.radius, self._widest)
        return replace(operand, radius=operand.radius + added)

    def operands(self, node: Node, operands: Sequence[_Approx]) -> list[_Approx]:
        """Return operands in the format that ``node`` is computed in."""
        fmt = self.formats[node] or self._widest
        return [self._operand(fmt, operand, self._times[node]) for operand in operands]

    def compared(self, operands: list[_Approx]) -> list[_Approx]:
        """Return operands in the widest of their formats; unchanged if all are whole numbers."""
        if not any(operand.value.is_floating_point() for operand in operands):
            return operands
        formats = [operand.format for operand in operands if operand.format is not None]
        fmt = max(formats, key=lambda f: f.significand, default=FORMATS["fp32"])
        return [self._operand(fmt, operand, 2) for operand in operands]

    def _operand(self, fmt: Format, operand: _Approx, times: int) -> _Approx:
        """Return an operand in ``fmt``; numbers without a format and wider ones are rounded."""
        own = operand.format
        if operand.is_truth or (own is not None and own.significand <= fmt.significand):
            return operand
        real, radius = operand.real, operand.radius
        exact = (radius == 0) & _is_held(real, fmt)
        if not operand.value.is_floating_point():
            exact = exact | (real.abs() + radius < 2.0**fmt.significand)
        half = times * 0.5 * SLACK * _ulp(real, radius, fmt)
        return replace(operand, radius=radius + torch.where(exact, 0.0, half))


def _is_held(real: Tensor, fmt: Format) -> Tensor:
    """Return where ``fmt`` holds a number exactly."""
    return real == real.to(fmt.torch_dtype).double()


def _ulp(real: Tensor, radius: Tensor, fmt: Format) -> Tensor:
    """Return a unit in the last place of the largest number within ``radius`` of ``real``."""
    return spacing((real.abs() + radius).nan_to_num(nan=0.0, posinf=fmt.max), fmt)


# --- radii of the results of exact operations, from the operands' radii ------------------------


def _sum(_result: Tensor, a: _Approx, b: _Approx) -> Tensor:
    return a.radius + b.radius


def _product(_result: Tensor, a: _Approx, b: _Approx) -> Tensor:
    return a.real.abs() * b.radius + b.real.abs() * a.radius + a.radius * b.radius


def _quotient(result: Tensor, a: _Approx, b: _Approx) -> Tensor:
    room = b.real.abs() - b.radius  # the divisor's smallest size
    return torch.where(room > 0, (a.radius + result.abs() * b.radius) / room, torch.inf)


def _operand_radius(_result: Tensor, a: _Approx) -> Tensor:
    return a.radius


def _radius_of_extreme(sign: int) -> Callable[[Tensor, _Approx, _Approx], Tensor]:
    """Return the radius function of min or max: of the operand that surely wins, or the larger."""

    def radius(_result: Tensor, a: _Approx, b: _Approx) -> Tensor:
        ahead, both = sign * (a.real - b.real), a.radius + b.radius
        either = torch.maximum(a.radius, b.radius)
        return torch.where(ahead > both, a.radius, torch.where(-ahead > both, b.radius, either))

    return radius


def _monotone(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, _Approx], Tensor]:
    """Return a radius function: the larger distance from the result to the values at both ends."""

    def radius(result: Tensor, a: _Approx) -> Tensor:
        ends = (function(a.real - a.radius), function(a.real + a.radius))
        return torch.maximum(*(_distance(end, result) for end in ends))

    return radius


def _monotone_from_0(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, _Approx], Tensor]:
    """Return the radius function of a monotone ``function`` on x ≥ 0 that may flush subnormals."""
    ends = _stepping(function)

    def radius(result: Tensor, a: _Approx) -> Tensor:
        least = a.real - _flushed(a).radius
        return torch.where(least >= 0, ends(result, a), torch.inf)

    return radius


def _stepping(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, _Approx], Tensor]:
    """Return the radius function of a step function that may flush subnormals to 0."""
    ends = _monotone(function)
    return lambda result, a: ends(result, _flushed(a))


def _flushed(a: _Approx) -> _Approx:
    tiny = (a.real != 0) & (a.real.abs() < _SMALLEST)
    return replace(a, radius=torch.where(tiny, a.radius + _SMALLEST, a.radius))


def _wave(_result: Tensor, a: _Approx) -> Tensor:
    return _flushed(a).radius.clamp(max=2.0)


def _whole_quotient(result: Tensor, a: _Approx, b: _Approx) -> Tensor:
    exact = a.real / b.real
    spread = _quotient(exact, a, b)
    ends = (torch.floor(exact - spread), torch.floor(exact + spread))
    return torch.where(spread > 0, torch.maximum(*(_distance(e, result) for e in ends)), 0.0)


def _remainder(_result: Tensor, a: _Approx, b: _Approx) -> Tensor:
    whole = torch.floor(a.real / b.real)
    same_quotient = a.radius + whole.abs() * b.radius
    size = b.real.abs()
    radius = torch.where(_whole_quotient(whole, a, b) > 0, size + b.radius, same_quotient)
    return torch.where((size > b.radius) | (b.radius == 0), radius, torch.inf)


RADII: dict[str, Callable[..., Tensor]] = {
    "add": _sum,
    "sub": _sum,
    "mul": _product,
    "div": _quotient,
    "neg": _operand_radius,
    "abs": _operand_radius,
    "minimum": _radius_of_extreme(-1),
    "maximum": _radius_of_extreme(1),
    "floor_divide": _whole_quotient,
    "remainder": _remainder,
    "floor": _stepping(torch.floor),
    "ceil": _stepping(torch.ceil),
    "sign": _stepping(torch.sign),
    "tanh": _monotone(torch.tanh),
    "sigmoid": _monotone(torch.sigmoid),
    "exp": _monotone(torch.exp),
    "exp2": _monotone(torch.exp2),
    "log": _monotone_from_0(torch.log),
    "log2": _monotone_from_0(torch.log2),
    "sqrt": _monotone_from_0(torch.sqrt),
    "rsqrt": _monotone_from_0(torch.rsqrt),
    "sin": _wave,
    "cos": _wave,
}
"""Functions (result, *operands) → radius; those of sums and products hold for whole numbers too."""

_JUMPS = frozenset({"floor_divide", "remainder", "floor", "ceil", "sign"})  # step functions


def _may_meet(a: _Approx, b: _Approx) -> Tensor:
    """Return the radius of a comparison's truth value: 1 where the operands may meet."""
    reach = a.radius + b.radius
    meet = (_distance(a.real, b.real) <= reach) | torch.isinf(reach)
    return ((reach > 0) & meet).double()


def _logical_radius(op: str, *operands: _Approx) -> Tensor:
    """Return the radius of and, or, xor, not: 1 where an operand that may flip decides."""
    if op == "not":
        return operands[0].radius
    a, b = operands
    if op == "xor":
        return torch.maximum(a.radius, b.radius)
    # One operand decides the result where the other is, or may be, true for and, false for or.
    a_lets_b_decide, b_lets_a_decide = ((x.value == (op == "and")) | x.moves for x in operands)
    return ((a.moves & b_lets_a_decide) | (b.moves & a_lets_b_decide)).double()


def _read_radius(table: Tensor, value: Tensor, places: Sequence[_Approx]) -> tuple[Tensor, Tensor]:
    """Return the radius of ``table[places]``, and where another element may be read.

    If one index may be off by one, up or down, the neighbour with the larger difference counts;
    beyond that the radius is infinite.
    """
    place_radii = [place.radius for place in places]
    total = sum(place_radii[1:], start=place_radii[0])
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


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Return |a − b|; 0 for equal infinities."""
    return torch.where(a == b, 0.0, (a - b).abs())


def _split_branches(holds: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the branch that a condition takes, the other branch), elementwise."""
    return torch.where(holds, first, second), torch.where(holds, second, first)


def _any_moves(operands: Sequence[_Approx]) -> Tensor:
    moves = operands[0].moves
    for operand in operands[1:]:
        moves = moves | operand.moves
    return moves


def _nan_to_infinite(radius: Tensor) -> Tensor:
    return torch.nan_to_num(radius, nan=math.inf, posinf=math.inf)
