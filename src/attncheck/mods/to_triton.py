"""Expressions as ``@triton.jit`` functions that a kernel takes as ``tl.constexpr`` arguments.

The function is printed from the structure alone and compiled once; numbers and tensors are
passed at run time in a tuple. Triton specialises whole numbers in a tuple (equal to 1, multiple
of 16, any other), also where the kernel says ``do_not_specialize``: at most three variants each.

Arithmetic is fp32 and int32, whatever torch computes the callable in: a whole number beyond 32 bits
wraps, and one beyond 2^24 is rounded where it meets a real one. ``operation_errors`` states the
error of each operation. On a GPU ``/`` on fp32 is ``div.full.f32`` or has its bits (``_quotient``):
within 2 ulp, not IEEE (read from the PTX of Triton 3.9; ``tl.div_rn`` would be IEEE, and slower).
Triton may fuse a multiplication and an addition into one rounding. ``floor`` and ``ceil`` take
subnormal numbers for 0 (``cvt.ftz``).
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from attncheck.core.errors import UsageError
from attncheck.core.formats import fp32
from attncheck.mods.expression import (
    OPERATIONS,
    Algebra,
    Captured,
    Expression,
    Node,
    Structure,
    evaluate,
)
from attncheck.mods.triton_functions import FUNCTIONS

_INT32_LARGEST = 2**31 - 1
SHORT = 2**23  # of indices below
_SHORT_BITS = 0x4B000000  # of 2^23 in fp32, to which a number below 2^23 adds itself


@dataclass(frozen=True, slots=True, eq=False)
class TritonMod:
    """A mod as a kernel takes it."""

    # ``mask_mod(b, h, q_idx, kv_idx, captured)`` or ``score_mod(score, b, h, q_idx, kv_idx,
    # captured)``, a ``@triton.jit`` function; the same object for every expression of one text. It
    # may be called at indices beyond query and kv: what it reads there is inside the captured
    # tensors. The result broadcasts to the indices.
    function: Any
    # What to pass as ``captured``: for each slot a number, or a tensor's pointer followed by its
    # sizes.
    captured: tuple[Captured, ...]
    source: str  # the text of the function
    long: bool  # ``is_long``


def to_triton(expression: Expression, *, short: bool = False) -> TritonMod:
    """Return the expression as a Triton function, and its captured values.

    Args:
        expression: What to print.
        short: Whether query and kv are at most ``SHORT``. Where a distance meets a real number, it
            is then the difference of two fp32 numbers, 2^23 and the indices, as exactly: no score
            needs a conversion.

    Raises:
        UsageError: if a captured tensor is too large for 32-bit offsets.
    """
    nodes = expression.structure.nodes
    divisors = (nodes[node.operands[1]] for node in nodes if node.op == "div")
    moderate = frozenset(
        one.slot
        for one in divisors
        if one.slot >= 0 and _is_moderate(expression.captured[one.slot])
    )
    source = _Printer(expression.structure, moderate, short=short).source()
    function = _function(_name(expression.structure), source)
    captured: list[Captured] = []
    for value in expression.captured:
        if not isinstance(value, torch.Tensor):
            captured.append(fp32(value) if isinstance(value, float) else value)
            continue
        if value.numel() > _INT32_LARGEST:
            raise UsageError(f"a mod captures {value.numel()} elements: at most {_INT32_LARGEST}.")
        flat = value.detach().reshape(-1).contiguous()
        captured += [flat.to(_read_as(flat)), *value.shape]
    return TritonMod(function, tuple(captured), source, is_long(expression))


def _is_moderate(value: Captured) -> bool:
    """Whether it is a number that ``_quotient`` divides by."""
    return not isinstance(value, torch.Tensor) and 2.0**-126 <= abs(fp32(value)) <= 2.0**126


def is_long(expression: Expression) -> bool:
    """Return whether it is tens of instructions: functions of reals, whole numbers divided."""
    long = _FUNCTIONS_OF_REALS.keys() - {"floor", "ceil", "sqrt"} | {"floor_divide", "remainder"}
    return any(node.op in long for node in expression.structure.nodes)


def _read_as(flat: torch.Tensor) -> torch.dtype:
    """The dtype that a kernel reads the elements in, exactly: the mod may not compute in fewer."""
    if flat.is_floating_point():
        return torch.float32
    if flat.dtype is torch.bool:
        return torch.int8
    if flat.dtype is torch.int64:
        low, high = (int(limit) for limit in torch.aminmax(flat))
        if max(-1 - low, high) > _INT32_LARGEST:
            return torch.int64
    return torch.int32


@cache
def _function(name: str, source: str) -> Any:
    """The one function of a text, whatever it was printed from."""
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
    return triton.jit(function)


def _name(structure: Structure) -> str:
    return "score_mod" if structure.inputs[0] == "score" else "mask_mod"


class _Text(NamedTuple):
    """A value of the printed function, and the node that it is."""

    node: Node
    text: str
    real: str = ""  # of a distance: the same as a real number, if that is less work


class _Printer:
    """The algebra of Triton's text: each operation is a line, its value the line's variable."""

    def __init__(self, structure: Structure, moderate: frozenset[int], *, short: bool) -> None:
        self._structure, self._lines = structure, list[str]()
        # Slots of the numbers that ``_quotient`` divides by, and whether indices are exact in fp32.
        self._moderate, self._short = moderate, short
        # Where each slot begins in the tuple: a tensor is followed by its sizes.
        ranks = {n.slot: n.rank * (n.op == "tensor") for n in structure.nodes if n.slot >= 0}
        self._first: dict[int, int] = {}
        position = 0
        for slot in sorted(ranks):
            self._first[slot] = position
            position += 1 + ranks[slot]

    def source(self) -> str:
        """Return the text of the function."""
        inputs = self._structure.inputs
        special: dict[str, Callable[..., _Text]] = {"index": self._load, "cast": self._cast}
        algebra = Algebra.of(self._leaf, self._operation, special)
        # The text follows from the structure alone: what is captured is passed at run time.
        nothing = (0,) * (1 + max(self._first, default=-1))
        result = evaluate(Expression(self._structure, nothing), algebra, *inputs)
        head = f"def {_name(self._structure)}({', '.join(inputs)}, captured):"
        return "\n".join([head, *self._lines, f"    return {result.text}", ""])

    def _leaf(self, node: Node, _value: object) -> _Text:
        if node.op == "input":
            return _Text(node, node.name)
        if node.op in {"true", "false"}:
            return _Text(node, f"tl.cast({node.op == 'true'}, tl.int1)")
        return _Text(node, f"captured[{self._first[node.slot]}]")

    def _line(self, node: Node, text: str) -> _Text:
        variable = f"v{len(self._lines)}"
        self._lines.append(f"    {variable} = {text}")
        return _Text(node, variable)

    def _operation(self, node: Node, *operands: _Text) -> _Text:
        texts = [_converted(node, i, operand) for i, operand in enumerate(operands)]
        is_real = node.kind == "float"
        template = _REAL_TEMPLATES.get(node.op, "") if is_real else ""
        if node.op == "div" and operands[1].node.slot in self._moderate:
            template = "_quotient({0}, {1})"
        nan = ", propagate_nan=tl.PropagateNan.ALL" if is_real else ""
        line = self._line(node, (template or _TEMPLATES[node.op]).format(*texts, nan=nan))
        indices = all(operand.node.op == "input" for operand in operands)
        if self._short and indices and (node.op, node.kind) == ("sub", "int"):
            one = f"({{}} + {_SHORT_BITS:#x}).to(tl.float32, bitcast=True)"
            line = line._replace(real=f"({' - '.join(map(one.format, texts))})")
        return line

    def _cast(self, node: Node, operand: _Text) -> _Text:
        if node.kind == operand.node.kind:
            return operand._replace(node=node)  # one width a kind: nothing to do
        if node.kind == "float" and operand.real:
            return self._line(node, operand.real)
        if node.kind == "bool":
            return self._line(node, f"{operand.text} != 0")
        dtype = "tl.float32" if node.kind == "float" else "tl.int32"
        return self._line(node, f"{operand.text}.to({dtype})")

    def _load(self, node: Node, table: _Text, *indices: _Text) -> _Text:
        offset = ""
        for axis, (index, text, _) in enumerate(indices):
            size = f"captured[{self._first[table.node.slot] + 1 + axis}]"
            # Only b, h, q_idx and kv_idx are known to be no negative (from the end) index.
            place = f"{'_inside' if index.op == 'input' else '_wrapped'}({text}, {size})"
            offset = f"({offset}) * {size} + {place}" if axis else place
        loaded = f"tl.load({table.text} + {offset})"
        return self._line(node, f"{loaded} != 0" if node.kind == "bool" else loaded)


def _converted(node: Node, position: int, operand: _Text) -> str:
    """The operand with the type that the operation works on: truth values count as 0 and 1."""
    kind, text = operand.node.kind, operand.text
    if node.kind == "float" and operand.real:
        return operand.real
    if node.op in _FUNCTIONS_OF_REALS:
        return text if kind == "float" else f"{text}.to(tl.float32)"
    condition = node.op == "where" and position == 0
    truth = node.kind == "bool" and node.op in {"and", "or", "xor", "not", "where"}
    return f"{text}.to(tl.int32)" if kind == "bool" and not condition | truth else text


_FUNCTIONS_OF_REALS = {
    **{op: f"tl.{op}({{0}})" for op in ("floor", "ceil", "log", "log2", "sin", "cos")},
    **{op: f"_{op}({{0}})" for op in ("exp", "exp2", "rsqrt", "sigmoid", "tanh")},
    "sqrt": "tl.sqrt_rn({0})",
}

_TEMPLATES = {
    **{op: f"{{0}} {known.sign} {{1}}" for op, known in OPERATIONS.items() if known.sign},
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
