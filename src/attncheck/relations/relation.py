"""The class Relation, its conditions on a Problem, and the comparisons that its rules use."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.core.tensor_names import GRADIENTS, TensorName
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Parameters, Problem, Promise, Question

_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# ------------------------------------------------------------------ a relation

Errors = Sequence[Outputs] | None
"""Error bound of every element for each run, in float64; None where runs are compared bitwise."""

Unfit = Callable[["Problem"], "str | None"]
"""Problem → the reason why a relation does not apply to it, in a few words; None if it does."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Results:
    """Everything that a relation's rule may look at; sequences have one item per run."""

    inputs: Sequence[Inputs]
    outputs: Sequence[Outputs]
    parameters: Parameters
    # How far each run's out ``(batch, heads, query, value_dim)``, LSE ``(batch, heads, query)``
    # and gradients may be from the exact result; None where runs are compared bitwise.
    errors: Errors

    def number(self, name: str) -> int:
        """Return the value of the parameter ``name``."""
        return int(self.parameters[name])

    def bounds(self) -> Sequence[Outputs]:
        """Return ``errors`` for a rule that never compares bitwise, so that they are not None."""
        assert self.errors is not None, "compared within bounds"
        return self.errors


def _unchanged(outputs: Outputs) -> Outputs:
    return outputs


def compare_ends(
    results: Results,
    *,
    first: Callable[[Outputs], Outputs] = _unchanged,
    last: Callable[[Outputs], Outputs] = _unchanged,
    signed_zeros: bool = True,
) -> Finding | None:
    """Return a Finding if ``last`` of the last run is not ``first`` of the first run.

    Both are applied to the runs' error bounds too: for parts, orders and multiples of outputs.
    """
    value, expected, errors = results.outputs[-1], results.outputs[0], results.errors
    bounds = errors and [first(errors[0]), last(errors[-1])]
    return compare_outputs(last(value), first(expected), bounds, signed_zeros=signed_zeros)


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation(Question):
    """A condition that the outputs of a correct kernel's runs meet; it needs no oracle.

    It only makes inputs and compares outputs: it calls no kernel, no oracle and no judge.
    """

    # (inputs, parameters) → the inputs of each run of the kernel, in order. Runs may have other
    # Problems and may share tensors. The arguments are not changed.
    runs: Callable[[Inputs, Parameters], tuple[Inputs, ...]]
    # Results of the runs → a Finding if the condition fails, or None. By default the last run must
    # equal the first. The tolerance between runs follows from the error bound of each.
    # A Finding's value is an element of the last run.
    rule: Callable[[Results], Finding | None] = compare_ends
    # The promise that a kernel must make to be compared bitwise; without it, it is compared within
    # bounds. Empty: the bits of every correct kernel agree. ``bounds``: no kernel's bits need to
    # agree. Two runs are compared bitwise only if the kernel also promises ``repeat``.
    promise: Promise | Literal["", "bounds"] = ""
    needs_lse: bool = False  # Check only kernels that return LSE.
    # Check only kernels that promise one of these. The last run's inputs have no error bounds, so
    # the first run's stand for both where runs are not compared bitwise. A finding in a kernel
    # that does not make ``promise`` is a warning.
    only_promised: frozenset[Promise] = frozenset()
    # The runs are consecutive calls in one process: each call sees the memory that earlier calls
    # left behind, and must not overwrite what they returned. A call outside the judge's bounds is
    # a finding too if the first call is within them.
    consecutive_calls: bool = False
    # The last run uses the launch of the kernel with the index ``launch`` (a parameter) among
    # ``Subject.launches``; kernels without launches are not checked.
    uses_other_launch: bool = False
    # Its inputs take gibibytes of address space or GPU memory: where there is too little, the
    # relation is skipped and no kernel is blamed.
    needs_much_memory: bool = False

    def holds(
        self,
        inputs: Sequence[Inputs],
        outputs: Sequence[Outputs],
        parameters: Parameters,
        errors: Errors,
    ) -> Finding | None:
        """Return a Finding about the last run, or None; the arguments are the fields of Results."""
        return self.rule(
            Results(inputs=inputs, outputs=outputs, parameters=parameters, errors=errors)
        )


# ------------------------------------------------------------------ when it applies


def of_attention(*reasons: Unfit, gradients: bool = False) -> Unfit:
    """Return the ``unfit`` of a relation about attention: the first of ``reasons`` that applies.

    Problems with a backward are unfit, unless the relation also covers ``gradients``.
    """
    return _unfit_unless("attention", reasons if gradients else (_without_gradients, *reasons))


def of_gradients(*reasons: Unfit) -> Unfit:
    """Return the ``unfit`` of a relation that applies only to Problems with a backward."""
    return _unfit_unless("attention", (_with_gradients, *reasons))


def of_softmax(*reasons: Unfit) -> Unfit:
    """Return the ``unfit`` of a relation about a softmax of scores."""
    return _unfit_unless("softmax", reasons)


def _unfit_unless(operation: str, reasons: tuple[Unfit, ...]) -> Unfit:
    def unfit(problem: Problem) -> str | None:
        if problem.operation != operation:
            return f"it is about {operation}"
        return next(filter(None, (reason(problem) for reason in reasons)), None)

    return unfit


def without_sink(problem: Problem) -> str | None:
    """Reject a sink: for relations that count a row's keys or shift only the keys' scores."""
    return "it has a sink" if problem.sink else None


def _without_gradients(problem: Problem) -> str | None:
    return "it says nothing of gradients" if problem.backward else None


def _with_gradients(problem: Problem) -> str | None:
    return None if problem.backward else "it is about gradients"


INDICES = frozenset({"b", "h", "q_idx", "kv_idx"})
"""Indices of a score that a mask or score mod may read."""

_POSITIONS = frozenset({"q_idx", "kv_idx"})
_INDICES_READ = {
    **dict.fromkeys(("full", "none", "softcap", "temperature"), frozenset[str]()),
    **dict.fromkeys(("causal", "causal_bottom_right", "sliding_window", "prefix_lm"), _POSITIONS),
    **dict.fromkeys(("document", "documents"), _POSITIONS),
    **dict.fromkeys(("neighborhood", "neighborhood_tiled", "neighborhood_morton"), _POSITIONS),
    "documents_bottom_right": _POSITIONS,
    "padding": frozenset({"b", "kv_idx"}),
    "bottom_right": _POSITIONS | {"b"},
    "alibi": _POSITIONS | {"h"},
    **dict.fromkeys(("and", "or", "not", "offset", "chain"), frozenset[str]()),  # only their parts
}


def indices_read(mod: Spec) -> frozenset[str]:
    """Return which of ``INDICES`` a mask or score mod reads, judged by the names of its parts.

    A part with an unknown name counts as reading all of them.
    """
    return frozenset[str]().union(*map(_indices_of_part, mod.walk()))


def _indices_of_part(part: Spec) -> frozenset[str]:
    if part.name == "expression":
        return INDICES.intersection(re.findall(r"\w+", str(part.values["text"])))
    if part.name == "relative_bias":  # a distance clamped to 0 does not depend on the positions
        return frozenset({"h"}) | (_POSITIONS if part.values["distance"] else frozenset())
    if part.name == "bias":
        each = (("b", "per_batch"), ("h", "per_head"))
        return _POSITIONS.union(index for index, per in each if part.values[per])
    return _INDICES_READ.get(part.name, INDICES)


# ------------------------------------------------------------------ making runs


def replace_where(old: torch.Tensor, new: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Return ``new`` where ``where``, else ``old``, bit for bit; also for fp8, which has no where.

    Args:
        old: Any dtype.
        new: Same shape and dtype.
        where: bool, broadcasts to that shape.
    """
    bits = _INT_OF_SIZE[old.element_size()]
    return torch.where(where, new.view(bits), old.view(bits)).view(old.dtype)


def change_tensors(
    inputs: Inputs, change: Callable[[torch.Tensor], torch.Tensor], *names: str
) -> dict[str, Any]:
    """Return ``change`` of each tensor in ``names`` that ``inputs`` has, for ``Inputs.replace``."""
    tensors = inputs.tensors()
    return {name: change(tensors[name]) for name in names if name in tensors}


def describe_turn(inputs: Sequence[Inputs], run: int) -> str:
    """Return a few words on a run's place in its sequence of calls and on the call before it."""
    current, previous = inputs[run].problem, inputs[run - 1].problem
    change = f"a {'longer' if previous.kv > current.kv else 'shorter'} one ({previous.shape})"
    if previous.shape == current.shape:
        change = "other numbers of the same shapes"
        change += f" under {previous.mask}" if previous.mask != current.mask else ""
    return f"call {run + 1}, after {change}"


# ------------------------------------------------------------------ comparing outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The elements of one tensor that differ from their expected values."""

    tensor: TensorName
    # Index of the worst element, or of the first if bits were compared; axes: ``judgement.AXES``.
    place: tuple[int, ...]
    value: float
    expected: float
    allowed: float = 0.0  # how far value and expected may be apart; 0 where bits are compared
    count: int
    compared: int
    what: str = ""  # which run it is about and what came before; empty where that is clear

    @property
    def message(self) -> str:
        """The finding in one line."""
        place = ", ".join(map(str, self.place))
        # Nine digits suffice to distinguish any two fp32 numbers.
        value, expected = f"{self.value:.9g}", f"{self.expected:.9g}"
        tolerance = f" ± {self.allowed:.2g}" if self.allowed else " bit for bit"
        verb = "differs" if self.count == 1 else "differ"
        what = f"{self.what}: " if self.what else ""
        return (
            f"{what}{self.tensor}[{place}] = {value}, but should be {expected}{tolerance} "
            f"({self.count} of {self.compared} elements {verb})"
        )

    def __str__(self) -> str:
        return self.message


def compare_bits(tensor: TensorName, value: torch.Tensor, expected: torch.Tensor) -> Finding | None:
    """Return a Finding if any bit differs, including NaN payloads and the signs of zeros.

    Args:
        expected: The right values, same shape and dtype.
    """
    bits = _INT_OF_SIZE[value.element_size()]
    different = value.contiguous().view(bits) != expected.contiguous().view(bits)
    return _first_difference(tensor, value, expected, different)


def compare_values(
    tensor: TensorName,
    value: torch.Tensor,
    expected: torch.Tensor | float,
    where: torch.Tensor | None = None,
) -> Finding | None:
    """Return a Finding if elements are NaN or not equal to ``expected``; −0 equals +0.

    A sum that starts at 0 cannot return −0, since 0 + (−0) is +0.

    Args:
        expected: One number for all elements, or a tensor of the same shape.
        where: bool, same shape: the elements to compare; None compares all.
    """
    if not isinstance(expected, torch.Tensor):
        expected = torch.full_like(value, expected)
    if where is None:
        return _first_difference(tensor, value, expected, value != expected)
    finding = _first_difference(tensor, value, expected, (value != expected) & where)
    return finding and replace(finding, compared=int(where.sum()))


def compare_within(
    tensor: TensorName, value: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor
) -> Finding | None:
    """Return a Finding at the worst element if any two are further apart than ``allowed``.

    Args:
        expected: The right values, same shape; compared in float64. Equal infinities agree.
        allowed: The largest distance, same shape; NaN allows no distance.
    """
    value, expected = value.double(), expected.double()
    distance = torch.where(value == expected, 0.0, (value - expected).abs())
    distance = distance.nan_to_num(nan=torch.inf, posinf=torch.inf)
    allowed = allowed.double().nan_to_num(nan=0.0, posinf=torch.inf)
    different = (distance > allowed) | (distance.isinf() & ~allowed.isinf())
    if not bool(different.any()):
        return None
    # A distance where 0 is allowed has an infinite share: it is worse than any with a tolerance.
    share = torch.where(different, distance / allowed, -1.0).nan_to_num(nan=torch.inf)
    # NumPy's unravel_index, because torch's imports sympy.
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


def _first_difference(
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


def compare_outputs(
    value: Outputs, expected: Outputs, errors: Errors, *, signed_zeros: bool = True
) -> Finding | None:
    """Return a Finding for the first tensor that differs; tensors that one side lacks are skipped.

    Args:
        expected: The right outputs, with the axes of ``value``.
        errors: Error bounds of each run that enters ``value`` or ``expected``, in the same axes;
            the two may be apart by their sum. None: every bit must agree.
        signed_zeros: Whether bitwise comparison distinguishes −0 from +0.
    """
    tensors, right_tensors = value.tensors(), expected.tensors()
    for name, tensor in tensors.items():
        if name not in right_tensors:
            continue
        allowed = None
        if errors is not None:
            run_errors = [each.tensors().get(name) for each in errors]
            if any(error is None for error in run_errors):  # a gradient nobody asked for
                continue
            allowed = torch.stack([error for error in run_errors if error is not None]).sum(0)
        right = right_tensors[name]
        if not signed_zeros:
            right = replace_where(right, tensor, (tensor == 0) & (right == 0))
        if allowed is None:
            finding = compare_bits(name, tensor, right)
        else:
            finding = compare_within(name, tensor, right, allowed)
        if finding:
            return finding
    return None


def each_tensor(
    change: Callable[[torch.Tensor], torch.Tensor],
    gradients: Callable[[TensorName, torch.Tensor], torch.Tensor | None] | None = None,
) -> Callable[[Outputs], Outputs]:
    """Return a function of Outputs that applies ``change``, such as an index, to out and LSE.

    Gradients are dropped, unless ``gradients`` maps (name, tensor) to a new tensor and not to None.
    """

    def change_each(outputs: Outputs) -> Outputs:
        new: dict[str, Any] = {}
        for name, tensor in outputs.tensors().items():
            if name not in GRADIENTS:
                new[name] = change(tensor)
            elif gradients is not None:
                new[name] = gradients(name, tensor)
        return Outputs(**new)

    return change_each
