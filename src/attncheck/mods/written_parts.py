"""What the operations of a written mod make of their operands: kind, range and torch code."""

from __future__ import annotations

import ast
import itertools
import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from attncheck.errors import ProblemError
from attncheck.formats import fp32

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "FUNCTIONS",
    "FUNCTIONS_OF_SCORES",
    "JOINED",
    "Kind",
    "Part",
    "Range",
    "alike",
    "computed",
    "constant",
    "real",
    "refused",
    "require_truth",
]

Kind: TypeAlias = Literal["truth", "whole", "real"]
Range: TypeAlias = tuple[int, int]

JOINED = "join comparisons, as (b < h) & (h < 3)"
"""What to do where a number stands for a truth value."""

_INT32: Range = (-(2**31), 2**31 - 1)
_LONGEST = 40  # characters of a part in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a text, understood.

    Attributes:
        kind: What it gives.
        code: Python that computes it on tensors.
        range: A whole number's smallest and largest value.
        value: The number, if it is one whatever the indices.
        scored: Whether it reads the score.
    """

    kind: Kind
    code: str
    range: Range = (0, 0)
    value: float | None = None
    scored: bool = False


def _abs(node: ast.expr, part: Part) -> Part:
    return computed(node, abs, "abs({})", part)


def _minimum(node: ast.expr, *parts: Part) -> Part:
    return _clamped(node, min, "torch.clamp({}, max={})", *parts)


def _maximum(node: ast.expr, *parts: Part) -> Part:
    return _clamped(node, max, "torch.clamp({}, min={})", *parts)


def _tanh(node: ast.expr, part: Part) -> Part:
    _require_numbers(node, part)
    if part.value is not None:
        raise refused(node, "is a number", "write it as one")
    return Part(kind="real", code=f"torch.tanh({real(part).code})", scored=part.scored)


def _where(node: ast.expr, condition: Part, *branches: Part) -> Part:
    require_truth(node, condition)
    one, other = alike(node, *branches)
    code = f"torch.where({condition.code}, {one.code}, {other.code})"
    lows, highs = zip(one.range, other.range, strict=True)
    return Part(
        kind=one.kind,
        # Of two Python numbers torch gives its default dtype.
        code=f"{code}.to(score.dtype)" if one.kind == "real" else code,
        range=(min(lows), max(highs)),
        scored=condition.scored or one.scored or other.scored,
    )


_Function: TypeAlias = "Callable[..., Part]"

FUNCTIONS: dict[str, tuple[int, _Function]] = {
    "abs": (1, _abs),
    "minimum": (2, _minimum),
    "maximum": (2, _maximum),
}
"""Each with how many arguments it takes."""

FUNCTIONS_OF_SCORES: dict[str, tuple[int, _Function]] = {"tanh": (1, _tanh), "where": (3, _where)}
"""Those that a score mod has besides."""


def computed(node: ast.expr, function: Callable[..., float], template: str, *parts: Part) -> Part:
    """``function`` of numbers: a number if they are, otherwise ``template`` of their code."""
    parts = alike(node, *parts)
    if all(part.value is not None for part in parts):
        return constant(node, function(*(part.value for part in parts)))
    code = template.format(*(part.code for part in parts))
    if parts[0].kind == "real":
        return Part(kind="real", code=code, scored=any(part.scored for part in parts))
    return Part(kind="whole", code=code, range=_range_of(node, function, *parts))


def _clamped(
    node: ast.expr, function: Callable[..., float], template: str, one: Part, other: Part
) -> Part:
    if one.value is None and other.value is None:
        template = f"torch.{function.__name__}imum({{}}, {{}})"
    elif one.value is not None:  # clamp takes the number last
        one, other = other, one
    return computed(node, function, template, one, other)


def _range_of(node: ast.expr, function: Callable[..., float], *parts: Part) -> Range:
    """The extremes of what is monotone between them; refused beyond 32 bits."""
    if function is operator.mod:
        divisor = int(parts[1].value or 0)
        return min(0, divisor + 1), max(0, divisor - 1)
    values = [int(function(*corner)) for corner in itertools.product(*(p.range for p in parts))]
    if function is abs and parts[0].range[0] < 0 < parts[0].range[1]:
        values.append(0)
    for value in values:
        _require_32_bits(node, value)
    return min(values), max(values)


def constant(node: ast.expr, value: float) -> Part:
    """A number: a whole one of 32 bits, or a real one rounded to fp32; else refused."""
    if isinstance(value, int):
        _require_32_bits(node, value)
        return Part(kind="whole", code=repr(value), range=(value, value), value=value)
    rounded = fp32(value)
    if not math.isfinite(rounded):
        raise refused(node, f"is {value:g}", "a number is one that fp32 holds")
    return Part(kind="real", code=repr(rounded), value=rounded)


def alike(node: ast.expr, *parts: Part) -> tuple[Part, ...]:
    """The parts as real numbers if one of them is."""
    _require_numbers(node, *parts)
    return tuple(map(real, parts)) if any(part.kind == "real" for part in parts) else parts


def real(part: Part) -> Part:
    """A whole number in the score's dtype: in fp32, torch's choice, float64 would be lost."""
    if part.kind == "real":
        return part
    if part.value is not None:
        value = fp32(part.value)
        return Part(kind="real", code=repr(value), value=value)
    return Part(kind="real", code=f"({part.code}).to(score.dtype)")


def _require_numbers(node: ast.expr, *parts: Part) -> None:
    if any(part.kind == "truth" for part in parts):
        raise refused(node, "computes with a truth value", "compare, join, or choose with those")


def require_truth(node: ast.expr, *parts: Part) -> None:
    """Raises ProblemError unless every part of ``node`` is a truth value."""
    if any(part.kind != "truth" for part in parts):
        raise refused(node, "takes a number for a truth value", JOINED)


def _require_32_bits(node: ast.expr, value: int) -> None:
    if not _INT32[0] <= value <= _INT32[1]:
        raise refused(node, f"may be {value}", "whole numbers are of 32 bits in kernels")


def refused(node: ast.expr, fact: str, remedy: str) -> ProblemError:
    """What is wrong with ``node``, with its column and what to do."""
    text = ast.unparse(node)
    shown = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
    return ProblemError(f"column {node.col_offset + 1}: `{shown}` {fact}: {remedy}.")
