"""Expressions as JSON and back, bit for bit, and a digest that stands for one."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attncheck.errors import ProblemError
from attncheck.mods.expression import LEAVES, OPERATIONS, Expression, Node, Structure
from attncheck.mods.promotion import dtypes

if TYPE_CHECKING:
    from attncheck.mods.expression import Captured

__all__ = ["FORMAT", "digest", "from_json", "to_json"]

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


def to_json(expression: Expression) -> dict[str, Any]:
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


def digest(expression: Expression) -> str:
    """The SHA-256 of its canonical JSON, in hexadecimal digits; the same on every machine."""
    text = json.dumps(to_json(expression), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def from_json(data: Any) -> Expression:
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
        found = dtypes(expression)
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
