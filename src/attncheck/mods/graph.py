"""An expression under construction: what a mod's values become, one by one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from attncheck.errors import TraceError
from attncheck.mods.expression import Node

if TYPE_CHECKING:
    from attncheck.mods.expression import Captured, Kind

__all__ = ["CAPTURED_DTYPES", "Graph", "Operand", "Traced", "kind_of"]

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
