"""Masks and score mods written as formulas, as ``q_idx % 3 <= kv_idx``.

The text is a Python expression of whole numbers, truth values and, in a score mod, real numbers. It
becomes a FlexAttention callable of plain torch operations. Nothing of it is run before every part
has been checked against this vocabulary:

* ``b``, ``h``, ``q_idx``, ``kv_idx`` and, in a score mod, ``score``; numbers.
* ``+ - *``, ``//`` and ``%`` of whole numbers by a number (rounding down, as in Python and torch),
  unary ``-``, ``abs(x)``, ``minimum(x, y)``, ``maximum(x, y)``.
* Comparisons, and ``& | ~`` of them.
* In a score mod also ``/`` by a number, ``tanh(x)`` and ``where(condition, x, y)``.

Whole numbers must fit in 32 bits at all indices of a Problem. Real numbers are rounded to fp32, and
all arithmetic with them is in the dtype of the incoming score.
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from attncheck.core.errors import ProblemError
from attncheck.core.formats import fp32
from attncheck.core.mod_spec import Dimensions
from attncheck.mods.signatures import MaskMod, ScoreMod

_INDICES = ("b", "h", "q_idx", "kv_idx")
_DEEPEST = 24  # Most levels of nested operations.
_CACHE_SIZE = 4096
_INT32 = (-(2**31), 2**31 - 1)
_LONGEST = 40  # Most characters of a quoted part in a message.


def formula_mask(text: str, dimensions: Dimensions) -> MaskMod:
    """Return the mask that ``text`` describes; raise as ``mask_formula_code``."""
    mod: MaskMod = _compile_text("mask", _INDICES, mask_formula_code(text, dimensions))
    return mod


def formula_score(text: str, dimensions: Dimensions) -> ScoreMod:
    """Return the score mod that ``text`` describes; raise as ``score_formula_code``."""
    names = ("score", *_INDICES)
    mod: ScoreMod = _compile_text("score_mod", names, score_formula_code(text, dimensions))
    return mod


@lru_cache(maxsize=_CACHE_SIZE)
def mask_formula_code(text: str, dimensions: Dimensions) -> str:
    """Return Python on torch tensors that computes the mask ``text``.

    Args:
        dimensions: The index ranges at which its whole numbers must fit in 32 bits.

    Raises:
        ProblemError: for parts outside the vocabulary, with the column; or if it is no mask.
    """
    part = _Reader(dimensions, scores=False).read(text)
    if part.kind != "truth value":
        raise ProblemError(f"gives a {part.kind}: a mask compares, as in q_idx >= kv_idx.")
    return part.code


@lru_cache(maxsize=_CACHE_SIZE)
def score_formula_code(text: str, dimensions: Dimensions) -> str:
    """Return Python on torch tensors that computes the score mod ``text``; as the mask's."""
    part = _Reader(dimensions, scores=True).read(text)
    if part.kind == "truth value":
        raise ProblemError("gives a truth value: a score mod gives a number, as in score * 0.5.")
    if not part.scored:
        raise ProblemError("does not read score: a score mod begins with it, as in score + kv_idx.")
    return _as_real(part).code  # whole numbers too: later parts of a chain use the result


@lru_cache(maxsize=_CACHE_SIZE)
def _compile_text(name: str, arguments: tuple[str, ...], code: str) -> Any:
    """Return a function of plain operations, which torch.compile and the tracer can read.

    Equal texts get the same function, since torch.compile would compile each new one.
    """
    import torch

    source = f"def {name}({', '.join(arguments)}):\n    return {code}\n"
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(source, "<expression>", "exec"), scope)  # noqa: S102  (printed by _Reader)
    return scope[name]


# --- parts ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A parsed part of a text."""

    kind: Literal["truth value", "whole number", "real number"]  # of its value
    code: str  # Python that computes it on tensors
    range: tuple[int, int] = (0, 0)  # a whole number's smallest and largest value
    value: float | None = None  # its value, if it is a constant
    scored: bool = False  # whether it reads the score


def _refusal(node: ast.expr, fact: str, remedy: str) -> ProblemError:
    """Return an error about ``node``, with its column, the ``fact`` and the ``remedy``."""
    text = ast.unparse(node)
    short = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
    return ProblemError(f"column {node.col_offset + 1}: `{short}` {fact}: {remedy}.")


def _constant(node: ast.expr, value: float) -> _Part:
    """Return a number as 32-bit whole or fp32 real number; raise if it is beyond them."""
    if isinstance(value, int):
        _require_32_bits(node, value)
        return _Part(kind="whole number", code=repr(value), range=(value, value), value=value)
    rounded = fp32(value)
    if not math.isfinite(rounded):
        raise _refusal(node, f"is {value:g}", "a number is one that fp32 holds")
    return _Part(kind="real number", code=repr(rounded), value=rounded)


def _as_real(part: _Part) -> _Part:
    """Return a whole number in the score's dtype; torch's choice, fp32, would lose float64."""
    if part.kind == "real number":
        return part
    if part.value is not None:
        value = fp32(part.value)
        return _Part(kind="real number", code=repr(value), value=value)
    return _Part(kind="real number", code=f"({part.code}).to(score.dtype)", scored=part.scored)


def _promote(node: ast.expr, *parts: _Part) -> tuple[_Part, ...]:
    """Return the parts as real numbers if one of them is."""
    if any(part.kind == "truth value" for part in parts):
        raise _refusal(node, "computes with a truth value", "compare, join, or choose with those")
    real = any(part.kind == "real number" for part in parts)
    return tuple(map(_as_real, parts)) if real else parts


def _require_truth(node: ast.expr, *parts: _Part) -> None:
    if any(part.kind != "truth value" for part in parts):
        raise _refusal(node, "takes a number for a truth value", _JOIN_REMEDY)


_JOIN_REMEDY = "join comparisons, as (b < h) & (h < 3)"  # where a number stands for a truth value


def _require_32_bits(node: ast.expr, value: int) -> None:
    if not _INT32[0] <= value <= _INT32[1]:
        raise _refusal(node, f"may be {value}", "whole numbers are of 32 bits in kernels")


def _compute(node: ast.expr, function: Callable[..., float], template: str, *parts: _Part) -> _Part:
    """Return a constant if all ``parts`` are, else ``template`` filled with their code."""
    parts = _promote(node, *parts)
    if all(part.value is not None for part in parts):
        return _constant(node, function(*(part.value for part in parts)))
    code = template.format(*(part.code for part in parts))
    scored = any(part.scored for part in parts)
    if parts[0].kind == "real number":
        return _Part(kind="real number", code=code, scored=scored)
    if function is operator.mod:
        divisor = int(parts[1].value or 0)
        limits = (min(0, divisor + 1), max(0, divisor - 1))
        return _Part(kind="whole number", code=code, range=limits, scored=scored)
    # Monotone functions have their extremes in the corners; abs may have one between them.
    values = [int(function(*corner)) for corner in itertools.product(*(p.range for p in parts))]
    if function is abs and parts[0].range[0] < 0 < parts[0].range[1]:
        values.append(0)
    for value in values:
        _require_32_bits(node, value)
    return _Part(kind="whole number", code=code, range=(min(values), max(values)), scored=scored)


# --- functions --------------------------------------------------------------------------------


def _clamp(
    node: ast.expr, function: Callable[..., float], template: str, one: _Part, other: _Part
) -> _Part:
    if one.value is None and other.value is None:
        template = f"torch.{function.__name__}imum({{}}, {{}})"
    elif one.value is not None:  # clamp takes the number last
        one, other = other, one
    return _compute(node, function, template, one, other)


def _tanh(node: ast.expr, part: _Part) -> _Part:
    (number,) = _promote(node, part)
    if number.value is not None:
        raise _refusal(node, "is a number", "write it as one")
    code = f"torch.tanh({_as_real(number).code})"
    return _Part(kind="real number", code=code, scored=number.scored)


def _where(node: ast.expr, condition: _Part, *branches: _Part) -> _Part:
    _require_truth(node, condition)
    one, other = _promote(node, *branches)
    code = f"torch.where({condition.code}, {one.code}, {other.code})"
    lows, highs = zip(one.range, other.range, strict=True)
    return _Part(
        kind=one.kind,
        # For two Python numbers torch.where gives its default dtype.
        code=f"{code}.to(score.dtype)" if one.kind == "real number" else code,
        range=(min(lows), max(highs)),
        scored=condition.scored or one.scored or other.scored,
    )


_FUNCTIONS: dict[str, tuple[int, Callable[..., _Part]]] = {
    "abs": (1, lambda node, part: _compute(node, abs, "abs({})", part)),
    # torch.minimum takes only tensors; clamp is the minimum of a tensor and a number.
    "minimum": (2, lambda node, *parts: _clamp(node, min, "torch.clamp({}, max={})", *parts)),
    "maximum": (2, lambda node, *parts: _clamp(node, max, "torch.clamp({}, min={})", *parts)),
}
"""Functions by name: (number of arguments, their reader)."""

_SCORE_FUNCTIONS = _FUNCTIONS | {"tanh": (1, _tanh), "where": (3, _where)}


# --- reading ----------------------------------------------------------------------------------

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
_LOGIC: dict[type[ast.operator], str] = {ast.BitAnd: "&", ast.BitOr: "|"}
_ABLE = "there are + - * // % - abs, comparisons, & | ~, minimum, maximum, in scores / tanh where"


class _Reader:
    """Parses a text recursively, from the outermost operation inwards."""

    def __init__(self, dimensions: Dimensions, *, scores: bool) -> None:
        sizes = (dimensions.batch, dimensions.heads, dimensions.query, dimensions.kv)
        self._ranges = dict(zip(_INDICES, ((0, size - 1) for size in sizes), strict=True))
        self._scores = scores
        self._depth = 0
        self._readers: dict[type[ast.expr], Callable[[Any], _Part]] = {
            ast.Constant: self._number,
            ast.Name: self._name,
            ast.UnaryOp: self._unary,
            ast.BinOp: self._binary,
            ast.Compare: self._compare,
            ast.Call: self._call,
        }

    def read(self, text: str) -> _Part:
        with warnings.catch_warnings():  # Python warns about texts that we refuse, as "1is b"
            warnings.simplefilter("ignore")
            try:
                tree = ast.parse(text.strip(), mode="eval")
            except SyntaxError:
                raise ProblemError("is no expression: write one, as q_idx >= kv_idx.") from None
            except (MemoryError, RecursionError):
                raise ProblemError(f"is nested deeper than {_DEEPEST} operations.") from None
        return self._part(tree.body)

    def _part(self, node: ast.expr) -> _Part:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ProblemError(f"is nested deeper than {_DEEPEST} operations.")
        if type(node) not in self._readers:
            raise _refusal(node, "is not in the vocabulary", _ABLE)
        part = self._readers[type(node)](node)
        self._depth -= 1
        return part

    def _number(self, node: ast.Constant) -> _Part:
        if type(node.value) is int or (type(node.value) is float and self._scores):
            return _constant(node, node.value)
        able = "whole and real numbers" if self._scores else "whole numbers"
        raise _refusal(node, "is no number of it", f"write {able}")

    def _name(self, node: ast.Name) -> _Part:
        if node.id in self._ranges:
            return _Part(kind="whole number", code=node.id, range=self._ranges[node.id])
        if node.id == "score" and self._scores:
            return _Part(kind="real number", code="score", scored=True)
        able = ", ".join([*_INDICES, *["score"] * self._scores])
        raise _refusal(node, "is not known", f"choose from {able}")

    def _unary(self, node: ast.UnaryOp) -> _Part:
        part = self._part(node.operand)
        if isinstance(node.op, ast.Invert):
            _require_truth(node, part)
            return _Part(kind="truth value", code=f"~({part.code})", scored=part.scored)
        if not isinstance(node.op, ast.USub):
            raise _refusal(node, "is not in the vocabulary", _ABLE)
        return _compute(node, operator.neg, "-({})", part)

    def _binary(self, node: ast.BinOp) -> _Part:
        left, right = self._part(node.left), self._part(node.right)
        if type(node.op) in _LOGIC:
            _require_truth(node, left, right)
            code = f"({left.code}) {_LOGIC[type(node.op)]} ({right.code})"
            return _Part(kind="truth value", code=code, scored=left.scored or right.scored)
        if type(node.op) not in _ARITHMETIC:
            raise _refusal(node, "is not in the vocabulary", _ABLE)
        sign, function = _ARITHMETIC[type(node.op)]
        if sign in {"/", "//", "%"} and not right.value:
            by = ast.unparse(node.right)
            raise _refusal(node, f"divides by {by}", "a divisor is a number other than 0")
        if sign == "/" and not self._scores:
            raise _refusal(node, "is a real number", "in a mask divide with //, which rounds down")
        if sign in {"//", "%"} and "real number" in {left.kind, right.kind}:
            raise _refusal(node, f"takes {sign} of a real number", f"{sign} is for whole ones")
        if sign == "/":  # torch divides two whole numbers in its default dtype, fp32
            left = _as_real(left)
        return _compute(node, function, f"({{}}) {sign} ({{}})", left, right)

    def _compare(self, node: ast.Compare) -> _Part:
        if len(node.ops) > 1:
            raise _refusal(node, "compares twice", _JOIN_REMEDY)
        (op,), (other,) = node.ops, node.comparators
        if type(op) not in _COMPARISONS:
            raise _refusal(node, "is not in the vocabulary", _ABLE)
        parts = _promote(node, self._part(node.left), self._part(other))
        if all(part.value is not None for part in parts):
            raise _refusal(node, "compares two numbers", "compare an index, or leave it out")
        code = f"({parts[0].code}) {_COMPARISONS[type(op)]} ({parts[1].code})"
        return _Part(kind="truth value", code=code, scored=any(part.scored for part in parts))

    def _call(self, node: ast.Call) -> _Part:
        functions = _SCORE_FUNCTIONS if self._scores else _FUNCTIONS
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in functions:
            able = ", ".join(functions)
            raise _refusal(node.func, "is no function of it", f"choose from {able}")
        count, function = functions[name]
        if len(node.args) != count or node.keywords:
            raise _refusal(node, "has other arguments", f"{name} takes {count}, without names")
        return function(node, *map(self._part, node.args))
