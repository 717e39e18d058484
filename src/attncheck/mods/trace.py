"""From a FlexAttention callable to an expression, through torch's own tracer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from attncheck.errors import TraceError
from attncheck.mods.agreement import disagreements
from attncheck.mods.aten import CREATIONS, SAME_VALUE, translate
from attncheck.mods.expression import OPERATIONS, Expression, Node, Structure
from attncheck.mods.graph import Graph, Operand, Traced, kind_of
from attncheck.mods.kept_traces import kept
from attncheck.mods.places import described
from attncheck.mods.recording import PLACE, record

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.mods.signatures import MaskMod, ScoreMod

__all__ = ["disagreements", "trace_mask", "trace_place", "trace_score"]

_INDICES = ("b", "h", "q_idx", "kv_idx")


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


def trace_place(place: Callable[..., Tensor], device: str = "cpu") -> Expression:
    """The expression of a whole number of a score mod's arguments, as where it reads a tensor.

    Arguments and errors as for ``trace_mask``.
    """
    return _trace("place", place, ("score", *_INDICES), device)


def _trace(
    what: str, mod: Callable[..., Tensor], inputs: tuple[str, ...], device: str
) -> Expression:
    return kept(what, mod, device, lambda: _traced(what, mod, inputs, device))


def _traced(
    what: str, mod: Callable[..., Tensor], inputs: tuple[str, ...], device: str
) -> Expression:
    examples = [_example(argument, device) for argument in inputs]
    try:
        recorded = record(mod, inputs, examples)
        graph, result = _Conversion(recorded).run(inputs, examples)
        position = _one_value(what, graph, result)
    except TraceError as error:
        raise TraceError(f"{described(what, mod)} cannot be traced: {error}.") from None
    return _reachable(graph, inputs, position)


def _one_value(what: str, graph: Graph, result: Any) -> int:
    """Position of what the mod gives, which must be one value an index of the right kind."""
    kind, must = _MUST[what]
    if not isinstance(result, Traced | Tensor):
        many = [t for t in (tuple, list, dict) if isinstance(result, t)]
        text = f"a {many[0].__name__} of {len(result)}" if many else repr(result)
        raise TraceError(f"it gives {text}: {must}")
    value = result.example if isinstance(result, Traced) else result
    if value.ndim > 1 or value.numel() != 1:
        raise TraceError(f"it gives shape {tuple(value.shape)} for one index: {must}")
    position = graph.operand(result)
    if graph.nodes[position].kind != kind:
        dtype = str(value.dtype).removeprefix("torch.")
        raise TraceError(f"it gives dtype {dtype}: {must}")
    return position


_MUST: dict[str, tuple[str, str]] = {
    "mask": (
        "bool",
        "it must give one tensor of truth values, torch.bool, one value an index",
    ),
    "score mod": (
        "float",
        "it must give one tensor of real numbers, as score.dtype, one value an index",
    ),
    "place": ("int", "it must give one tensor of whole numbers, one value an index"),
}


def _example(argument: str, device: str) -> Tensor:
    """One element, a tensor of its own: the tracer takes one object for one symbol.

    The score is float64, so that Python numbers stay what they are.
    """
    if argument == "score":
        return torch.full((1,), 0.5, dtype=torch.float64, device=device)
    return torch.zeros(1, dtype=torch.int64, device=device)


@dataclass(slots=True)
class _Conversion:
    """Walks a recorded graph once, with every value on the example beside its node."""

    recorded: fx.GraphModule
    graph: Graph = field(default_factory=Graph)
    values: dict[fx.Node, Any] = field(default_factory=dict)

    def run(self, inputs: tuple[str, ...], examples: list[Tensor]) -> tuple[Graph, Any]:
        """The graph, and what the mod gives: a Traced, a constant tensor, or what it must not."""
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
        return self.graph, result

    def _call(self, node: fx.Node) -> Operand:
        target: Any = node.target
        args, kwargs = self._operands(node.args), self._operands(node.kwargs)
        value: Tensor = target(*_examples(args), **_examples(kwargs))
        name = target.overloadpacket.__name__
        depends = any(isinstance(self.values[n], Traced) for n in node.all_input_nodes)
        if not depends or name in CREATIONS:
            return value
        position = self._position(node, name, args, kwargs, value)
        if value.numel() != 1:
            raise TraceError(
                f"{target.overloadpacket} gives shape {tuple(value.shape)} for one index"
                f"{_place(node)}: a mod must work on each index by itself"
            )
        return Traced(position, value)

    def _position(
        self, node: fx.Node, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
    ) -> int:
        target: Any = node.target
        if name == "view" and target._overloadname == "dtype":
            raise TraceError(f"it reads bits as another dtype{_place(node)}: convert with .to()")
        if name in SAME_VALUE:
            return self.graph.operand(args[0])
        position = None
        if isinstance(value, Tensor):
            try:
                position = translate(self.graph, name, args, dict(kwargs), value.dtype)
            except TraceError as error:
                fact, colon, remedy = str(error).partition(": ")
                raise TraceError(f"{fact}{_place(node)}{colon}{remedy}") from None
        if position is None:
            raise TraceError(
                f"operation {target.overloadpacket} is not supported{_place(node)}: "
                f"use {', '.join(sorted(OPERATIONS))}"
            )
        return position

    def _operands(self, arguments: Any) -> Any:
        return fx.map_arg(arguments, lambda node: self.values[node])


def _place(node: fx.Node) -> str:
    place: str = node.meta.get(PLACE, "")
    return place


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
