"""A relation, when it applies to a Problem, and the comparisons that it is made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from attncheck.core.errors import ProblemError
from attncheck.core.outputs import Outputs
from attncheck.inputs import input_tensors as inputs_room
from attncheck.inputs.problem import (
    Allowed,
    Parameters,
    Promise,
    check_parameters,
    fits_all,
    no_parameters,
)

if TYPE_CHECKING:
    from attncheck.core.outputs import TensorName
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Problem
    from attncheck.mods.spec import Spec

__all__ = [
    "INDICES",
    "Errors",
    "Fill",
    "Finding",
    "Holds",
    "Parameters",
    "Relation",
    "Unfit",
    "compare_bits",
    "compare_outputs",
    "compare_reordered",
    "compare_tensors",
    "compare_values",
    "compare_within",
    "effective_turns",
    "huge_keys",
    "indices_read",
    "map_outputs",
    "nan_keys",
    "of_attention",
    "of_gradients",
    "of_softmax",
    "redraw_keys",
    "reflect",
    "replace_where",
    "without_sink",
]


_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Elements that are not what they must be.

    Attributes:
        tensor: Which one.
        place: The worst element, or of bits the first, in the axes of ``judgement.AXES``.
        value: What it is.
        expected: What it should be.
        allowed: How far the two may be apart; 0 where bits are compared.
        count: Wrong elements.
        compared: Elements compared.
    """

    tensor: TensorName
    place: tuple[int, ...]
    value: float
    expected: float
    allowed: float = 0.0
    count: int
    compared: int

    @property
    def message(self) -> str:
        """One line."""
        place = ", ".join(map(str, self.place))
        # Nine digits tell any two fp32 numbers apart.
        value, expected = f"{self.value:.9g}", f"{self.expected:.9g}"
        how = f" ± {self.allowed:.2g}" if self.allowed else " bit for bit"
        verb = "differs" if self.count == 1 else "differ"
        return (
            f"{self.tensor}[{place}] = {value}, but should be {expected}{how} "
            f"({self.count} of {self.compared} elements {verb})"
        )

    def __str__(self) -> str:
        return self.message


def compare_bits(tensor: TensorName, value: torch.Tensor, expected: torch.Tensor) -> Finding | None:
    """Elements of which any bit differs, NaNs and the signs of zeros included.

    Args:
        tensor: Its name.
        value: What a kernel gave.
        expected: What it must be, same shape and dtype.
    """
    bits = _SAME_SIZE[value.element_size()]
    different = value.contiguous().view(bits) != expected.contiguous().view(bits)
    return _first(tensor, value, expected, different)


def compare_values(
    tensor: TensorName, value: torch.Tensor, expected: torch.Tensor
) -> Finding | None:
    """Elements that are another number, or NaN; the sign of a zero is left open.

    0 + (−0) is +0: a sum that starts at 0 cannot return the −0 that it was given.
    """
    return _first(tensor, value, expected, value != expected)


def compare_within(
    tensor: TensorName, value: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor
) -> Finding | None:
    """Elements that are further apart than ``allowed``; the worst of them.

    Args:
        tensor: Its name.
        value: What a kernel gave.
        expected: What it must be, same shape; compared in float64. Equal infinities agree.
        allowed: How far the two may be apart, same shape; NaN allows nothing.
    """
    value, expected = value.double(), expected.double()
    distance = torch.where(value == expected, 0.0, (value - expected).abs())
    distance = distance.nan_to_num(nan=torch.inf, posinf=torch.inf)
    allowed = allowed.double().nan_to_num(nan=0.0, posinf=torch.inf)
    different = (distance > allowed) | (distance.isinf() & ~allowed.isinf())
    if not bool(different.any()):
        return None
    # 0 ÷ 0 is no share: where nothing is allowed, any distance is worse than where something is.
    share = torch.where(different, distance / allowed, -1.0).nan_to_num(nan=torch.inf)
    # torch's own of it imports sympy.
    worst = np.unravel_index(int(share.argmax()), share.shape)
    place = tuple(int(index) for index in worst)
    return Finding(
        tensor=tensor,
        place=place,
        value=float(value[place]),
        expected=float(expected[place]),
        allowed=float(allowed[place]),
        count=int(different.sum()),
        compared=different.numel(),
    )


def compare_tensors(
    tensor: TensorName, value: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor | None
) -> Finding | None:
    """``moved``, or ``apart`` where an error is allowed."""
    if allowed is None:
        return compare_bits(tensor, value, expected)
    return compare_within(tensor, value, expected, allowed)


def _first(
    tensor: TensorName, value: torch.Tensor, expected: torch.Tensor, different: torch.Tensor
) -> Finding | None:
    places = different.nonzero()
    if not len(places):
        return None
    place = tuple(places[0].tolist())
    return Finding(
        tensor=tensor,
        place=place,
        value=float(value[place]),
        expected=float(expected[place]),
        count=len(places),
        compared=different.numel(),
    )


Fill = Callable[["Inputs"], tuple[torch.Tensor, torch.Tensor]]
"""Inputs → other k and v, of the same shapes and dtype."""

_HUGE = 1e30


def replace_where(old: torch.Tensor, new: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """``new`` where it is asked for, else ``old``: bit for bit, in fp8 too, which has no where.

    Args:
        old: Any dtype.
        new: Same shape and dtype.
        where: bool, broadcasts to that shape.
    """
    bits = _SAME_SIZE[old.element_size()]
    return torch.where(where, new.view(bits), old.view(bits)).view(old.dtype)


def redraw_keys(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Another draw, normal whatever the first: constant values would change nothing."""
    seed = (inputs.problem.seed + 1) % 2**63
    other = inputs_room.draw_inputs(
        inputs.problem.replace(distribution="normal", seed=seed), inputs.q.device
    )
    return other.k, other.v


def nan_keys(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN throughout."""
    return torch.full_like(inputs.k, torch.nan), torch.full_like(inputs.v, torch.nan)


def huge_keys(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """1e30, in every other key the largest finite number: q·k may overflow, to inf − inf even."""
    largest = inputs.problem.formats.storage.max

    def filled(like: torch.Tensor) -> torch.Tensor:
        full = torch.full_like(like, min(_HUGE, largest))
        full[:, :, ::2] = largest
        return full

    return filled(inputs.k), filled(inputs.v)


def compare_outputs(
    value: Outputs,
    expected: Outputs,
    errors: Sequence[Outputs] | None,
    *,
    signed_zeros: bool = True,
) -> Finding | None:
    """What of ``value`` is not what is expected; LSE and gradients where both have them.

    Args:
        value: Of the last run.
        expected: In the same axes.
        errors: How far each of the runs that the two are made of may be from the exact result, in
            these axes: together they may be apart by the sum. None: every bit must agree.
        signed_zeros: Whether the sign of a zero is a bit like any.
    """
    given, wanted = value.tensors(), expected.tensors()
    asked = [name for name in given if name in wanted]
    if errors is not None:  # gradients that nobody asked for have no bound
        asked = [name for name in asked if all(name in each.tensors() for each in errors)]
    for name in asked:
        should = wanted[name]
        if not signed_zeros:
            should = replace_where(should, given[name], (given[name] == 0) & (should == 0))
        found = compare_tensors(name, given[name], should, _sum(errors, name))
        if found:
            return found
    return None


def map_outputs(
    outputs: Outputs,
    change: Callable[[torch.Tensor], torch.Tensor],
    gradients: Callable[[TensorName, torch.Tensor], torch.Tensor] | None = None,
) -> Outputs:
    """Outputs with out and LSE changed alike: indexed, permuted or repeated in common axes.

    Gradients are left out, unless ``gradients`` says for each what becomes of it.
    """
    changed = {name: change(tensor) for name, tensor in _forward(outputs).items()}
    if gradients is not None:
        changed |= {name: gradients(name, one) for name, one in outputs.gradients().items()}
    return Outputs(**changed)


def _forward(outputs: Outputs) -> dict[TensorName, torch.Tensor]:
    gradients = outputs.gradients()
    return {name: one for name, one in outputs.tensors().items() if name not in gradients}


def _sum(errors: Sequence[Outputs] | None, tensor: TensorName) -> torch.Tensor | None:
    if errors is None:
        return None
    return torch.stack([each.tensors()[tensor] for each in errors]).sum(0)


Errors = Sequence["Outputs"] | None
"""What each run may be off by, in float64; None where bits are compared."""

Holds = Callable[[Sequence["Inputs"], Sequence["Outputs"], Parameters, Errors], "Finding | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """Something that holds between what a right kernel gives in several runs, without an oracle.

    All of it is pure: no kernel, no oracle, no judge.

    Attributes:
        name: The question of a Case.
        summary: What must hold, in one line: a failure quotes it.
        runs: (inputs, parameters) → the inputs of each run of the kernel, in order; of other
            Problems too. What is given is not changed; tensors may be shared between runs.
        holds: (inputs of each run, outputs of each run, parameters, errors) → what is wrong, or
            None. ``errors`` is None where bits are compared. Else it has for each run how far its
            out ``(batch, heads, query, value_dim)`` and LSE ``(batch, heads, query)`` may be from
            the exact result, and of a backward its gradients; what the runs may be apart follows
            from that. The value of a
            Finding is an element of the last run.
        promise: What a kernel must promise for bits to be compared; empty where every right
            kernel's agree; ``bounds`` where no kernel's need to. Of a kernel that does not promise
            it, the relation is asked within bounds. Bits of two
            runs are compared only of a kernel that promises ``repeat``.
        needs_lse: Whether it is asked only of kernels that give LSE.
        only_promised: Whether it is not asked of a kernel that does not promise it: the last run's
            inputs have no bounds. Where what is not promised is gradients alone, the first run's
            are taken for those of both.
        spacious: Whether its inputs take gibibytes, of addresses or of a GPU: where there is not so
            much memory it is not asked, and no kernel is blamed.
        relaunched: Whether the last run is by another launch of the kernel, the one that the
            parameter ``launch`` counts (``Subject.launches``); asked only of a kernel that has any.
        unfit: Why the relation says nothing of a Problem, in one line; None if it does.
        allowed: The numbers that may be asked of a Problem, by name, smallest first.
    """

    name: str
    summary: str
    runs: Callable[[Inputs, Parameters], tuple[Inputs, ...]]
    holds: Holds
    promise: Promise | Literal["", "bounds"] = ""
    needs_lse: bool = False
    only_promised: bool = False
    relaunched: bool = False
    spacious: bool = False
    unfit: Callable[[Problem], str | None] = fits_all
    allowed: Callable[[Problem], Allowed] = no_parameters

    def check(self, problem: Problem, parameters: Parameters) -> None:
        """Raises ProblemError unless the relation can be asked of ``problem`` with these."""
        reason = self.unfit(problem)
        if reason:
            raise ProblemError(f"{self.name} says nothing of {problem}: {reason}.")
        check_parameters(self.name, parameters, self.allowed(problem))


Unfit = Callable[["Problem"], "str | None"]

INDICES = frozenset({"b", "h", "q_idx", "kv_idx"})

_PLACES = frozenset({"q_idx", "kv_idx"})
_READ = {
    "full": frozenset[str](),
    "causal": _PLACES,
    "causal_bottom_right": _PLACES,
    "sliding_window": _PLACES,
    "prefix_lm": _PLACES,
    "document": _PLACES,
    "documents": _PLACES,
    "neighborhood": _PLACES,
    "neighborhood_tiled": _PLACES,
    "neighborhood_morton": _PLACES,
    "padding": frozenset({"b", "kv_idx"}),
    **dict.fromkeys(("and", "or", "not", "offset", "chain"), frozenset[str]()),  # their parts do
    **dict.fromkeys(("none", "softcap", "temperature"), frozenset[str]()),
    "alibi": _PLACES | {"h"},
}


def of_attention(*reasons: Unfit, gradients: bool = False) -> Unfit:
    """``unfit`` of a relation about attention: the first of ``reasons`` that there is.

    Of a Problem with a backward it says nothing unless it speaks of ``gradients`` too.
    """
    return _of("attention", reasons if gradients else (_without_gradients, *reasons))


def of_gradients(*reasons: Unfit) -> Unfit:
    """``unfit`` of a relation about gradients alone."""
    return of_attention(_with_gradients, *reasons, gradients=True)


def of_softmax(*reasons: Unfit) -> Unfit:
    """``unfit`` of a relation about a softmax of scores."""
    return _of("softmax", reasons)


def without_sink(problem: Problem) -> str | None:
    """Why a relation that counts a row's keys, or moves their scores alone, says nothing."""
    return "it has a sink" if problem.sink else None


def _without_gradients(problem: Problem) -> str | None:
    return "it says nothing of gradients" if problem.backward else None


def _with_gradients(problem: Problem) -> str | None:
    return None if problem.backward else "it is about gradients"


def indices_read(mod: Spec) -> frozenset[str]:
    """Which of b, h, q_idx and kv_idx a mask or score mod reads, as far as its names tell.

    All of them where they do not.
    """
    return frozenset[str]().union(*map(_read_by, mod.walk()))


def _read_by(part: Spec) -> frozenset[str]:
    if part.name == "expression":
        return INDICES.intersection(re.findall(r"\w+", str(part.values["text"])))
    if part.name == "relative_bias":  # clamped to 0, a distance is no distance
        return frozenset({"h"}) | (_PLACES if part.values["distance"] else frozenset())
    if part.name == "bias":
        each = (("b", "per_batch"), ("h", "per_head"))
        return _PLACES.union(index for index, per in each if part.values[per])
    return _READ.get(part.name, INDICES)


def _of(operation: str, reasons: tuple[Unfit, ...]) -> Unfit:
    def unfit(problem: Problem) -> str | None:
        if problem.operation != operation:
            return f"it is about {operation}"
        return next(filter(None, (reason(problem) for reason in reasons)), None)

    return unfit


_TURNS = 64


def reflect(count: int, turn: int) -> list[int]:
    """``turn`` − i modulo ``count``: what read its neighbour on one side has it on the other."""
    return [(turn - i) % count for i in range(count)]


def effective_turns(count: int, order: Callable[[int], list[int]]) -> list[int]:
    """The first turns below ``count`` of which ``order`` moves anything, smallest first."""
    some = range(min(count, _TURNS))
    return [turn for turn in some if any(i != old for i, old in enumerate(order(turn)))]


def compare_reordered(
    outputs: Sequence[Outputs],
    change: Callable[[torch.Tensor], torch.Tensor],
    errors: Errors,
    gradients: Callable[[TensorName, torch.Tensor], torch.Tensor] | None = None,
) -> Finding | None:
    """What of the second run is not the first one's, changed as by ``agreement.mapped``."""
    before, after = outputs

    def moved(one: Outputs) -> Outputs:
        return map_outputs(one, change, gradients)

    return compare_outputs(after, moved(before), errors and [moved(errors[0]), errors[1]])
