"""How far the result of an operation may move when its operands may: one rule an operation.

Operands are float64 tensors with a radius each, which may be anywhere within it. Results are radii
of the exact operation; what rounds is added by ``running_error``. A radius is infinite where
nothing can be said. Rules compute in float64 without outward rounding: see ``running_error.SLACK``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = [
    "JUMPS",
    "RADII",
    "SMALLEST",
    "WHOLE_QUOTIENT",
    "Around",
    "chosen",
    "compared",
    "logical",
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


def compared(a: Around, b: Around) -> Tensor:
    """The radius of a comparison's truth value: 1 where the operands may meet."""
    reach = a.radius + b.radius
    meet = (_apart(a.real, b.real) <= reach) | torch.isinf(reach)
    return ((reach > 0) & meet).double()


def logical(op: str, *operands: Around) -> Tensor:
    """The radius of and, or, xor, not of truth values: 1 where one that may change decides."""
    if op == "not":
        return operands[0].radius
    a, b = operands
    if op == "xor":
        return torch.maximum(a.radius, b.radius)
    # What the other must be, or may be, for this one to decide: true for and, false for or.
    open_a, open_b = ((x.value == (op == "and")) | x.moves for x in operands)
    return ((a.moves & open_b) | (b.moves & open_a)).double()


def chosen(condition: Around, first: Around, second: Around) -> tuple[Tensor, Tensor]:
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
