"""Expressions of a score mod's reads from captured float tensors, and of its derivatives there.

A loss has a gradient with respect to each captured number: a read adds to that of the number at
``place`` the gradient of the score after the mod times ``slope``. ``captured_gradients`` computes
this without a trace, for the oracles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from attncheck.core.errors import TraceError
from attncheck.mods.captured_gradients import captured_tensors
from attncheck.mods.expression import INDICES, Expression
from attncheck.mods.signatures import ScoreMod
from attncheck.mods.torch_tracer import (
    VocabularyInterpreter,
    aten_name,
    describe_mod,
    example_arguments,
    record_gradient,
    record_operations,
)
from attncheck.mods.trace import trace_derivative, trace_index, trace_score

_ARGUMENTS = ("score", *INDICES)
_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, eq=False)
class CapturedRead:
    """One place in a score mod's code where it reads a float tensor."""

    tensor: Tensor  # the captured tensor itself
    # Index of its first number among all captured numbers: tensors in the order of the trace, each
    # flattened row-major.
    start: int
    place: Expression  # index of the number read in its tensor: of (score, b, h, q_idx, kv_idx)
    slope: Expression  # ∂ score_mod / ∂ the number read, of (score, b, h, q_idx, kv_idx)


def trace_reads(score_mod: ScoreMod, device: str = "cpu") -> tuple[CapturedRead, ...]:
    """Return every read of a float tensor with respect to which the result has a derivative.

    A tensor that is only compared with, for example, has none. Derivatives are torch's, as in
    ``trace_derivative``, of the mod on real numbers: casts of a read number to another float dtype
    change nothing. A tensor of one number may be read without an index.

    Args:
        score_mod: Any FlexAttention callable of the vocabulary (``expression.OPERATIONS``).
        device: The device of the tensors that it captures.

    Raises:
        TraceError: as ``trace_derivative``, and where the mod computes with a whole captured tensor
            before it indexes it, or reads other tensors than its trace does.
    """
    trace_score(score_mod, device)  # refuses what cannot be traced with the same message
    name = describe_mod("score mod", score_mod)
    try:
        reads = tuple(_reads(score_mod, device))
    except TraceError as error:
        fact = str(error).rpartition(" cannot be traced: ")[2].removesuffix(".")
        raise TraceError(
            f"{name} has no derivative to what it captures that can be traced: {fact}."
        ) from None
    # Kernels and oracles find the captured tensors separately, and must agree on their order.
    if list(map(id, read_tensors(reads))) != list(map(id, captured_tensors(score_mod, device))):
        raise TraceError(f"{name} reads other tensors than its trace, or in another order.")
    return reads


def read_tensors(reads: Iterable[CapturedRead]) -> tuple[Tensor, ...]:
    """Return the tensors of ``reads``, each once, in the order of ``start``."""
    return tuple({read.start: read.tensor for read in reads}.values())


def count_read_numbers(score_mod: ScoreMod, device: str = "cpu") -> int:
    """Return the total number of elements of the float tensors of ``trace_reads``."""
    return sum(tensor.numel() for tensor in read_tensors(trace_reads(score_mod, device)))


class EvaluatedReads:
    """The reads of a score mod in another number system than torch's.

    Args:
        convert: Converts an expression to a function of numpy arrays.

    Raises:
        TraceError: as ``trace_reads``, and where the index of a read depends on the score.
    """

    def __init__(
        self,
        score_mod: ScoreMod,
        convert: Callable[[Expression], Callable[..., NDArray[Any]]],
        device: str = "cpu",
    ) -> None:
        self._reads = [(read, convert(read.slope)) for read in trace_reads(score_mod, device)]
        # As ``count_read_numbers``.
        self.numbers = sum(t.numel() for t in read_tensors(read for read, _ in self._reads))
        for read, _ in self._reads:
            # Places are computed in torch, which cannot take scores of other number systems.
            if read.place.reads("score"):
                name = describe_mod("score mod", score_mod)
                raise TraceError(f"{name} reads a number that its score decides on: {read.place}.")

    def __call__(self, *arguments: NDArray[Any]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Yield (place among all numbers, slope) of each read at these scores and indices."""
        indices = [torch.from_numpy(axis) for axis in arguments[1:]]
        score = torch.zeros((), dtype=torch.float64)
        for read, slope in self._reads:
            places = read.start + read.place.evaluate(score, *indices)
            yield places.numpy(), slope(*arguments)


@dataclass(frozen=True, slots=True)
class NumberSystem:
    """Score mods as functions in another number system than torch's, for an oracle to call.

    The methods raise TraceError for a score mod that cannot be traced.
    """

    # (expression, context) → function of scores and indices; the context is that of
    # ``to_mpmath``, or the bits of ``to_ball``.
    convert: Callable[[Expression, Any], Callable[..., NDArray[Any]]]

    def score(
        self, score_mod: ScoreMod, context: Any, device: str = "cpu"
    ) -> Callable[..., NDArray[Any]]:
        """Return the score mod as a function of arrays, its captured tensors on ``device``."""
        return self.convert(trace_score(score_mod, device), context)

    def slope(
        self, score_mod: ScoreMod, context: Any, device: str = "cpu"
    ) -> Callable[..., NDArray[Any]]:
        """Return its derivative with respect to the score as a function of arrays."""
        return self.convert(trace_derivative(score_mod, device), context)

    def captures(self, score_mod: ScoreMod, context: Any, device: str = "cpu") -> EvaluatedReads:
        """Return its reads from captured float tensors as functions of arrays."""
        return EvaluatedReads(score_mod, lambda slope: self.convert(slope, context), device)


def _reads(score_mod: ScoreMod, device: str) -> Iterator[CapturedRead]:
    examples = example_arguments(_ARGUMENTS, device)
    recorded = record_operations(score_mod, _ARGUMENTS, examples)
    loads = list(_loads(recorded))
    # Gradients must pass only through the number with respect to which they are taken.
    for name in {str(node.target) for node in recorded.graph.nodes if node.op == "get_attr"}:
        constant: Tensor = getattr(recorded, name)
        if constant.requires_grad:
            delattr(recorded, name)
            setattr(recorded, name, constant.detach())
    starts: dict[int, int] = {}
    end = 0
    for tensor, load in loads:
        slope = _slope(recorded, load, examples)
        if slope is None:
            continue
        # By identity: two tensors with equal elements have separate gradients.
        if id(tensor) not in starts:
            starts[id(tensor)], end = end, end + tensor.numel()
        yield CapturedRead(
            tensor,
            starts[id(tensor)],
            trace_index(_place(recorded, load, tensor), device),
            trace_score(slope, device),
        )


def _loads(recorded: fx.GraphModule) -> Iterator[tuple[Tensor, fx.Node]]:
    """Yield each captured float tensor that the result needs, and the node that reads it.

    torch's tracer creates a separate node for each use of a captured tensor.
    """
    needed: set[fx.Node] = set()
    pending = list(recorded.graph.output_node().all_input_nodes)
    while pending:
        node = pending.pop()
        # Walk backwards from the result: reads that it does not need have no gradient.
        if node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    for node in recorded.graph.nodes:
        if node.op != "get_attr" or node not in needed:
            continue
        tensor: Tensor = getattr(recorded, str(node.target))
        (user,) = node.users
        if not tensor.is_floating_point() or aten_name(user).startswith("lift_fresh"):
            continue  # torch.tensor(…) in the mod's code is a constant, not a captured tensor
        if aten_name(user) == "index" and user.args[0] is node:
            yield tensor, user
        elif tensor.numel() == 1:
            yield tensor, node
        else:
            raise TraceError(
                f"it computes {aten_name(user)} of a whole tensor of shape {tuple(tensor.shape)}: "
                "read the tensor itself"
            )


def _slope(recorded: fx.GraphModule, load: fx.Node, examples: list[Tensor]) -> ScoreMod | None:
    """Return the derivative of the result by the value of ``load``; None if there is none.

    There is none where no gradient passes through; a derivative whose value is 0 is returned.
    """
    passes = False

    def with_number(number: Tensor, *arguments: Tensor) -> Tensor:
        nonlocal passes
        result: Tensor = _WithNumber(recorded, load, number).run(*arguments)
        passes = result.requires_grad
        return result

    number = _value(recorded, load, examples).double().reshape(1).clone()
    gradient = record_gradient(with_number, [number, *examples])
    if not passes:  # a slope of 0 would add a useless term to every sum
        return None

    def slope(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        arguments = (score, b, h, q_idx, kv_idx)
        read = _value(recorded, load, arguments).double().reshape(1)
        value: Tensor = VocabularyInterpreter(gradient).run(read, *arguments)
        return value

    return slope


def _value(recorded: fx.GraphModule, node: fx.Node, arguments: Iterable[Tensor]) -> Tensor:
    """Return the value of ``node`` for these arguments of the mod."""
    run = fx.Interpreter(recorded, garbage_collect_values=False)
    run.run(*arguments)
    value: Tensor = run.env[node]
    return value


class _WithNumber(fx.Interpreter):
    """Runs a score mod with one number that it reads replaced by ``number``.

    Values computed from that number stay float64, since a cast would also round the gradient.
    """

    def __init__(self, recorded: fx.GraphModule, load: fx.Node, number: Tensor) -> None:
        super().__init__(recorded)
        self._load, self._number = load, number
        self._follows = {load}

    def run_node(self, n: fx.Node) -> Any:
        if n is self._load:
            return self._number
        if not self._follows.isdisjoint(n.all_input_nodes):
            self._follows.add(n)
            if aten_name(n) == "_to_copy" and n.kwargs.get("dtype") in _REAL:
                (operand,) = n.all_input_nodes
                return self.env[operand].double()
        return super().run_node(n)


def _place(recorded: fx.GraphModule, load: fx.Node, tensor: Tensor) -> Callable[..., Tensor]:
    """Return a function that gives the flat index of ``load``; negative indices are resolved."""

    def place(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        flat = torch.zeros_like(b)
        if load.op == "get_attr":
            return flat
        run = fx.Interpreter(recorded, garbage_collect_values=False)
        run.run(score, b, h, q_idx, kv_idx)
        indices: Any = load.args[1]
        for axis, (node, size) in enumerate(zip(indices, tensor.shape, strict=True)):
            # In 64 bits, since rows times columns may overflow int32.
            index = run.env[node].to(torch.int64)
            if node.op != "placeholder":
                index = torch.where(index < 0, index + size, index)
            flat = flat * size + index if axis else index
        return flat

    return place
