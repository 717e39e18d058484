"""Expressions of what a score mod reads of its captured float tensors, and its derivatives there.

A loss has a gradient with respect to each of those numbers: what a read brings to the number at
``place`` is the gradient of the score after the mod times ``slope``. ``captured_gradients`` has the
same without a trace, for the oracles.
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
    """One place in a score mod's text where it reads a float tensor."""

    tensor: Tensor  # the tensor itself, as captured
    # Where its numbers begin among all: one tensor after the other, as the trace meets them, each
    # flattened row-major.
    start: int
    place: Expression  # which of them is read, a whole number: of (score, b, h, q_idx, kv_idx)
    slope: Expression  # ∂ score_mod / ∂ the number read, of (score, b, h, q_idx, kv_idx)


def trace_reads(score_mod: ScoreMod, device: str = "cpu") -> tuple[CapturedRead, ...]:
    """Return every read of a float tensor that the score mod's result has a derivative to.

    A tensor that is only compared with, say, has none. Derivatives are torch's, as in
    ``trace_derivative``, of the mod computed with real numbers: on the way from what is read, a
    cast to another float dtype changes nothing. A tensor of one number may be read without an
    index.

    Args:
        score_mod: Any FlexAttention callable of the vocabulary (``expression.OPERATIONS``).
        device: Where the tensors are that it captures.

    Raises:
        TraceError: as ``trace_derivative``, and where the mod computes with a whole tensor that it
            captures before it reads it, or reads other tensors than its trace does.
    """
    trace_score(score_mod, device)  # what cannot be traced is refused in the same words
    name = describe_mod("score mod", score_mod)
    try:
        reads = tuple(_reads(score_mod, device))
    except TraceError as error:
        fact = str(error).rpartition(" cannot be traced: ")[2].removesuffix(".")
        raise TraceError(
            f"{name} has no derivative to what it captures that can be traced: {fact}."
        ) from None
    # The order of numbers is what kernels and oracles agree on, each from its own reading.
    if list(map(id, read_tensors(reads))) != list(map(id, captured_tensors(score_mod, device))):
        raise TraceError(f"{name} reads other tensors than its trace, or in another order.")
    return reads


def read_tensors(reads: Iterable[CapturedRead]) -> tuple[Tensor, ...]:
    """Return the tensors that are read, each once, in the order of their numbers."""
    return tuple({read.start: read.tensor for read in reads}.values())


def count_read_numbers(score_mod: ScoreMod, device: str = "cpu") -> int:
    """Return how many numbers the float tensors of ``trace_reads`` hold together."""
    return sum(tensor.numel() for tensor in read_tensors(trace_reads(score_mod, device)))


class EvaluatedReads:
    """The reads of a score mod in another number system than torch's.

    Args:
        convert: Makes a function of numpy arrays of an expression.

    Raises:
        TraceError: as ``trace_reads``, and where the score decides which number is read.
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
            # Places are computed in torch: scores of other number systems have no place there.
            if read.place.reads("score"):
                name = describe_mod("score mod", score_mod)
                raise TraceError(f"{name} reads a number that its score decides on: {read.place}.")

    def __call__(self, *arguments: NDArray[Any]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Yield of each read the place among all numbers, and the slope; of scores and indices."""
        indices = [torch.from_numpy(axis) for axis in arguments[1:]]
        score = torch.zeros((), dtype=torch.float64)
        for read, slope in self._reads:
            places = read.start + read.place.evaluate(score, *indices)
            yield places.numpy(), slope(*arguments)


@dataclass(frozen=True, slots=True)
class NumberSystem:
    """Score mods in another number system than torch's: what an oracle on it is given to call.

    The methods trace; they raise TraceError for a score mod that cannot be traced.
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
        """Return its derivative with respect to the score likewise."""
        return self.convert(trace_derivative(score_mod, device), context)

    def captures(self, score_mod: ScoreMod, context: Any, device: str = "cpu") -> EvaluatedReads:
        """Return what it reads of the float tensors that it captures likewise."""
        return EvaluatedReads(score_mod, lambda slope: self.convert(slope, context), device)


def _reads(score_mod: ScoreMod, device: str) -> Iterator[CapturedRead]:
    examples = example_arguments(_ARGUMENTS, device)
    recorded = record_operations(score_mod, _ARGUMENTS, examples)
    loads = list(_loads(recorded))
    # A gradient is to pass through the one number alone with respect to which it is taken.
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
        # By identity: two tensors of equal numbers are two gradients.
        if id(tensor) not in starts:
            starts[id(tensor)], end = end, end + tensor.numel()
        yield CapturedRead(
            tensor,
            starts[id(tensor)],
            trace_index(_place(recorded, load, tensor), device),
            trace_score(slope, device),
        )


def _loads(recorded: fx.GraphModule) -> Iterator[tuple[Tensor, fx.Node]]:
    """Yield each captured float tensor where the result needs it, and the node that reads it.

    torch's tracer has a node of its own for each use of a captured tensor.
    """
    needed: set[fx.Node] = set()
    waiting = list(recorded.graph.output_node().all_input_nodes)
    while waiting:
        node = waiting.pop()
        # Backwards from the result: a read that it does not need has no gradient.
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    for node in recorded.graph.nodes:
        if node.op != "get_attr" or node not in needed:
            continue
        tensor: Tensor = getattr(recorded, str(node.target))
        (user,) = node.users
        if not tensor.is_floating_point() or aten_name(user).startswith("lift_fresh"):
            continue  # torch.tensor(…) in the mod's text is nobody's number
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
    """Return the derivative of the result by the value of ``load``; None where it is 0.

    That is where no gradient passes through, not where it happens to be 0.
    """
    passes = False

    def with_number(number: Tensor, *arguments: Tensor) -> Tensor:
        nonlocal passes
        result: Tensor = _WithNumber(recorded, load, number).run(*arguments)
        passes = result.requires_grad
        return result

    number = _value(recorded, load, examples).double().reshape(1).clone()
    gradient = record_gradient(with_number, [number, *examples])
    if not passes:  # nothing to trace: a zero slope would be a term of every sum
        return None

    def slope(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        arguments = (score, b, h, q_idx, kv_idx)
        read = _value(recorded, load, arguments).double().reshape(1)
        value: Tensor = VocabularyInterpreter(gradient).run(read, *arguments)
        return value

    return slope


def _value(recorded: fx.GraphModule, node: fx.Node, arguments: Iterable[Tensor]) -> Tensor:
    """Return what ``node`` is, of these arguments of the mod."""
    run = fx.Interpreter(recorded, garbage_collect_values=False)
    run.run(*arguments)
    value: Tensor = run.env[node]
    return value


class _WithNumber(fx.Interpreter):
    """Runs a score mod with another number in the place of one that it reads.

    What is computed from that number is computed in float64: a gradient is cast as its number was.
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
    """Return where ``load`` reads: an index from the end is counted from the start."""

    def place(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        flat = torch.zeros_like(b)
        if load.op == "get_attr":
            return flat
        run = fx.Interpreter(recorded, garbage_collect_values=False)
        run.run(score, b, h, q_idx, kv_idx)
        indices: Any = load.args[1]
        for axis, (node, size) in enumerate(zip(indices, tensor.shape, strict=True)):
            # In 64 bits: rows times columns may pass what an int32 index holds.
            index = run.env[node].to(torch.int64)
            if node.op != "placeholder":
                index = torch.where(index < 0, index + size, index)
            flat = flat * size + index if axis else index
        return flat

    return place
