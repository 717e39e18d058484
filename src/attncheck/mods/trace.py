"""From a FlexAttention callable to an expression, through torch's own tracer."""

from __future__ import annotations

import linecache
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from attncheck.errors import TraceError
from attncheck.mods.agreement import disagreements
from attncheck.mods.aten import (
    CREATIONS,
    SAME_VALUE,
    Graph,
    Operand,
    Traced,
    kind_of,
    translate,
)
from attncheck.mods.expression import OPERATIONS, Expression, Node, Structure

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from attncheck.mods.signatures import MaskMod, ScoreMod

__all__ = ["disagreements", "trace_mask", "trace_score"]

_INDICES = ("b", "h", "q_idx", "kv_idx")
_NOT_THE_MOD = (str(Path(torch.__file__).parent), __file__)


def trace_mask(mask_mod: MaskMod, device: str = "cpu") -> Expression:
    """The expression of a mask ``mask(b, h, q_idx, kv_idx) -> bool``.

    Args:
        mask_mod: Any FlexAttention callable of the vocabulary (``expression.OPERATIONS``).
        device: Where the tensors are that it captures.

    Raises:
        TraceError: for another operation, for control flow on tensors, or if the mod fails.
    """
    return _trace("mask", mask_mod, _INDICES, device)


def trace_score(score_mod: ScoreMod, device: str = "cpu") -> Expression:
    """The expression of a score mod ``score(score, b, h, q_idx, kv_idx) -> score``.

    Arguments and errors as for ``trace_mask``.
    """
    return _trace("score mod", score_mod, ("score", *_INDICES), device)


def _trace(
    what: str, mod: Callable[..., Tensor], inputs: tuple[str, ...], device: str
) -> Expression:
    name = f"{what} {getattr(mod, '__name__', type(mod).__name__)!r}"
    lines = _Lines()
    examples = [_example(argument, device) for argument in inputs]
    try:
        recorded = _record(mod, examples, lines)
        graph, result = _Conversion(recorded, lines).run(inputs, examples)
    except TraceError as error:
        raise TraceError(f"{name} cannot be traced: {error}.") from None
    kind = "bool" if what == "mask" else "float"
    if result.kind != kind:
        raise TraceError(f"{name} gives a value of kind {result.kind}: a {what} gives {kind}.")
    return _reachable(graph, inputs, graph.nodes.index(result))


def _example(argument: str, device: str) -> Tensor:
    """One element, a tensor of its own: the tracer takes one object for one symbol.

    The score is float64, so that Python numbers stay what they are.
    """
    if argument == "score":
        return torch.full((1,), 0.5, dtype=torch.float64, device=device)
    return torch.zeros(1, dtype=torch.int64, device=device)


def _record(mod: Callable[..., Tensor], examples: list[Tensor], lines: _Lines) -> fx.GraphModule:
    def listened(*arguments: Tensor) -> Tensor:
        with lines:
            return mod(*arguments)

    try:
        with torch.no_grad():
            return make_fx(listened)(*examples)
    except TraceError:
        raise
    except Exception as error:  # noqa: BLE001  (somebody's code: it may raise anything)
        where = _failed_at(error)
        if "get value out of a tracing tensor" in str(error):
            raise TraceError(f"it decides on a tensor's value{where}: use torch.where") from None
        text = str(error).strip().partition("\n")[0]
        raise TraceError(f"it raised {type(error).__name__}: {text}{where}") from None


def _failed_at(error: BaseException) -> str:
    place = ""
    traceback = error.__traceback__
    while traceback is not None:
        place = _place(traceback.tb_frame, traceback.tb_lineno) or place
        traceback = traceback.tb_next
    return place


def _place(frame: FrameType, line: int) -> str:
    """`` at file:line `text```, or nothing for a frame of torch or of this module."""
    file = frame.f_code.co_filename
    if file.startswith(_NOT_THE_MOD):
        return ""
    text = linecache.getline(file, line).strip()
    return f" at {Path(file).name}:{line}" + (f" `{text}`" if text else "")


class _Lines(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Notes which line of the mod calls which operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.calls: dict[Any, list[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame: FrameType | None = sys._getframe(1)
        place = ""
        while frame is not None and not place:
            place = _place(frame, frame.f_lineno)
            frame = frame.f_back
        self.calls.setdefault(func, []).append(place)
        return func(*args, **(kwargs or {}))


@dataclass(slots=True)
class _Conversion:
    """Walks a recorded graph once, with every value on the example beside its node."""

    recorded: fx.GraphModule
    lines: _Lines
    graph: Graph = field(default_factory=Graph)
    values: dict[fx.Node, Any] = field(default_factory=dict)

    def run(self, inputs: tuple[str, ...], examples: list[Tensor]) -> tuple[Graph, Node]:
        """The graph, and its node that is the result."""
        arguments = iter(zip(inputs, examples, strict=True))
        result: Any = None
        for node in self.recorded.graph.nodes:
            if node.op == "placeholder":
                name, example = next(arguments)
                position = self.graph.add(Node("input", kind_of(example.dtype), (), name))
                self.values[node] = Traced(position, example)
            elif node.op == "get_attr":
                self.values[node] = getattr(self.recorded, str(node.target))
            elif node.op == "call_function":
                self.values[node] = self._call(node)
            else:
                result = self._operands(node.args[0])
        if not isinstance(result, Traced | Tensor):
            raise TraceError(f"it gives {result!r}: it must give a tensor")
        return self.graph, self.graph.nodes[self.graph.operand(result)]

    def _call(self, node: fx.Node) -> Operand:
        target: Any = node.target
        args, kwargs = self._operands(node.args), self._operands(node.kwargs)
        value = target(*_examples(args), **_examples(kwargs))
        name = target.overloadpacket.__name__
        depends = any(isinstance(self.values[n], Traced) for n in node.all_input_nodes)
        if not depends and torch.Tag.nondeterministic_seeded in target.tags:
            raise TraceError(f"it draws random numbers{self._line(node)}: capture them instead")
        if not depends or name in CREATIONS:
            constant: Tensor = value
            return constant
        position = self._position(node, name, args, kwargs, value)
        if value.numel() != 1:
            raise TraceError(
                f"{target.overloadpacket} gives shape {tuple(value.shape)} for one index"
                f"{self._line(node)}: a mod must work on each index by itself"
            )
        return Traced(position, value)

    def _position(
        self, node: fx.Node, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], value: Tensor
    ) -> int:
        if name in SAME_VALUE:
            return self.graph.operand(args[0])
        try:
            position = translate(self.graph, name, args, dict(kwargs), value.dtype)
        except TraceError as error:
            fact, colon, remedy = str(error).partition(":")
            raise TraceError(f"{fact}{self._line(node)}{colon}{remedy}") from None
        if position is None:
            target: Any = node.target
            raise TraceError(
                f"operation {target.overloadpacket} is not supported{self._line(node)}: "
                f"use {', '.join(sorted(OPERATIONS))}"
            )
        return position

    def _operands(self, arguments: Any) -> Any:
        return fx.map_arg(arguments, lambda node: self.values[node])

    def _line(self, node: fx.Node) -> str:
        """Where the mod calls ``node``, if the tracer kept every call of that operation."""
        same = [n for n in self.recorded.graph.nodes if n.target == node.target]
        calls = self.lines.calls.get(node.target, [])
        return calls[same.index(node)] if len(calls) == len(same) else ""


def _examples(arguments: Any) -> Any:
    """``arguments`` with every traced value as it is on the example."""
    if isinstance(arguments, Traced):
        return arguments.example
    if isinstance(arguments, dict):
        return {name: _examples(value) for name, value in arguments.items()}
    if isinstance(arguments, list | tuple):
        return type(arguments)(_examples(value) for value in arguments)
    return arguments


def _reachable(graph: Graph, inputs: tuple[str, ...], result: int) -> Expression:
    """The expression of what ``result`` needs, its slots numbered in order of use."""
    needed: set[int] = set()
    waiting = [result]
    while waiting:
        position = waiting.pop()
        if position not in needed:
            needed.add(position)
            waiting += graph.nodes[position].operands
    order = sorted(needed)
    slots = sorted({graph.nodes[i].slot for i in order} - {-1})
    nodes = tuple(_renumbered(graph.nodes[i], order, slots) for i in order)
    return Expression(Structure(inputs, nodes), tuple(graph.captured[slot] for slot in slots))


def _renumbered(node: Node, order: list[int], slots: list[int]) -> Node:
    operands = tuple(order.index(i) for i in node.operands)
    slot = slots.index(node.slot) if node.slot >= 0 else -1
    return Node(node.op, node.kind, operands, node.name, slot, node.rank)
