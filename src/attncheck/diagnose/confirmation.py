"""Confirmation of a fault model on independent problems, and what is seen where none is confirmed.

A model that explains one failure may be one of many that predict the same there. It is the cause
only if it also predicts what the kernel gives on problems of other numbers, lengths, heads, scales
and masks, where it and its neighbours differ, and is wrong on one of them at least.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.core.errors import ProblemError
from attncheck.core.mod_spec import FULL, NONE, Spec
from attncheck.diagnose.explanations import Asked, form_tiles, form_words, within_twice
from attncheck.fault_models import FAULT_MODELS
from attncheck.inputs.problem import USUAL_SCALE, Case
from attncheck.judge.fault_explanation import FaultPrediction
from attncheck.verify.evidence_builder import EvidenceBuilder

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from torch import Tensor

    from attncheck.fault_models.exact_attention import ExactAttention
    from attncheck.fault_models.fault_model import Family
    from attncheck.inputs.problem import Problem

    Ask = Callable[[Case], Sequence[Asked]]
    """What the kernel gives in each run of a Case; nothing where it does not take it."""

_FEWEST = 5  # cases that are asked however long they take
_ENOUGH = 3  # answers, of fewer of which nothing is confirmed
_LENGTHS = (1, 2, 4, 8, 16, 17, 32, 33, 64, 65, 128, 129)
_TILE = 16  # keys of the smallest tile that kernels have
_HALF = 0.5  # of a key, from which it counts


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
        {"scale": problem.scale * 0.75, "seed": seed + 4},
        # A kernel may take no other lengths than those that it was asked.
        {"batch": 2, "heads": 4, "kv_heads": 4, "seed": seed + 6},
        {"distribution": "normal", "seed": seed + 7},
    ]
    asked = {problem}
    for change in changes:
        try:
            other = problem.replace(**change)
        except ProblemError:  # a mask may be of so many keys and no more
            continue
        nearest: Problem | None = other
        if not takes(other):
            from attncheck.cases.strategies.problems import nearest_supported  # loads Hypothesis

            nearest = nearest_supported(other, takes, ())
        if nearest is None or nearest in asked:
            continue
        other = nearest
        asked.add(other)
        yield Case(problem=other, question=case.question, parameters=case.parameters)
        if case.question != "compare" and change["seed"] == seed:
            yield Case(problem=other)


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """What is left of the models that explain a failure, and whether a further wrong answer did."""

    left: tuple[str, ...]
    confirmed: bool
    problems: int


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
    left: dict[str, set[object] | None] = dict.fromkeys(models)
    telling = number = 0
    end = time.monotonic() + seconds
    for other in independent_cases(case, takes):
        if not left or (number >= _FEWEST and time.monotonic() > end):
            break
        for asked in ask(other):
            number += 1
            words = {name: form_words(asked, FAULT_MODELS[name]) for name in left}
            both = {name: _common(left[name], words[name]) for name in left}
            left = {name: some for name, some in both.items() if some is None or some}
            telling += asked.error.proven and _is_telling(asked)
    confirmed = bool(left and telling and number >= _ENOUGH)
    return Confirmation(left=tuple(left), confirmed=confirmed, problems=number)


def contradicted(
    models: Collection[str], passed: Sequence[Case], asked: Asked, device: str
) -> set[str]:
    """Return those of ``models`` that say of a question which passed that it is wrong.

    What passed is within its bound, so that what is predicted is within it twice.

    Args:
        models: What explains a failure.
        passed: Comparisons and probes that the same kernel answered rightly.
        asked: The failure.
        device: Where.
    """
    own = asked.call.problem
    # The tiles of which each explains the failure: it is refuted where none of them is left.
    tiles = {name: form_tiles(asked, FAULT_MODELS[name]) for name in models}
    left = {name: {tile for tile, fits in of.items() if fits} for name, of in tiles.items()}
    for case in passed:
        # Another mask or score mod is another argument: a flag may be lost and a tensor heeded.
        alike = case.problem.mask.name in {own.mask.name, "full"}
        alike &= case.problem.score.name in {own.score.name, "none"}
        if alike and case.problem.dtype == own.dtype:
            evidence = EvidenceBuilder(case, device)
            evidence.establish(reference_errors=False)
            right = within_twice(evidence, asked.arithmetic)
            # Which keys a loop visits may be wrong where there is a mask alone.
            other = case.problem.mask.name != own.mask.name
            for name in models:
                if other and FAULT_MODELS[name].family in {"mask", "tile"}:
                    continue
                says = form_tiles(right, FAULT_MODELS[name]) if left[name] else {}
                left[name] -= {tile for tile, agrees in says.items() if not agrees}
    return {name for name, of in tiles.items() if any(of.values()) and not left[name]}


def _common(before: set[object] | None, now: set[object] | None) -> set[object] | None:
    """Forms that fit every case so far: a constant, or a head, is not another one each time."""
    return before if now is None else now if before is None else before & now


def _is_telling(asked: Asked) -> bool:
    """Return whether any of the wrong numbers is finite: NaN everywhere is what many give."""
    return any(bool(asked.error.got[name].isfinite().any()) for name in asked.error.wrong)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """What is known of a failure that no model was confirmed of."""

    family: Family | None = None
    facts: tuple[str, ...] = ()


def observe(
    asked: Asked,
    case: Case,
    ask: Ask,
    *,
    varies: bool,
    seconds: float,
    takes: Callable[[Problem], bool] = lambda _problem: True,
) -> Observations:
    """Return where and when a kernel is wrong, and the family of faults that this tells.

    Args:
        asked: What it gave.
        case: For it.
        ask: Calls the kernel.
        varies: Whether it gives something else where memory holds something else.
        seconds: After which no shorter length is asked.
        takes: As of ``independent_cases``.
    """
    facts = [_place(asked)]
    facts += ["what it gives changes with what free memory holds"] if varies else []
    needed = set()
    for name, (words, change) in _plainer(case.problem).items():
        if others := _asked_with(case, change, ask):
            wrong = any(run.error.proven for run in others)
            facts.append(f"{'wrong as well' if wrong else 'right'} {words}")
            needed |= set() if wrong else {name}
    runs = [asked, *_with_few_keys(case, ask)]
    for other in itertools.islice(independent_cases(case, takes), _FEWEST):
        runs += ask(other)
    every = [(run, _Counts.of(run)) for run in runs if run.error.proven]
    facts += next((told for _, one in every if one is not None and (told := one.facts())), [])
    facts.append(_shortest(case, ask, time.monotonic() + seconds))
    # One family for all that it gets wrong: few numbers alone look like many.
    families = {_own_family(run, counts=counts) for run, counts in every}
    if len(families) > 1:
        families -= {None, *_THROUGHOUT}
    family = families.pop() if len(families) == 1 else None
    # Few rows of one shape: a mask that is off may be wrong there alone.
    if family == "empty rows" and len({run.call.shape for run, _ in every}) == 1:
        family = None
    if varies:
        family = "memory"
    elif case.question.startswith("strides_"):
        family = "mapping"
    # A score mod that is off changes weights as if parts were not rescaled, or keys not there.
    elif family is None or (family != "gradient" and needed & {"score", "sink"}):
        family = next((family for name, family in _TOLD_BY.items() if name in needed), family)
    return Observations(family=family, facts=tuple(filter(None, facts)))


def _own_family(run: Asked, *, counts: _Counts | None) -> Family | None:
    """Return the family that one run's numbers tell by themselves."""
    error, alive = run.error, run.call.parts.lse > -torch.inf
    if not error.forward:
        return "gradient"
    beyond = {name: error.beyond(name) for name in error.wrong}
    off = [x.any(-1) if x.dim() > alive.dim() else x for x in beyond.values()]
    rows = torch.stack(off).any(0)
    if not bool((rows & alive).any()):
        # Where no row sees a key, a mask that is not looked at is wrong alike.
        return "empty rows" if bool(alive.any()) else None
    wrong = [error.got[name][off & _rows_of(off, alive)] for name, off in beyond.items()]
    if not all(bool(x.isfinite().all()) for x in wrong):
        # NaN that is read is another's: no input has any, and all that is wrong is it.
        alone = all(not bool(x.isfinite().any()) for x in wrong)
        return "overflow" if alone and _is_finite(run.call) else None
    if set(error.wrong) == {"lse"}:
        return "lse"
    return None if counts is None else counts.family()


def _rows_of(tensor: Tensor, rows: Tensor) -> Tensor:
    """``rows`` as they broadcast to out, or to LSE."""
    return rows[..., None] if tensor.dim() > rows.dim() else rows


def _is_finite(call: ExactAttention) -> bool:
    """Return whether no number is NaN or infinite that the kernel may read."""
    problem, inputs = call.problem, call.inputs.tensors().values()
    # Pages that are nobody's hold NaN.
    return problem.paging is None and all(bool(x.float().isfinite().all()) for x in inputs)


_THROUGHOUT: tuple[Family, ...] = ("empty rows", "lse", "gradient", "overflow")
"""What is told by which numbers are right: by all that it gets wrong, or by nothing."""

_TOLD_BY: dict[str, Family] = {
    "score": "score",
    "sink": "score",
    "batch": "mapping",
    "heads": "mapping",
}
"""What a kernel has wrong that is right without a feature."""


def _plainer(problem: Problem) -> dict[str, tuple[str, dict[str, object]]]:
    """What the problem may be without, in words: what makes the kernel right tells its cause."""
    if problem.backward or problem.operation != "attention":
        return {}
    one_group = problem.kv_heads == 1
    causal: dict[str, object] = {"mask": Spec.of("causal")}
    narrow = problem.dtype != "fp32" and not problem.formats.scaled
    square = problem.mask == FULL and problem.query == problem.kv
    table: tuple[tuple[bool, str, str, dict[str, object]], ...] = (
        (
            problem.score != NONE,
            "score",
            "without the score mod",
            {"score": NONE, "dcaptured": False},
        ),
        (problem.sink, "sink", "without the sink", {"sink": False}),
        (problem.mask != FULL, "mask", "without the mask", {"mask": FULL}),
        (square, "causal", "with a causal mask", causal),
        (problem.paging is not None, "paging", "without pages", {"paging": None}),
        (problem.batch > 1, "batch", "with one sequence alone", {"batch": 1}),
        (not one_group, "heads", "with one head alone", {"heads": 1, "kv_heads": 1}),
        (one_group and problem.heads > 1, "group", "with one query head alone", {"heads": 1}),
        (narrow, "dtype", "in fp32", {"dtype": "fp32"}),
    )
    return {name: (words, change) for holds, name, words, change in table if holds}


def _asked_with(case: Case, change: dict[str, object], ask: Ask) -> Sequence[Asked]:
    try:
        other = case.problem.replace(**change)
        return ask(Case(problem=other, question=case.question, parameters=case.parameters))
    except ProblemError:
        return ()


def _shortest(case: Case, ask: Ask, end: float) -> str:
    """Return from how many keys on the kernel is wrong, as far as short lengths tell."""
    problem, right = case.problem, 0
    for kv in _LENGTHS:
        if kv >= problem.kv or time.monotonic() > end:
            break
        change: dict[str, object] = {"kv": kv}
        if problem.query == problem.kv:
            change["query"] = kv
        runs = _asked_with(case, change, ask)
        if any(run.error.proven for run in runs):
            return f"wrong from {kv} keys on" + (f", right with {right}" if right else "")
        right = kv if runs else right
    return f"right with up to {right} keys, wrong with {problem.kv}" if right else ""


def _with_few_keys(case: Case, ask: Ask) -> Iterator[Asked]:
    """Yield runs of as many keys as values of so many columns can tell apart."""
    problem = case.problem
    if problem.operation != "attention" or problem.backward:
        return
    for dim in dict.fromkeys((problem.value_dim, 128)):
        # One short of whole tiles; or as many, for a kernel that takes whole tiles alone.
        for length in (dim - 1, dim):
            change: dict[str, object] = {"query": length, "kv": length}
            runs = _asked_with(case, change | {"head_dim": dim, "value_dim": dim}, ask)
            yield from runs
            if runs:
                break


def _place(asked: Asked) -> str:
    """Return which tensors are wrong, and in which sequences, heads, rows, columns or keys."""
    parts = []
    for name in asked.error.wrong:
        beyond = asked.error.beyond(name)
        axes = ("sequence", "head", "row" if name in {"out", "lse", "dq"} else "key", "column")
        if beyond.dim() < 3 or not bool(beyond.any()):
            continue
        where = []
        for axis, word in enumerate(axes[: beyond.dim()]):
            others = [n for n in range(beyond.dim()) if n != axis]
            along = beyond.any(dim=others) if others else beyond
            if not bool(along.all()):
                own = along.nonzero().flatten()
                own = asked.call.rows[own] if word == "row" and name != "dq" else own
                where.append(f"{word}s {_ranges(own.tolist())}")
        parts.append(f"{name} is wrong in {', '.join(where)}" if where else f"{name} is wrong")
    return "; ".join(parts)


def _ranges(numbers: Sequence[int]) -> str:
    """``0–31, 64``; of many the first few."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [str(a) if a == b else f"{a}–{b}" for a, b in spans[:4]]
    return ", ".join([*texts, "…"] if spans[4:] else texts)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Counts:
    """How often each key counts in each row, ``(batch, heads, rows, kv)``: 1 where it must, else 0.

    Where values have as many columns as there are keys, out and LSE say it: Σ w v = out has one
    solution. ``doubt`` is by how much that may be off, from what rounding allows of out.
    """

    counts: Tensor
    doubt: Tensor
    seen: Tensor
    asked: Asked
    with_lse: bool  # without it a tile that is gone looks like another one that weighs more
    other_sum: bool  # whether LSE is wrong, or not there

    @classmethod
    def of(cls, asked: Asked) -> _Counts | None:
        call, error = asked.call, asked.error
        problem, out = call.problem, error.got.get("out")
        fits = problem.operation == "attention" and call.whole and problem.kv <= problem.value_dim
        if not fits or out is None or not bool(out.isfinite().all() & call.v.isfinite().all()):
            return None
        inverse = torch.linalg.pinv(call.v.expand(problem.batch, problem.heads, -1, -1))
        lse = error.got.get("lse", call.parts.lse)
        if not bool(lse[call.parts.lse > -torch.inf].isfinite().all()):
            return None
        odds = (torch.where(call.parts.dead, 0.0, lse)[..., None] - call.s).exp()
        allowed, counts = error.allowed["out"], out @ inverse * odds
        doubt = allowed @ inverse.abs() * odds
        if "lse" in error.got:
            doubt = doubt + counts.abs() * error.allowed["lse"].expm1()[..., None]
        there = ~call.parts.dead[..., None] & doubt.isfinite()
        # What is left of out, that no weights of these values give, is other values.
        others = torch.eye(problem.value_dim, dtype=out.dtype) - inverse @ call.v
        left = (out @ others).abs() > allowed @ others.abs()
        if bool((left & ~call.parts.dead[..., None]).any()):
            return None
        doubt = torch.where(there, doubt, torch.inf)
        with_lse = "lse" in error.got
        return cls(
            counts=counts,
            doubt=doubt,
            seen=call.seen.expand(counts.shape),
            asked=asked,
            with_lse=with_lse,
            other_sum="lse" in error.wrong or not with_lse,
        )

    def _whole(self) -> Tensor | None:
        """Whole counts, where that is what all are; None where they are not."""
        sure = self.doubt < _HALF
        near = (self.counts - self.counts.round()).abs() <= self.doubt
        if not bool(sure.any()) or not bool(near[sure].all()):
            return None
        # Of what is in doubt: as in all other rows, or all others of its tile, where these agree.
        known = torch.where(sure & self.seen, self.counts.round(), torch.nan)
        least = self._tiles(known.nan_to_num(nan=torch.inf), torch.inf).amin(-1)
        most = self._tiles(known.nan_to_num(nan=-torch.inf), -torch.inf).amax(-1)
        of_tile = torch.where(least == most, least, 1.0).repeat_interleave(_TILE, -1)
        least = known.nan_to_num(nan=torch.inf).amin(-2, keepdim=True)
        most = known.nan_to_num(nan=-torch.inf).amax(-2, keepdim=True)
        alike = torch.where(least == most, least, of_tile[..., : known.shape[-1]])
        others = torch.where(self.seen, alike, 0.0)
        whole = torch.where(sure, self.counts.round(), others).clamp(min=0.0)
        # What is small looks like 0: these counts have to give what the kernel gave.
        call = self.asked.call
        parts = call.softmax(call.s + whole.log(), sink=call.sink)
        says = FaultPrediction(name="", tensors=parts.outputs.tensors())
        return whole if self.asked.error.agrees(says) else None

    def facts(self) -> list[str]:
        """Which keys count too often, and which too rarely, in words."""
        whole = self._whole()
        if whole is None:
            return []
        kinds = {
            "do not count": (whole == 0) & self.seen,
            "count although they are hidden": (whole > 0) & ~self.seen,
            "count more than once": (whole > 1) & self.seen,
        }
        return [
            f"keys {_ranges(where.any(dim=(0, 1, 2)).nonzero().flatten().tolist())} {says} in "
            f"rows {_ranges(where.any(dim=(0, 1, 3)).nonzero().flatten().tolist())}"
            for says, where in kinds.items()
            if bool(where.any())
        ]

    def family(self) -> Family | None:
        """Return the family: tiles that are gone as a whole, another mask, parts not rescaled."""
        whole, sure = self._whole(), self.doubt < _HALF
        if whole is not None:
            wrong = whole != self.seen.double()
            # Other values than the keys' own, where the weights of all add up as they must.
            if not bool(wrong.any()) or not self.other_sum:
                return None
            if bool((wrong & ~self.seen).any()):
                return "mask"
            # Of each tile either all keys that a row sees are wrong, or none.
            kept = self._tiles((self.seen & sure & ~wrong).double()).sum(-1) > 0
            gone = self._tiles(wrong.double()).sum(-1) > 0
            return "mask" if bool((kept & gone).any()) else "tile"
        # Each tile of a row by a factor of its own, and not all by one.
        low = torch.where(self.seen, self.counts - self.doubt, -torch.inf)
        high = torch.where(self.seen, self.counts + self.doubt, torch.inf)
        hidden = bool((self.counts.abs() > self.doubt)[~self.seen].any())
        least, most = self._tiles(low, -torch.inf).amax(-1), self._tiles(high, torch.inf).amin(-1)
        apart = least.amax(-1) > most.amin(-1)
        by_tile = bool((least <= most).all() & (most > 0).all()) and bool(apart.any())
        # What counts a whole number of times is a tile that is gone, or there again.
        by_tile = by_tile and bool((least.ceil() > most).any())
        return "rescaling" if by_tile and self.with_lse and not hidden else None

    def _tiles(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Keys in tiles, ``(…, tiles, keys of one)``."""
        missing = -x.shape[-1] % _TILE
        padded: Tensor = torch.nn.functional.pad(x, (0, missing), value=fill)
        return padded.view(*x.shape[:-1], -1, _TILE)
