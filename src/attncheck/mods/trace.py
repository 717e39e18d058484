"""From a FlexAttention callable to an expression, and to that of its derivative.

A trace costs as much as a small kernel, and a library mod is built anew for each Problem: causal
for a thousand lengths is one function. Only the library's own functions are known to read nothing
that changes; one function of somebody else's in a closure, and nothing is kept.
"""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from dataclasses import dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, fx

from attncheck.core.draws import Draws
from attncheck.core.errors import TraceError
from attncheck.core.source_files import error_line
from attncheck.mods.aten import (
    CREATIONS,
    SAME_VALUE,
    Graph,
    Operand,
    Traced,
    kind_of,
    translate_aten,
)
from attncheck.mods.expression import OPERATIONS, Expression, Node, Structure
from attncheck.mods.torch_tracer import (
    PLACE,
    VocabularyInterpreter,
    describe_mod,
    failing_mod_line,
    record_gradient,
    record_operations,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.mods.expression import Captured
    from attncheck.mods.spec import Dimensions, MaskMod, ScoreMod

__all__ = [
    "cached_trace",
    "count_disagreements",
    "trace_derivative",
    "trace_index",
    "trace_mask",
    "trace_score",
]


def count_disagreements(
    expression: Expression,
    mod: Callable[..., Tensor],
    dimensions: Dimensions,
    *,
    samples: int = 1024,
    seed: int = 0,
    device: str = "cpu",
) -> int:
    """At how many sampled indices ``expression`` and ``mod`` differ (NaN equals NaN).

    Sampled are the corners of the index ranges, ``samples`` draws, half of them near the
    diagonal, and the places where a comparison with one of the expression's whole numbers (of a
    captured tensor: the first few) can change: kv_idx or kv_idx − q_idx next to ± the number.
    Scores are compared exactly, in float64.

    Args:
        expression: What was traced.
        mod: What it was traced from.
        dimensions: The index ranges.
        samples: How many tuples to draw.
        seed: Which draw.
        device: Where the tensors are that both capture.

    Raises:
        TraceError: if one of them fails at these indices, as when a captured tensor is too short,
            or if the callable does not give one value an index.
    """
    whole = [number for value in expression.captured for number in _whole(value)]
    indices = _indices(dimensions, whole, samples, Draws(seed))
    inputs = [torch.from_numpy(column) for column in indices.T.copy()]
    is_score = expression.structure.inputs[0] == "score"
    if is_score:
        scores = 8.0 * Draws(seed).normal("agreement/score", (len(indices),))
        inputs.insert(0, torch.from_numpy(scores))
    name = describe_mod("score mod" if is_score else "mask", mod)
    if torch.device(device).type != "cpu":
        # A GPU that reads beyond a tensor is lost to this process: fail here, where it is caught.
        _values(name, _on_cpu(expression).evaluate, inputs)
        inputs = [values.to(device) for values in inputs]
    meant = _values(name, mod, inputs)
    said = _values(name, expression.evaluate, inputs)
    both_nan = torch.isnan(said) & torch.isnan(meant)
    return int((~((said == meant) | both_nan)).sum())


def _values(name: str, mod: Callable[..., Tensor], inputs: list[Tensor]) -> Tensor:
    """What ``mod`` gives at ``inputs``, one value each."""
    try:
        with torch.no_grad():
            values = mod(*inputs)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  (somebody's code: SystemExit, too)
        kind, colon, text = error_line(error).partition(": ")
        raise TraceError(
            f"{name} raised {kind} at an index of its Problem{colon}{text}{failing_mod_line(error)}."
        ) from None
    count = len(inputs[0])
    if not isinstance(values, torch.Tensor) or values.shape not in {(), (1,), (count,)}:
        given = tuple(values.shape) if isinstance(values, torch.Tensor) else repr(values)
        raise TraceError(f"{name} gives {given} for {count} indices: it must give one value each.")
    return values.expand(count)


def _on_cpu(expression: Expression) -> Expression:
    captured = tuple(v.cpu() if isinstance(v, torch.Tensor) else v for v in expression.captured)
    return Expression(expression.structure, captured)


def _whole(value: Captured) -> list[int]:
    """The whole numbers that a comparison may be made with; of a tensor the first few."""
    if isinstance(value, torch.Tensor):
        numbers = [] if value.is_floating_point() else torch.unique(value)[:_OF_A_TENSOR].tolist()
    else:
        numbers = [value] if isinstance(value, int) else []
    return [int(n) for n in numbers if abs(n) < 2**31]


_OF_A_TENSOR = 16


def _indices(
    dimensions: Dimensions, whole: list[int], samples: int, draws: Draws
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Index tuples (b, h, q_idx, kv_idx), one a row."""
    sizes = (dimensions.batch, dimensions.heads, dimensions.query, dimensions.kv)
    # The last corner first: index 0, the trace's example, is what a mod may have read wrongly.
    corners = list(itertools.product(*(sorted({0, size - 1}, reverse=True) for size in sizes)))
    columns = [
        draws.integers(f"agreement/{name}", (samples,), size)
        for name, size in zip(("b", "h", "q_idx", "kv_idx"), sizes, strict=True)
    ]
    near = draws.integers("agreement/near", (samples,), 9) - 4
    half = samples // 2
    columns[3][:half] = columns[2][:half] + near[:half]
    drawn = np.stack(columns, axis=1)
    edges = _edges(drawn[: max(1, samples // 8)], whole)
    every = np.concatenate([np.array(corners, np.int64), drawn, edges])
    inside = (every[:, 3] >= 0) & (every[:, 3] < dimensions.kv)
    return every[inside]


def _edges(
    drawn: np.ndarray[tuple[int, int], np.dtype[np.int64]], whole: list[int]
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """``drawn`` with the key moved next to each number, and to its distance from the row."""
    edges = [drawn[:0]]
    for number, step in itertools.product(whole, (-1, 0, 1)):
        for start in (0, drawn[:, 2]):
            for sign in (-1, 1):
                moved = drawn.copy()
                moved[:, 3] = start + sign * (number + step)
                edges.append(moved)
    return np.concatenate(edges)


_LIBRARY = frozenset(
    f"attncheck.mods.{room}" for room in ("compose", "masks", "neighborhoods", "scores", "tables")
)
_MOST = 256
_LARGEST = 4096  # numbers of a tensor that is compared
_PLAIN = (bool, int, float, str, type(None))
_KEPT: OrderedDict[Any, Expression] = OrderedDict()


class _Unknown(Exception):
    """Something in a closure may be another next time."""


def cached_trace(
    what: str, mod: Callable[..., Tensor], device: str, trace: Callable[[], Expression]
) -> Expression:
    """``trace()``, or what it gave for a library mod of the same code and closure.

    Args:
        what: What is traced of it.
        mod: The callable.
        device: Where its tensors are.
        trace: Makes the trace.
    """
    try:
        key = what, device, _of(mod)
    except _Unknown:
        return trace()
    if key not in _KEPT:
        _KEPT[key] = trace()
        while len(_KEPT) > _MOST:
            _KEPT.popitem(last=False)
    _KEPT.move_to_end(key)
    return _KEPT[key]


def _of(value: object) -> Any:
    """What tells a value of a closure from others; raises _Unknown."""
    if type(value) in _PLAIN:
        # 1, 1.0 and True are equal, and 0.0 and -0.0: they are not the same.
        return type(value), repr(value)
    if type(value) in (tuple, list):
        return type(value), tuple(map(_of, value))  # type: ignore[call-overload]  # it is one
    if isinstance(value, FunctionType):
        return _of_function(value)
    if type(value) is functools.partial:
        return "partial", _of(value.func), _of(value.args), _of(sorted(value.keywords.items()))
    if type(value) is Tensor:
        return _of_tensor(value)
    raise _Unknown


def _of_function(function: FunctionType) -> Any:
    if function.__module__ not in _LIBRARY or function.__dict__:
        raise _Unknown
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # an empty cell
        raise _Unknown from None
    named = sorted((function.__kwdefaults__ or {}).items())
    return function.__code__, _of(cells), _of(function.__defaults__), _of(named)


def _of_tensor(tensor: Tensor) -> Any:
    if tensor.device.type != "cpu" or tensor.numel() > _LARGEST or tensor.requires_grad:
        raise _Unknown
    numbers = tensor.contiguous().numpy().tobytes()
    return str(tensor.dtype), tuple(tensor.shape), tensor.stride(), numbers


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


def trace_index(place: Callable[..., Tensor], device: str = "cpu") -> Expression:
    """The expression of a whole number of a score mod's arguments, as where it reads a tensor.

    Arguments and errors as for ``trace_mask``.
    """
    return _trace("place", place, ("score", *_INDICES), device)


def _trace(
    what: str, mod: Callable[..., Tensor], inputs: tuple[str, ...], device: str
) -> Expression:
    return cached_trace(what, mod, device, lambda: _traced(what, mod, inputs, device))


def _traced(
    what: str, mod: Callable[..., Tensor], inputs: tuple[str, ...], device: str
) -> Expression:
    examples = [_example(argument, device) for argument in inputs]
    try:
        recorded = record_operations(mod, inputs, examples)
        graph, result = _Conversion(recorded).run(inputs, examples)
        position = _one_value(what, graph, result)
    except TraceError as error:
        raise TraceError(f"{describe_mod(what, mod)} cannot be traced: {error}.") from None
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
                position = translate_aten(self.graph, name, args, dict(kwargs), value.dtype)
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


def trace_derivative(score_mod: ScoreMod, device: str = "cpu") -> Expression:
    """The expression of ∂ score_mod / ∂ score, of the arguments of a score mod.

    Where there is no derivative (a kink, a jump, the border of a ``where``) it says what torch's
    autograd of the very callable says: it is traced from that. A number that autograd has as a
    float64 one is that number: ln 2, of exp2 and log2.

    Args:
        score_mod: Any FlexAttention callable of the vocabulary (``expression.OPERATIONS``).
        device: Where the tensors are that it captures.

    Raises:
        TraceError: as ``trace_score`` of the score mod itself, and where torch has no derivative
            of an operation, or one that the vocabulary has no words for.
    """
    return cached_trace("derivative", score_mod, device, lambda: _derivative(score_mod, device))


def _derivative(score_mod: ScoreMod, device: str) -> Expression:
    trace_score(score_mod, device)  # what cannot be traced is refused in the same words
    name = describe_mod("score mod", score_mod)
    examples = [torch.full((1,), 0.5, dtype=torch.float64, device=device)]
    examples += [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(4)]
    try:
        recorded = record_gradient(score_mod, examples)

        def slope(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            given: Tensor = VocabularyInterpreter(recorded).run(score, b, h, q_idx, kv_idx)
            return given

        return trace_score(slope, device)
    except TraceError as error:
        fact = str(error).removeprefix("score mod 'slope' cannot be traced: ").removesuffix(".")
        raise TraceError(f"{name} has no derivative that can be traced: {fact}.") from None
