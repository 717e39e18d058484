"""Translates ATen operations, recorded by torch's tracer, to the vocabulary of ``expression``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attncheck.core.errors import TraceError
from attncheck.mods.expression import OPERATIONS, Captured, Kind, Node, kind_of

# Operations whose values do not depend on their tensor, but only on its shape, dtype and device.
CREATIONS = frozenset({"new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like"})

# Operations that change at most the shape of one element.
SAME_VALUE = frozenset(
    {"alias", "clone", "contiguous", "detach", "expand", "lift_fresh", "lift_fresh_copy"}
    | {"reshape", "squeeze", "unsqueeze", "view", "_unsafe_view"}
)

# Dtypes of captured tensors: exact in int32 or fp32, as the values in int64 and float64 must be.
_CAPTURED_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)

_COMPUTED_DTYPES = (torch.bool, torch.int32, torch.int64, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Traced:
    """A value that depends on the inputs: its position in the graph, and its example value."""

    position: int
    example: Tensor


Operand: TypeAlias = "Traced | Tensor | int | float"
"""An operand of an operation; a Tensor or a number here is a constant of the mod."""


@dataclass(slots=True)
class Graph:
    """An expression under construction, in which equal nodes are merged."""

    nodes: list[Node] = field(default_factory=list)
    captured: list[Captured] = field(default_factory=list)
    _positions: dict[Node, int] = field(default_factory=dict)
    _slots: dict[int, int] = field(default_factory=dict)

    def add(self, node: Node) -> int:
        """Return the position of ``node``, and add it if it is new."""
        if node not in self._positions:
            self._positions[node] = len(self.nodes)
            self.nodes.append(node)
        return self._positions[node]

    def kind(self, *positions: int) -> Kind:
        """Return the kind that values at ``positions`` are promoted to."""
        kinds = {self.nodes[position].kind for position in positions}
        return "float" if "float" in kinds else "int" if "int" in kinds else "bool"

    def apply(self, op: str, *positions: int) -> int:
        """Return the position of an operation on values at ``positions``."""
        promoted = positions[1:] if op == "where" else positions
        kind = OPERATIONS[op].kind or self.kind(*promoted)
        return self.add(Node(op, kind, positions))

    def number(self, value: float, dtype: str = "", rank: int = 0) -> int:
        """Add a number in a new slot: equal numbers may differ in another mod of this structure."""
        if isinstance(value, bool):
            return self.add(Node(str(value).lower(), "bool"))
        kind: Kind = "int" if isinstance(value, int) else "float"
        self.captured.append(value)
        return self.add(Node("number", kind, (), dtype, len(self.captured) - 1, rank))

    def tensor(self, value: Tensor) -> int:
        """Add a captured tensor, to be indexed; raise if kernels would read it as other numbers."""
        _require_readable(value)
        # A tensor has one slot, however often it is read: kernels get one pointer.
        if id(value) not in self._slots:
            self._slots[id(value)] = len(self.captured)
            self.captured.append(value.detach())
        slot = self._slots[id(value)]
        return self.add(Node("tensor", kind_of(value.dtype), (), _name(value), slot, value.ndim))

    def operand(self, value: Operand) -> int:
        """Return the position of a value that is used as one number."""
        if isinstance(value, Traced):
            return value.position
        if not isinstance(value, Tensor):
            return self.number(value)
        if value.numel() != 1:
            shape = tuple(value.shape)
            raise TraceError(
                f"it uses a whole tensor of shape {shape}: index every dimension of it"
            )
        return self.number(value.item(), _name(value), value.ndim)

    def truth(self, value: Operand) -> int:
        """Return the position of a value as a truth value."""
        position = self.operand(value)
        if self.nodes[position].kind == "bool":
            return position
        return self.add(Node("cast", "bool", (position,), "bool"))


def _name(value: Tensor | torch.dtype) -> str:
    dtype = value.dtype if isinstance(value, Tensor) else value
    return str(dtype).removeprefix("torch.")


def _require_readable(value: Tensor) -> None:
    """Raise if a tensor holds numbers that kernels, which read fp32 and integers, would change."""
    if value.dtype not in _CAPTURED_DTYPES:
        able = ", ".join(map(_name, _CAPTURED_DTYPES))
        raise TraceError(f"it captures a {value.dtype} tensor: it may capture {able}")
    if value.dtype is torch.float64:
        lossy = (value != value.float()) & ~value.isnan()
        if lossy.any():
            raise TraceError(
                f"it captures a torch.float64 tensor with {int(lossy.sum())} elements that are no "
                f"fp32 number, as {value[lossy][0].item()!r}: capture tensor.float()"
            )


_Arguments: TypeAlias = tuple[Any, ...]
_Keywords: TypeAlias = dict[str, Any]
_Rule: TypeAlias = "Callable[[Graph, _Arguments, _Keywords], int]"
"""Adds an ATen call to a graph, pops the keyword arguments it uses, and returns its position."""


def translate_aten(
    graph: Graph, name: str, args: _Arguments, kwargs: _Keywords, result: torch.dtype
) -> int | None:
    """Add the ATen operation ``name`` to ``graph``; return its position, or None if unsupported.

    Args:
        name: Its name without namespace and overload.
        result: Dtype of its result on the example.

    Raises:
        TraceError: for arguments that the vocabulary cannot express.
    """
    if name not in _RULES:
        return None
    _require_width(name, result)
    if name in {"add", "sub", "rsub"}:  # torch may pass alpha by position
        args, kwargs = args[:2], kwargs | dict(zip(("alpha",), args[2:], strict=False))
    position = _RULES[name](graph, args, kwargs)
    if kwargs.pop("alpha", 1) != 1 or kwargs:
        unsupported = ", ".join(kwargs) or "alpha"
        raise TraceError(f"it uses {name} with {unsupported}: write it with + - * and torch.where")
    # Where torch treats truth values as numbers, a kernel's int1 would behave differently.
    node = graph.nodes[position]
    if node.kind != kind_of(result) or (node.kind == "bool" and node.op in _NOT_ON_TRUTH):
        raise TraceError(f"it uses {name} on truth values: convert with .to(torch.int64) first")
    return position


_NOT_ON_TRUTH = frozenset({"sub", "neg", "abs", "floor_divide", "remainder", "sign"})


def _require_width(name: str, result: torch.dtype) -> None:
    """Raise if torch computes in a narrower dtype than kernels' fp32 and int32."""
    if result in _COMPUTED_DTYPES or name == "index":
        return
    if _RULES[name] is _cast:
        able = ", ".join(map(_name, _COMPUTED_DTYPES))
        raise TraceError(f"it casts to {_name(result)}: it may cast to {able}")
    wide = "torch.float32" if result.is_floating_point else "torch.int64"
    raise TraceError(f"it computes {name} in {_name(result)}: convert with .to({wide}) first")


def _plain(op: str) -> _Rule:
    """Return the rule that applies ``op`` to all arguments."""
    return lambda graph, args, _kwargs: graph.apply(op, *map(graph.operand, args))


def _logical(op: str) -> _Rule:
    """Return the rule that applies ``op`` to arguments converted to truth values."""
    return lambda graph, args, _kwargs: graph.apply(op, *map(graph.truth, args))


def _arithmetic(op: str, on_truth: str) -> _Rule:
    """Return the rule for ``op``; on truth values alone it is ``on_truth``, as in torch."""

    def rule(graph: Graph, args: _Arguments, _kwargs: _Keywords) -> int:
        operands = [graph.operand(value) for value in args]
        return graph.apply(on_truth if graph.kind(*operands) == "bool" else op, *operands)

    return rule


def _whole(op: str) -> _Rule:
    """Return the rule for ``op``, which takes only whole numbers."""

    def rule(graph: Graph, args: _Arguments, _kwargs: _Keywords) -> int:
        operands = [graph.operand(value) for value in args]
        if any(graph.nodes[i].kind != "int" for i in operands):
            raise TraceError(f"it uses {op} on numbers that are not whole: convert them first")
        return graph.apply(op, *operands)

    return rule


def _unary(rule: Callable[[Graph, int], int]) -> _Rule:
    """Return the rule that calls ``rule`` with the first argument's position."""
    return lambda graph, args, _kwargs: rule(graph, graph.operand(args[0]))


def _unless_whole(op: str) -> _Rule:
    """Return the rule that applies ``op`` to real numbers, and leaves whole ones as they are."""
    return _unary(lambda graph, x: graph.apply(op, x) if graph.kind(x) == "float" else x)


def _truncate(graph: Graph, position: int) -> int:
    if graph.kind(position) != "float":
        return position
    # The vocabulary has no truncation: it is ceil below 0 and floor above.
    negative = graph.apply("lt", position, graph.number(0.0))
    return graph.apply(
        "where", negative, graph.apply("ceil", position), graph.apply("floor", position)
    )


def _fmod(graph: Graph, args: _Arguments, _kwargs: _Keywords) -> int:
    """Add |a| mod |b| with the sign of a."""
    a, b = (graph.operand(value) for value in args)
    size = graph.apply("remainder", graph.apply("abs", a), graph.apply("abs", b))
    negative = graph.apply("lt", a, graph.number(0))
    return graph.apply("where", negative, graph.apply("neg", size), size)


def _div(graph: Graph, args: _Arguments, kwargs: _Keywords) -> int:
    rounding = kwargs.pop("rounding_mode", None)
    a, b = (graph.operand(value) for value in args)
    if rounding == "floor":
        return graph.apply("floor_divide", a, b)
    quotient = graph.apply("div", a, b)
    if rounding is None:
        return quotient
    if graph.kind(a, b) == "float":
        return _truncate(graph, quotient)
    # A quotient rounded towards zero is the floor of its absolute value, with its sign.
    size = graph.apply("floor_divide", graph.apply("abs", a), graph.apply("abs", b))
    signs = [graph.apply("lt", i, graph.number(0)) for i in (a, b)]
    return graph.apply("where", graph.apply("ne", *signs), graph.apply("neg", size), size)


def _pow(graph: Graph, args: _Arguments, _kwargs: _Keywords) -> int:
    base, exponent = args
    # 2 ** whole is a shift, which is exact; pow in floats need not be.
    if isinstance(base, int) and base == 2 and graph.kind(graph.operand(exponent)) == "int":
        return graph.apply("left_shift", graph.number(1), graph.operand(exponent))
    if not isinstance(exponent, int | float):
        raise TraceError(
            "it raises to a computed power: use torch.exp2(x) for 2 ** x, "
            "torch.exp2(x * math.log2(a)) for a ** x"
        )
    position = graph.operand(base)
    if isinstance(exponent, float) and graph.kind(position) != "float":
        # torch computes the root of a whole number in its default dtype.
        default = _name(torch.get_default_dtype())
        position = graph.add(Node("cast", "float", (position,), default))
    if exponent in _ROOTS:
        return graph.apply(_ROOTS[exponent], position)
    if exponent not in _POWERS:
        able = ", ".join(map(str, sorted([*_POWERS, *_ROOTS])))
        raise TraceError(f"it raises to the power {exponent}: it may raise to {able}")
    power = position
    for _ in range(abs(int(exponent)) - 1):
        power = graph.apply("mul", power, position)
    return graph.apply("div", graph.number(1), power) if exponent < 0 else power


_ROOTS = {0.5: "sqrt", -0.5: "rsqrt"}
_POWERS = (-2, -1, 1, 2, 3)  # torch multiplies for these exponents, and calls pow() for others


def _rsub(graph: Graph, args: _Arguments, _kwargs: _Keywords) -> int:
    subtrahend, minuend = (graph.operand(value) for value in args)
    return graph.apply("sub", minuend, subtrahend)


def _masked_fill(graph: Graph, args: _Arguments, _kwargs: _Keywords) -> int:
    value, mask, filler = (graph.operand(argument) for argument in args)
    if graph.kind(value, filler) != graph.kind(value):
        raise TraceError("it fills a tensor with numbers of another kind: use torch.where")
    return graph.apply("where", mask, filler, value)


def _clamp(graph: Graph, args: _Arguments, kwargs: _Keywords) -> int:
    position = graph.operand(args[0])
    low = args[1] if len(args) > 1 else kwargs.pop("min", None)
    high = args[2] if len(args) > 2 else kwargs.pop("max", None)
    for op, limit in (("maximum", low), ("minimum", high)):
        if limit is not None:
            position = graph.apply(op, position, graph.operand(limit))
    return position


def _cast(graph: Graph, args: _Arguments, kwargs: _Keywords) -> int:
    position = graph.operand(args[0])
    dtype = args[1] if len(args) > 1 else kwargs.get("dtype")
    kwargs.clear()  # device, layout and memory format change no value
    if isinstance(dtype, torch.dtype):
        position = graph.add(Node("cast", kind_of(dtype), (position,), _name(dtype)))
    return position


def _index(graph: Graph, args: _Arguments, _kwargs: _Keywords) -> int:
    table, indices = args
    if not isinstance(table, Tensor):
        raise TraceError("it indexes a computed tensor: only captured tensors can be indexed")
    if len(indices) != table.ndim or any(i is None for i in indices):
        count = sum(i is not None for i in indices)
        raise TraceError(
            f"it indexes {count} of the {table.ndim} dimensions of a tensor: "
            "index all at once, as in table[i, j]"
        )
    position = graph.tensor(table)
    operands = (position, *(graph.operand(i) for i in indices))
    if any(graph.nodes[i].kind != "int" for i in operands[1:]):
        raise TraceError("it indexes a tensor with truth values: use torch.where")
    return graph.add(Node("index", graph.nodes[position].kind, operands))


_RULES: dict[str, _Rule] = {
    **{name: _plain(name) for name in ("ge", "gt", "le", "lt", "eq", "ne", "sub", "neg", "abs")},
    **{name: _plain(name) for name in ("tanh", "sigmoid", "exp", "exp2", "log", "log2", "sqrt")},
    **{name: _plain(name) for name in ("rsqrt", "sin", "cos", "floor_divide", "remainder")},
    **{name: _plain(name) for name in ("sign", "where")},
    "sgn": _plain("sign"),
    **{f"bitwise_{op}": _plain(op) for op in ("and", "or", "xor", "not")},
    **{f"logical_{op}": _logical(op) for op in ("and", "or", "xor", "not")},
    "add": _arithmetic("add", "or"),
    "mul": _arithmetic("mul", "and"),
    "maximum": _arithmetic("maximum", "or"),
    "minimum": _arithmetic("minimum", "and"),
    "clamp_min": _arithmetic("maximum", "or"),
    "clamp_max": _arithmetic("minimum", "and"),
    **{name: _whole("left_shift") for name in ("__lshift__", "bitwise_left_shift")},
    **{name: _whole("right_shift") for name in ("__rshift__", "bitwise_right_shift")},
    **{name: _unless_whole(name) for name in ("floor", "ceil")},
    "trunc": _unary(_truncate),
    "frac": _unary(lambda graph, x: graph.apply("sub", x, _truncate(graph, x))),
    "fmod": _fmod,
    "div": _div,
    "pow": _pow,
    "reciprocal": lambda graph, args, _: _div(graph, (1, args[0]), {}),
    "relu": _unary(lambda graph, x: graph.apply("maximum", x, graph.number(0))),
    "rsub": _rsub,
    "masked_fill": _masked_fill,
    # Only NaN is unequal to itself.
    "isnan": _unary(lambda graph, x: graph.apply("ne", x, x)),
    "isinf": _unary(
        lambda graph, x: graph.apply("eq", graph.apply("abs", x), graph.number(math.inf))
    ),
    "clamp": _clamp,
    "_to_copy": _cast,
    "convert_element_type": _cast,
    "index": _index,
}
