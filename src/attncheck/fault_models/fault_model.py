"""Fault models: each has a name, a sentence for users, and predictions of a call's outputs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping  # dataclasses
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch

from attncheck.core.outputs import Outputs
from attncheck.fault_models.steps import Steps

if TYPE_CHECKING:
    from torch import Tensor

    from attncheck.core.tensor_names import TensorName
    from attncheck.fault_models.exact_attention import ExactAttention
    from attncheck.inputs.problem import Problem

Parameters = Mapping[str, int | float | str]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Prediction:
    """Outputs of a call that has the fault in one of its forms."""

    # Out and LSE ``(batch, heads, rows, …)`` of the predicted rows, or the gradients for a fault in
    # the backward.
    outputs: Outputs
    parameters: Parameters = field(default_factory=dict)  # the form: tile sizes, heads
    # For a fault with a size: the outputs at any size, of which 0 is no fault; ``outputs`` are
    # those at ``start``.
    family: Callable[[float], Outputs] | None = None
    start: float = 0.0  # the size that is tried first
    parameter: str = ""  # name of the number that readers see, which ``shown`` makes of the size
    shown: Callable[[float], float] = float
    free: Tensor | None = None  # rows ``(batch, heads, rows)`` without a prediction
    # What out, or LSE, may be off by where a rounding that the fault makes may fall either way.
    ties: Mapping[TensorName, Tensor] = field(default_factory=dict)


Form = Prediction | Outputs | Steps | tuple[Outputs | Steps, Parameters]
"""An item that a model yields: outputs or steps, with parameters if it has several forms."""


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
"""Kinds of faults, in words for users; shown where no single model is confirmed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultModel:
    """A model of one fault."""

    id: str  # words with hyphens
    sentence: str  # for a kernel's author
    family: Family
    of: Literal["forward", "backward"]  # which half of the call
    # Whether a Problem has the features that the fault concerns, such as a mask, a sink, shared key
    # heads, pages or a backward.
    applies: Callable[[Problem], bool]
    # Where several models explain as much, the smaller order comes first: 0 for a plain mistake, 1
    # for one in a single tile or head of several, 2 for a model with a number to fit.
    order: int
    # Whether one of a backward's two kernels may have the fault alone, without a model of its own.
    of_one_kernel: bool = True
    # Forms with changed steps; the first is the one planted in the ideal kernel.
    steps: tuple[Steps, ...] = ()
    # Other forms: a function of the call.
    forms: Callable[[ExactAttention], Iterable[Form]] | None = None

    def predictions(self, call: ExactAttention) -> Iterator[Prediction]:
        """Yield the prediction for ``call`` of each form of the fault."""
        for one in self._forms(call):
            yield one
            if self.of == "backward" and self.of_one_kernel:
                yield from _single_kernel_variants(one, call.backward.exact)
            elif self.family in {"mask", "tile"}:
                yield from _lost_row_variants(one, call)

    def _forms(self, call: ExactAttention) -> Iterator[Prediction]:
        for form in chain(self.steps, self.forms(call) if self.forms else ()):
            one, parameters = form if isinstance(form, tuple) else (form, {})
            if isinstance(one, Steps):
                for outputs, of_tile in call.predict(one):
                    yield Prediction(outputs=outputs, parameters={**parameters, **of_tile})
            elif isinstance(one, Outputs):
                yield Prediction(outputs=one, parameters=parameters)
            else:
                yield one


def _lost_row_variants(one: Prediction, call: ExactAttention) -> Iterator[Prediction]:
    """Yield other results that a kernel may give in rows that have lost all keys that they see.

    These are NaN, from 0 / 0 or ∞ - ∞, or the visited values' mean if hidden scores are finite.
    """
    out, lse = one.outputs.out, one.outputs.lse
    lost = torch.zeros(()) if lse is None else (lse == -math.inf) & ~call.parts.dead
    if lse is None or not bool(lost.any()):
        return
    for lost_lse in (lse, torch.where(lost, math.nan, lse)):
        nan = torch.where(lost[..., None], math.nan, out)
        yield replace(one, outputs=Outputs(nan, lost_lse))
    # The loop visits all keys, or those up to the diagonal.
    ends = [torch.tensor(call.problem.kv)]
    for end in [*ends, *((call.i // rows + 1) * rows for rows in call.row_tiles)]:
        visited = (call.j < end).double()
        mean = visited @ call.v / visited.sum(-1, keepdim=True)
        yield replace(one, outputs=Outputs(torch.where(lost[..., None], mean, out), lse))


def _single_kernel_variants(whole: Prediction, exact: Outputs) -> Iterator[Prediction]:
    """Yield the predictions for a fault in only one of the two kernels of many backwards.

    One of them computes dQ, the other dK and dV.
    """
    kernels: dict[str, tuple[TensorName, ...]] = {"dq": ("dq",), "dk, dv": ("dk", "dv")}
    right = exact.tensors()
    changed = {n for n, x in whole.outputs.tensors().items() if not torch.equal(x, right[n])}
    if not changed:  # A fault without an effect may be in either.
        for of in kernels:
            yield replace(whole, parameters={**whole.parameters, "kernel of": of})
        return
    for of, own in kernels.items():
        others = {name: right[name] for names in kernels.values() for name in names}
        others = {name: x for name, x in others.items() if name not in own}
        if not changed & {*own} or not changed & {*others}:
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
    """Fault models by id, in the order in which they are shown; of one family by default.

    Models of a backward apply to Problems with one; their forms are functions of ExactGradients.
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

    def model(self, **options: Any) -> Callable[[Callable[[Any], Iterable[Form]]], None]:
        """Return a decorator that adds a function as a model: name is id, docstring is sentence.

        Args:
            options: Further arguments of ``add``.
        """

        def add(function: Callable[[Any], Iterable[Form]]) -> None:
            sentence = " ".join((function.__doc__ or "").split()).removesuffix(".")
            # Lower the first letter, but not of names such as LSE, ALiBi or K.
            sentence = re.sub(r"^[A-Z](?=[^A-Z]|[KOQSV]\b)", lambda a: a[0].lower(), sentence)
            of_call = function
            if self._of == "backward":
                of_call = lambda call: function(call.backward)  # noqa: E731
            self.add(function.__name__.replace("_", "-"), sentence, forms=of_call, **options)

        return add


def is_attention(problem: Problem) -> bool:
    """Return whether a Problem is one of attention, with heads, q and k."""
    return problem.operation == "attention"


def is_scaled(problem: Problem) -> bool:
    """Return whether a Problem's tensors have descales: they are fp8."""
    return problem.formats.scaled


def has_mask(*names: str) -> Callable[[Problem], bool]:
    """Return a test for masks with a part in ``names``; without names, for any but the full one."""
    return lambda problem: any(
        part.name in names if names else part.name != "full" for part in problem.mask.walk()
    )


def has_score(*names: str) -> Callable[[Problem], bool]:
    """Return a test for score mods with a part in ``names``; without names, for any at all."""
    return lambda problem: any(
        part.name in names if names else part.name != "none" for part in problem.score.walk()
    )


MOST_GRID_PLACES = 65_535
"""Programs along each of CUDA's grid axes y and z (CUDA C++ Programming Guide, table of limits)."""

# No model can predict a result that changes from call to call, or with memory beside an input, but
# further calls can show that it does.
SIGNS: dict[str, str] = {
    "not-the-same-again": (
        "the same call gives something else another time: a race, memory that is not cleared or "
        "never written, or what is kept from an earlier call"
    ),
    "depends-on-earlier-calls": (
        "right as the first call of a process, and wrong after others: what an earlier call left, "
        "like a cached mask or a buffer, is used again where it does not fit"
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
"""Sentences on faults that no model predicts, but further calls of the kernel prove, by id."""
