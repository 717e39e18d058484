"""ATen operations, as torch's tracer records them, in the vocabulary of ``expression``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from attncheck.errors import TraceError
from attncheck.mods.expression import Captured, Kind, Node

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CREATIONS", "SAME_VALUE", "Graph", "Operand", "Traced", "kind_of", "translate"]

# Their values do not depend on the tensor whose shape, dtype or device they borrow.
CREATIONS = frozenset({"new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like"})

# On one element these change nothing but the shape.
SAME_VALUE = frozenset(
    {"alias", "clone", "contiguous", "detach", "expand", "lift_fresh", "lift_fresh_copy"}
    | {"reshape", "squeeze", "unsqueeze", "view", "_unsafe_view"}
)

_CAPTURED_DTYPES = (torch.int32, torch.int64, torch.bool, torch.float32)

_CAST_DTYPES = (*_CAPTURED_DTYPES, torch.float64)


@dataclass(frozen=True, slots=True)
class Traced:
    """A value that depends on the inputs: its place in the graph, and what it is on an example."""

    position: int
    example: Tensor


Operand: TypeAlias = "Traced | Tensor | int | float"
"""What an operation is applied to; a Tensor or a number here is a constant of the mod."""


def kind_of(dtype: torch.dtype) -> Kind:
    """Whether values of ``dtype`` are truth values, whole numbers or real numbers."""
    if dtype is torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "int"


@dataclass(slots=True)
class Graph:
    """An expression under construction; equal nodes are one node."""

    nodes: list[Node] = field(default_factory=list)
    captured: list[Captured] = field(default_factory=list)
    _known: dict[Node, int] = field(default_factory=dict)
    _slots: dict[int, int] = field(default_factory=dict)

    def add(self, node: Node) -> int:
        """Position of ``node``, which is new or was there."""
        if node not in self._known:
            self._known[node] = len(self.nodes)
            self.nodes.append(node)
        return self._known[node]

    def number(self, value: float, dtype: str = "", rank: int = 0) -> int:
        """A number of the mod: always a slot of its own, for equal numbers may differ next time."""
        if isinstance(value, bool):
            return self.add(Node(str(value).lower(), "bool"))
        kind: Kind = "int" if isinstance(value, int) else "float"
        self.captured.append(value)
        return self.add(Node("number", kind, (), dtype, len(self.captured) - 1, rank))

    def tensor(self, value: Tensor) -> int:
        """A captured tensor, to be indexed."""
        if value.dtype not in _CAPTURED_DTYPES:
            able = ", ".join(str(d).removeprefix("torch.") for d in _CAPTURED_DTYPES)
            raise TraceError(f"it captures a {value.dtype} tensor: it may capture {able}")
        if id(value) not in self._slots:
            self._slots[id(value)] = len(self.captured)
            self.captured.append(value)
        slot = self._slots[id(value)]
        dtype = str(value.dtype).removeprefix("torch.")
        return self.add(Node("tensor", kind_of(value.dtype), (), dtype, slot, value.ndim))

    def operand(self, value: Operand) -> int:
        """Position of a value that is used as one number."""
        if isinstance(value, Traced):
            return value.position
        if not isinstance(value, Tensor):
            return self.number(value)
        if value.numel() != 1:
            shape = tuple(value.shape)
            raise TraceError(
                f"it uses a whole tensor of shape {shape}: index every dimension of it"
            )
        return self.number(value.item(), str(value.dtype).removeprefix("torch."), value.ndim)

    def truth(self, value: Operand) -> int:
        """Position of a value as a truth value."""
        position = self.operand(value)
        if self.nodes[position].kind == "bool":
            return position
        return self.add(Node("cast", "bool", (position,), "bool"))


def translate(
    graph: Graph, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.dtype
) -> int | None:
    """Adds the ATen operation ``name`` to ``graph``: its position, or None if it is not known.

    Args:
        graph: What the operation is added to.
        name: Its name without namespace and overload.
        args: Its arguments; tensors are Operands.
        kwargs: Its keyword arguments, likewise.
        result: Dtype of its result on the example.

    Raises:
        TraceError: for arguments that the vocabulary has no word for.
    """
    if name in _PLAIN:
        operands = tuple(graph.operand(value) for value in args)
        position = graph.add(Node(_PLAIN[name], kind_of(result), operands))
    elif name in _SPECIAL:
        position, kwargs = _SPECIAL[name](graph, args, kwargs)
    else:
        return None
    if kwargs.pop("alpha", 1) != 1 or kwargs:
        left = ", ".join(kwargs) or "alpha"
        raise TraceError(f"it uses {name} with {left}, which is not supported")
    return position


def _logical(op: str) -> _Rule:
    def rule(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Translated:
        return graph.add(Node(op, "bool", tuple(graph.truth(value) for value in args))), kwargs

    return rule


def _whole_division(op: str) -> _Rule:
    def rule(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Translated:
        operands = tuple(graph.operand(value) for value in args)
        if any(graph.nodes[i].kind != "int" for i in operands):
            raise TraceError(f"it uses {op} on numbers that are not whole, which is not supported")
        return graph.add(Node(op, "int", operands)), kwargs

    return rule


def _div(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Translated:
    rounding = kwargs.pop("rounding_mode", None)
    if rounding == "floor":
        return _whole_division("floor_divide")(graph, args, kwargs)
    if rounding is not None:
        raise TraceError(f"it divides with rounding_mode={rounding!r}: only 'floor' is supported")
    operands = tuple(graph.operand(value) for value in args)
    return graph.add(Node("div", "float", operands)), kwargs


def _rsub(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Translated:
    subtrahend, minuend = (graph.operand(value) for value in args)
    kinds = {graph.nodes[i].kind for i in (subtrahend, minuend)}
    kind: Kind = "float" if "float" in kinds else "int"
    return graph.add(Node("sub", kind, (minuend, subtrahend))), kwargs


def _clamp(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Translated:
    position = graph.operand(args[0])
    low = args[1] if len(args) > 1 else kwargs.pop("min", None)
    high = args[2] if len(args) > 2 else kwargs.pop("max", None)
    for op, limit in (("maximum", low), ("minimum", high)):
        if limit is not None:
            operands = (position, graph.operand(limit))
            kinds = {graph.nodes[i].kind for i in operands}
            position = graph.add(Node(op, "float" if "float" in kinds else "int", operands))
    return position, kwargs


def _cast(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Translated:
    position = graph.operand(args[0])
    dtype = args[1] if len(args) > 1 else kwargs.get("dtype")
    if isinstance(dtype, torch.dtype):
        if dtype not in _CAST_DTYPES:
            raise TraceError(f"it casts to {dtype}, which is not supported")
        name = str(dtype).removeprefix("torch.")
        position = graph.add(Node("cast", kind_of(dtype), (position,), name))
    return position, {}  # device, layout and memory format change no value


def _index(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Translated:
    table, indices = args
    if not isinstance(table, Tensor):
        raise TraceError("it indexes a computed tensor: only captured tensors can be indexed")
    if len(indices) != table.ndim or any(i is None for i in indices):
        given = sum(i is not None for i in indices)
        raise TraceError(
            f"it indexes {given} of the {table.ndim} dimensions of a tensor: index all at once"
        )
    position = graph.tensor(table)
    operands = (position, *(graph.operand(i) for i in indices))
    if any(graph.nodes[i].kind != "int" for i in operands[1:]):
        raise TraceError("it indexes a tensor with truth values: use torch.where")
    return graph.add(Node("index", graph.nodes[position].kind, operands)), kwargs


_Translated: TypeAlias = tuple[int, dict[str, Any]]
_Rule: TypeAlias = "Callable[[Graph, tuple[Any, ...], dict[str, Any]], _Translated]"

_PLAIN = {
    **{name: name for name in ("ge", "gt", "le", "lt", "eq", "ne", "add", "sub", "mul")},
    **{name: name for name in ("neg", "abs", "minimum", "maximum", "where", "tanh", "exp")},
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "bitwise_not": "not",
    "clamp_min": "maximum",
    "clamp_max": "minimum",
}

_SPECIAL: dict[str, _Rule] = {
    "logical_and": _logical("and"),
    "logical_or": _logical("or"),
    "logical_xor": _logical("xor"),
    "logical_not": _logical("not"),
    "floor_divide": _whole_division("floor_divide"),
    "remainder": _whole_division("remainder"),
    "div": _div,
    "rsub": _rsub,
    "clamp": _clamp,
    "_to_copy": _cast,
    "convert_element_type": _cast,
    "index": _index,
}
