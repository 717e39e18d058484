"""A fault model: a name, a sentence for who has the fault, and what the call gives with it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping  # dataclasses
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from attncheck.core.outputs import Outputs

if TYPE_CHECKING:
    from torch import Tensor

    from attncheck.core.tensor_names import TensorName
    from attncheck.fault_models.exact_attention import ExactAttention
    from attncheck.fault_models.steps import Steps
    from attncheck.inputs.problem import Problem

Parameters = Mapping[str, int | float | str]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Prediction:
    """Outputs of a call that has the fault in one of its forms."""

    # Out and LSE ``(batch, heads, rows, …)`` of the rows that are predicted; of a fault of the
    # backward the gradients.
    outputs: Outputs
    parameters: Parameters = field(default_factory=dict)  # which form: tile sizes, heads
    # Of a fault that is larger or smaller: the outputs at any size of it, 0 for none; ``outputs``
    # are those at ``start``.
    family: Callable[[float], Outputs] | None = None
    start: float = 0.0  # the size that is tried first
    parameter: str = ""  # its name
    free: Tensor | None = None  # rows ``(batch, heads, rows)`` of which nothing is predicted


Form = Prediction | Outputs | tuple[Outputs, Parameters]
"""What a model yields: outputs, with the parameters of the form where there are several."""


Family = Literal[
    "mask",
    "tile",
    "rescaling",
    "empty rows",
    "factor",
    "lse",
    "score",
    "mapping",
    "memory",
    "overflow",
    "precision",
    "gradient",
]
FAMILIES: dict[Family, str] = {
    "mask": "keys count that the mask hides, or do not count although it shows them",
    "tile": "tiles of keys: one is left out or counts twice, or the padding of the last one counts",
    "rescaling": "the running softmax: the maximum, the sum, or how parts are rescaled and merged",
    "empty rows": "rows that see no key",
    "factor": "a factor: the scale, its units, a descale, or a constant on the output",
    "lse": "LSE alone: its units, its maximum or its sum; the output is right",
    "score": "what is added to scores or done to them: the score mod, softcap, a bias or the sink",
    "mapping": "where numbers are read or written: head, sequence, page, stride or column",
    "memory": "memory that is stale, never written, or not the call's",
    "overflow": "NaN or infinity of finite numbers: an overflow, 0 · ∞, 0 / 0 or ∞ - ∞",
    "precision": "lost precision: something is rounded to too few bits",
    "gradient": "a term of the gradients: the forward is right",
}
"""Kinds of fault, in plain words: what is said where no single model is confirmed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultModel:
    """One way to be wrong."""

    id: str  # words with hyphens
    sentence: str  # for a kernel's author
    family: Family
    of: Literal["forward", "backward"]  # which half of the call
    # Whether a Problem has what it speaks of (a mask, a sink, shared key heads, pages, a
    # backward), and could have the fault at all.
    applies: Callable[[Problem], bool]
    # Where several explain as much, the smaller is told first: 0 a plain slip, 1 a slip in one
    # tile or head of several, 2 what has a number to fit.
    order: int
    # Whether one of a backward's two kernels may have it alone, and no other model is of that.
    of_one_kernel: bool = True
    # Forms that are steps done otherwise: the first is how it is planted in the ideal kernel.
    steps: tuple[Steps, ...] = ()
    # Other forms of the fault, of a call.
    forms: Callable[[ExactAttention], Iterable[Form]] | None = None

    def predictions(self, call: ExactAttention) -> Iterator[Prediction]:
        """Yield what ``call`` gives with the fault, in each form that there is."""
        for one in self._forms(call):
            yield one
            if self.of == "backward" and self.of_one_kernel:
                yield from _of_one_kernel(one, call.backward.exact)
            elif self.family in {"mask", "tile"}:
                yield from _of_lost_rows(one, call)

    def _forms(self, call: ExactAttention) -> Iterator[Prediction]:
        for steps in self.steps:
            for outputs, parameters in call.predict(steps):
                yield Prediction(outputs=outputs, parameters=parameters)
        for form in self.forms(call) if self.forms else ():
            if isinstance(form, Prediction):
                yield form
            elif isinstance(form, Outputs):
                yield Prediction(outputs=form)
            else:
                yield Prediction(outputs=form[0], parameters=form[1])


def _of_lost_rows(one: Prediction, call: ExactAttention) -> Iterator[Prediction]:
    """Yield what else a kernel may give of rows that see keys and have lost them all.

    That is NaN, of 0 / 0 or ∞ - ∞, or the mean of what is visited, where what hides keys is finite.
    """
    out, lse = one.outputs.out, one.outputs.lse
    lost = torch.zeros(()) if lse is None else (lse == -math.inf) & ~call.parts.dead
    if lse is None or not bool(lost.any()):
        return
    for other in (lse, torch.where(lost, math.nan, lse)):
        nan = torch.where(lost[..., None], math.nan, out)
        yield replace(one, outputs=Outputs(nan, other))
    # All keys, or those of a causal loop.
    ends = [torch.tensor(call.problem.kv)]
    for end in [*ends, *((call.i // rows + 1) * rows for rows in call.row_tiles)]:
        visited = (call.j < end).double()
        mean = visited @ call.v / visited.sum(-1, keepdim=True)
        yield replace(one, outputs=Outputs(torch.where(lost[..., None], mean, out), lse))


def _of_one_kernel(whole: Prediction, exact: Outputs) -> Iterator[Prediction]:
    """Yield what is left where only one of the two kernels that many backwards have has the fault.

    One gives dQ, the other dK and dV.
    """
    kernels: dict[str, tuple[TensorName, ...]] = {"dq": ("dq",), "dk, dv": ("dk", "dv")}
    right = exact.tensors()
    changed = {n for n, x in whole.outputs.tensors().items() if not torch.equal(x, right[n])}
    if not changed:  # where it shows nothing it may be of either
        for of in kernels:
            yield replace(whole, parameters={**whole.parameters, "kernel of": of})
        return
    for of, mine in kernels.items():
        others = {name: right[name] for names in kernels.values() for name in names}
        others = {name: x for name, x in others.items() if name not in mine}
        if not changed & {*mine} or not changed & {*others}:
            continue
        family = whole.family
        yield replace(
            whole,
            outputs=replace(whole.outputs, **others),
            parameters={**whole.parameters, "kernel of": of},
            family=None if family is None else partial(_with_others, family, others),
        )


def _with_others(
    family: Callable[[float], Outputs], others: dict[TensorName, Tensor], size: float
) -> Outputs:
    return replace(family(size), **others)


class ModelTable(dict[str, FaultModel]):
    """Fault models by id, in the order in which they are told; of one family unless told.

    Of a backward a model applies where there is one, and its forms are of the call's gradients.
    """

    def __init__(self, family: Family, *, of: Literal["forward", "backward"] = "forward") -> None:
        super().__init__()
        self._family, self._of = family, of

    def add(
        self,
        name: str,
        sentence: str,
        *,
        steps: Steps | tuple[Steps, ...] = (),
        forms: Callable[[ExactAttention], Iterable[Form]] | None = None,
        applies: Callable[[Problem], bool] = lambda _problem: True,
        order: int = 0,
        family: Family | None = None,
    ) -> None:
        """Add a model of ``steps``, of other ``forms``, or of both."""
        backward = self._of == "backward"
        self[name] = FaultModel(
            id=name,
            sentence=sentence,
            family=family or self._family,
            of=self._of,
            applies=(lambda problem: problem.backward and applies(problem))
            if backward
            else applies,
            order=order,
            steps=steps if isinstance(steps, tuple) else (steps,),
            forms=forms,
        )

    def model(self, **known: Any) -> Callable[[Callable[[Any], Iterable[Form]]], None]:
        """Return what adds a function as a model: its name is the id, its docstring the sentence.

        Args:
            known: What ``add`` takes beside them.
        """

        def add(function: Callable[[Any], Iterable[Form]]) -> None:
            sentence = " ".join((function.__doc__ or "").split()).removesuffix(".")
            # Of LSE and ALiBi the first letter is their own; dQ, say, begins with a small one.
            sentence = re.sub(r"^[A-Z](?=[^A-Z]|[KOQSV]\b)", lambda a: a[0].lower(), sentence)
            of_call = function
            if self._of == "backward":
                of_call = lambda call: function(call.backward)  # noqa: E731
            self.add(function.__name__.replace("_", "-"), sentence, forms=of_call, **known)

        return add


def is_attention(problem: Problem) -> bool:
    """Return whether it has heads, q and k."""
    return problem.operation == "attention"


def has_mask(*names: str) -> Callable[[Problem], bool]:
    """Return whether the mask, or a part, is one of ``names``; of none: any but the full one."""
    return lambda problem: any(
        part.name in names if names else part.name != "full" for part in problem.mask.walk()
    )


def has_score(*names: str) -> Callable[[Problem], bool]:
    """The same of the score mod."""
    return lambda problem: any(
        part.name in names if names else part.name != "none" for part in problem.score.walk()
    )


MOST_GRID_PLACES = 65_535
"""Programs along each of CUDA's grid axes y and z (CUDA C++ Programming Guide, table of limits)."""

# A result that differs from call to call, or with what lies beside an input, is nobody's to
# predict; that it does is known all the same.
SIGNS: dict[str, str] = {
    "not-the-same-again": (
        "the same call gives something else another time: a race, memory that is not cleared or "
        "never written, or what is kept from an earlier call"
    ),
    "depends-on-the-batch": (
        "what a sequence gives depends on the others of its batch, within rounding: the whole "
        "batch decides into how many parts its keys are cut, or which launch it gets"
    ),
    "free-memory-read": (
        "the result changes with what free memory holds: part of an output, or of a buffer between "
        "kernels, is never written, or something is read before its start or behind its end"
    ),
    "grid-axis-exceeded": (
        "there are more sequences and heads than the 65 535 places of an axis of the grid: nothing "
        "is launched, and out holds what its memory held"
    ),
    "strides-not-taken": (
        "where a tensor's elements lie is not taken from its strides: the same numbers are right "
        "contiguous, and wrong laid out otherwise"
    ),
    "softcap-of-another-function": (
        "the cap makes another function of a score than cap · tanh(score / cap): it is right "
        "without one, and with it the weights of equal scores are off by the same factor"
    ),
    "far-offsets-wrap": (
        "a tensor is right laid out near, and wrong with the same layout 2³¹ elements apart: its "
        "offsets are 32-bit integers"
    ),
    "reads-beside-an-input": (
        "the result changes with what lies in memory beside a tensor, or between its rows, and is "
        "no part of it"
    ),
}
"""Faults that no model predicts and a failure tells by itself: a sentence for each, by id."""
