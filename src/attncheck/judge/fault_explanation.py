"""Explanation of a kernel's error by the results of known faults, and their ranking.

Nothing here decides whether a kernel is right. Errors are measured in units of the rounding
allowance. A prediction explains the share of a tensor's squared error that vanishes once the
prediction replaces the exact result; it explains all of it if the rest is within the allowance.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from attncheck.core.tensor_names import GRADIENTS
from attncheck.judge.allowance import shares

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from attncheck.core.tensor_names import TensorName

    Tensors = Mapping[TensorName, Tensor]

_STEPS = 6  # Gauss–Newton steps that fit the size of a fault.
_NUDGE = 2.0**-10  # Relative change of that size in the difference quotient for its derivative.
_NONFINITE = 2.0**10  # An error that is not finite counts as at least this many allowances.
_TIED = 1 / 64  # Largest share of a tensor's numbers that may round the other way at a tie.
_MOSTLY = 0.75  # A rounding fault must explain this share of squared error and of wrong numbers.
_ROUNDING = 0.25  # Unexplained error ÷ allowance (RMS) that rounding alone leaves anyway.


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FaultPrediction:
    """Results of a call with one fault."""

    name: str  # of the fault
    tensors: Tensors  # predicted out, LSE and gradients; only the tensors that it predicts
    parameters: Mapping[str, int | float | str] = field(default_factory=dict)  # the fault's form
    order: int = 0  # among faults that explain equally much, the lowest is named first
    # (size of the fault) → the tensors; None if the fault has no size.
    family: Callable[[float], Tensors] | None = None
    start: float = 0.0  # the size at which fitting starts
    parameter: str = ""  # name of the number that readers see, which ``shown`` makes of the size
    shown: Callable[[float], float] = float
    # Rows, in the axes of LSE, about which the fault predicts nothing: they may hold any numbers,
    # and most of them must be wrong.
    free: Tensor | None = None
    # What a tensor may be off by where a rounding that the fault makes may fall either way.
    ties: Tensors = field(default_factory=dict)
    # Whether it is a fault of rounding, which may fall the other way where a sum is near a tie.
    rounds: bool = False

    def at(self, size: float) -> FaultPrediction:
        """Return the prediction of a fault with a size at ``size`` alone."""
        assert self.family is not None, "asked of a fault without a size"
        parameters = {**self.parameters, self.parameter: self.shown(size)}
        return replace(self, tensors=self.family(size), parameters=parameters, family=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultExplanation:
    """Share of a kernel's error that one fault explains."""

    name: str  # of the fault
    share: float  # of the squared error, 0–1; the smallest over the wrong tensors
    all: bool  # whether the unexplained error is within the allowance in every tensor
    unexplained: float  # root mean square of unexplained error ÷ allowance, in the worst tensor
    order: int = 0  # see FaultPrediction
    # The fault's form, and its fitted size.
    parameters: Mapping[str, int | float | str] = field(default_factory=dict)
    size: float | None = None  # the fitted size itself
    loose: bool = False  # whether the prediction says nothing about some rows
    # Parameters of the fault's other forms that explain all.
    others: tuple[Mapping[str, int | float | str], ...] = ()


def words_of(parameters: Mapping[str, int | float | str]) -> tuple[tuple[str, str], ...]:
    """Return those parameters of a fault's form that are words: numbers depend on the call."""
    return tuple((k, v) for k, v in parameters.items() if isinstance(v, str))


class ObservedError:
    """A kernel's results and their errors, tensor by tensor.

    Args:
        got: The kernel's results.
        exact: The exact result, float64.
        allowed: Largest rounding error of each element; infinite where none is known.
        spacing: Distance from 1 to the next number of each tensor's format; 0 by default.
    """

    def __init__(
        self,
        got: Tensors,
        exact: Tensors,
        allowed: Tensors,
        spacing: Mapping[TensorName, float] | None = None,
    ) -> None:
        self.got = got
        self.allowed = allowed
        spacings = spacing or {}
        self._errors = {
            name: _TensorError(
                tensor.double(), exact[name].double(), allowed[name], spacings.get(name, 0.0)
            )
            for name, tensor in got.items()
            if name in exact and name in allowed
        }
        # A wrong forward makes a right backward look wrong, so only the forward is explained then.
        beyond = [name for name, error in self._errors.items() if error.beyond]
        forward = [name for name in beyond if name not in GRADIENTS]
        differ = [name for name, error in self._errors.items() if error.total > 0]
        # Tensors beyond their allowance: out and LSE if one of them is, else gradients. If no
        # tensor is beyond it, every tensor that differs from the exact one.
        self.wrong: tuple[TensorName, ...] = tuple(forward or beyond or differ)
        self.proven = bool(beyond)  # whether any tensor is beyond its allowance

    @property
    def forward(self) -> bool:
        """Return whether out or LSE is wrong."""
        return any(name not in GRADIENTS for name in self.wrong)

    def beyond(self, name: TensorName) -> Tensor:
        """Return a bool mask of the tensor's numbers that are beyond their allowance."""
        return self._errors[name].error > 1

    def explained(self, prediction: FaultPrediction) -> FaultExplanation | None:
        """Explain the error by ``prediction``; None if the prediction explains none or is refuted.

        The size of a fault that has one is fitted first, by Gauss–Newton steps.
        """
        size = None
        if prediction.family is not None:
            size = self._fit_size(prediction.family, prediction.start)
            prediction = prediction.at(size)
        errors, free, tensors = self._errors, prediction.free, prediction.tensors
        if any(name not in tensors for name in self.wrong):
            return None
        if free is not None and not self._mostly_wrong(free):
            return None
        rests = [errors[n].rest(tensors[n], free, prediction.ties.get(n)) for n in self.wrong]
        # A fault has to explain every wrong tensor, so the worst one counts. Differences within
        # the bound are mostly rounding, which no fault explains, so there the best one counts.
        each = [rest.share for rest in rests]
        share = min(each) if self.proven or min(each) < -_ROUNDING else max(each)
        if prediction.ties:
            # Ties may settle the last numbers. Where scores are large every weight may be near one,
            # and would explain any error.
            share = min(share, *(errors[n].rest(tensors[n], free).share for n in self.wrong))
        if not share > (_MOSTLY if prediction.ties else 0.0):
            return None
        # Larger predicted numbers have larger rounding errors.
        growth = max(1.0, *(errors[name].growth(tensors[name]) for name in self.wrong))
        right_names = [name for name in tensors if name in errors and name not in self.wrong]
        if self.forward:
            right_names = [name for name in right_names if name not in GRADIENTS]
        unexplained = [
            errors[n].rest(tensors[n], free, prediction.ties.get(n)) for n in right_names
        ]
        ties = prediction.rounds and share >= _MOSTLY
        if self.proven and any(not rest.within(growth, ties=ties) for rest in unexplained):
            return None
        explains_all = self.proven and all(rest.within(growth, ties=ties) for rest in rests)
        # Free rows stay unexplained, so the prediction must explain all others completely.
        if free is not None and not explains_all:
            return None
        return FaultExplanation(
            name=prediction.name,
            share=share,
            all=explains_all,
            unexplained=max(rest.unexplained for rest in rests),
            order=prediction.order,
            parameters=prediction.parameters,
            size=size,
            loose=free is not None,
        )

    def agrees(self, prediction: FaultPrediction) -> bool:
        """Return whether all of the kernel's results, right or wrong, match ``prediction``."""
        if self.wrong and self.proven:
            explanation = self.explained(prediction)
            return explanation is not None and explanation.all
        if prediction.family is not None:  # a fault of size 0 predicts the exact result
            return True
        rests = [
            self._errors[n].rest(x, prediction.free, prediction.ties.get(n))
            for n, x in prediction.tensors.items()
            if n in self._errors
        ]
        return all(rest.within(1.0) for rest in rests)

    def _mostly_wrong(self, rows: Tensor) -> bool:
        """Return whether more than half of ``rows`` are beyond their allowance in out or LSE."""
        # Otherwise a prediction could free just the rows that it gets wrong.
        wrong = torch.zeros_like(rows)
        for name in ("out", "lse"):
            if name in self._errors:
                beyond = self._errors[name].error > 1
                wrong |= beyond if beyond.dim() == rows.dim() else beyond.any(-1)
        return bool(wrong[rows].double().mean() > 0.5)

    def _fit_size(self, family: Callable[[float], Tensors], start: float) -> float:
        size = start
        for _ in range(_STEPS):
            nudge = _NUDGE * max(abs(size), _NUDGE)
            here, there = family(size), family(size + nudge)
            gradient = curvature = 0.0
            for name in self.wrong:
                if name in here:
                    above, below = self._errors[name].step(here[name], there[name], nudge)
                    gradient, curvature = gradient + above, curvature + below
            # The size has no effect, or the errors are not finite: keep the current size.
            if not 0.0 < curvature < float("inf") or gradient != gradient:  # noqa: PLR0124  # NaN
                return size
            size += gradient / curvature
            if abs(gradient / curvature) < _NUDGE * _NUDGE * abs(size):
                break
        return size


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rest:
    """One tensor's error that a prediction leaves unexplained."""

    of: _TensorError
    share: float
    unexplained: float
    units: Tensor
    distance: Tensor
    allowed: Tensor

    def within(self, growth: float, *, ties: bool = False) -> bool:
        """Return whether rounding numbers ``growth`` times as large as the exact ones explains it.

        With ``ties`` a few of the numbers that were beyond their bound may still be.
        """
        most = self.allowed.clamp(min=growth * self.of.most)
        close = (self.units <= 1) | (self.distance <= most) | ~self.of.counts
        if not ties:
            return bool(close.all())
        beyond = int((self.of.error > 1).sum())
        spare = min(_TIED * close.numel(), (1.0 - _MOSTLY) * beyond)
        return int((~close).sum()) <= spare


class _TensorError:
    """The error of one tensor in units of its allowance."""

    def __init__(self, got: Tensor, exact: Tensor, allowed: Tensor, spacing: float) -> None:
        self.spacing = spacing
        self.got, self.largest_exact = got, _largest(exact)
        self._finite = bool(got.isfinite().all())
        some = allowed[(allowed > 0) & allowed.isfinite()]
        # An element with an allowance of 0 gets the tensor's smallest allowance as its unit.
        least = some.amin() if some.numel() else allowed.new_ones(())
        self.unit = torch.where(allowed > 0, allowed, least)
        # A row that sees one key has a tiny allowance; with one key too many it rounds like others.
        self.most = float(some.amax()) if some.numel() else 1.0
        self.without_allowance = allowed <= 0
        self.counts = allowed.isfinite()
        self._count = max(1, int(self.counts.sum()))
        # Errors are in units of the allowance, so that elements of any size count equally.
        distance = self._distance(exact)
        units = self._units(distance, self._allowed(exact))
        finite = units[units.isfinite()]
        # An error that is not finite counts as much as the largest finite one.
        self.cap = max(_NONFINITE, float(finite.amax())) if finite.numel() else _NONFINITE
        self.error = units.clamp(max=self.cap)
        self.total = float(self.error.square().sum())
        off = torch.where(self.counts, distance, 0.0)
        self.beyond = bool((shares(off, allowed) > 1).any())

    def _distance(self, expected: Tensor) -> Tensor:
        """Return |got − expected|, 0 where both are NaN or the same infinity."""
        distance = (self.got - expected).abs()
        if self._finite:
            return distance
        same = (self.got == expected) | (self.got.isnan() & expected.isnan())
        return torch.where(same, 0.0, distance)

    def _units(self, distance: Tensor, allowed: Tensor) -> Tensor:
        """Return ``distance`` in units of the allowance; 0 in elements without a finite one."""
        # Only an allowance of 0 may grow with the prediction: else any large one would look close.
        off = distance / torch.where(self.without_allowance, allowed, self.unit)
        return torch.where(self.counts, off.nan_to_num(nan=torch.inf, posinf=torch.inf), 0.0)

    def _allowed(self, expected: Tensor) -> Tensor:
        """Return the allowance, but at least the rounding error of ``expected`` itself."""
        own = expected.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs() * self.spacing
        return torch.maximum(self.unit, own)

    def growth(self, expected: Tensor) -> float:
        """Return the ratio of the largest predicted number to the largest exact one."""
        largest, largest_exact = _largest(expected), self.largest_exact
        return largest / largest_exact if largest >= 0 and largest_exact > 0 else 1.0

    def rest(
        self, expected: Tensor, free: Tensor | None = None, ties: Tensor | None = None
    ) -> _Rest:
        """Return the error that remains if ``expected`` is taken for the exact result.

        For ``free`` and ``ties`` see ``FaultPrediction``.
        """
        distance, allowed = self._distance(expected), self._allowed(expected)
        if ties is not None:
            distance = (distance - ties).clamp(min=0.0)
        units = self._units(distance, allowed)
        if free is not None:
            units = torch.where(free[..., None] if units.dim() > free.dim() else free, 0.0, units)
        left = float(torch.where(units.isinf(), self.cap, units).square().sum())
        return _Rest(
            of=self,
            share=1.0 - left / self.total if self.total else 0.0,
            unexplained=(left / self._count) ** 0.5,
            units=units,
            distance=distance,
            allowed=allowed,
        )

    def step(self, here: Tensor, there: Tensor, nudge: float) -> tuple[float, float]:
        """Return the sums (slope · remaining error, slope²) of a Gauss–Newton step."""
        slope = (there - here) / nudge / self.unit
        rest = (self.got - here) / self.unit
        both = slope.isfinite() & rest.isfinite() & self.counts
        slope, rest = (torch.where(both, x, 0.0) for x in (slope, rest))
        return float((slope * rest).sum()), float(slope.square().sum())


def _largest(tensor: Tensor) -> float:
    """Return the largest magnitude of a finite number in ``tensor``; −1 if none is finite."""
    sizes = tensor.abs()
    return float(torch.where(sizes.isfinite(), sizes, -1.0).amax()) if sizes.numel() else -1.0


def rank_explanations(
    error: ObservedError, predictions: Iterable[FaultPrediction]
) -> list[FaultExplanation]:
    """Rank the predictions that explain anything, each name in its best form, the best first.

    Those that explain all come first, ones with free rows last among them. If they leave about as
    little unexplained as the best one, they are ranked by ``order``. The others follow by share.
    """
    forms: dict[str, list[FaultExplanation]] = {}
    for prediction in predictions:
        if (one := error.explained(prediction)) is not None:
            forms.setdefault(one.name, []).append(one)
    best = []
    for each in forms.values():
        first, *rest = sorted(each, key=_form_key)
        # A prediction with free rows fits whatever they hold.
        others = (one.parameters for one in rest if one.all and one.loose == first.loose)
        best.append(replace(first, others=tuple(others)))
    return _sort(best)


def _form_key(one: FaultExplanation) -> tuple[bool, bool, float, int]:
    left = one.unexplained if one.all else -one.share
    # Between equally good forms, one with parameters tells the reader more.
    return not one.all, one.loose, left, -len(one.parameters)


def combine_rankings(
    first: Sequence[FaultExplanation], *more: Sequence[FaultExplanation]
) -> list[FaultExplanation]:
    """Combine the rankings of several problems of one kernel into one.

    Each name is ranked by the problem that it explains worst, or, if it explains all of every
    problem, by the one that it explains best. A name missing from one of the rankings is left out;
    if that leaves none, the first ranking is returned.
    """
    each = [{one.name: one for one in ranking} for ranking in (first, *more)]
    everywhere = [name for name in each[0] if all(name in one for one in each)]
    combined = []
    for name in everywhere:
        worst = min((one[name] for one in each), key=lambda e: (e.all, e.share))
        if worst.all:  # rounding is a large share of an error that is barely beyond its bound
            worst = max((one[name] for one in each), key=lambda e: e.share)
        own, unexplained = each[0][name], max(one[name].unexplained for one in each)
        words = [{*map(words_of, (one[name].parameters, *one[name].others))} for one in each]
        others = tuple(form for form in own.others if all(words_of(form) in w for w in words))
        combined.append(
            replace(worst, parameters=own.parameters, others=others, unexplained=unexplained)
        )
    return _sort(combined) or list(first)


def count_ties(ranking: Sequence[FaultExplanation]) -> int:
    """Count the explanations of a ranking that explain all as closely as the best one does.

    0 if none explains all. Explanations with free rows never count as equal to those without.
    """
    least = _least_unexplained(ranking)
    loose = bool(ranking) and ranking[0].loose
    return sum(one.all and one.loose == loose and _is_as_close(one, least) for one in ranking)


def _sort(explanations: Iterable[FaultExplanation]) -> list[FaultExplanation]:
    some = list(explanations)
    least = _least_unexplained(some)

    def rank(one: FaultExplanation) -> tuple[bool, bool, bool, int, float]:
        if one.all:
            close = _is_as_close(one, least)
            # Explanations with free rows come after those that predict every row.
            return False, one.loose, not close, one.order if close else 0, one.unexplained
        return True, False, False, 0, -one.share

    return sorted(some, key=rank)


def _least_unexplained(some: Sequence[FaultExplanation]) -> float:
    """Return the smallest unexplained error among the explanations that explain all."""
    whole = [one for one in some if one.all]
    strict = [one for one in whole if not one.loose]
    return min((one.unexplained for one in strict or whole), default=0.0)


def _is_as_close(one: FaultExplanation, least: float) -> bool:
    return one.unexplained <= max(2 * least, _ROUNDING)
