"""Expressions as ``@triton.jit`` functions that a kernel takes as ``tl.constexpr`` arguments.

The function is printed from the structure alone and compiled once; numbers and tensors are
passed at run time in a tuple. Triton specialises whole numbers in a tuple (1, multiples of 16,
others), even with ``do_not_specialize``: at most three variants each.

Arithmetic is fp32 and int32, whatever dtypes torch uses for the callable: whole numbers beyond 32
bits wrap, and those beyond 2^24 are rounded when combined with reals. ``operation_errors`` lists
the error of each operation. On a GPU ``/`` on fp32 is ``div.full.f32`` or has its bits
(``_quotient``): within 2 ulp, not IEEE (seen in the PTX of Triton 3.9; ``tl.div_rn`` would be IEEE,
and slower). Triton may fuse a multiplication and an addition into one rounding. ``floor`` and
``ceil`` flush subnormal numbers to 0 (``cvt.ftz``).
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

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
SHORT = 2**23  # Indices below this are exact in fp32: see ``to_triton``.
_SHORT_BITS = 0x4B000000  # The bits of fp32 2^23; plus n < 2^23 they are the bits of 2^23 + n.


Weight = Literal["light", "medium", "heavy"]


@dataclass(frozen=True, slots=True, eq=False)
class TritonMod:
    """A mod in the form of kernel arguments."""

    # ``mask_mod(b, h, q_idx, kv_idx, captured)`` or ``score_mod(score, b, h, q_idx, kv_idx,
    # captured)``, a ``@triton.jit`` function; the same object for all expressions of equal source.
    # A kernel that has kv_idx − q_idx may pass it behind these, as int32, and as fp32 if ``short``.
    # It may be called at indices beyond query and kv: its reads stay inside the captured tensors.
    # The result broadcasts to the indices.
    function: Any
    # The argument ``captured``: per slot a number, or a tensor's pointer followed by its sizes.
    captured: tuple[Captured, ...]
    source: str  # the source of the function
    weight: Weight  # ``weight_of``


def to_triton(expression: Expression, *, short: bool = False) -> TritonMod:
    """Return the expression as a Triton function, and its captured values.

    Args:
        expression: The expression to print.
        short: Whether query and kv are at most ``SHORT``. Distances combined with real numbers are
            then differences of the fp32 numbers 2^23 + index, which are exact: no element needs a
            conversion from int32.

    Raises:
        UsageError: if a captured tensor is too large for 32-bit offsets.
    """
    nodes = expression.structure.nodes
    divisors = (nodes[node.operands[1]] for node in nodes if node.op == "div")
    moderate = frozenset(
        divisor.slot
        for divisor in divisors
        if divisor.slot >= 0 and _is_moderate(expression.captured[divisor.slot])
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
    return TritonMod(function, tuple(captured), source, weight_of(expression))


def _is_moderate(value: Captured) -> bool:
    """Return whether ``_quotient`` can divide by a captured value."""
    return not isinstance(value, torch.Tensor) and 2.0**-126 <= abs(fp32(value)) <= 2.0**126


def weight_of(expression: Expression) -> Weight:
    """Return how much a mod asks of a kernel for each score.

    "heavy" takes tens of instructions: transcendentals, rsqrt, // or %. "medium" reads tensors or
    compares, which takes a score mod's registers. "light" is other arithmetic.
    """
    nodes = expression.structure.nodes
    heavy = _FUNCTIONS_OF_REALS.keys() - {"floor", "ceil", "sqrt"} | {"floor_divide", "remainder"}
    if any(node.op in heavy for node in nodes):
        return "heavy"
    of_scores = list[bool]()  # of each value, whether it differs between the scores of a head
    for node in nodes:
        varies = node.op == "input" and node.name not in {"b", "h"}
        of_scores.append(varies or any(of_scores[operand] for operand in node.operands))
    values = zip(nodes, of_scores, strict=True)
    medium = any(varies and (node.op == "index" or node.kind == "bool") for node, varies in values)
    return "medium" if medium else "light"


def _read_as(flat: torch.Tensor) -> torch.dtype:
    """Return the dtype of a captured tensor in kernels, which must hold its elements exactly."""
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
    """Return the only function object of a source."""
    # Triton and inspect read a function's source through linecache; no file is needed.
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    file = f"<attncheck {name} {digest}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"tl": tl, "__name__": __name__, **FUNCTIONS}
    exec(compile(source, file, "exec"), scope)  # noqa: S102  (our own printed text)
    function = scope[name]
    # Triton identifies a called function by its module, this name and the types of its arguments:
    # without a digest it would confuse a score mod with its derivative.
    function.__qualname__ = f"{name}_{digest}"
    return triton.jit(function)


def _name(structure: Structure) -> str:
    return "score_mod" if structure.inputs[0] == "score" else "mask_mod"


class _Text(NamedTuple):
    """A node with its expression in the printed function."""

    node: Node
    text: str
    real: str = ""  # of a distance: its fp32 expression without a conversion, if any


class _Printer:
    """The algebra of Triton source: each operation is a line, its value the line's variable."""

    def __init__(self, structure: Structure, moderate: frozenset[int], *, short: bool) -> None:
        self._structure, self._lines = structure, list[str]()
        # Slots of divisors for ``_quotient``, and whether indices are exact in fp32.
        self._moderate, self._short = moderate, short
        # The position of each slot in the tuple, where a tensor is followed by its sizes.
        ranks = {n.slot: n.rank * (n.op == "tensor") for n in structure.nodes if n.slot >= 0}
        self._first: dict[int, int] = {}
        position = 0
        for slot in sorted(ranks):
            self._first[slot] = position
            position += 1 + ranks[slot]

    def source(self) -> str:
        """Return the source of the function."""
        inputs = self._structure.inputs
        special: dict[str, Callable[..., _Text]] = {"index": self._load, "cast": self._cast}
        algebra = Algebra.of(self._leaf, self._operation, special)
        # The source depends only on the structure: captured values are passed at run time.
        placeholders = (0,) * (1 + max(self._first, default=-1))
        result = evaluate(Expression(self._structure, placeholders), algebra, *inputs)
        differences = {
            "offset": "kv_idx - q_idx",
            "distance": _exact_difference("kv_idx", "q_idx"),
        }
        body = list[str]()
        for name, text in differences.items():
            if any(name in line for line in self._lines):
                body += [f"    if {name} is None:", f"        {name} = {text}"]
        arguments = [*inputs, "captured", *(f"{name}=None" for name in differences)]
        head = f"def {_name(self._structure)}({', '.join(arguments)}):"
        return "\n".join([head, *body, *self._lines, f"    return {result.text}", ""])

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
        texts = [_convert_operand(node, i, operand) for i, operand in enumerate(operands)]
        is_real = node.kind == "float"
        template = _REAL_TEMPLATES.get(node.op, "") if is_real else ""
        if node.op == "div" and operands[1].node.slot in self._moderate:
            template = "_quotient({0}, {1})"
        nan = ", propagate_nan=tl.PropagateNan.ALL" if is_real else ""
        text = (template or _TEMPLATES[node.op]).format(*texts, nan=nan)
        indices = all(operand.node.op == "input" for operand in operands)
        if not indices or (node.op, node.kind) != ("sub", "int"):
            return self._line(node, text)
        # A difference of indices: between row and key the kernel may have it already.
        whole, real = {
            ("kv_idx", "q_idx"): ("offset", "distance"),
            ("q_idx", "kv_idx"): ("-offset", "(0.0 - distance)"),
        }.get((texts[0], texts[1]), (text, _exact_difference(*texts)))
        return self._line(node, whole)._replace(real=real if self._short else "")

    def _cast(self, node: Node, operand: _Text) -> _Text:
        if node.kind == operand.node.kind:
            return operand._replace(node=node)  # each kind has one width
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
            # Only b, h, q_idx and kv_idx are surely no negative indices, which count from the end.
            place = f"{'_inside' if index.op == 'input' else '_wrapped'}({text}, {size})"
            offset = f"({offset}) * {size} + {place}" if axis else place
        loaded = f"tl.load({table.text} + {offset})"
        return self._line(node, f"{loaded} != 0" if node.kind == "bool" else loaded)


def _exact_difference(left: str, right: str) -> str:
    """Return the text of a difference of indices below ``SHORT``, as an fp32 number."""
    exact = f"({{}} + {_SHORT_BITS:#x}).to(tl.float32, bitcast=True)"
    return f"({exact.format(left)} - {exact.format(right)})"


def _convert_operand(node: Node, position: int, operand: _Text) -> str:
    """Return the operand converted for the operation: truth values count as 0 and 1."""
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
