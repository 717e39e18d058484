"""A mask or score mod as data: a small graph over a closed vocabulary of operations."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch

from attncheck.core.errors import ProblemError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = [
    "FORMAT",
    "INFIX",
    "LEAVES",
    "OPERATIONS",
    "Captured",
    "Expression",
    "Kind",
    "Node",
    "Structure",
    "expression_digest",
    "expression_from_json",
    "expression_to_json",
    "node_dtypes",
]


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


def node_dtypes(
    expression: Expression, score: torch.dtype = torch.float64
) -> tuple[torch.dtype | None, ...]:
    """The dtype of each node, in order; None for a Python number, which has none of its own.

    torch itself promotes, on its meta device, where tensors have a dtype and a shape only. Indices
    are int64.

    Args:
        expression: A mask or score mod.
        score: The dtype of the score that comes in.

    Raises:
        Whatever torch raises for operands that it does not take.
    """
    values: list[Any] = []
    for node in expression.structure.nodes:
        if node.op in LEAVES:
            values.append(_leaf(node, expression.captured, score))
        else:
            values.append(OPERATIONS[node.op](node, *(values[i] for i in node.operands)))
    return tuple(v.dtype if isinstance(v, torch.Tensor) else None for v in values)


def _leaf(node: Node, captured: tuple[Captured, ...], score: torch.dtype) -> Any:
    if node.op == "input":
        return _meta((1,), score if node.name == "score" else torch.int64)
    if node.op in {"true", "false"}:
        return _meta((), torch.bool)
    if node.op == "number" and not node.name:
        return captured[node.slot]
    if node.op == "number":
        return _meta((1,) * node.rank, getattr(torch, node.name))
    tensor = captured[node.slot]
    assert isinstance(tensor, torch.Tensor)
    return _meta(tuple(tensor.shape), tensor.dtype)


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


FORMAT = "attncheck expression 1"

_INDICES = ("b", "h", "q_idx", "kv_idx")
_KINDS = ("bool", "int", "float")
_UNARY = frozenset(
    {"not", "neg", "abs", "sign", "floor", "ceil", "tanh", "sigmoid", "exp", "exp2", "log"}
    | {"log2", "sqrt", "rsqrt", "sin", "cos", "cast"}
)
_READABLE = 64  # elements of a tensor that are written as a list of numbers
_NAMED = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_TENSORS: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64"),
    )
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def expression_to_json(expression: Expression) -> dict[str, Any]:
    """A JSON object; ``from_json`` gives an equal expression back, its tensors bit for bit.

    Up to 64 elements a tensor is a list of numbers, beyond that the base64 of its little-endian
    bytes. NaN and ±∞, for which JSON has no numbers, are the strings ``nan``, ``inf``, ``-inf``.
    Where the tensors are is not written.
    """
    return {
        "format": FORMAT,
        "inputs": list(expression.structure.inputs),
        "nodes": [_node_to_json(node) for node in expression.structure.nodes],
        "captured": [_captured_to_json(value) for value in expression.captured],
    }


def expression_digest(expression: Expression) -> str:
    """The SHA-256 of its canonical JSON, in hexadecimal digits; the same on every machine."""
    text = json.dumps(expression_to_json(expression), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def expression_from_json(data: Any) -> Expression:
    """The expression that ``to_json`` wrote, its tensors on the CPU.

    Raises:
        ProblemError: for anything else; in one line, with the node or the captured value.
    """
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise ProblemError(f"an expression is a JSON object with format {FORMAT!r}.")
    for key in ("inputs", "nodes", "captured"):
        if not isinstance(data.get(key), list):
            raise ProblemError(f"an expression's {key} are a list, not {_short(data.get(key))}.")
    inputs = tuple(data["inputs"])
    if inputs not in (_INDICES, ("score", *_INDICES)):
        raise ProblemError(
            f"an expression's inputs are {', '.join(_INDICES)}, for a score mod after score; "
            f"not {_short(data['inputs'])}."
        )
    captured = tuple(_captured(f"captured[{i}]", v) for i, v in enumerate(data["captured"]))
    nodes: list[Node] = []
    for item in data["nodes"]:
        nodes.append(_node(f"nodes[{len(nodes)}]", item, inputs, nodes, captured))
    expression = Expression(Structure(inputs, tuple(nodes)), captured)
    _check_kinds(expression)
    return expression


def _node_to_json(node: Node) -> dict[str, Any]:
    written: dict[str, Any] = {"op": node.op, "kind": node.kind}
    if node.operands:
        written["operands"] = list(node.operands)
    if node.name:
        written["name"] = node.name
    if node.slot >= 0:
        written["slot"] = node.slot
    if node.rank:
        written["rank"] = node.rank
    return written


def _node(
    where: str,
    data: Any,
    inputs: tuple[str, ...],
    before: list[Node],
    captured: tuple[Captured, ...],
) -> Node:
    """The node that ``data`` says, refused unless it can be evaluated after those ``before``."""
    if not isinstance(data, Mapping):
        raise ProblemError(f"{where} is an object, not {_short(data)}.")
    operands = data.get("operands", [])
    if not isinstance(operands, list) or not all(_is_whole(i, 0, len(before)) for i in operands):
        raise ProblemError(f"{where}.operands={_short(operands)} must be numbers of earlier nodes.")
    if not isinstance(data.get("name", ""), str) or not isinstance(data.get("rank", 0), int):
        raise ProblemError(f"{where} needs a name that is text and a rank that is a number.")
    node = Node(
        _one_of(where, data, "op", (*sorted(LEAVES), *sorted(OPERATIONS))),
        _one_of(where, data, "kind", _KINDS),  # type: ignore[arg-type]  # one of these three
        tuple(operands),
        data.get("name", ""),
        data.get("slot", -1),
        data.get("rank", 0),
    )
    wanted = _operands_wanted(node, before)
    if len(operands) != wanted:
        raise ProblemError(f"{where} is {node.op} of {len(operands)} operands: it takes {wanted}.")
    if node.op == "input" and node.name not in inputs:
        raise ProblemError(f"{where}.name={node.name!r} is no input.")
    if node.op == "cast" and node.name not in _TENSORS:
        raise ProblemError(f"{where}.name={node.name!r} is no dtype of a cast.")
    if node.op in {"number", "tensor"}:
        _check_slot(where, node, captured)
    return node


def _operands_wanted(node: Node, before: list[Node]) -> int:
    if node.op == "index":
        table = before[node.operands[0]] if node.operands else None
        return 1 + table.rank if table is not None and table.op == "tensor" else -1
    if node.op in LEAVES:
        return 0
    return 3 if node.op == "where" else 1 if node.op in _UNARY else 2


def _check_slot(where: str, node: Node, captured: tuple[Captured, ...]) -> None:
    if not _is_whole(node.slot, 0, len(captured)):
        raise ProblemError(f"{where}.slot={node.slot!r} must be one of {len(captured)} slots.")
    value = captured[node.slot]
    if isinstance(value, torch.Tensor):
        fits = node.op == "tensor" and node.rank == value.ndim
        fits = fits and _TENSORS.get(str(node.name)) == value.dtype
    else:
        fits = node.op == "number" and _is_whole(node.rank, 0, 64)
        fits = fits and node.kind == ("int" if isinstance(value, int) else "float")
        fits = fits and (node.name == "" or node.name in _TENSORS)
    if not fits:
        raise ProblemError(f"{where} is not what captured[{node.slot}] is.")


def _check_kinds(expression: Expression) -> None:
    """Every kind is what torch's own promotion gives, and the result's is the mod's."""
    nodes = expression.structure.nodes
    if not nodes:
        raise ProblemError("an expression has at least one node.")
    try:
        found = node_dtypes(expression)
    except Exception as error:  # noqa: BLE001  (torch refuses operands in many ways)
        said = str(error).partition("\n")[0]
        raise ProblemError(f"the expression cannot be evaluated: {said}") from None
    for position, (node, dtype) in enumerate(zip(nodes, found, strict=True)):
        if dtype is not None and node.kind != _kind(dtype):
            raise ProblemError(f"nodes[{position}].kind={node.kind!r} should be {_kind(dtype)!r}.")
    wanted = "float" if "score" in expression.structure.inputs else "bool"
    if nodes[-1].kind != wanted:
        raise ProblemError(f"the result's kind is {nodes[-1].kind!r}: it must be {wanted!r}.")


def _kind(dtype: torch.dtype) -> str:
    if dtype is torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "int"


def _captured_to_json(value: Captured) -> Any:
    if not isinstance(value, torch.Tensor):
        return _number_to_json(value)
    flat = value.detach().cpu().reshape(-1).contiguous()
    head = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    # The bits of a NaN do not survive as a number.
    if flat.numel() > _READABLE or (flat.is_floating_point() and bool(flat.isnan().any())):
        size = flat.element_size()
        bits = flat.view(_BITS[size]).numpy().astype(f"<{'u' if size == 1 else 'i'}{size}")
        return head | {"base64": base64.b64encode(bits.tobytes()).decode()}
    return head | {"values": [_number_to_json(number) for number in flat.tolist()]}


def _number_to_json(value: float) -> float | str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _captured(where: str, data: Any) -> Captured:
    if not isinstance(data, Mapping):
        return _number(where, data)
    name, shape = data.get("dtype"), data.get("shape")
    if not isinstance(name, str) or name not in _TENSORS:
        raise ProblemError(f"{where}.dtype={_short(name)} must be one of {', '.join(_TENSORS)}.")
    if not isinstance(shape, list) or not all(_is_whole(size, 0, 2**63) for size in shape):
        raise ProblemError(f"{where}.shape={_short(shape)} must be a list of sizes.")
    flat = _elements(where, data, _TENSORS[name])
    if flat.numel() != math.prod(shape):
        raise ProblemError(f"{where} has {flat.numel()} values: shape {shape} needs another count.")
    return flat.reshape(shape)


def _elements(where: str, data: Mapping[str, Any], dtype: torch.dtype) -> torch.Tensor:
    if "base64" in data:
        try:
            raw = base64.b64decode(data["base64"], validate=True)
            bits = np.frombuffer(raw, f"<{'u' if dtype.itemsize == 1 else 'i'}{dtype.itemsize}")
        except (binascii.Error, TypeError, ValueError):
            raise ProblemError(f"{where}.base64 is not base64 of whole elements.") from None
        return torch.from_numpy(bits.astype(bits.dtype.newbyteorder("="))).view(dtype)
    values = data.get("values")
    if not isinstance(values, list):
        raise ProblemError(f"{where} has neither values nor base64.")
    if dtype is torch.bool and all(isinstance(value, bool) for value in values):
        return torch.tensor(values, dtype=dtype)
    numbers = [_number(f"{where}.values", value) for value in values]
    try:
        tensor = torch.tensor(numbers, dtype=dtype)
        held: list[float] = tensor.tolist()
    except (RuntimeError, TypeError, ValueError, OverflowError):
        held = []
    if held != numbers:
        raise ProblemError(f"{where}.values hold a number that {dtype} does not.")
    return tensor


def _number(where: str, data: Any) -> int | float:
    if isinstance(data, str) and data in _NAMED:
        return _NAMED[data]
    if isinstance(data, bool) or not isinstance(data, int | float):
        raise ProblemError(f"{where}={_short(data)} must be a number or a tensor.")
    return data


def _one_of(where: str, data: Mapping[str, Any], key: str, allowed: tuple[str, ...]) -> str:
    value = data.get(key)
    if not isinstance(value, str) or value not in allowed:
        raise ProblemError(f"{where}.{key}={_short(value)} must be one of {', '.join(allowed)}.")
    return value


def _is_whole(value: object, low: int, end: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < end


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
