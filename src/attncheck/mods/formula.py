"""Masks and score mods written as formulas, as ``q_idx % 3 <= kv_idx``.

The text is a Python expression of whole numbers, truth values and, in a score mod, real numbers. It
becomes a FlexAttention callable of plain torch operations; nothing of it is run before every part
is known to be in this vocabulary:

* ``b``, ``h``, ``q_idx``, ``kv_idx`` and, in a score mod, ``score``; numbers.
* ``+ - *``, ``//`` and ``%`` of whole numbers by a number (rounding down, as in Python and torch),
  unary ``-``, ``abs(x)``, ``minimum(x, y)``, ``maximum(x, y)``.
* Comparisons, and ``& | ~`` of them.
* In a score mod also ``/`` by a number, ``tanh(x)`` and ``where(condition, x, y)``.

Whole numbers fit in 32 bits at all indices of a Problem. Real ones are rounded to fp32, and all
arithmetic with them is in the dtype of the incoming score.
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from attncheck.core.errors import ProblemError
from attncheck.core.formats import fp32

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.mods.spec import Dimensions, MaskMod, ScoreMod

__all__ = [
    "FORMULA_FUNCTIONS",
    "JOINED",
    "SCORE_FUNCTIONS",
    "FormulaKind",
    "FormulaRange",
    "Part",
    "as_real",
    "compute",
    "constant",
    "formula_mask",
    "formula_score",
    "mask_formula_code",
    "promote",
    "refusal",
    "require_truth",
    "score_formula_code",
]


FormulaKind: TypeAlias = Literal["truth", "whole", "real"]
FormulaRange: TypeAlias = tuple[int, int]

JOINED = "join comparisons, as (b < h) & (h < 3)"
"""What to do where a number stands for a truth value."""

_INT32: FormulaRange = (-(2**31), 2**31 - 1)
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

    kind: FormulaKind
    code: str
    range: FormulaRange = (0, 0)
    value: float | None = None
    scored: bool = False


def _abs(node: ast.expr, part: Part) -> Part:
    return compute(node, abs, "abs({})", part)


def _minimum(node: ast.expr, *parts: Part) -> Part:
    return _clamped(node, min, "torch.clamp({}, max={})", *parts)


def _maximum(node: ast.expr, *parts: Part) -> Part:
    return _clamped(node, max, "torch.clamp({}, min={})", *parts)


def _tanh(node: ast.expr, part: Part) -> Part:
    _require_numbers(node, part)
    if part.value is not None:
        raise refusal(node, "is a number", "write it as one")
    return Part(kind="real", code=f"torch.tanh({as_real(part).code})", scored=part.scored)


def _where(node: ast.expr, condition: Part, *branches: Part) -> Part:
    require_truth(node, condition)
    one, other = promote(node, *branches)
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

FORMULA_FUNCTIONS: dict[str, tuple[int, _Function]] = {
    "abs": (1, _abs),
    "minimum": (2, _minimum),
    "maximum": (2, _maximum),
}
"""Each with how many arguments it takes."""

SCORE_FUNCTIONS: dict[str, tuple[int, _Function]] = {"tanh": (1, _tanh), "where": (3, _where)}
"""Those that a score mod has besides."""


def compute(node: ast.expr, function: Callable[..., float], template: str, *parts: Part) -> Part:
    """``function`` of numbers: a number if they are, otherwise ``template`` of their code."""
    parts = promote(node, *parts)
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
    return compute(node, function, template, one, other)


def _range_of(node: ast.expr, function: Callable[..., float], *parts: Part) -> FormulaRange:
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
        raise refusal(node, f"is {value:g}", "a number is one that fp32 holds")
    return Part(kind="real", code=repr(rounded), value=rounded)


def promote(node: ast.expr, *parts: Part) -> tuple[Part, ...]:
    """The parts as real numbers if one of them is."""
    _require_numbers(node, *parts)
    return tuple(map(as_real, parts)) if any(part.kind == "real" for part in parts) else parts


def as_real(part: Part) -> Part:
    """A whole number in the score's dtype: in fp32, torch's choice, float64 would be lost."""
    if part.kind == "real":
        return part
    if part.value is not None:
        value = fp32(part.value)
        return Part(kind="real", code=repr(value), value=value)
    return Part(kind="real", code=f"({part.code}).to(score.dtype)")


def _require_numbers(node: ast.expr, *parts: Part) -> None:
    if any(part.kind == "truth" for part in parts):
        raise refusal(node, "computes with a truth value", "compare, join, or choose with those")


def require_truth(node: ast.expr, *parts: Part) -> None:
    """Raises ProblemError unless every part of ``node`` is a truth value."""
    if any(part.kind != "truth" for part in parts):
        raise refusal(node, "takes a number for a truth value", JOINED)


def _require_32_bits(node: ast.expr, value: int) -> None:
    if not _INT32[0] <= value <= _INT32[1]:
        raise refusal(node, f"may be {value}", "whole numbers are of 32 bits in kernels")


def refusal(node: ast.expr, fact: str, remedy: str) -> ProblemError:
    """What is wrong with ``node``, with its column and what to do."""
    text = ast.unparse(node)
    shown = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
    return ProblemError(f"column {node.col_offset + 1}: `{shown}` {fact}: {remedy}.")


_DEEPEST = 24
_REMEMBERED = 4096
_INDICES = ("b", "h", "q_idx", "kv_idx")
_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.GtE: ">=",
    ast.Gt: ">",
    ast.LtE: "<=",
    ast.Lt: "<",
    ast.Eq: "==",
    ast.NotEq: "!=",
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, Callable[..., float]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.FloorDiv: ("//", operator.floordiv),
    ast.Mod: ("%", operator.mod),
}
_MAY_BE = "there are + - * // % - abs, comparisons, & | ~, minimum, maximum, in scores / tanh where"
_LOGIC: dict[type[ast.operator], str] = {ast.BitAnd: "&", ast.BitOr: "|"}


def formula_mask(text: str, dimensions: Dimensions) -> MaskMod:
    """The mask that ``text`` says; raises as ``read_mask``."""
    found: MaskMod = _compiled("mask", _INDICES, mask_formula_code(text, dimensions))
    return found


def formula_score(text: str, dimensions: Dimensions) -> ScoreMod:
    """The score mod that ``text`` says; raises as ``read_score``."""
    names = ("score", *_INDICES)
    found: ScoreMod = _compiled("score_mod", names, score_formula_code(text, dimensions))
    return found


@lru_cache(maxsize=_REMEMBERED)
def mask_formula_code(text: str, dimensions: Dimensions) -> str:
    """Python on torch tensors that computes the mask ``text``.

    Args:
        text: One line.
        dimensions: The index ranges at which its whole numbers must fit in 32 bits.

    Raises:
        ProblemError: for what is not in the vocabulary, with the column; of no mask.
    """
    part = _Reader(dimensions, scores=False).read(text)
    if part.kind != "truth":
        raise ProblemError(f"gives a {_SAID[part.kind]}: a mask compares, as in q_idx >= kv_idx.")
    return part.code


@lru_cache(maxsize=_REMEMBERED)
def score_formula_code(text: str, dimensions: Dimensions) -> str:
    """Python on torch tensors that computes the score mod ``text``; otherwise as ``read_mask``."""
    part = _Reader(dimensions, scores=True).read(text)
    if part.kind == "truth":
        raise ProblemError("gives a truth value: a score mod gives a number, as in score * 0.5.")
    if not part.scored:
        raise ProblemError("does not read score: a score mod begins with it, as in score + kv_idx.")
    return as_real(part).code  # of whole numbers too: what follows in a chain computes with it


@lru_cache(maxsize=_REMEMBERED)
def _compiled(name: str, arguments: tuple[str, ...], code: str) -> Any:
    """A function of its own, so that torch.compile and the tracer read plain operations.

    The same one for the same text: torch.compile would compile another anew.
    """
    import torch

    source = f"def {name}({', '.join(arguments)}):\n    return {code}\n"
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(source, "<expression>", "exec"), scope)  # noqa: S102  (printed by _Reader)
    return scope[name]


_SAID: dict[FormulaKind, str] = {
    "truth": "truth value",
    "whole": "whole number",
    "real": "real number",
}


class _Reader:
    """Goes through a text once, from the outside in."""

    def __init__(self, dimensions: Dimensions, *, scores: bool) -> None:
        sizes = (dimensions.batch, dimensions.heads, dimensions.query, dimensions.kv)
        self._ranges = dict(zip(_INDICES, ((0, size - 1) for size in sizes), strict=True))
        self._scores = scores
        self._depth = 0

    def read(self, text: str) -> Part:
        with warnings.catch_warnings():  # Python warns of what we refuse, as "1is b"
            warnings.simplefilter("ignore")
            try:
                tree = ast.parse(text.strip(), mode="eval")
            except SyntaxError:
                raise ProblemError("is no expression: write one, as q_idx >= kv_idx.") from None
            except (MemoryError, RecursionError):
                raise ProblemError(f"is nested deeper than {_DEEPEST} operations.") from None
        return self._part(tree.body)

    def _part(self, node: ast.expr) -> Part:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ProblemError(f"is nested deeper than {_DEEPEST} operations.")
        reads: dict[type[ast.expr], Callable[[Any], Part]] = {
            ast.Constant: self._number,
            ast.Name: self._name,
            ast.UnaryOp: self._unary,
            ast.BinOp: self._binary,
            ast.Compare: self._compare,
            ast.Call: self._call,
        }
        if type(node) not in reads:
            raise refusal(node, "is not in the vocabulary", _MAY_BE)
        part = reads[type(node)](node)
        self._depth -= 1
        return part

    def _number(self, node: ast.Constant) -> Part:
        if type(node.value) is int or (type(node.value) is float and self._scores):
            return constant(node, node.value)
        able = "whole and real numbers" if self._scores else "whole numbers"
        raise refusal(node, "is no number of it", f"write {able}")

    def _name(self, node: ast.Name) -> Part:
        if node.id in self._ranges:
            return Part(kind="whole", code=node.id, range=self._ranges[node.id])
        if node.id == "score" and self._scores:
            return Part(kind="real", code="score", scored=True)
        able = ", ".join([*_INDICES, *["score"] * self._scores])
        raise refusal(node, "is not known", f"choose from {able}")

    def _unary(self, node: ast.UnaryOp) -> Part:
        part = self._part(node.operand)
        if isinstance(node.op, ast.Invert):
            require_truth(node, part)
            return Part(kind="truth", code=f"~({part.code})", scored=part.scored)
        if not isinstance(node.op, ast.USub):
            raise refusal(node, "is not in the vocabulary", _MAY_BE)
        return compute(node, operator.neg, "-({})", part)

    def _binary(self, node: ast.BinOp) -> Part:
        left, right = self._part(node.left), self._part(node.right)
        if type(node.op) in _LOGIC:
            require_truth(node, left, right)
            code = f"({left.code}) {_LOGIC[type(node.op)]} ({right.code})"
            return Part(kind="truth", code=code, scored=left.scored or right.scored)
        if type(node.op) not in _ARITHMETIC:
            raise refusal(node, "is not in the vocabulary", _MAY_BE)
        sign, function = _ARITHMETIC[type(node.op)]
        if sign in {"/", "//", "%"} and not right.value:
            by = ast.unparse(node.right)
            raise refusal(node, f"divides by {by}", "a divisor is a number other than 0")
        if sign == "/" and not self._scores:
            raise refusal(node, "is a real number", "in a mask divide with //, which rounds down")
        if sign in {"//", "%"} and "real" in {left.kind, right.kind}:
            raise refusal(node, f"takes {sign} of a real number", f"{sign} is for whole ones")
        if sign == "/":
            left = as_real(left)
        return compute(node, function, f"({{}}) {sign} ({{}})", left, right)

    def _compare(self, node: ast.Compare) -> Part:
        if len(node.ops) > 1:
            raise refusal(node, "compares twice", JOINED)
        (op,), (other,) = node.ops, node.comparators
        if type(op) not in _COMPARISONS:
            raise refusal(node, "is not in the vocabulary", _MAY_BE)
        parts = promote(node, self._part(node.left), self._part(other))
        if all(part.value is not None for part in parts):
            raise refusal(node, "compares two numbers", "compare an index, or leave it out")
        code = f"({parts[0].code}) {_COMPARISONS[type(op)]} ({parts[1].code})"
        return Part(kind="truth", code=code, scored=any(part.scored for part in parts))

    def _call(self, node: ast.Call) -> Part:
        functions = FORMULA_FUNCTIONS | (SCORE_FUNCTIONS if self._scores else {})
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in functions:
            able = ", ".join(functions)
            raise refusal(node.func, "is no function of it", f"choose from {able}")
        count, function = functions[name]
        if len(node.args) != count or node.keywords:
            raise refusal(node, "has other arguments", f"{name} takes {count}, without names")
        return function(node, *map(self._part, node.args))
