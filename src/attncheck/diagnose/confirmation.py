"""Confirmation of a fault model on independent problems.

A model that explains one failure may be one of many that predict the same there. It is the cause
only if it also predicts what the kernel gives on problems of other numbers, lengths, heads, scales
and masks, where it and its neighbours differ, and is wrong on one of them at least.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import torch

from attncheck.core.errors import ProblemError
from attncheck.diagnose.explanations import (
    Forms,
    Response,
    fitting_predictions,
    form_tiles,
    forms_of,
    within_twice,
    words_of,
)
from attncheck.fault_models import FAULT_MODELS
from attncheck.inputs.problem import USUAL_SCALE, Case
from attncheck.verify.evidence_builder import EvidenceBuilder

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from attncheck.inputs.problem import Problem
    from attncheck.judge.fault_explanation import FaultPrediction

    Ask = Callable[[Case], Sequence[Response]]
    """What the kernel gives in each run of a Case; nothing where it does not take it."""

_FEWEST = 7  # cases that are asked however long they take
_ENOUGH = 3  # answers, of fewer of which nothing is confirmed
_SAME = 2.0**-30  # of float64 numbers that are computed otherwise, and far below any rounding


def independent_cases(
    case: Case, takes: Callable[[Problem], bool] = lambda _problem: True
) -> Iterator[Case]:
    """Yield cases like ``case`` of other numbers, lengths, heads, scale and head dim.

    They have what the problem has and no more: of a second fault in what it has not, a mask say,
    its own cause would be refuted there.

    Args:
        case: That failed.
        takes: Whether the kernel takes a Problem; the nearest that it does is asked in its place.
    """
    problem = case.problem
    seed, dim = problem.seed + 1, 64 if problem.head_dim > 64 else 128
    group = {"heads": 4, "kv_heads": 2} if problem.heads < 4 else {}
    # The usual scale goes with the head dim: many kernels take no other.
    scale = (
        {"scale": USUAL_SCALE} if problem.scale == problem.replace(scale=USUAL_SCALE).scale else {}
    )
    changes: list[dict[str, object]] = [
        {"seed": seed},
        # What one distribution hides another shows: far below 0 no rescaling leaves anything.
        {
            "query": 150,
            "kv": 150,
            "seed": seed,
            "scale": problem.scale * 0.75,
            "distribution": "normal",
        },
        # As many rows more than keys, or fewer, as there were: that is what empty rows are of.
        {"query": problem.query + 37, "kv": problem.kv + 37, "seed": seed + 5},
        {"batch": 2, "query": 40, "kv": 124, "seed": seed + 1, **group},
        {"batch": 2, "heads": 2, "kv_heads": 2, "query": 124, "kv": 124, "seed": seed + 1},
        {"query": 40, "kv": 256, "seed": seed + 2},
        # Few keys, of which the largest tiles have no half.
        {"head_dim": dim, "value_dim": dim, "query": 20, "kv": 20, "seed": seed + 3, **scale},
        # Not less: of scores far below 0 some weights would lose bits, not all of them.
        {"scale": problem.scale * 1.25, "seed": seed + 4},
        # A kernel may take no other lengths than those that it was asked.
        {"batch": 2, "heads": 4, "kv_heads": 4, "seed": seed + 6},
        {"distribution": "normal", "seed": seed + 7},
    ]
    problems = {problem}
    for change in changes:
        try:
            other = problem.replace(**change)
        except ProblemError:  # a mask may be of so many keys and no more
            continue
        nearest: Problem | None = other
        if not takes(other):
            from attncheck.cases.strategies.problems import nearest_supported  # loads Hypothesis

            nearest = nearest_supported(other, takes, ())
        if nearest is None or nearest in problems:
            continue
        other = nearest
        problems.add(other)
        yield Case(problem=other, question=case.question, parameters=case.parameters)
        if case.question != "compare" and change["seed"] == seed:
            yield Case(problem=other)


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """What is left of the models that explain a failure, and whether a further wrong answer did."""

    left: tuple[str, ...]
    # Of each model the largest share of the error in a case that it explains.
    shares: dict[str, float]
    confirmed: bool
    problems: int
    # What each predicts of the cases, by their numbers, in forms that fit; and what was given.
    said: dict[str, dict[int, list[FaultPrediction]]]
    responses: dict[int, Response]

    def are_alike(self, names: Sequence[str]) -> bool:
        """Return whether these predict the very same numbers wherever they were asked.

        There they are one fault in several words.
        """
        first, *others = (self.said[name] for name in names)
        return all(_are_alike(first, other, self.responses) for other in others)


def confirm(
    models: Collection[str],
    case: Case,
    ask: Ask,
    *,
    seconds: float,
    takes: Callable[[Problem], bool] = lambda _problem: True,
) -> Confirmation:
    """Return those of ``models`` that predict all that the kernel gives on independent cases.

    Nothing is confirmed where it is right on all of them, or NaN throughout, or answers few.

    Args:
        models: What explains a failure.
        case: Of the failure.
        ask: Calls the kernel.
        seconds: After which no further case is asked, but for the first few.
        takes: As of ``independent_cases``.
    """
    # Of each model its forms that fit so far, and of these the tiles at each head_dim, by which
    # kernels choose them.
    left: dict[str, dict[object, dict[int, set[object]]] | None] = dict.fromkeys(models)
    # Of tiles that hold all keys any fault may be that loses a row: one of several has to fit.
    in_part: set[str] = set()
    shares = dict.fromkeys(models, 0.0)
    said: dict[str, dict[int, list[FaultPrediction]]] = {name: {} for name in models}
    responses: dict[int, Response] = {}
    telling = number = 0
    end = time.monotonic() + seconds
    for other in independent_cases(case, takes):
        if not left or (number >= _FEWEST and time.monotonic() > end):
            break
        for response in ask(other):
            number += 1
            responses[number] = response
            for name, before in list(left.items()):
                fitting = fitting_predictions(response, FAULT_MODELS[name])
                now = None if fitting is None else forms_of(fitting, other.problem)
                if fitting is not None and now is not None:
                    said[name][number] = fitting
                    each = [
                        response.error.explained(one) for one in fitting if response.error.proven
                    ]
                    shares[name] = max(shares[name], *(one.share for one in each if one), 0.0)
                    left[name] = _common(before, now, other.problem.head_dim)
                if now and response.error.proven and _is_in_part(now, response):
                    in_part.add(name)
            left = {name: forms for name, forms in left.items() if forms is None or forms}
            telling += response.error.proven and _is_telling(response)
    some = tuple(n for n in left if n in in_part or FAULT_MODELS[n].family != "tile")
    confirmed = bool(some and telling and number >= _ENOUGH)
    return Confirmation(
        left=some or tuple(left),
        shares=shares,
        confirmed=confirmed,
        problems=number,
        said=said,
        responses=responses,
    )


def contradicted(
    models: Collection[str], passed: Sequence[Case], response: Response, device: str
) -> set[str]:
    """Return those of ``models`` that say of a question which passed that it is wrong.

    What passed is within its bound, so that what is predicted is within it twice.

    Args:
        models: What explains a failure.
        passed: Comparisons and probes that the same kernel answered rightly.
        response: The failure.
        device: Where.
    """
    own = response.call.problem
    # The tiles of which each explains the failure: it is refuted where none of them is left.
    tiles = {name: form_tiles(response, FAULT_MODELS[name]) for name in models}
    left = {name: {tile for tile, fits in of.items() if fits} for name, of in tiles.items()}
    for case in passed:
        # Another mask or score mod is another argument: a flag may be lost and a tensor heeded.
        alike = case.problem.mask.name in {own.mask.name, "full"}
        alike &= case.problem.score.name in {own.score.name, "none"}
        if alike and case.problem.dtype == own.dtype:
            evidence = EvidenceBuilder(case, device)
            evidence.establish(reference_errors=False)
            right = within_twice(evidence, response.arithmetic)
            # Which keys a loop visits may be wrong where there is a mask alone.
            other = case.problem.mask.name != own.mask.name
            for name in models:
                if other and FAULT_MODELS[name].family in {"mask", "tile"}:
                    continue
                says = form_tiles(right, FAULT_MODELS[name]) if left[name] else {}
                left[name] -= {tile for tile, agrees in says.items() if not agrees}
    return {name for name, of in tiles.items() if any(of.values()) and not left[name]}


def _common(
    before: dict[object, dict[int, set[object]]] | None, now: Forms, head_dim: int
) -> dict[object, dict[int, set[object]]]:
    """Forms that fit every case so far: a constant, or a tile, is not another one each time."""
    both = {}
    for words, tiles in now.items():
        known = {} if before is None else before.get(words)
        if known is not None and (same := tiles & known.get(head_dim, tiles)):
            both[words] = {**known, head_dim: same}
    return both


def _are_alike(
    one: dict[int, list[FaultPrediction]],
    other: dict[int, list[FaultPrediction]],
    responses: dict[int, Response],
) -> bool:
    """Return whether a form of each predicts the same of all that a kernel gave, in every case."""
    both = [number for number in one if number in other]
    forms = [
        {words_of(each) for of in predictions.values() for each in of}
        for predictions in (one, other)
    ]

    def same(number: int, words: object, its: object) -> bool:
        of, to = (
            [x.tensors for x in predictions[number] if x.free is None and words_of(x) == its_words]
            for predictions, its_words in ((one, words), (other, its))
        )
        allowed = responses[number].error.allowed
        return any(
            all(
                name in a and name in b and _is_equal(a[name], b[name], allowed[name])
                for name in responses[number].error.got
                if name in allowed
            )
            for a, b in product(of, to)
        )

    return bool(both) and any(
        all(same(number, words, its) for number in both) for words, its in product(*forms)
    )


def _is_equal(one: torch.Tensor, other: torch.Tensor, allowed: torch.Tensor) -> bool:
    """Return whether numbers differ by far less than themselves, and than rounding may change."""
    a, b = one.double(), other.double()
    unit = torch.maximum(b.abs(), torch.where(allowed.isfinite(), allowed, 0.0))
    close = (a == b) | ((a - b).abs() <= _SAME * unit) | (a.isnan() & b.isnan())
    return bool(close.all())


def _is_in_part(forms: Forms, response: Response) -> bool:
    """Return whether a form fits that is of no tile, or of one that holds some keys of all."""
    seen = int(response.call.seen.any(dim=(0, 1, 2)).sum())
    tiles = {tile for fitting in forms.values() for tile in fitting}
    return any(not isinstance(tile, int) or tile < seen for tile in tiles)


def _is_telling(response: Response) -> bool:
    """Return whether any of the wrong numbers is finite: NaN everywhere is what many give."""
    return any(bool(response.error.got[name].isfinite().any()) for name in response.error.wrong)
