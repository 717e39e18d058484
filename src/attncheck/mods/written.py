"""Masks and score mods that are written as text, as ``q_idx % 3 <= kv_idx``.

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
import operator
import warnings
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from attncheck.errors import ProblemError
from attncheck.mods.written_parts import (
    FUNCTIONS,
    FUNCTIONS_OF_SCORES,
    JOINED,
    Kind,
    Part,
    alike,
    computed,
    constant,
    real,
    refused,
    require_truth,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.mods.signatures import MaskMod, ScoreMod
    from attncheck.mods.spec import Dimensions

__all__ = ["mask", "read_mask", "read_score", "score"]

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


def mask(text: str, dimensions: Dimensions) -> MaskMod:
    """The mask that ``text`` says; raises as ``read_mask``."""
    found: MaskMod = _compiled("mask", _INDICES, read_mask(text, dimensions))
    return found


def score(text: str, dimensions: Dimensions) -> ScoreMod:
    """The score mod that ``text`` says; raises as ``read_score``."""
    names = ("score", *_INDICES)
    found: ScoreMod = _compiled("score_mod", names, read_score(text, dimensions))
    return found


@lru_cache(maxsize=_REMEMBERED)
def read_mask(text: str, dimensions: Dimensions) -> str:
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
def read_score(text: str, dimensions: Dimensions) -> str:
    """Python on torch tensors that computes the score mod ``text``; otherwise as ``read_mask``."""
    part = _Reader(dimensions, scores=True).read(text)
    if part.kind == "truth":
        raise ProblemError("gives a truth value: a score mod gives a number, as in score * 0.5.")
    if not part.scored:
        raise ProblemError("does not read score: a score mod begins with it, as in score + kv_idx.")
    return real(part).code  # of whole numbers too: what follows in a chain computes with it


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


_SAID: dict[Kind, str] = {"truth": "truth value", "whole": "whole number", "real": "real number"}


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
            raise refused(node, "is not in the vocabulary", _MAY_BE)
        part = reads[type(node)](node)
        self._depth -= 1
        return part

    def _number(self, node: ast.Constant) -> Part:
        if type(node.value) is int or (type(node.value) is float and self._scores):
            return constant(node, node.value)
        able = "whole and real numbers" if self._scores else "whole numbers"
        raise refused(node, "is no number of it", f"write {able}")

    def _name(self, node: ast.Name) -> Part:
        if node.id in self._ranges:
            return Part(kind="whole", code=node.id, range=self._ranges[node.id])
        if node.id == "score" and self._scores:
            return Part(kind="real", code="score", scored=True)
        able = ", ".join([*_INDICES, *["score"] * self._scores])
        raise refused(node, "is not known", f"choose from {able}")

    def _unary(self, node: ast.UnaryOp) -> Part:
        part = self._part(node.operand)
        if isinstance(node.op, ast.Invert):
            require_truth(node, part)
            return Part(kind="truth", code=f"~({part.code})", scored=part.scored)
        if not isinstance(node.op, ast.USub):
            raise refused(node, "is not in the vocabulary", _MAY_BE)
        return computed(node, operator.neg, "-({})", part)

    def _binary(self, node: ast.BinOp) -> Part:
        left, right = self._part(node.left), self._part(node.right)
        if type(node.op) in _LOGIC:
            require_truth(node, left, right)
            code = f"({left.code}) {_LOGIC[type(node.op)]} ({right.code})"
            return Part(kind="truth", code=code, scored=left.scored or right.scored)
        if type(node.op) not in _ARITHMETIC:
            raise refused(node, "is not in the vocabulary", _MAY_BE)
        sign, function = _ARITHMETIC[type(node.op)]
        if sign in {"/", "//", "%"} and not right.value:
            by = ast.unparse(node.right)
            raise refused(node, f"divides by {by}", "a divisor is a number other than 0")
        if sign == "/" and not self._scores:
            raise refused(node, "is a real number", "in a mask divide with //, which rounds down")
        if sign in {"//", "%"} and "real" in {left.kind, right.kind}:
            raise refused(node, f"takes {sign} of a real number", f"{sign} is for whole ones")
        if sign == "/":
            left = real(left)
        return computed(node, function, f"({{}}) {sign} ({{}})", left, right)

    def _compare(self, node: ast.Compare) -> Part:
        if len(node.ops) > 1:
            raise refused(node, "compares twice", JOINED)
        (op,), (other,) = node.ops, node.comparators
        if type(op) not in _COMPARISONS:
            raise refused(node, "is not in the vocabulary", _MAY_BE)
        parts = alike(node, self._part(node.left), self._part(other))
        if all(part.value is not None for part in parts):
            raise refused(node, "compares two numbers", "compare an index, or leave it out")
        code = f"({parts[0].code}) {_COMPARISONS[type(op)]} ({parts[1].code})"
        return Part(kind="truth", code=code, scored=any(part.scored for part in parts))

    def _call(self, node: ast.Call) -> Part:
        functions = FUNCTIONS | (FUNCTIONS_OF_SCORES if self._scores else {})
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in functions:
            able = ", ".join(functions)
            raise refused(node.func, "is no function of it", f"choose from {able}")
        count, function = functions[name]
        if len(node.args) != count or node.keywords:
            raise refused(node, "has other arguments", f"{name} takes {count}, without names")
        return function(node, *map(self._part, node.args))
