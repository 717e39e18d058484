"""Expressions as ``@triton.jit`` functions that a kernel takes as ``tl.constexpr`` arguments.

The function is printed from the structure alone and compiled once; numbers and tensors are
passed at run time in a tuple. Triton specialises whole numbers in a tuple (equal to 1, multiple
of 16, any other), also where the kernel says ``do_not_specialize``: at most three variants each.

Arithmetic is fp32 and int32, whatever torch computes the callable in: a whole number beyond 32 bits
wraps, and one beyond 2^24 is rounded where it meets a real one. ``triton_ulp`` states the error of
each operation. On a GPU ``/`` on fp32 is ``div.full.f32``: within 2 ulp, not IEEE (read from the
PTX of Triton 3.9; ``tl.div_rn`` would be IEEE, and slower). Triton may fuse a multiplication and an
addition into one rounding. ``floor`` and ``ceil`` take subnormal numbers for 0 (``cvt.ftz``).
"""

from __future__ import annotations

import hashlib
import linecache
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from attncheck.core.errors import UsageError
from attncheck.core.formats import fp32
from attncheck.mods.expression import INFIX, LEAVES
from attncheck.mods.operation_errors import TRITON_FLUSHED, TRITON_ULP
from attncheck.mods.triton_functions import FUNCTIONS

if TYPE_CHECKING:
    from attncheck.mods.expression import Captured, Expression, Node, Structure

__all__ = ["TRITON_FLUSHED", "TRITON_ULP", "TritonMod", "to_triton"]


@dataclass(frozen=True, slots=True, eq=False)
class TritonMod:
    """A mod as a kernel takes it.

    Attributes:
        function: ``mask_mod(b, h, q_idx, kv_idx, captured)`` or ``score_mod(score, b, h, q_idx,
            kv_idx, captured)``, a ``@triton.jit`` function; the same object for every expression
            of one structure. It may be called at indices beyond query and kv: what it reads
            there is inside the captured tensors. The result broadcasts to the indices.
        captured: What to pass as ``captured``: for each slot a number, or a tensor's pointer
            followed by its sizes.
        source: The text of the function.
    """

    function: Any
    captured: tuple[Captured, ...]
    source: str


def to_triton(expression: Expression, device: str | torch.device | None = None) -> TritonMod:
    """The expression as a Triton function and its captured values.

    Args:
        expression: A traced mask or score mod.
        device: Where the captured tensors are to be (default: where they are).

    Raises:
        UsageError: if a captured tensor is too large for 32-bit offsets.
    """
    function, source = _function(expression.structure)
    captured: list[Captured] = []
    for value in expression.captured:
        captured += _arguments(value, device)
    return TritonMod(function, tuple(captured), source)


def _arguments(value: Captured, device: str | torch.device | None) -> list[Captured]:
    if isinstance(value, int):
        return [value]
    if isinstance(value, float):
        return [fp32(value)]
    if value.numel() > _INT32_LARGEST:
        raise UsageError(f"a mod captures {value.numel()} elements: at most {_INT32_LARGEST}.")
    flat = value.detach().to(device or value.device).reshape(-1).contiguous()
    return [flat.to(_read_as(flat)), *value.shape]


def _read_as(flat: torch.Tensor) -> torch.dtype:
    """The dtype that a kernel reads the elements in, exactly: the mod may not compute in fewer."""
    if flat.is_floating_point():
        return torch.float32
    if flat.dtype is torch.bool:
        return torch.int8
    wide = flat.dtype is torch.int64 and not _fits_int32(flat)
    return torch.int64 if wide else torch.int32


_INT32_LARGEST = 2**31 - 1


def _fits_int32(values: torch.Tensor) -> bool:
    low, high = (int(limit) for limit in torch.aminmax(values))
    return max(-1 - low, high) <= _INT32_LARGEST


@cache
def _function(structure: Structure) -> tuple[Any, str]:
    source = _source(structure)
    name = _name(structure)
    # Triton and inspect read a function's text through linecache; no file is needed.
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    file = f"<attncheck {name} {digest}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"tl": tl, "__name__": __name__, **FUNCTIONS}
    exec(compile(source, file, "exec"), scope)  # noqa: S102  (our own printed text)
    function = scope[name]
    # Triton knows a function that a kernel calls by its module, this name and the types of its
    # arguments: a score mod and its derivative would be one and the same.
    function.__qualname__ = f"{name}_{digest}"
    return triton.jit(function), source


def _name(structure: Structure) -> str:
    return "score_mod" if structure.inputs[0] == "score" else "mask_mod"


def _source(structure: Structure) -> str:
    first = _first_arguments(structure)
    lines = [f"def {_name(structure)}({', '.join(structure.inputs)}, captured):"]
    texts: list[str] = []
    for position, node in enumerate(structure.nodes):
        if node.op in LEAVES:
            texts.append(_leaf(node, first))
            continue
        operands = [(structure.nodes[i], texts[i]) for i in node.operands]
        if node.op == "cast" and node.kind == operands[0][0].kind:
            texts.append(operands[0][1])  # one width a kind: nothing to do
            continue
        lines.append(f"    v{position} = {_text(node, operands, first)}")
        texts.append(f"v{position}")
    return "\n".join([*lines, f"    return {texts[-1]}", ""])


def _first_arguments(structure: Structure) -> dict[int, int]:
    """Where each slot begins in the tuple: a tensor is followed by its sizes."""
    ranks = {n.slot: n.rank if n.op == "tensor" else 0 for n in structure.nodes if n.slot >= 0}
    first, position = {}, 0
    for slot in sorted(ranks):
        first[slot] = position
        position += 1 + ranks[slot]
    return first


def _leaf(node: Node, first: dict[int, int]) -> str:
    if node.op == "input":
        return node.name
    if node.op in {"true", "false"}:
        return f"tl.full((), {node.op == 'true'}, tl.int1)"
    return f"captured[{first[node.slot]}]"


def _text(node: Node, operands: list[tuple[Node, str]], first: dict[int, int]) -> str:
    if node.op == "index":
        return _load(node, operands, first)
    if node.op == "cast":
        return _cast(node, operands[0][1])
    texts = [_converted(node, i, *operand) for i, operand in enumerate(operands)]
    real = node.kind == "float"
    template = _REAL_TEMPLATES.get(node.op, "") if real else ""
    nan = ", propagate_nan=tl.PropagateNan.ALL" if real else ""
    return (template or _TEMPLATES[node.op]).format(*texts, nan=nan)


def _converted(node: Node, position: int, operand: Node, text: str) -> str:
    """The operand with the type that the operation works on: truth values count as 0 and 1."""
    if node.op in _FUNCTIONS_OF_REALS:
        return text if operand.kind == "float" else f"{text}.to(tl.float32)"
    condition = node.op == "where" and position == 0
    truth = node.kind == "bool" and node.op in {"and", "or", "xor", "not", "where"}
    return f"{text}.to(tl.int32)" if operand.kind == "bool" and not condition | truth else text


_FUNCTIONS_OF_REALS = {
    **{op: f"tl.{op}({{0}})" for op in ("floor", "ceil", "log", "log2", "sin", "cos")},
    **{op: f"_{op}({{0}})" for op in ("exp", "exp2", "rsqrt", "sigmoid", "tanh")},
    "sqrt": "tl.sqrt_rn({0})",
}

_TEMPLATES = {
    **{op: f"{{0}} {sign} {{1}}" for op, sign in INFIX.items()},
    **{op: f"_{op}({{0}}, {{1}})" for op in ("floor_divide", "remainder")},
    **{op: f"_{op}({{0}}, {{1}})" for op in ("left_shift", "right_shift")},
    **_FUNCTIONS_OF_REALS,
    "not": "~{0}",
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "sign": "_sign({0})",
    "where": "tl.where({0}, {1}, {2})",
    "minimum": "tl.minimum({0}, {1}{nan})",
    "maximum": "tl.maximum({0}, {1}{nan})",
}

_REAL_TEMPLATES = {
    "floor_divide": "_floor_divide_real({0}, {1})",
    "remainder": "_remainder_real({0}, {1})",
    "sign": "_sign({0}).to(tl.float32)",
}


def _cast(node: Node, text: str) -> str:
    if node.kind == "bool":
        return f"{text} != 0"
    return f"{text}.to({'tl.float32' if node.kind == 'float' else 'tl.int32'})"


def _load(node: Node, operands: list[tuple[Node, str]], first: dict[int, int]) -> str:
    (table, pointer), *indices = operands
    offset = ""
    for axis, (index, text) in enumerate(indices):
        size = f"captured[{first[table.slot] + 1 + axis}]"
        # Only b, h, q_idx and kv_idx are known to be no negative (from the end) index.
        place = f"{'_inside' if index.op == 'input' else '_wrapped'}({text}, {size})"
        offset = f"({offset}) * {size} + {place}" if axis else place
    loaded = f"tl.load({pointer} + {offset})"
    return f"{loaded} != 0" if node.kind == "bool" else loaded
