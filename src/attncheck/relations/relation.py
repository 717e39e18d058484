"""A relation, when it applies to a Problem, and the comparisons that it is made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from attncheck.core.errors import ProblemError
from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.core.tensor_names import TensorName
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import (
    Allowed,
    Parameters,
    Problem,
    Promise,
    check_parameters,
    fits_all,
    no_parameters,
)

_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# ------------------------------------------------------------------ a relation

Errors = Sequence[Outputs] | None
"""Largest errors of each run, in float64; None where bits are compared."""

Unfit = Callable[["Problem"], "str | None"]
"""Problem → why a relation does not apply to it, in a few words; None if it does."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Results:
    """All that a relation's rule may look at."""

    inputs: Sequence[Inputs]  # of each run
    outputs: Sequence[Outputs]  # of each run
    parameters: Parameters
    # How far each run's out ``(batch, heads, query, value_dim)``, LSE ``(batch, heads, query)``
    # and gradients may be from the exact result; None where bits are compared.
    errors: Errors

    def number(self, name: str) -> int:
        """Return the parameter ``name``."""
        return int(self.parameters[name])

    def bounds(self) -> Sequence[Outputs]:
        """Return ``errors`` for a rule that compares within bounds alone."""
        assert self.errors is not None, "compared within bounds"
        return self.errors


def _last_equals_first(results: Results) -> Finding | None:
    first, last = results.outputs
    return compare_outputs(last, first, results.errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """Something that holds between what a right kernel gives in several runs, without an oracle.

    All of it is pure: no kernel, no oracle, no judge.
    """

    name: str
    summary: str  # what must hold, in one line: a failure quotes it
    # (inputs, parameters) → the inputs of each run of the kernel, in order; of other Problems
    # too. The arguments are not changed; runs may share tensors.
    runs: Callable[[Inputs, Parameters], tuple[Inputs, ...]]
    # Results of the runs → what is wrong, or None. By default the last of two runs must give what
    # the first gives. What runs may be apart follows from what each may be off by. The value of a
    # Finding is an element of the last run.
    rule: Callable[[Results], Finding | None] = _last_equals_first
    # What a kernel must promise for bits to be compared; empty where every right kernel's agree;
    # ``bounds`` where no kernel's need to. A kernel that does not promise it is compared within
    # bounds. Bits of two runs are compared only of a kernel that promises ``repeat``.
    promise: Promise | Literal["", "bounds"] = ""
    needs_lse: bool = False  # ask it only of kernels that give LSE
    # Ask it only of a kernel that promises one of these: the last run's inputs have no bounds,
    # and the first run's are taken for those of both where bits are not compared. What it finds
    # of a kernel that does not make ``promise`` is a warning.
    only_promised: frozenset[Promise] = frozenset()
    # Its runs are calls of one sequence, in one process: a call finds in memory what the calls
    # before have left, and what they returned stays theirs. A call that is beyond the judge's
    # bounds is a finding too, where the first one is not.
    in_turn: bool = False
    # The last run is by another launch of the kernel, the one that the parameter ``launch``
    # counts (``Subject.launches``); asked only of a kernel that has any.
    relaunched: bool = False
    # Its inputs take gibibytes, of addresses or of a GPU: where there is not so much memory it is
    # not asked, and no kernel is blamed.
    spacious: bool = False
    # Why the relation does not apply to a Problem, in one line; None if it does.
    unfit: Unfit = fits_all
    # The numbers that each parameter may have for a Problem, smallest first.
    allowed: Callable[[Problem], Allowed] = no_parameters

    def check(self, problem: Problem, parameters: Parameters) -> None:
        """Raise ProblemError unless the relation applies to ``problem`` with ``parameters``."""
        reason = self.unfit(problem)
        if reason:
            raise ProblemError(f"{self.name} says nothing of {problem}: {reason}.")
        check_parameters(self.name, parameters, self.allowed(problem))

    def holds(
        self,
        inputs: Sequence[Inputs],
        outputs: Sequence[Outputs],
        parameters: Parameters,
        errors: Errors,
    ) -> Finding | None:
        """Return what is wrong with the last run, or None; arguments as of ``Results``."""
        return self.rule(
            Results(inputs=inputs, outputs=outputs, parameters=parameters, errors=errors)
        )


# ------------------------------------------------------------------ when it applies


def of_attention(*reasons: Unfit, gradients: bool = False) -> Unfit:
    """Return the ``unfit`` of a relation about attention: the first of ``reasons`` that there is.

    It does not apply to a Problem with a backward unless it speaks of ``gradients`` too.
    """
    return _of("attention", reasons if gradients else (_without_gradients, *reasons))


def of_gradients(*reasons: Unfit) -> Unfit:
    """Return the ``unfit`` of a relation about gradients alone."""
    return _of("attention", (_with_gradients, *reasons))


def of_softmax(*reasons: Unfit) -> Unfit:
    """Return the ``unfit`` of a relation about a softmax of scores."""
    return _of("softmax", reasons)


def _of(operation: str, reasons: tuple[Unfit, ...]) -> Unfit:
    def unfit(problem: Problem) -> str | None:
        if problem.operation != operation:
            return f"it is about {operation}"
        return next(filter(None, (reason(problem) for reason in reasons)), None)

    return unfit


def without_sink(problem: Problem) -> str | None:
    """Reject a sink: for relations that count a row's keys, or move their scores alone."""
    return "it has a sink" if problem.sink else None


def _without_gradients(problem: Problem) -> str | None:
    return "it says nothing of gradients" if problem.backward else None


def _with_gradients(problem: Problem) -> str | None:
    return None if problem.backward else "it is about gradients"


INDICES = frozenset({"b", "h", "q_idx", "kv_idx"})
"""Indices of a score that a mask or score mod may read."""

_PLACES = frozenset({"q_idx", "kv_idx"})
_READ = {
    **dict.fromkeys(("full", "none", "softcap", "temperature"), frozenset[str]()),
    **dict.fromkeys(("causal", "causal_bottom_right", "sliding_window", "prefix_lm"), _PLACES),
    **dict.fromkeys(("document", "documents"), _PLACES),
    **dict.fromkeys(("neighborhood", "neighborhood_tiled", "neighborhood_morton"), _PLACES),
    "padding": frozenset({"b", "kv_idx"}),
    "alibi": _PLACES | {"h"},
    **dict.fromkeys(("and", "or", "not", "offset", "chain"), frozenset[str]()),  # their parts do
}


def indices_read(mod: Spec) -> frozenset[str]:
    """Return which of ``INDICES`` a mask or score mod reads, by the names of its parts.

    All of them where a name says nothing.
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


# ------------------------------------------------------------------ making runs


def replace_where(old: torch.Tensor, new: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Return ``new`` where ``where``, else ``old``: bit for bit, in fp8 too, which has no where.

    Args:
        old: Any dtype.
        new: Same shape and dtype.
        where: bool, broadcasts to that shape.
    """
    bits = _SAME_SIZE[old.element_size()]
    return torch.where(where, new.view(bits), old.view(bits)).view(old.dtype)


def change_tensors(
    inputs: Inputs, change: Callable[[torch.Tensor], torch.Tensor], *names: str
) -> dict[str, Any]:
    """Return the tensors of ``names`` that ``inputs`` has, changed: for ``Inputs.replace``."""
    tensors = inputs.tensors()
    return {name: change(tensors[name]) for name in names if name in tensors}


def describe_turn(inputs: Sequence[Inputs], run: int) -> str:
    """Return which call of a sequence a run is and what came before it, in a few words."""
    own, before = inputs[run].problem, inputs[run - 1].problem
    what = f"a {'longer' if before.kv > own.kv else 'shorter'} one ({before.shape})"
    if before.shape == own.shape:
        what = "other numbers of the same shapes"
        what += f" under {before.mask}" if before.mask != own.mask else ""
    return f"call {run + 1}, after {what}"


# ------------------------------------------------------------------ comparing what they give


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Elements that are not what they must be."""

    tensor: TensorName
    # The worst element, or of bits the first, in the axes of ``judgement.AXES``.
    place: tuple[int, ...]
    value: float
    expected: float
    allowed: float = 0.0  # how far the two may be apart; 0 where bits are compared
    count: int
    compared: int
    what: str = ""  # of which run, and what came before it; empty where that is plain

    @property
    def message(self) -> str:
        """The finding in one line."""
        place = ", ".join(map(str, self.place))
        # Nine digits tell any two fp32 numbers apart.
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
    """Return the elements of which any bit differs, NaNs and the signs of zeros included.

    Args:
        expected: What it must be, same shape and dtype.
    """
    bits = _SAME_SIZE[value.element_size()]
    different = value.contiguous().view(bits) != expected.contiguous().view(bits)
    return _first(tensor, value, expected, different)


def compare_values(
    tensor: TensorName,
    value: torch.Tensor,
    expected: torch.Tensor | float,
    where: torch.Tensor | None = None,
) -> Finding | None:
    """Return the elements that are another number, or NaN; the sign of a zero is left open.

    0 + (−0) is +0: a sum that starts at 0 cannot return the −0 that it was given.

    Args:
        expected: What it must be: one number for all, or same shape.
        where: bool, same shape: the elements to compare; None compares all.
    """
    if not isinstance(expected, torch.Tensor):
        expected = torch.full_like(value, expected)
    if where is None:
        return _first(tensor, value, expected, value != expected)
    finding = _first(tensor, value, expected, (value != expected) & where)
    return finding and replace(finding, compared=int(where.sum()))


def compare_within(
    tensor: TensorName, value: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor
) -> Finding | None:
    """Return the elements that are further apart than ``allowed``, led by the worst of them.

    Args:
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


def compare_outputs(
    value: Outputs, expected: Outputs, errors: Errors, *, signed_zeros: bool = True
) -> Finding | None:
    """Return the first tensor that is not as expected; LSE and gradients where both have them.

    Args:
        expected: In the same axes.
        errors: How far each of the runs that the two are made of may be from the exact result, in
            these axes: together they may be apart by the sum. None: every bit must agree.
        signed_zeros: Compare the sign of a zero as a bit like any.
    """
    tensors, wanted = value.tensors(), expected.tensors()
    for name, tensor in tensors.items():
        if name not in wanted:
            continue
        allowed = None
        if errors is not None:
            terms = [each.tensors().get(name) for each in errors]
            if any(term is None for term in terms):  # a gradient that nobody wants has no bound
                continue
            allowed = torch.stack([term for term in terms if term is not None]).sum(0)
        should = wanted[name]
        if not signed_zeros:
            should = replace_where(should, tensor, (tensor == 0) & (should == 0))
        if allowed is None:
            finding = compare_bits(name, tensor, should)
        else:
            finding = compare_within(name, tensor, should, allowed)
        if finding:
            return finding
    return None


def map_outputs(
    outputs: Outputs,
    change: Callable[[torch.Tensor], torch.Tensor],
    gradients: Callable[[TensorName, torch.Tensor], torch.Tensor] | None = None,
) -> Outputs:
    """Return ``outputs`` with out and LSE changed alike: indexed or permuted in common axes.

    Gradients are left out, unless ``gradients`` says for each what becomes of it.
    """
    old = outputs.gradients()
    new = {name: change(one) for name, one in outputs.tensors().items() if name not in old}
    if gradients is not None:
        new |= {name: gradients(name, one) for name, one in old.items()}
    return Outputs(**new)
