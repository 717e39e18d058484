"""A fault model: a name, a sentence for who has the fault, and what the call gives with it.

A result that differs from call to call, or with what lies beside an input, is nobody's to predict;
that it does is known all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from attncheck.core.outputs import Outputs
    from attncheck.fault_models.exact_attention import ExactAttention
    from attncheck.inputs.problem import Problem

__all__ = [
    "FAULT_MODELS",
    "MOST_PLACES",
    "SIGNS",
    "FaultModel",
    "Prediction",
    "always",
    "attention",
    "masked",
    "model",
    "scored",
]


Of = Literal["forward", "backward"]
Group = Literal[
    "mask", "tiles", "softmax", "scale", "lse", "mods", "heads", "memory", "precision", "fp8",
    "splits", "sinks", "gradients",
]  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Prediction:
    """What a call gives that has the fault in one of its forms.

    Attributes:
        outputs: Out and LSE ``(batch, heads, rows, …)`` of the rows that are predicted; of a fault
            of the backward the gradients.
        parameters: Which form: tile sizes, heads.
        family: Of a fault that is larger or smaller: the outputs at any size of it, 0 for none;
            ``outputs`` are those at ``start``.
        start: The size that is tried first.
        parameter: Its name.
        free: Rows ``(batch, heads, rows)`` of which nothing is predicted.
    """

    outputs: Outputs
    parameters: Mapping[str, int | float | str] = field(default_factory=dict)
    family: Callable[[float], Outputs] | None = None
    start: float = 0.0
    parameter: str = ""
    free: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultModel:
    """One way to be wrong.

    Attributes:
        id: Words with hyphens.
        sentence: For a kernel's author.
        group: What it is about.
        of: Which half of the call.
        applies: Whether a Problem could have it at all.
        variants: What the call gives, in each form that there is.
        order: Where several explain as much, the smaller is told first: 0 a plain slip, 1 a slip in
            one tile or head of several, 2 what has a number to fit.
        room: The module that defines it.
    """

    id: str
    sentence: str
    group: Group
    of: Of
    applies: Callable[[Problem], bool]
    variants: Callable[[ExactAttention], Iterator[Prediction]]
    order: int = 0
    room: str = ""


FAULT_MODELS: dict[str, FaultModel] = {}
"""Every fault model, by id."""


def always(problem: Problem) -> bool:
    """Of any call."""
    del problem
    return True


def attention(problem: Problem) -> bool:
    """Of what has heads, q and k."""
    return problem.operation == "attention"


def masked(*names: str) -> Callable[[Problem], bool]:
    """Whether the mask, or a part of it, is one of ``names``; of none: any but the full one."""
    return lambda problem: any(
        part.name in names if names else part.name != "full" for part in problem.mask.walk()
    )


def scored(*names: str) -> Callable[[Problem], bool]:
    """The same of the score mod."""
    return lambda problem: any(
        part.name in names if names else part.name != "none" for part in problem.score.walk()
    )


def model(
    name: str,
    sentence: str,
    *,
    group: Group,
    applies: Callable[[Problem], bool] = always,
    of: Of = "forward",
    order: int = 0,
) -> Callable[
    [Callable[[ExactAttention], Iterator[Prediction]]],
    Callable[[ExactAttention], Iterator[Prediction]],
]:
    """Adds what it decorates to ``MODELS``."""

    def add(
        variants: Callable[[ExactAttention], Iterator[Prediction]],
    ) -> Callable[[ExactAttention], Iterator[Prediction]]:
        FAULT_MODELS[name] = FaultModel(
            id=name,
            sentence=sentence,
            group=group,
            of=of,
            applies=applies,
            variants=variants,
            order=order,
            room=variants.__module__,
        )
        return variants

    return add


MOST_PLACES = 65_535
"""Programs along each of CUDA's grid axes y and z (CUDA C++ Programming Guide, table of limits)."""
SIGNS: dict[str, str] = {
    "not-the-same-again": (
        "the same call gives something else another time: a race, memory that is not cleared or "
        "never written, or what is kept from an earlier call"
    ),
    "depends-on-the-batch": (
        "what a sequence gives depends on the others of its batch, within rounding: the whole "
        "batch decides into how many parts its keys are cut, or which launch it gets"
    ),
    "grid-axis-exceeded": (
        "there are more sequences and heads than the 65 535 places of an axis of the grid: nothing "
        "is launched, and out holds what its memory held"
    ),
    "strides-not-taken": (
        "where a tensor's elements lie is not taken from its strides: the same numbers are right "
        "contiguous, and wrong laid out otherwise"
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
"""A sentence for a kernel's author, by id."""
