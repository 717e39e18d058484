"""A mask or score mod as data: a small graph over a closed vocabulary of operations.

``OPERATIONS`` is the vocabulary. ``evaluate`` walks through an expression once, in any *algebra*: a
table that defines each operation on one type of values. The algebras are torch's tensors (here),
mpmath's numbers (``mpmath_algebra``), Arb's balls (``ball_algebra``), running error
(``running_error``), ranges of whole numbers (``index_ranges``) and Triton source (``to_triton``).
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import json
import math
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar, get_args

import msgspec
import numpy as np
import torch
from torch import Tensor

from attncheck.core.errors import ProblemError

Kind = Literal["bool", "int", "float"]
Captured: TypeAlias = "Tensor | int | float"
Value = TypeVar("Value")

LEAVES = frozenset({"input", "number", "tensor", "true", "false"})

INDICES = ("b", "h", "q_idx", "kv_idx")
"""Arguments of a mask; a score mod has the score before them."""


# --- the vocabulary ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of the vocabulary.

    Derivatives are torch's own: ``trace.trace_derivative`` traces autograd.
    """

    arity: int  # number of operands; −1 for ``index``: a tensor, and one index per dimension
    kind: Kind | Literal[""]  # of the result; empty for the kind that the operands are promoted to
    torch: Callable[..., Any]  # torch's function of tensors and numbers
    sign: str = ""  # the infix operator, if it has one


OPERATIONS: dict[str, Operation] = {
    "ge": Operation(2, "bool", operator.ge, ">="),
    "gt": Operation(2, "bool", operator.gt, ">"),
    "le": Operation(2, "bool", operator.le, "<="),
    "lt": Operation(2, "bool", operator.lt, "<"),
    "eq": Operation(2, "bool", operator.eq, "=="),
    "ne": Operation(2, "bool", operator.ne, "!="),
    "and": Operation(2, "", operator.and_, "&"),
    "or": Operation(2, "", operator.or_, "|"),
    "xor": Operation(2, "", operator.xor, "^"),
    "not": Operation(1, "", operator.invert),
    "add": Operation(2, "", operator.add, "+"),
    "sub": Operation(2, "", operator.sub, "-"),
    "mul": Operation(2, "", operator.mul, "*"),
    "div": Operation(2, "float", operator.truediv, "/"),
    "neg": Operation(1, "", operator.neg),
    "abs": Operation(1, "", operator.abs),
    "floor_divide": Operation(2, "", operator.floordiv, "//"),
    "remainder": Operation(2, "", operator.mod, "%"),
    # clamp takes a tensor and a number; torch.minimum needs two tensors.
    "minimum": Operation(2, "", lambda a, b: torch.clamp(a, max=b)),
    "maximum": Operation(2, "", lambda a, b: torch.clamp(a, min=b)),
    "where": Operation(3, "", torch.where),
    "sign": Operation(1, "", torch.sign),
    "floor": Operation(1, "", torch.floor),
    "ceil": Operation(1, "", torch.ceil),
    "left_shift": Operation(2, "", operator.lshift, "<<"),
    "right_shift": Operation(2, "", operator.rshift, ">>"),
    "tanh": Operation(1, "float", torch.tanh),
    "sigmoid": Operation(1, "float", torch.sigmoid),
    "exp": Operation(1, "float", torch.exp),
    "exp2": Operation(1, "float", torch.exp2),
    "log": Operation(1, "float", torch.log),
    "log2": Operation(1, "float", torch.log2),
    "sqrt": Operation(1, "float", torch.sqrt),
    "rsqrt": Operation(1, "float", torch.rsqrt),
    "sin": Operation(1, "float", torch.sin),
    "cos": Operation(1, "float", torch.cos),
    "index": Operation(-1, "", lambda table, *indices: table[indices]),
    "cast": Operation(1, "", lambda value, dtype: value.to(dtype)),
}
"""The closed vocabulary by name."""


def kind_of(dtype: torch.dtype) -> Kind:
    """Return the kind of values of ``dtype``: truth values, whole numbers or real numbers."""
    if dtype is torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "int"


# --- expressions ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Node:
    """One value of an expression, without its number."""

    # A leaf (``input``, ``number``, ``tensor``, ``true``, ``false``) or a name of ``OPERATIONS``.
    op: str
    kind: Kind
    # Positions of the operands among the nodes, all earlier than this one.
    operands: tuple[int, ...] = ()
    # The input's name; the dtype of a tensor, of a cast, or of a number that was a tensor of one
    # element ("" for a Python number, which promotes differently).
    name: str = ""
    slot: int = -1  # position in ``Expression.captured`` of a number or tensor
    rank: int = 0  # dimensions of a tensor, or of a number that was one


@dataclass(frozen=True, slots=True)
class Structure:
    """An expression without its captured values: what a compiled kernel depends on."""

    inputs: tuple[str, ...]  # names of the arguments, in the callable's order
    nodes: tuple[Node, ...]  # the values in an order of evaluation; the last one is the result


@dataclass(frozen=True, slots=True, eq=False)
class Expression:
    """A traced mask or score mod."""

    structure: Structure  # the graph; hashable, equal for mods that differ in their numbers only
    captured: tuple[Captured, ...]  # the numbers and tensors that the graph's slots stand for

    def evaluate(self, *inputs: Tensor) -> Tensor:
        """Return the mod's value on tensors in the callable's order, with torch's own promotion.

        Shapes may be any that broadcast. Only this graph is used, nothing else of the trace, so
        that a wrong graph shows as a difference from the callable.
        """
        value: Tensor = evaluate(self, torch_algebra(inputs[0].device), *inputs)
        return value

    def part(self, position: int) -> Expression:
        """Return the expression of node ``position``: only the nodes and slots that it needs."""
        nodes = self.structure.nodes
        needed: set[int] = set()
        pending = [position]
        while pending:
            node = pending.pop()
            if node not in needed:
                needed.add(node)
                pending += nodes[node].operands
        # Renumber positions and slots, so that equal parts of two mods are equal structures.
        order = sorted(needed)
        slots = sorted({nodes[i].slot for i in order} - {-1})
        new_position = {old: new for new, old in enumerate(order)}
        new_slot = {-1: -1} | {old: new for new, old in enumerate(slots)}
        renumbered = tuple(
            replace(
                nodes[i],
                operands=tuple(new_position[operand] for operand in nodes[i].operands),
                slot=new_slot[nodes[i].slot],
            )
            for i in order
        )
        structure = Structure(self.structure.inputs, renumbered)
        return Expression(structure, tuple(self.captured[i] for i in slots))

    def reads(self, name: str) -> bool:
        """Return whether any node is the input ``name``."""
        return any(node.op == "input" and node.name == name for node in self.structure.nodes)

    def __str__(self) -> str:
        return _bare(evaluate(self, _FORMULA, *self.structure.inputs))


# --- evaluation in any algebra ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Algebra(Generic[Value]):
    """Leaves and operations of an evaluation, as functions."""

    # (node, content) → value. A leaf's content is an input, a captured number or tensor, or a bool.
    leaf: Callable[[Node, Any], Value]
    # By name: (node, *values of its operands) → value.
    operations: Mapping[str, Callable[..., Value]]

    @classmethod
    def of(
        cls,
        leaf: Callable[[Node, Any], Value],
        apply: Callable[..., Value],
        special: Mapping[str, Callable[..., Value]],
    ) -> Algebra[Value]:
        """Return the algebra with ``apply`` for every operation except the ``special`` ones."""
        return cls(leaf, {op: special.get(op, apply) for op in OPERATIONS})


def evaluate(expression: Expression, algebra: Algebra[Value], *inputs: Any) -> Value:
    """Return the value of an expression in ``algebra``, for inputs in the callable's order."""
    # A deque of length 1 keeps only the last value alive, unlike a list.
    return deque(evaluate_nodes(expression, algebra, inputs), maxlen=1).pop()


def evaluate_nodes(
    expression: Expression, algebra: Algebra[Value], inputs: Sequence[Any]
) -> Iterator[Value]:
    """Yield the value of each node in order, and release values after their last use."""
    nodes, captured = expression.structure.nodes, expression.captured
    by_name = dict(zip(expression.structure.inputs, inputs, strict=True))
    last_use = {operand: i for i, node in enumerate(nodes) for operand in node.operands}
    values: dict[int, Value] = {}
    for i, node in enumerate(nodes):
        if node.op == "input":
            value = algebra.leaf(node, by_name[node.name])
        elif node.op in {"true", "false"}:
            value = algebra.leaf(node, node.op == "true")
        elif node.op in LEAVES:
            value = algebra.leaf(node, captured[node.slot])
        else:
            value = algebra.operations[node.op](node, *(values[o] for o in node.operands))
        values[i] = value
        for operand in set(node.operands):
            if last_use[operand] == i:  # values may be many gigabytes on a GPU
                del values[operand]
        yield value


def torch_algebra(device: torch.device | str) -> Algebra[Any]:
    """Return torch's algebra: tensors on ``device``, and Python numbers for its promotion."""

    def leaf(node: Node, value: Any) -> Any:
        if node.op in {"true", "false"}:
            return torch.tensor(value, device=device)
        # A tensor of one element promotes by its dtype and rank, unlike a Python number.
        if node.op == "number" and node.name:
            dtype = getattr(torch, node.name)
            return torch.tensor(value, dtype=dtype, device=device).reshape((1,) * node.rank)
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return Algebra(leaf, _TORCH)


def _ignoring_node(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _node, *operands: function(*operands)


_TORCH = {name: _ignoring_node(operation.torch) for name, operation in OPERATIONS.items()} | {
    "cast": lambda node, value: value.to(getattr(torch, node.name))
}


def node_dtypes(
    expression: Expression, score: torch.dtype = torch.float64
) -> tuple[torch.dtype | None, ...]:
    """Return the dtype of each node, in order; None for a Python number, which has none.

    torch promotes them on its meta device, without computing anything. Indices are int64.

    Args:
        score: The dtype of the incoming score.

    Raises:
        Whatever torch raises for operands that it does not support.
    """
    inputs = [
        torch.empty((1,), dtype=score if name == "score" else torch.int64, device="meta")
        for name in expression.structure.inputs
    ]
    values = evaluate_nodes(expression, torch_algebra("meta"), inputs)
    return tuple(v.dtype if isinstance(v, torch.Tensor) else None for v in values)


def _formula_leaf(node: Node, value: Any) -> str:
    if node.op == "input":
        return node.name
    if node.op == "number":
        return str(value)
    return f"tensor{node.slot}" if node.op == "tensor" else node.op


def _formula(node: Node, *operands: str) -> str:
    if node.op == "index":
        return f"{operands[0]}[{', '.join(map(_bare, operands[1:]))}]"
    if sign := OPERATIONS[node.op].sign:
        return f"({operands[0]} {sign} {operands[1]})"
    name = node.name if node.op == "cast" else node.op
    return f"{name}({', '.join(map(_bare, operands))})"


_FORMULA: Algebra[str] = Algebra.of(_formula_leaf, _formula, {})


def _bare(text: str) -> str:
    """Return ``(a + b)`` without its parentheses, and ``(a) + (b)`` unchanged."""
    if not text.startswith("("):
        return text
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[1:-1] if position == len(text) - 1 else text
    return text


# --- as JSON ----------------------------------------------------------------------------------

FORMAT = "attncheck expression 1"

_READABLE = 64  # Most elements of a tensor that is written as a list of numbers.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_NotFinite = Literal["inf", "-inf", "nan"]
_Dtype = Literal[
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"
]


class _Tensor(msgspec.Struct):
    """A captured tensor: its numbers, or the base64 of its little-endian bytes."""

    dtype: _Dtype
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    values: list[bool | int | float | _NotFinite] | None = None
    base64: str | None = None


class _Document(msgspec.Struct):
    """The JSON object of ``expression_to_json``."""

    format: Literal["attncheck expression 1"]
    inputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    captured: list[int | float | _NotFinite | _Tensor]


def expression_to_json(expression: Expression) -> dict[str, Any]:
    """Return a JSON object; ``expression_from_json`` gives an equal expression, bit for bit.

    A tensor of up to 64 elements is a list of numbers, a larger one the base64 of its little-endian
    bytes. NaN and ±∞, for which JSON has no numbers, are the strings ``nan``, ``inf``, ``-inf``.
    The tensors' device is not written.
    """
    nodes = []
    for node in expression.structure.nodes:
        written = dataclasses.asdict(node) | {"operands": list(node.operands)}
        nothing = {"operands": [], "name": "", "slot": -1, "rank": 0}
        nodes.append({key: v for key, v in written.items() if v != nothing.get(key)})
    return {
        "format": FORMAT,
        "inputs": list(expression.structure.inputs),
        "nodes": nodes,
        "captured": [_captured_to_json(value) for value in expression.captured],
    }


def expression_digest(expression: Expression) -> str:
    """Return the SHA-256 of its canonical JSON in hexadecimal; the same on every machine."""
    # Sorted and without spaces, so that the text does not depend on the order of fields.
    text = json.dumps(expression_to_json(expression), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def expression_from_json(data: Any) -> Expression:
    """Return the expression that ``expression_to_json`` wrote, its tensors on the CPU.

    Raises:
        ProblemError: for any other data; one line that names the node or the captured value.
    """
    try:
        read = msgspec.convert(data, _Document)
    except msgspec.ValidationError as error:
        raise ProblemError(f"it is no expression of format {FORMAT!r}: {error}.") from None
    # Names and order are fixed, since callables are called by the order of their arguments.
    if read.inputs not in (INDICES, ("score", *INDICES)):
        raise ProblemError(
            f"an expression's inputs are {', '.join(INDICES)}, for a score mod after score; "
            f"not {', '.join(read.inputs)}."
        )
    captured = tuple(_captured(f"captured[{i}]", value) for i, value in enumerate(read.captured))
    expression = Expression(Structure(read.inputs, read.nodes), captured)
    for position in range(len(read.nodes)):
        _check_node(expression, position)
    _check_kinds(expression)
    return expression


def _check_node(expression: Expression, position: int) -> None:
    """Raise ProblemError unless a node can be evaluated after those before it."""
    nodes, inputs = expression.structure.nodes, expression.structure.inputs
    node, where = nodes[position], f"nodes[{position}]"
    if node.op not in LEAVES and node.op not in OPERATIONS:
        able = ", ".join((*sorted(LEAVES), *sorted(OPERATIONS)))
        raise ProblemError(f"{where}.op={node.op!r} must be one of {able}.")
    # Operands must be earlier nodes, so that a file cannot contain a cycle.
    if not all(0 <= operand < position for operand in node.operands):
        raise ProblemError(f"{where}.operands={node.operands} must be numbers of earlier nodes.")
    arity = 0 if node.op in LEAVES else OPERATIONS[node.op].arity
    if node.op == "index":
        table = nodes[node.operands[0]] if node.operands else None
        arity = 1 + table.rank if table is not None and table.op == "tensor" else -1
    if len(node.operands) != arity:
        count = len(node.operands)
        raise ProblemError(f"{where} is {node.op} of {count} operands: it takes {arity}.")
    if node.op == "input" and node.name not in inputs:
        raise ProblemError(f"{where}.name={node.name!r} is no input.")
    if node.op == "cast" and node.name not in get_args(_Dtype):
        raise ProblemError(f"{where}.name={node.name!r} is no dtype of a cast.")
    if node.op in {"number", "tensor"} and not _fits_slot(node, expression.captured):
        raise ProblemError(f"{where} is not what captured[{node.slot}] is.")


def _fits_slot(node: Node, captured: tuple[Captured, ...]) -> bool:
    if not 0 <= node.slot < len(captured):
        return False
    value = captured[node.slot]
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        return (node.op, node.rank, node.name) == ("tensor", value.ndim, name)
    kind = "int" if isinstance(value, int) else "float"
    dtype = node.name == "" or node.name in get_args(_Dtype)
    return (node.op, node.kind) == ("number", kind) and dtype and 0 <= node.rank < 64


def _check_kinds(expression: Expression) -> None:
    """Raise ProblemError unless every kind is the one that torch's promotion gives."""
    # A kernel's source follows from the kinds: a wrong kind would make it compute something else.
    nodes = expression.structure.nodes
    if not nodes:
        raise ProblemError("an expression has at least one node.")
    try:
        dtypes = node_dtypes(expression)
    except Exception as error:  # noqa: BLE001  (torch refuses operands in many ways)
        fact = str(error).partition("\n")[0]
        raise ProblemError(f"the expression cannot be evaluated: {fact}") from None
    for position, (node, dtype) in enumerate(zip(nodes, dtypes, strict=True)):
        if dtype is not None and node.kind != kind_of(dtype):
            raise ProblemError(
                f"nodes[{position}].kind={node.kind!r} should be {kind_of(dtype)!r}."
            )
    kind = "float" if "score" in expression.structure.inputs else "bool"
    if nodes[-1].kind != kind:
        raise ProblemError(f"the result's kind is {nodes[-1].kind!r}: it must be {kind!r}.")


def _captured_to_json(value: Captured) -> Any:
    if not isinstance(value, torch.Tensor):
        return _number_to_json(value)
    flat = value.detach().cpu().reshape(-1).contiguous()
    head = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    # As a JSON number a NaN would lose its bits.
    if flat.numel() > _READABLE or (flat.is_floating_point() and bool(flat.isnan().any())):
        size = flat.element_size()
        bits = flat.view(_BITS[size]).numpy().astype(f"<{'u' if size == 1 else 'i'}{size}")
        return head | {"base64": base64.b64encode(bits.tobytes()).decode()}
    return head | {"values": [_number_to_json(number) for number in flat.tolist()]}


def _number_to_json(value: float) -> float | str:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _captured(where: str, data: int | float | str | _Tensor) -> Captured:
    if not isinstance(data, _Tensor):
        return float(data) if isinstance(data, str) else data
    dtype: torch.dtype = getattr(torch, data.dtype)
    if data.base64 is not None:
        flat = _from_bytes(where, data.base64, dtype)
    elif data.values is not None:
        flat = _from_numbers(where, data.values, dtype)
    else:
        raise ProblemError(f"{where} has neither values nor base64.")
    if flat.numel() != math.prod(data.shape):
        raise ProblemError(
            f"{where} has {flat.numel()} values: shape {data.shape} needs another count."
        )
    return flat.reshape(data.shape)


def _from_bytes(where: str, text: str, dtype: torch.dtype) -> Tensor:
    try:
        raw = base64.b64decode(text, validate=True)
        bits = np.frombuffer(raw, f"<{'u' if dtype.itemsize == 1 else 'i'}{dtype.itemsize}")
    except (binascii.Error, ValueError):
        raise ProblemError(f"{where}.base64 is not base64 of whole elements.") from None
    # Convert to this machine's byte order: the file is always little-endian.
    return torch.from_numpy(bits.astype(bits.dtype.newbyteorder("="))).view(dtype)


def _from_numbers(where: str, values: list[Any], dtype: torch.dtype) -> Tensor:
    numbers = [float(value) if isinstance(value, str) else value for value in values]
    try:
        tensor = torch.tensor(numbers, dtype=dtype)
        stored: list[float] = tensor.tolist()
    except (RuntimeError, TypeError, ValueError, OverflowError):
        stored = []
    # Since 1 == True, check that exactly the values of bool tensors are booleans.
    kinds_match = all(isinstance(number, bool) == (dtype is torch.bool) for number in numbers)
    if stored != numbers or not kinds_match:
        raise ProblemError(f"{where}.values hold a number that {dtype} does not.")
    return tensor
