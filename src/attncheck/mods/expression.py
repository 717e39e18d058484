"""A mask or score mod as data: a small graph over a closed vocabulary of operations."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["INFIX", "LEAVES", "OPERATIONS", "Captured", "Expression", "Kind", "Node", "Structure"]

Kind = Literal["bool", "int", "float"]
Captured: TypeAlias = "Tensor | int | float"

LEAVES = frozenset({"input", "number", "tensor", "true", "false"})

INFIX = {
    "ge": ">=",
    "gt": ">",
    "le": "<=",
    "lt": "<",
    "eq": "==",
    "ne": "!=",
    "and": "&",
    "or": "|",
    "xor": "^",
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "floor_divide": "//",
    "remainder": "%",
    "left_shift": "<<",
    "right_shift": ">>",
}


@dataclass(frozen=True, slots=True)
class Node:
    """One value of an expression, without its number.

    Attributes:
        op: A leaf (``input``, ``number``, ``tensor``, ``true``, ``false``) or a name of
            ``OPERATIONS``. An ``index`` reads a tensor at one index a dimension.
        kind: What the value is.
        operands: Positions of the operands among the nodes, all earlier than this one.
        name: The input's name; the dtype of a tensor, of a cast, or of a number that was a tensor
            of one element ("" for a Python number, which promotes differently).
        slot: Position in ``Expression.captured`` of a number or tensor.
        rank: Dimensions of a tensor, or of a number that was one.
    """

    op: str
    kind: Kind
    operands: tuple[int, ...] = ()
    name: str = ""
    slot: int = -1
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Structure:
    """An expression without its captured values: what a compiled kernel depends on.

    Attributes:
        inputs: Names of the arguments, in the callable's order.
        nodes: The values in an order of evaluation; the last one is the result.
    """

    inputs: tuple[str, ...]
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Expression:
    """A traced mask or score mod.

    Attributes:
        structure: The graph; hashable, equal for mods that differ in their numbers only.
        captured: The numbers and tensors that the graph's slots stand for.
    """

    structure: Structure
    captured: tuple[Captured, ...]

    def evaluate(self, *inputs: Tensor) -> Tensor:
        """The mod's value on tensors in the callable's order, with torch's own promotion.

        Shapes: any that broadcast. Nothing of the trace is used but this graph, so that a wrong
        graph shows as a difference from the callable.
        """
        named = dict(zip(self.structure.inputs, inputs, strict=True))
        values: list[Any] = []
        for node in self.structure.nodes:
            if node.op in LEAVES:
                values.append(self._leaf(node, named))
            else:
                operands = [values[i] for i in node.operands]
                values.append(OPERATIONS[node.op](node, *operands))
        result: Tensor = values[-1]
        return result

    def _leaf(self, node: Node, inputs: dict[str, Tensor]) -> Any:
        if node.op == "input":
            return inputs[node.name]
        device = next(iter(inputs.values())).device
        if node.op in {"true", "false"}:
            return torch.tensor(node.op == "true", device=device)
        value = self.captured[node.slot]
        if node.op == "number" and node.name:
            dtype = getattr(torch, node.name)
            return torch.tensor(value, dtype=dtype, device=device).reshape((1,) * node.rank)
        return value

    def __str__(self) -> str:
        texts: list[str] = []
        for node in self.structure.nodes:
            operands = [texts[i] for i in node.operands]
            texts.append(self._text(node, operands))
        return _without_outer_parentheses(texts[-1])

    def _text(self, node: Node, operands: list[str]) -> str:
        if node.op == "input":
            return node.name
        if node.op == "number":
            return str(self.captured[node.slot])
        if node.op == "tensor":
            return f"tensor{node.slot}"
        if node.op == "index":
            return (
                f"{operands[0]}[{', '.join(_without_outer_parentheses(i) for i in operands[1:])}]"
            )
        if node.op in INFIX:
            return f"({operands[0]} {INFIX[node.op]} {operands[1]})"
        name = node.name if node.op == "cast" else node.op
        inner = ", ".join(_without_outer_parentheses(text) for text in operands)
        return f"{name}({inner})" if inner else name


def _without_outer_parentheses(text: str) -> str:
    """``(a + b)`` as ``a + b``, and ``(a) + (b)`` as it is."""
    if not text.startswith("("):
        return text
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[1:-1] if position == len(text) - 1 else text
    return text


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that is told by its name alone."""
    return lambda _node, *operands: function(*operands)


def _read(_node: Node, table: Tensor, *indices: Tensor) -> Tensor:
    return table[indices]


def _cast(node: Node, value: Tensor) -> Tensor:
    dtype: torch.dtype = getattr(torch, node.name)
    return value.to(dtype)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "ge": _plain(operator.ge),
    "gt": _plain(operator.gt),
    "le": _plain(operator.le),
    "lt": _plain(operator.lt),
    "eq": _plain(operator.eq),
    "ne": _plain(operator.ne),
    "and": _plain(operator.and_),
    "or": _plain(operator.or_),
    "xor": _plain(operator.xor),
    "not": _plain(operator.invert),
    "add": _plain(operator.add),
    "sub": _plain(operator.sub),
    "mul": _plain(operator.mul),
    "div": _plain(operator.truediv),
    "neg": _plain(operator.neg),
    "abs": _plain(operator.abs),
    "floor_divide": _plain(operator.floordiv),
    "remainder": _plain(operator.mod),
    "minimum": _plain(lambda a, b: torch.clamp(a, max=b)),
    "maximum": _plain(lambda a, b: torch.clamp(a, min=b)),
    "where": _plain(torch.where),
    "sign": _plain(torch.sign),
    "floor": _plain(torch.floor),
    "ceil": _plain(torch.ceil),
    "left_shift": _plain(operator.lshift),
    "right_shift": _plain(operator.rshift),
    "tanh": _plain(torch.tanh),
    "sigmoid": _plain(torch.sigmoid),
    "exp": _plain(torch.exp),
    "exp2": _plain(torch.exp2),
    "log": _plain(torch.log),
    "log2": _plain(torch.log2),
    "sqrt": _plain(torch.sqrt),
    "rsqrt": _plain(torch.rsqrt),
    "sin": _plain(torch.sin),
    "cos": _plain(torch.cos),
    "index": _read,
    "cast": _cast,
}
"""The closed vocabulary, each operation as torch computes it: (node, *operand values) → value."""
