"""Confirmation of a fault model on independent problems.

Many models may predict the same numbers for one failure. A model is the cause only if it also
predicts the kernel's results on problems with other numbers, lengths, heads, scales and masks,
where similar models differ from it, and the kernel is wrong on at least one of these.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import torch

from attncheck.core.errors import ProblemError
from attncheck.diagnose.explanations import (
    Forms,
    Response,
    form_tiles,
    forms_of,
    judged_predictions,
    passing_response,
)
from attncheck.fault_models import FAULT_MODELS
from attncheck.inputs.problem import USUAL_SCALE, Case
from attncheck.judge.fault_explanation import words_of
from attncheck.verify.evidence_builder import EvidenceBuilder

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from attncheck.diagnose.failing_kernel import FailingKernel
    from attncheck.inputs.problem import Problem
    from attncheck.judge.fault_explanation import FaultExplanation, FaultPrediction

_SECONDS = 1.0  # time after which no further case is tried
_FEWEST = 7  # responses that are awaited regardless of the time limit
_ENOUGH = 3  # responses needed to confirm anything
_SAME = 2.0**-30  # relative distance of equal results computed in different ways in float64


def independent_cases(
    case: Case, takes: Callable[[Problem], bool] = lambda _problem: True
) -> Iterator[Case]:
    """Yield cases like ``case`` with other numbers, lengths, heads, scale and head dim.

    They have no feature, such as a mask, that the problem lacks: a second fault in that feature
    would refute the cause of the failure.

    Args:
        case: The Case that failed.
        takes: Whether the kernel supports a Problem; else the nearest supported one is used.
    """
    problem = case.problem
    seed, dim = problem.seed + 1, 64 if problem.head_dim > 64 else 128
    group = {"heads": 4, "kv_heads": 2} if problem.heads < 4 else {}
    # The usual scale depends on the head dim, and many kernels support no other.
    scale = (
        {"scale": USUAL_SCALE} if problem.scale == problem.replace(scale=USUAL_SCALE).scale else {}
    )
    changes: list[dict[str, object]] = [
        {"seed": seed},
        # One distribution may hide a fault: far below 0 any rescaling gives 0, whatever the fault.
        {
            "query": 150,
            "kv": 150,
            "seed": seed,
            "scale": problem.scale * 0.75,
            "distribution": "normal",
        },
        # The same difference of rows and keys, on which empty rows depend.
        {"query": problem.query + 37, "kv": problem.kv + 37, "seed": seed + 5},
        {"batch": 2, "query": 40, "kv": 124, "seed": seed + 1, **group},
        {"batch": 2, "heads": 2, "kv_heads": 2, "query": 124, "kv": 124, "seed": seed + 1},
        {"query": 40, "kv": 256, "seed": seed + 2},
        # So few keys that they fill less than half of a large tile.
        {"head_dim": dim, "value_dim": dim, "query": 20, "kv": 20, "seed": seed + 3, **scale},
        # No smaller scale: with it some weights of scores far below 0 lose bits, but not all do.
        {"scale": problem.scale * 1.25, "seed": seed + 4},
        # The same lengths, since a kernel may support no others.
        {"batch": 2, "heads": 4, "kv_heads": 4, "seed": seed + 6},
        {"distribution": "normal", "seed": seed + 7},
    ]
    problems = {problem}
    for change in changes:
        try:
            other = problem.replace(**change)
        except ProblemError:  # A mask may need this many keys.
            continue
        nearest = nearest_taken(other, takes)
        if nearest is None or nearest in problems:
            continue
        problems.add(nearest)
        yield Case(problem=nearest, question=case.question, parameters=case.parameters)
        if case.question != "compare" and change["seed"] == seed:
            yield Case(problem=nearest)


def nearest_taken(problem: Problem, takes: Callable[[Problem], bool]) -> Problem | None:
    """Return ``problem`` if the kernel takes it, else the nearest one that it takes, or None."""
    if takes(problem):
        return problem
    from attncheck.cases.strategies.problems import nearest_supported  # loads Hypothesis

    return nearest_supported(problem, takes, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """The models that independent cases left unrefuted, and whether any case confirms them."""

    unrefuted: tuple[str, ...]
    # The largest share of the error in any case that each model explains.
    shares: dict[str, float]
    confirmed: bool
    problems: int
    # Each model's predictions that fit, and the kernel's responses, by number of the response.
    predictions: dict[str, dict[int, list[FaultPrediction]]]
    responses: dict[int, Response]
    sizes: dict[str, list[float]]  # each model's fitted sizes, one or more for a wrong response
    # The words of each model's forms that are left; None where no case tells them apart.
    forms: dict[str, Collection[object] | None]

    def are_alike(self, names: Sequence[str]) -> bool:
        """Return whether these models predict the very same numbers in all cases.

        If so, they describe one fault in several words.
        """
        first, *others = (self.predictions[name] for name in names)
        return all(_are_alike(first, other, self.responses) for other in others)

    def with_remaining_forms(self, one: FaultExplanation) -> FaultExplanation:
        """Return an explanation with those of its forms that no case refuted; all if none is left.

        A single failure may not tell which form it is: with two key heads, which of two orders.
        """
        words = self.forms.get(one.name)
        forms = [one.parameters, *one.others]
        remaining = [form for form in forms if words is None or words_of(form) in words]
        if not remaining:
            return one
        return replace(one, parameters=remaining[0], others=tuple(remaining[1:]))

    def with_common_size(self, one: FaultExplanation) -> FaultExplanation:
        """Return an explanation with the fitted size that explains the most responses, if any do.

        A single failure may not tell the size: beyond some factor all weights are 0 and 1.
        """
        fits = [
            (self.responses[number].error, fitting)
            for number, each in self.predictions.get(one.name, {}).items()
            if (fitting := [p for p in each if p.family is not None])
            and self.responses[number].error.proven
        ]
        if one.size is None or not fits:
            return one

        def explained(size: float) -> int:
            return sum(any(error.agrees(p.at(size)) for p in each) for error, each in fits)

        best = max([one.size, *self.sizes[one.name]], key=explained)
        shown = fits[0][1][0]
        parameters = {**one.parameters, shown.parameter: shown.shown(best)}
        return replace(one, parameters=parameters, size=best)


def confirm(
    models: Collection[str],
    kernel: FailingKernel,
    *,
    seconds: float = _SECONDS,
    varies: bool = False,
) -> Confirmation:
    """Return those of ``models`` that predict the kernel's results on independent cases.

    Nothing is confirmed if the kernel is right on all cases, all NaN, or supports too few.

    Args:
        models: Names of models that explain the failure.
        seconds: Time after which no further case is tried, except for the first few.
        varies: Whether the failure changes with the contents of free memory: only then may
            predictions leave rows free.
    """
    # Each model's forms that fit so far, each with the tiles that fit at each head_dim: kernels
    # choose tiles by the head_dim.
    rest: dict[str, dict[object, dict[int, set[object]]] | None] = dict.fromkeys(models)
    # Models with a fit without tiles or with a partial one: a tile of all keys fits any lost row.
    partial_fits: set[str] = set()
    shares = dict.fromkeys(models, 0.0)
    predictions: dict[str, dict[int, list[FaultPrediction]]] = {name: {} for name in models}
    responses: dict[int, Response] = {}
    sizes: dict[str, list[float]] = {name: [] for name in models}
    finite_failures = number = 0
    end = time.monotonic() + seconds
    for other in independent_cases(kernel.case, kernel.takes):
        if not rest or (number >= _FEWEST and time.monotonic() > end):
            break
        for response in kernel.ask(other):
            number += 1
            responses[number] = response
            for name, before in list(rest.items()):
                every = judged_predictions(response, FAULT_MODELS[name])
                if not response.error.proven and all(fits for _, fits in every):
                    continue  # The kernel is right, as the model says.
                fitting = [one for one, fits in every if fits and (varies or one.free is None)]
                now = forms_of(fitting, other.problem)
                if not response.error.proven:
                    # Fewer keys may not be split.
                    split = other.problem.kv >= kernel.case.problem.kv
                    _add_silent_forms(now, before, every, response, split=split)
                if fitting:
                    predictions[name][number] = fitting
                if response.error.proven:
                    each = [response.error.explained(one) for one in fitting]
                    sizes[name] += [one.size for one in each if one and one.size is not None]
                    shares[name] = max(shares[name], *(one.share for one in each if one), 0.0)
                rest[name] = _common(before, now, other.problem.head_dim)
                if now and response.error.proven and _has_partial_fit(now, response):
                    partial_fits.add(name)
            rest = {name: forms for name, forms in rest.items() if forms is None or forms}
            finite_failures += response.error.proven and _has_finite_error(response)
    some = tuple(n for n in rest if n in partial_fits or FAULT_MODELS[n].family != "tile")
    confirmed = bool(some and finite_failures and number >= _ENOUGH)
    return Confirmation(
        unrefuted=some or tuple(rest),
        shares=shares,
        confirmed=confirmed,
        problems=number,
        predictions=predictions,
        responses=responses,
        sizes=sizes,
        forms={name: forms and forms.keys() for name, forms in rest.items()},
    )


def contradicted_models(
    models: Collection[str], passed: Sequence[Case], response: Response, device: str
) -> set[str]:
    """Return those of ``models`` that predict a failure of a question that passed.

    A passing result is within its bound, so that a right prediction is within twice the bound.

    Args:
        models: Names of models that explain a failure.
        passed: Comparisons and probes that the same kernel passed.
        response: The failure.
        device: Device of the exact result.
    """
    own = response.call.problem
    # A model is refuted when none of the tiles with which it explains the failure remains.
    tiles = {name: form_tiles(response, FAULT_MODELS[name]) for name in models}
    fitting = {name: {tile for tile, fits in each.items() if fits} for name, each in tiles.items()}
    for case in passed:
        # Another mask or score mod takes another path: a kernel may lose a flag but read a tensor.
        alike = case.problem.mask.name in {own.mask.name, "full"}
        alike &= case.problem.score.name in {own.score.name, "none"}
        if alike and case.problem.dtype == own.dtype:
            evidence = EvidenceBuilder(case, device)
            evidence.establish(reference_errors=False)
            right = passing_response(evidence, response)
            # The keys that a loop visits may be wrong only where there is a mask.
            other = case.problem.mask.name != own.mask.name
            for name in models:
                if other and FAULT_MODELS[name].family in {"mask", "tile"}:
                    continue
                split = case.problem.kv >= own.kv  # as in a confirmation
                model = FAULT_MODELS[name]
                agreements = form_tiles(right, model, split=split) if fitting[name] else {}
                fitting[name] -= {tile for tile, agrees in agreements.items() if not agrees}
    return {name for name, each in tiles.items() if any(each.values()) and not fitting[name]}


def _common(
    before: dict[object, dict[int, set[object]]] | None, now: Forms, head_dim: int
) -> dict[object, dict[int, set[object]]]:
    """Return the forms and tiles that fit every case so far; neither changes from case to case."""
    both = {}
    for words, tiles in now.items():
        tiles_before = {} if before is None else before.get(words)
        if tiles_before is not None and (common := tiles & tiles_before.get(head_dim, tiles)):
            both[words] = {**tiles_before, head_dim: common}
    return both


def _add_silent_forms(
    forms: Forms,
    before: dict[object, dict[int, set[object]]] | None,
    every: Sequence[tuple[FaultPrediction, bool]],
    response: Response,
    *,
    split: bool,
) -> None:
    """Add the forms and tiles so far that predict nothing here, and so an exact result.

    A tile that holds all keys may lose none, and a constant may be what the call asks for.

    Args:
        split: Whether a kernel that splits the keys would do so here.
    """
    shown = (one for one, _ in every if split or "splits" not in one.parameters)
    predicted = forms_of(shown, response.call.problem)
    sizes = {size for _, size in response.call.any_tiles}
    for words, by_dim in (before or {}).items():
        tiles = set[object]().union(*by_dim.values())
        kinds: set[object] = ({None} & tiles) | (sizes if tiles - {None} else set())
        if silent := kinds - predicted.get(words, set()):
            forms[words] = forms.get(words, set()) | silent


def _are_alike(
    one: dict[int, list[FaultPrediction]],
    other: dict[int, list[FaultPrediction]],
    responses: dict[int, Response],
) -> bool:
    """Return whether some form of each model predicts the same outputs in every case."""
    both = [number for number in one if number in other]
    forms = [
        {words_of(each.parameters) for ones in predictions.values() for each in ones}
        for predictions in (one, other)
    ]

    def agree(number: int, words: object, its: object) -> bool:
        ones, others = (
            [
                x.tensors
                for x in predictions[number]
                if x.free is None and words_of(x.parameters) == its_words
            ]
            for predictions, its_words in ((one, words), (other, its))
        )
        allowed = responses[number].error.allowed
        return any(
            all(
                name in a and name in b and _is_equal(a[name], b[name], allowed[name])
                for name in responses[number].error.got
                if name in allowed
            )
            for a, b in product(ones, others)
        )

    return bool(both) and any(
        all(agree(number, words, its) for number in both) for words, its in product(*forms)
    )


def _is_equal(one: torch.Tensor, other: torch.Tensor, allowed: torch.Tensor) -> bool:
    """Return whether numbers differ by far less than their size or rounding allowance."""
    a, b = one.double(), other.double()
    unit = torch.maximum(b.abs(), torch.where(allowed.isfinite(), allowed, 0.0))
    close = (a == b) | ((a - b).abs() <= _SAME * unit) | (a.isnan() & b.isnan())
    return bool(close.all())


def _has_partial_fit(forms: Forms, response: Response) -> bool:
    """Return whether a form fits without tiles, or with a tile that holds only some of the keys."""
    seen = int(response.call.seen.any(dim=(0, 1, 2)).sum())
    tiles = {tile for fitting in forms.values() for tile in fitting}
    return any(not isinstance(tile, int) or tile < seen for tile in tiles)


def _has_finite_error(response: Response) -> bool:
    """Return whether any wrong number is finite: many faults give NaN everywhere.

    Where LSE alone is wrong, numbers of out count: they are right, which NaN everywhere is not.
    """
    error = response.error
    names = ("out",) if set(error.wrong) == {"lse"} else error.wrong
    return any(bool(error.got[name].isfinite().any()) for name in names)
