"""Explanation of a kernel's error by the results of known faults, and their ranking.

Nothing here decides whether a kernel is right. Errors are measured in units of what rounding
allows; a prediction explains a tensor by the share of the squared error that is gone once it is
taken for the exact result, and all of it where what remains is within what rounding allows.
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

_STEPS = 6  # of Gauss and Newton, for a number that is fitted
_NUDGE = 2.0**-10  # of that number, for its derivative
_WILD = 2.0**10  # what is not finite is at least as many times off as is allowed
_TIES = 1 / 64  # of all numbers, so many that a rounding may have the other way
_MOSTLY = 0.75  # of the squared error, and of what is beyond its bound, that it explains then
_ROUNDING = 0.25  # root mean square of what remains ÷ allowed, that rounding leaves, and no less


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FaultPrediction:
    """Results of a call with one fault."""

    name: str  # of the fault
    tensors: Tensors  # out, LSE, gradients: those that it says something of
    parameters: Mapping[str, int | float | str] = field(default_factory=dict)  # its form
    order: int = 0  # of those that explain as much the smallest is named first
    # (size of the fault) → the tensors; None of what has no size.
    family: Callable[[float], Tensors] | None = None
    start: float = 0.0  # the size from which it is fitted
    parameter: str = ""  # the size's name
    # Rows, as LSE has them, of which it predicts nothing: what is there may be anything, and most
    # of it wrong.
    free: Tensor | None = None
    # Whether it is a rounding, which falls the other way where a sum in fp32 is close to a tie.
    rounds: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultExplanation:
    """Share of a kernel's error that one fault explains."""

    name: str  # of the fault
    share: float  # of the squared error, 0–1; of several wrong tensors the smallest
    all: bool  # whether what remains is within what rounding allows, in every tensor
    left: float  # root mean square of what remains ÷ what is allowed, of the worst tensor
    order: int = 0  # see FaultPrediction
    # Its form, and the number that was fitted.
    parameters: Mapping[str, int | float | str] = field(default_factory=dict)
    loose: bool = False  # whether it leaves rows free, of which it predicts nothing


class ObservedError:
    """A kernel's results beside the exact ones, tensor by tensor.

    Args:
        got: What the kernel gave.
        exact: The exact result, float64.
        allowed: What rounding may do to each element; infinite where nothing is known.
        spacing: Distance from 1 to the next number of each tensor's format; 0 by default.
    """

    def __init__(
        self,
        got: Tensors,
        exact: Tensors,
        allowed: Tensors,
        spacing: Mapping[TensorName, float] | None = None,
    ) -> None:
        self.got = got  # what the kernel gave
        self.allowed = allowed
        apart = spacing or {}
        self._errors = {
            name: _TensorError(
                tensor.double(), exact[name].double(), allowed[name], apart.get(name, 0.0)
            )
            for name, tensor in got.items()
            if name in exact and name in allowed
        }
        # A wrong forward makes a right backward look wrong: only the forward is explained then.
        beyond = [name for name, error in self._errors.items() if error.beyond]
        forward = [name for name in beyond if name not in GRADIENTS]
        differ = [name for name, error in self._errors.items() if error.total > 0]
        # Tensors that are beyond what is allowed. Of the forward where any is: a backward takes
        # what it gave. All of it that differs where nothing is beyond.
        self.wrong: tuple[TensorName, ...] = tuple(forward or beyond or differ)
        self.proven = bool(beyond)  # whether anything is beyond what is allowed

    @property
    def forward(self) -> bool:
        """Return whether out or LSE is wrong."""
        return any(name not in GRADIENTS for name in self.wrong)

    def beyond(self, name: TensorName) -> Tensor:
        """Return which numbers of a tensor are beyond what is allowed, bool."""
        return self._errors[name].error > 1

    def explained(self, prediction: FaultPrediction) -> FaultExplanation | None:
        """Explain the error by ``prediction``; None where it says what is exact, or is refuted.

        A fault with a size is fitted first, by Gauss and Newton's steps.
        """
        errors, free = self._errors, prediction.free
        tensors, parameters = prediction.tensors, dict(prediction.parameters)
        if prediction.family is not None:
            size = self._fitted_size(prediction.family, prediction.start)
            tensors = prediction.family(size)
            parameters[prediction.parameter] = size
        if any(name not in tensors for name in self.wrong):
            return None
        if free is not None and not self._mostly_wrong(free):
            return None
        rests = [errors[name].rest(tensors[name], free) for name in self.wrong]
        # A fault has to explain every wrong tensor: the worst one counts. Of what differs and is
        # within its bound most is rounding, which no fault explains: there the best one does.
        each = [rest.share for rest in rests]
        share = min(each) if self.proven or min(each) < -_ROUNDING else max(each)
        if not share > 0.0:
            return None
        # What rounds more, as it is larger, may be off by more.
        room = max(1.0, *(errors[name].growth(tensors[name]) for name in self.wrong))
        right = [name for name in tensors if name in errors and name not in self.wrong]
        if self.forward:
            right = [name for name in right if name not in GRADIENTS]
        unexplained = [errors[name].rest(tensors[name], free) for name in right]
        ties = prediction.rounds and share >= _MOSTLY
        if self.proven and any(not rest.within(room, ties=ties) for rest in unexplained):
            return None
        whole = self.proven and all(rest.within(room, ties=ties) for rest in rests)
        # To leave rows free explains nothing of them: all others have to be right.
        if free is not None and not whole:
            return None
        return FaultExplanation(
            name=prediction.name,
            share=share,
            all=whole,
            left=max(rest.left for rest in rests),
            order=prediction.order,
            parameters=parameters,
            loose=free is not None,
        )

    def agrees(self, prediction: FaultPrediction) -> bool:
        """Return whether all that a kernel gave, right or wrong, is what ``prediction`` says."""
        if self.wrong and self.proven:
            explanation = self.explained(prediction)
            return explanation is not None and explanation.all
        if prediction.family is not None:  # of no size at all it is right
            return True
        both = [name for name in prediction.tensors if name in self._errors]
        return all(
            self._errors[n].rest(prediction.tensors[n], prediction.free).within(1.0) for n in both
        )

    def _mostly_wrong(self, rows: Tensor) -> bool:
        """Return whether more than half of ``rows`` are beyond what is allowed, in any tensor."""
        # Else a prediction could free the rows that it gets wrong.
        wrong = torch.zeros_like(rows)
        for name in ("out", "lse"):
            if name in self._errors:
                beyond = self._errors[name].error > 1
                wrong |= beyond if beyond.dim() == rows.dim() else beyond.any(-1)
        return bool(wrong[rows].double().mean() > 0.5)

    def _fitted_size(self, family: Callable[[float], Tensors], start: float) -> float:
        size = start
        for _ in range(_STEPS):
            nudge = _NUDGE * max(abs(size), _NUDGE)
            here, there = family(size), family(size + nudge)
            up = down = 0.0
            for name in self.wrong:
                if name in here:
                    above, below = self._errors[name].step(here[name], there[name], nudge)
                    up, down = up + above, down + below
            # The size moves nothing, or everything is off: the start is as good as any.
            if not 0.0 < down < float("inf") or up != up:  # noqa: PLR0124  # NaN
                return size
            size += up / down
            if abs(up / down) < _NUDGE * _NUDGE * abs(size):
                break
        return size


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rest:
    """One tensor's error that a prediction leaves unexplained."""

    of: _TensorError
    share: float
    left: float
    units: Tensor
    distance: Tensor
    allowed: Tensor

    def within(self, room: float, *, ties: bool = False) -> bool:
        """Return whether it is rounding, of numbers ``room`` times as large as the exact ones.

        With ``ties`` but for a few, of those that were beyond their bound.
        """
        most = self.allowed.clamp(min=room * self.of.most)
        close = (self.units <= 1) | (self.distance <= most) | ~self.of.counts
        if not ties:
            return bool(close.all())
        beyond = int((self.of.error > 1).sum())
        spare = min(_TIES * close.numel(), (1.0 - _MOSTLY) * beyond)
        return int((~close).sum()) <= spare


class _TensorError:
    """One tensor: its error in units of what is allowed."""

    def __init__(self, got: Tensor, exact: Tensor, allowed: Tensor, spacing: float) -> None:
        self.spacing = spacing
        self.got, self.usual = got, _largest(exact)
        self._finite = bool(got.isfinite().all())
        some = allowed[(allowed > 0) & allowed.isfinite()]
        # Where nothing at all is allowed, as little as anywhere.
        least = some.amin() if some.numel() else allowed.new_ones(())
        self.unit = torch.where(allowed > 0, allowed, least)
        # A row that sees one key is allowed next to nothing; with one too many, as much as any.
        self.most = float(some.amax()) if some.numel() else 1.0
        self.nothing = allowed <= 0
        self.counts = allowed.isfinite()
        self._count = max(1, int(self.counts.sum()))
        # Errors in units of what rounding allows: elements of any size count alike.
        distance = self._distance(exact)
        units = self._units(distance, self._allowed(exact))
        finite = units[units.isfinite()]
        # What is not finite counts as much as the largest that is.
        self.cap = max(_WILD, float(finite.amax())) if finite.numel() else _WILD
        self.error = units.clamp(max=self.cap)
        self.total = float(self.error.square().sum())
        off = torch.where(self.counts, distance, 0.0)
        self.beyond = bool((shares(off, allowed) > 1).any())

    def _distance(self, expected: Tensor) -> Tensor:
        """|got − expected|, 0 where both are NaN or the same infinity."""
        distance = (self.got - expected).abs()
        if self._finite:
            return distance
        same = (self.got == expected) | (self.got.isnan() & expected.isnan())
        return torch.where(same, 0.0, distance)

    def _units(self, distance: Tensor, allowed: Tensor) -> Tensor:
        """``distance`` in units of what is allowed; 0 where nothing counts."""
        # Elsewhere a unit that grows with the prediction would make any large one look close.
        off = distance / torch.where(self.nothing, allowed, self.unit)
        return torch.where(self.counts, off.nan_to_num(nan=torch.inf, posinf=torch.inf), 0.0)

    def _allowed(self, expected: Tensor) -> Tensor:
        """Of another result at least what its own rounding to the format takes."""
        own = expected.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs() * self.spacing
        return torch.maximum(self.unit, own)

    def growth(self, expected: Tensor) -> float:
        """Ratio of the largest predicted number to the largest exact one."""
        most, usual = _largest(expected), self.usual
        return most / usual if most >= 0 and usual > 0 else 1.0

    def rest(self, expected: Tensor, free: Tensor | None) -> _Rest:
        """The error that remains with ``expected`` for the exact result."""
        distance, allowed = self._distance(expected), self._allowed(expected)
        units = self._units(distance, allowed)
        if free is not None:
            units = torch.where(free[..., None] if units.dim() > free.dim() else free, 0.0, units)
        left = float(torch.where(units.isinf(), self.cap, units).square().sum())
        return _Rest(
            of=self,
            share=1.0 - left / self.total if self.total else 0.0,
            left=(left / self._count) ** 0.5,
            units=units,
            distance=distance,
            allowed=allowed,
        )

    def step(self, here: Tensor, there: Tensor, nudge: float) -> tuple[float, float]:
        """(slope · what remains, slope²) for a step of Gauss and Newton."""
        slope = (there - here) / nudge / self.unit
        rest = (self.got - here) / self.unit
        both = slope.isfinite() & rest.isfinite() & self.counts
        slope, rest = (torch.where(both, x, 0.0) for x in (slope, rest))
        return float((slope * rest).sum()), float(slope.square().sum())


def _largest(tensor: Tensor) -> float:
    """Return the largest size of a finite number in ``tensor``; −1 where there is none."""
    sizes = tensor.abs()
    return float(torch.where(sizes.isfinite(), sizes, -1.0).amax()) if sizes.numel() else -1.0


def rank_explanations(
    error: ObservedError, predictions: Iterable[FaultPrediction]
) -> list[FaultExplanation]:
    """Rank the predictions that explain anything, each name in its best form, the best first.

    First what explains all; among those the plainest of what leaves about as little as the least
    does, which rounding decides and not the fault. Else by the share that is explained.
    """
    best: dict[str, FaultExplanation] = {}
    for prediction in predictions:
        one = error.explained(prediction)
        if one is not None and (one.name not in best or _fit(one) < _fit(best[one.name])):
            best[one.name] = one
    return _in_order(best.values())


def _fit(one: FaultExplanation) -> tuple[bool, bool, float, int]:
    left = one.left if one.all else -one.share
    # Of two forms that are alike the one that says which it is tells its reader more.
    return not one.all, one.loose, left, -len(one.parameters)


def combine_rankings(
    first: Sequence[FaultExplanation], *more: Sequence[FaultExplanation]
) -> list[FaultExplanation]:
    """Combine the rankings of several problems of one kernel into one.

    Each name counts by the problem that it explains least; by the one that it explains best, where
    it explains all of each. A name that says nothing of one of them is left out, unless all are.
    """
    each = [{one.name: one for one in ranking} for ranking in (first, *more)]
    everywhere = [name for name in each[0] if all(name in one for one in each)]
    combined = []
    for name in everywhere:
        worst = min((one[name] for one in each), key=lambda e: (e.all, e.share))
        if worst.all:  # of an error little beyond its bound rounding is a large share
            worst = max((one[name] for one in each), key=lambda e: e.share)
        parameters, left = each[0][name].parameters, max(one[name].left for one in each)
        combined.append(replace(worst, parameters=parameters, left=left))
    return _in_order(combined) or list(first)


def count_equals(ranking: Sequence[FaultExplanation]) -> int:
    """Count those of a ranking, from the first on, that explain all and leave only rounding.

    0 where none explains all. What leaves rows free equals nothing that predicts them.
    """
    least = _least(ranking)
    loose = bool(ranking) and ranking[0].loose
    return sum(one.all and one.loose == loose and _as_close(one, least) for one in ranking)


def _in_order(explanations: Iterable[FaultExplanation]) -> list[FaultExplanation]:
    some = list(explanations)
    least = _least(some)

    def rank(one: FaultExplanation) -> tuple[bool, bool, bool, int, float]:
        if one.all:
            close = _as_close(one, least)
            # What says nothing of some rows comes after all that predict them.
            return False, one.loose, not close, one.order if close else 0, one.left
        return True, False, False, 0, -one.share

    return sorted(some, key=rank)


def _least(some: Sequence[FaultExplanation]) -> float:
    """Return what the best leaves unexplained."""
    whole = [one for one in some if one.all]
    strict = [one for one in whole if not one.loose]
    return min((one.left for one in strict or whole), default=0.0)


def _as_close(one: FaultExplanation, least: float) -> bool:
    return one.left <= max(2 * least, _ROUNDING)
