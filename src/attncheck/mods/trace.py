"""Traces a FlexAttention callable, or its derivative, into an expression."""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from attncheck.core.draws import Draws
from attncheck.core.errors import TraceError
from attncheck.core.mod_spec import Dimensions
from attncheck.core.source_files import error_line
from attncheck.mods.aten import CREATIONS, SAME_VALUE, Graph, Operand, Traced, translate_aten
from attncheck.mods.expression import (
    INDICES,
    OPERATIONS,
    Captured,
    Expression,
    Node,
    Structure,
    kind_of,
)
from attncheck.mods.masks import full
from attncheck.mods.signatures import MaskMod, ScoreMod
from attncheck.mods.torch_tracer import (
    PLACE,
    VocabularyInterpreter,
    describe_mod,
    example_arguments,
    failing_mod_line,
    record_gradient,
    record_operations,
)

_SCORE_ARGUMENTS = ("score", *INDICES)


def trace_mask(mask_mod: MaskMod, device: str = "cpu") -> Expression:
    """Return the expression of a mask ``mask(b, h, q_idx, kv_idx) -> bool``.

    Args:
        mask_mod: Any FlexAttention callable of the vocabulary (``expression.OPERATIONS``).
        device: The device of the tensors that it captures.

    Raises:
        TraceError: for another operation, for control flow on tensors, or if the mod fails.
    """
    if mask_mod is full:
        # The tracer's result, without the tracer: it imports torch's compiler, which takes seconds.
        return Expression(Structure(INDICES, (Node("true", "bool"),)), ())
    return _trace("mask", mask_mod, INDICES, device)


def trace_score(score_mod: ScoreMod, device: str = "cpu") -> Expression:
    """Return the expression of a score mod ``score(score, b, h, q_idx, kv_idx) -> score``.

    Arguments and errors as for ``trace_mask``.
    """
    return _trace("score mod", score_mod, _SCORE_ARGUMENTS, device)


def trace_index(index: Callable[..., Tensor], device: str = "cpu") -> Expression:
    """Return the expression of an index at which a score mod reads a tensor.

    ``index`` takes a score mod's arguments. Arguments and errors as for ``trace_mask``.
    """
    return _trace("index", index, _SCORE_ARGUMENTS, device)


def trace_derivative(score_mod: ScoreMod, device: str = "cpu") -> Expression:
    """Return the expression of ∂ score_mod / ∂ score, a function of the score mod's arguments.

    It is traced from torch's autograd of the callable, and equals that also where there is no
    derivative (a kink, a jump, the border of a ``where``). Float64 constants of autograd, as the
    ln 2 of exp2 and log2, become captured numbers.

    Arguments as for ``trace_score``.

    Raises:
        TraceError: as ``trace_score`` of the score mod itself, and where torch has no derivative
            of an operation, or one outside the vocabulary.
    """

    def trace() -> Expression:
        trace_score(score_mod, device)  # refuses what cannot be traced with the same message
        try:
            recorded = record_gradient(score_mod, example_arguments(_SCORE_ARGUMENTS, device))

            def slope(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
                value: Tensor = VocabularyInterpreter(recorded).run(score, b, h, q_idx, kv_idx)
                return value

            return trace_score(slope, device)
        except TraceError as error:
            fact = str(error).removeprefix("score mod 'slope' cannot be traced: ")
            name = describe_mod("score mod", score_mod)
            raise TraceError(
                f"{name} has no derivative that can be traced: {fact.removesuffix('.')}."
            ) from None

    return _cached("derivative", score_mod, device, trace)


def _trace(
    what: str, mod: Callable[..., Tensor], inputs: tuple[str, ...], device: str
) -> Expression:
    def trace() -> Expression:
        examples = example_arguments(inputs, device)
        try:
            recorded = record_operations(mod, inputs, examples)
            graph, result = _Conversion(recorded).run(inputs, examples)
            position = _one_value(what, graph, result)
        except TraceError as error:
            name = describe_mod(what, mod)
            raise TraceError(f"{name} cannot be traced: {error}.") from None
        # Leave out nodes that the result does not need, such as a value that the mod drops.
        whole = Expression(Structure(inputs, tuple(graph.nodes)), tuple(graph.captured))
        return whole.part(position)

    return _cached(what, mod, device, trace)


_RESULT_RULES: dict[str, tuple[str, str]] = {
    "mask": ("bool", "it must give one tensor of truth values, torch.bool, one value an index"),
    "score mod": (
        "float",
        "it must give one tensor of real numbers, as score.dtype, one value an index",
    ),
    "index": ("int", "it must give one tensor of whole numbers, one value an index"),
}


def _one_value(what: str, graph: Graph, result: Any) -> int:
    """Return the position of a mod's result; raise unless it is one value of the right kind."""
    kind, requirement = _RESULT_RULES[what]
    if not isinstance(result, Traced | Tensor):
        collections = [t for t in (tuple, list, dict) if isinstance(result, t)]
        text = f"a {collections[0].__name__} of {len(result)}" if collections else repr(result)
        raise TraceError(f"it gives {text}: {requirement}")
    value = result.example if isinstance(result, Traced) else result
    if value.ndim > 1 or value.numel() != 1:
        raise TraceError(f"it gives shape {tuple(value.shape)} for one index: {requirement}")
    position = graph.operand(result)
    if graph.nodes[position].kind != kind:
        dtype = str(value.dtype).removeprefix("torch.")
        raise TraceError(f"it gives dtype {dtype}: {requirement}")
    return position


@dataclass(slots=True)
class _Conversion:
    """Converts a recorded graph in one walk, computing each node's value on the example too."""

    recorded: fx.GraphModule
    graph: Graph = field(default_factory=Graph)
    values: dict[fx.Node, Any] = field(default_factory=dict)

    def run(self, inputs: tuple[str, ...], examples: list[Tensor]) -> tuple[Graph, Any]:
        """Return the graph and the mod's result: a Traced, a constant tensor, or any object."""
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
        # A value that depends on no argument is a constant of the mod, however it was computed.
        if not depends or name in CREATIONS:
            return value
        position = self._position(node, name, args, kwargs, value)
        if value.numel() != 1:
            raise TraceError(
                f"{target.overloadpacket} gives shape {tuple(value.shape)} for one index"
                f"{node.meta.get(PLACE, '')}: a mod must work on each index by itself"
            )
        return Traced(position, value)

    def _position(
        self, node: fx.Node, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
    ) -> int:
        target: Any = node.target
        place = node.meta.get(PLACE, "")
        if name == "view" and target._overloadname == "dtype":
            raise TraceError(f"it reads bits as another dtype{place}: convert with .to()")
        if name in SAME_VALUE:
            return self.graph.operand(args[0])
        position = None
        if isinstance(value, Tensor):
            try:
                position = translate_aten(self.graph, name, args, dict(kwargs), value.dtype)
            except TraceError as error:
                fact, colon, remedy = str(error).partition(": ")
                raise TraceError(f"{fact}{place}{colon}{remedy}") from None
        if position is None:
            raise TraceError(
                f"operation {target.overloadpacket} is not supported{place}: "
                f"use {', '.join(sorted(OPERATIONS))}"
            )
        return position

    def _operands(self, arguments: Any) -> Any:
        return fx.map_arg(arguments, lambda node: self.values[node])


def _examples(arguments: Any) -> Any:
    """Return ``arguments`` with every traced value replaced by its value on the example."""
    if isinstance(arguments, Traced):
        return arguments.example
    if isinstance(arguments, dict):
        return {name: _examples(value) for name, value in arguments.items()}
    if isinstance(arguments, list | tuple):
        return type(arguments)(_examples(value) for value in arguments)
    return arguments


# --- cached traces ----------------------------------------------------------------------------
#
# A trace costs as much as a small kernel, and a library mod is built anew for each Problem, though
# causal is one function for all lengths. Equal code with an equal closure has an equal trace, if it
# reads nothing else that changes. Only the library's own functions are known not to: a mod with a
# foreign function in its closure is not cached.

_LIBRARY = frozenset({"attncheck.mods.masks", "attncheck.mods.scores"})
_MOST_TRACES = 256
_MOST_NUMBERS = 4096  # Most elements of a captured tensor whose bytes become part of a cache key.
_TRACES: OrderedDict[Any, Expression] = OrderedDict()


class _MayChange(Exception):
    """A closure holds something that has no cache key, since it may change."""


def _cached(
    what: str, mod: Callable[..., Tensor], device: str, trace: Callable[[], Expression]
) -> Expression:
    """Return ``trace()``, cached for library mods by their code and closure."""
    try:
        key = what, device, _identity(mod)
    except _MayChange:
        return trace()
    if key not in _TRACES:
        _TRACES[key] = trace()
        while len(_TRACES) > _MOST_TRACES:
            _TRACES.popitem(last=False)
    _TRACES.move_to_end(key)
    return _TRACES[key]


def _identity(value: object) -> Any:
    """Return a cache key of a value in a closure; raise _MayChange if it has none."""
    if type(value) in (bool, int, float, str, type(None)):
        # 1, 1.0 and True compare equal, and so do 0.0 and -0.0: their types and reprs differ.
        return type(value), repr(value)
    if type(value) in (tuple, list):
        return type(value), tuple(map(_identity, value))  # type: ignore[call-overload]  # it is one
    if type(value) is functools.partial:
        keywords = sorted(value.keywords.items())
        return "partial", _identity(value.func), _identity(value.args), _identity(keywords)
    if isinstance(value, FunctionType) and value.__module__ in _LIBRARY and not value.__dict__:
        try:
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
        except ValueError:  # an empty cell
            raise _MayChange from None
        keywords = sorted((value.__kwdefaults__ or {}).items())
        parts = map(_identity, (cells, value.__defaults__, keywords))
        return value.__code__, tuple(parts)
    if isinstance(value, Tensor) and type(value) is Tensor and _is_small_constant(value):
        numbers = value.contiguous().numpy().tobytes()
        return str(value.dtype), tuple(value.shape), value.stride(), numbers
    raise _MayChange


def _is_small_constant(value: Tensor) -> bool:
    small = value.numel() <= _MOST_NUMBERS
    return small and value.device.type == "cpu" and not value.requires_grad


# --- agreement --------------------------------------------------------------------------------


def count_disagreements(
    expression: Expression,
    mod: Callable[..., Tensor],
    dimensions: Dimensions,
    *,
    samples: int = 1024,
    seed: int = 0,
    device: str = "cpu",
) -> int:
    """Return the number of sampled indices at which ``expression`` and ``mod`` differ.

    Samples are the corners of the index ranges, ``samples`` draws, half of them near the diagonal,
    and the indices where a comparison with one of the expression's whole numbers (the first few of
    a captured tensor) can change: kv_idx or kv_idx − q_idx next to ± the number. Scores are
    compared exactly, in float64; NaN equals NaN.

    Args:
        device: The device of the tensors that both capture.

    Raises:
        TraceError: if one of them fails at these indices, as when a captured tensor is too short,
            or if the callable does not return one value per index.
    """
    whole = [number for value in expression.captured for number in _whole_numbers(value)]
    indices = _sample_indices(dimensions, whole, samples, Draws(seed))
    inputs = [torch.from_numpy(column) for column in indices.T.copy()]
    is_score = expression.structure.inputs[0] == "score"
    if is_score:
        scores = 8.0 * Draws(seed).normal("agreement/score", (len(indices),))
        inputs.insert(0, torch.from_numpy(scores))
    name = describe_mod("score mod" if is_score else "mask", mod)
    if torch.device(device).type != "cpu":
        # Run on the CPU first: an out-of-range read on a GPU makes it unusable in this process.
        _values(name, expression.evaluate, inputs)
        inputs = [values.to(device) for values in inputs]
    from_mod = _values(name, mod, inputs)
    from_trace = _values(name, expression.evaluate, inputs)
    both_nan = torch.isnan(from_trace) & torch.isnan(from_mod)
    return int((~((from_trace == from_mod) | both_nan)).sum())


def _values(name: str, mod: Callable[..., Tensor], inputs: list[Tensor]) -> Tensor:
    """Return the values of ``mod`` at ``inputs``, one each."""
    try:
        with torch.no_grad():
            values = mod(*inputs)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  (somebody's code: SystemExit, too)
        kind, colon, text = error_line(error).partition(": ")
        raise TraceError(
            f"{name} raised {kind} at an index of its Problem{colon}{text}"
            f"{failing_mod_line(error)}."
        ) from None
    count = len(inputs[0])
    if not isinstance(values, Tensor) or values.shape not in {(), (1,), (count,)}:
        shape = tuple(values.shape) if isinstance(values, Tensor) else repr(values)
        raise TraceError(f"{name} gives {shape} for {count} indices: it must give one value each.")
    return values.expand(count)


def _whole_numbers(value: Captured) -> list[int]:
    """Return whole numbers that comparisons may involve; of a tensor only the first few."""
    if isinstance(value, Tensor):
        numbers = [] if value.is_floating_point() else torch.unique(value)[:_FIRST_NUMBERS].tolist()
    else:
        numbers = [value] if isinstance(value, int) else []
    return [int(n) for n in numbers if abs(n) < 2**31]


_FIRST_NUMBERS = 16  # Whole numbers of a captured tensor near which indices are sampled.


def _sample_indices(
    dimensions: Dimensions, whole: list[int], samples: int, draws: Draws
) -> NDArray[np.int64]:
    """Return index tuples ``(samples, (b, h, q_idx, kv_idx))``."""
    sizes = (dimensions.batch, dimensions.heads, dimensions.query, dimensions.kv)
    # The last corner first, since a wrong trace is most likely right at index 0, its example.
    corners = list(itertools.product(*(sorted({0, size - 1}, reverse=True) for size in sizes)))
    columns = [
        draws.integers(f"agreement/{name}", (samples,), size)
        for name, size in zip(INDICES, sizes, strict=True)
    ]
    # Masks change near the diagonal, which uniform draws of keys would hardly ever hit.
    near = draws.integers("agreement/near", (samples,), 9) - 4
    half = samples // 2
    columns[3][:half] = columns[2][:half] + near[:half]
    tuples = np.stack(columns, axis=1)
    # Move kv_idx, or kv_idx − q_idx, next to ± each number.
    rows = tuples[: max(1, samples // 8)]
    edges = []
    for number, step in itertools.product(whole, (-1, 0, 1)):
        for from_row, sign in itertools.product((0, 1), (-1, 1)):
            moved = rows.copy()
            moved[:, 3] = from_row * rows[:, 2] + sign * (number + step)
            edges.append(moved)
    candidates = np.concatenate([np.array(corners, np.int64), tuples, *edges])
    inside = (candidates[:, 3] >= 0) & (candidates[:, 3] < dimensions.kv)
    return candidates[inside]
