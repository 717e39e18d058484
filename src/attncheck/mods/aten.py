"""ATen operations, as torch's tracer records them, in the vocabulary of ``expression``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from attncheck.core.errors import TraceError
from attncheck.mods.expression import Node

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.mods.expression import Captured, Kind

__all__ = [
    "CAPTURED_DTYPES",
    "CREATIONS",
    "SAME_VALUE",
    "Graph",
    "Operand",
    "Traced",
    "kind_of",
    "translate_aten",
]


CAPTURED_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
"""What a captured tensor may be: exact in int32 or fp32, int64 and float64 by their values."""


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

    def kind(self, *positions: int) -> Kind:
        """The kind that values at ``positions`` are promoted to."""
        kinds = {self.nodes[position].kind for position in positions}
        return "float" if "float" in kinds else "int" if "int" in kinds else "bool"

    def apply(self, op: str, *positions: int) -> int:
        """Position of an operation whose result is of its operands' kind."""
        return self.add(Node(op, self.kind(*positions), positions))

    def compare(self, op: str, *positions: int) -> int:
        """Position of an operation whose result is a truth value."""
        return self.add(Node(op, "bool", positions))

    def choose(self, condition: int, if_true: int, if_false: int) -> int:
        """Position of one of two values."""
        kind = self.kind(if_true, if_false)
        return self.add(Node("where", kind, (condition, if_true, if_false)))

    def number(self, value: float, dtype: str = "", rank: int = 0) -> int:
        """A number of the mod: always a slot of its own, for equal numbers may differ next time."""
        if isinstance(value, bool):
            return self.add(Node(str(value).lower(), "bool"))
        kind: Kind = "int" if isinstance(value, int) else "float"
        self.captured.append(value)
        return self.add(Node("number", kind, (), dtype, len(self.captured) - 1, rank))

    def tensor(self, value: Tensor) -> int:
        """A captured tensor, to be indexed."""
        _require_readable(value)
        if id(value) not in self._slots:
            self._slots[id(value)] = len(self.captured)
            self.captured.append(value.detach())
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


def _require_readable(value: Tensor) -> None:
    """Kernels read fp32 and whole numbers: what they would read another number for is refused."""
    if value.dtype not in CAPTURED_DTYPES:
        able = ", ".join(str(d).removeprefix("torch.") for d in CAPTURED_DTYPES)
        raise TraceError(f"it captures a {value.dtype} tensor: it may capture {able}")
    if value.dtype is torch.float64:
        other = (value != value.float()) & ~value.isnan()
        if other.any():
            raise TraceError(
                f"it captures a torch.float64 tensor with {int(other.sum())} elements that are no "
                f"fp32 number, as {value[other][0].item()!r}: capture tensor.float()"
            )


# Their values do not depend on the tensor whose shape, dtype or device they borrow.
CREATIONS = frozenset({"new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like"})

# On one element these change nothing but the shape.
SAME_VALUE = frozenset(
    {"alias", "clone", "contiguous", "detach", "expand", "lift_fresh", "lift_fresh_copy"}
    | {"reshape", "squeeze", "unsqueeze", "view", "_unsafe_view"}
)

_COMPUTED_DTYPES = (torch.bool, torch.int32, torch.int64, torch.float32, torch.float64)


def translate_aten(
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
    if name not in _PLAIN and name not in _SPECIAL:
        return None
    _require_width(name, result)
    if name in {"add", "sub", "rsub"}:  # torch may give alpha by its place
        args, kwargs = args[:2], kwargs | dict(zip(("alpha",), args[2:], strict=False))
    if name in _PLAIN:
        operands = tuple(graph.operand(value) for value in args)
        position = graph.add(Node(_PLAIN[name], kind_of(result), operands))
    else:
        position, kwargs = _SPECIAL[name](graph, args, kwargs)
    if kwargs.pop("alpha", 1) != 1 or kwargs:
        left = ", ".join(kwargs) or "alpha"
        raise TraceError(f"it uses {name} with {left}: write it with + - * and torch.where")
    node = graph.nodes[position]
    if node.kind != kind_of(result) or (node.kind == "bool" and node.op in _NOT_OF_TRUTH):
        raise TraceError(f"it uses {name} on truth values: convert with .to(torch.int64) first")
    return position


def _require_width(name: str, result: torch.dtype) -> None:
    """Kernels compute in fp32 and int32: torch would round, or wrap, in a narrower dtype."""
    if result in _COMPUTED_DTYPES or name == "index":
        return
    dtype = str(result).removeprefix("torch.")
    if _SPECIAL.get(name) is _cast:
        able = ", ".join(str(d).removeprefix("torch.") for d in _COMPUTED_DTYPES)
        raise TraceError(f"it casts to {dtype}: it may cast to {able}")
    wide = "torch.float32" if result.is_floating_point else "torch.int64"
    raise TraceError(f"it computes {name} in {dtype}: convert with .to({wide}) first")


def _logical(op: str) -> _Rule:
    """``op`` on truth values, whatever the operands are."""

    def rule(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Translated:
        return graph.compare(op, *(graph.truth(value) for value in args)), kwargs

    return rule


def _arithmetic(op: str, on_truth: str) -> _Rule:
    """``op``; on truth values alone torch gives a truth value, which is ``on_truth``."""

    def rule(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Translated:
        operands = [graph.operand(value) for value in args]
        name = on_truth if graph.kind(*operands) == "bool" else op
        return graph.apply(name, *operands), kwargs

    return rule


def _whole(op: str) -> _Rule:
    """``op``, which vocabulary and torch have on whole numbers only."""

    def rule(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Translated:
        operands = [graph.operand(value) for value in args]
        if any(graph.nodes[i].kind != "int" for i in operands):
            raise TraceError(f"it uses {op} on numbers that are not whole: convert them first")
        return graph.apply(op, *operands), kwargs

    return rule


def _unless_whole(op: str) -> _Rule:
    """``op`` on real numbers; whole ones stay what they are."""

    def rule(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Translated:
        position = graph.operand(args[0])
        real = graph.kind(position) == "float"
        return (graph.apply(op, position) if real else position), kwargs

    return rule


def _truncated(graph: Graph, position: int) -> int:
    if graph.kind(position) != "float":
        return position
    negative = graph.compare("lt", position, graph.number(0.0))
    return graph.choose(negative, graph.apply("ceil", position), graph.apply("floor", position))


def _trunc(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Translated:
    return _truncated(graph, graph.operand(args[0])), kwargs


def _frac(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Translated:
    position = graph.operand(args[0])
    return graph.apply("sub", position, _truncated(graph, position)), kwargs


def _fmod(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Translated:
    """|a| mod |b| with the sign of a."""
    a, b = (graph.operand(value) for value in args)
    left = graph.apply("remainder", graph.apply("abs", a), graph.apply("abs", b))
    negative = graph.compare("lt", a, graph.number(0))
    return graph.choose(negative, graph.apply("neg", left), left), kwargs


def _div(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Translated:
    rounding = kwargs.pop("rounding_mode", None)
    a, b = (graph.operand(value) for value in args)
    if rounding == "floor":
        return graph.apply("floor_divide", a, b), kwargs
    quotient = graph.add(Node("div", "float", (a, b)))
    if rounding is None:
        return quotient, kwargs
    if graph.kind(a, b) == "float":
        return _truncated(graph, quotient), kwargs
    size = graph.apply("floor_divide", graph.apply("abs", a), graph.apply("abs", b))
    signs = [graph.compare("lt", i, graph.number(0)) for i in (a, b)]
    return graph.choose(graph.compare("ne", *signs), graph.apply("neg", size), size), kwargs


def _pow(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Translated:
    base, exponent = args
    if isinstance(base, int) and base == 2 and graph.kind(graph.operand(exponent)) == "int":
        return graph.apply("left_shift", graph.number(1), graph.operand(exponent)), kwargs
    if not isinstance(exponent, int | float):
        raise TraceError(
            "it raises to a computed power: use torch.exp2(x) for 2 ** x, "
            "torch.exp2(x * math.log2(a)) for a ** x"
        )
    position = graph.operand(base)
    if isinstance(exponent, float) and graph.kind(position) != "float":
        default = str(torch.get_default_dtype()).removeprefix("torch.")
        position = graph.add(Node("cast", "float", (position,), default))
    if exponent in _ROOTS:
        return graph.apply(_ROOTS[exponent], position), kwargs
    if exponent not in _POWERS:
        able = ", ".join(map(str, sorted([*_POWERS, *_ROOTS])))
        raise TraceError(f"it raises to the power {exponent}: it may raise to {able}")
    power = position
    for _ in range(abs(int(exponent)) - 1):
        power = graph.apply("mul", power, position)
    if exponent < 0:
        power = graph.add(Node("div", "float", (graph.number(1), power)))
    return power, kwargs


def _reciprocal(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Translated:
    return graph.add(Node("div", "float", (graph.number(1), graph.operand(args[0])))), kwargs


def _relu(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Translated:
    return graph.apply("maximum", graph.operand(args[0]), graph.number(0)), kwargs


def _rsub(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Translated:
    subtrahend, minuend = (graph.operand(value) for value in args)
    return graph.apply("sub", minuend, subtrahend), kwargs


def _masked_fill(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Translated:
    value, mask, filler = (graph.operand(argument) for argument in args)
    if graph.kind(value, filler) != graph.kind(value):
        raise TraceError("it fills a tensor with numbers of another kind: use torch.where")
    return graph.choose(mask, filler, value), kwargs


def _isnan(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Translated:
    position = graph.operand(args[0])
    return graph.compare("ne", position, position), kwargs


def _isinf(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Translated:
    size = graph.apply("abs", graph.operand(args[0]))
    return graph.compare("eq", size, graph.number(float("inf"))), kwargs


def _clamp(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Translated:
    position = graph.operand(args[0])
    low = args[1] if len(args) > 1 else kwargs.pop("min", None)
    high = args[2] if len(args) > 2 else kwargs.pop("max", None)
    for op, limit in (("maximum", low), ("minimum", high)):
        if limit is not None:
            position = graph.apply(op, position, graph.operand(limit))
    return position, kwargs


def _cast(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Translated:
    position = graph.operand(args[0])
    dtype = args[1] if len(args) > 1 else kwargs.get("dtype")
    if isinstance(dtype, torch.dtype):
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
            f"it indexes {given} of the {table.ndim} dimensions of a tensor: "
            "index all at once, as in table[i, j]"
        )
    position = graph.tensor(table)
    operands = (position, *(graph.operand(i) for i in indices))
    if any(graph.nodes[i].kind != "int" for i in operands[1:]):
        raise TraceError("it indexes a tensor with truth values: use torch.where")
    return graph.add(Node("index", graph.nodes[position].kind, operands)), kwargs


_Translated: TypeAlias = tuple[int, dict[str, Any]]
_Rule: TypeAlias = "Callable[[Graph, tuple[Any, ...], dict[str, Any]], _Translated]"

_ROOTS = {0.5: "sqrt", -0.5: "rsqrt"}
_POWERS = (-2, -1, 1, 2, 3)  # torch multiplies for these, and calls pow() for others
_NOT_OF_TRUTH = frozenset({"sub", "neg", "abs", "floor_divide", "remainder", "sign"})

_PLAIN = {
    **{name: name for name in ("ge", "gt", "le", "lt", "eq", "ne", "sub", "neg", "abs", "where")},
    **{name: name for name in ("tanh", "sigmoid", "exp", "exp2", "log", "log2", "sqrt", "rsqrt")},
    **{name: name for name in ("sin", "cos", "floor_divide", "remainder", "sign")},
    "sgn": "sign",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "bitwise_not": "not",
}

_SPECIAL: dict[str, _Rule] = {
    "add": _arithmetic("add", "or"),
    "mul": _arithmetic("mul", "and"),
    "maximum": _arithmetic("maximum", "or"),
    "minimum": _arithmetic("minimum", "and"),
    "clamp_min": _arithmetic("maximum", "or"),
    "clamp_max": _arithmetic("minimum", "and"),
    "logical_and": _logical("and"),
    "logical_or": _logical("or"),
    "logical_xor": _logical("xor"),
    "logical_not": _logical("not"),
    **{name: _whole("left_shift") for name in ("__lshift__", "bitwise_left_shift")},
    **{name: _whole("right_shift") for name in ("__rshift__", "bitwise_right_shift")},
    **{name: _unless_whole(name) for name in ("floor", "ceil")},
    "trunc": _trunc,
    "frac": _frac,
    "fmod": _fmod,
    "div": _div,
    "pow": _pow,
    "reciprocal": _reciprocal,
    "relu": _relu,
    "rsub": _rsub,
    "masked_fill": _masked_fill,
    "isnan": _isnan,
    "isinf": _isinf,
    "clamp": _clamp,
    "_to_copy": _cast,
    "convert_element_type": _cast,
    "index": _index,
}
