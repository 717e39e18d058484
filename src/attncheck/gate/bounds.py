"""Stage bounds: comparisons that cover every pair, or triple, of what problems differ in."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from attncheck.gate.axes import (
    BACKWARD,
    DIMS,
    DISTRIBUTIONS,
    EXCLUSIONS,
    HEADS,
    MASKS,
    SCORES,
    SHAPES,
    STORED,
    problem_of,
    said,
)
from attncheck.gate.covering import covering
from attncheck.gate.lost_pairs import restored, values_of
from attncheck.inputs.problem import SOFTMAX_DTYPES, Case, Problem
from attncheck.records.baseline_entries import architecture
from attncheck.suite.kinds import Kind
from attncheck.suite.marks import SOFTMAX
from attncheck.suite.samples import NOT_CONCERNED
from attncheck.verify.environment import environment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.gate.planning import Planning
    from attncheck.records.run_reports import Stage
    from attncheck.workers.units import Unit

__all__ = ["axes_of", "bounds", "measurements"]

_STAGE: Stage = "bounds"
# Of an axis with many values the first few, where there is little time: those that find most.
_FEW = {"heads": 5, "dims": 4, "distribution": 4}
_FAMILIES = {"varlen": "documents"}
_KINDS = {"plain": Kind(), "sink": Kind(sink=True), "paged": Kind(paged=True)}
_ROWS = ((4, 64), (3, 77), (64, 1), (1, 129))


def bounds(planning: Planning) -> Iterator[Unit]:
    """The questions; what the kernel does not take is moved to the nearest that it does.

    Pairs that are lost on the way have a row of their own, where the kernel takes one.
    """
    tier, asked = planning.choices.tier, set()
    shapes, axes = tier.sizes_on(planning.device), axes_of(planning)
    rows, had = covering(axes, tier.strength, EXCLUSIONS), []
    for number, row in enumerate(rows):
        problem = problem_of(row, shapes, planning.choices.seed + number)
        unit = planning.asked_nearest(_STAGE, problem, said(row))
        if unit is None:
            continue
        had.append(values_of(row, Case.from_json(unit.case).problem, shapes))
        if unit.id not in asked:
            asked.add(unit.id)
            yield unit
    lost = restored(axes, had, shapes, planning.supports)
    for number, row in enumerate(lost, len(rows)):
        problem = problem_of(row, shapes, planning.choices.seed + number)
        yield planning.ask(_STAGE, Case(problem=problem), said(row))
    yield from _softmax(planning)


def measurements(planning: Planning) -> Iterator[Unit]:
    """Stage baseline: some of the same Cases, evenly, measured so that runs can be compared.

    Where there is a baseline, its own Cases too: which ones a plan has depends on all that the
    kernel takes. Where there is another commit, each is asked of it too, right after.
    """
    tree = planning.choices.tree
    units = [*_measured(planning)]
    known = {Case.from_json(unit.case).id for unit in units}
    units += [unit for unit in _held(planning) if Case.from_json(unit.case).id not in known]
    for unit in units:
        yield unit
        if tree is not None:
            yield replace(unit, commit=tree.commit)


def _measured(planning: Planning) -> Iterator[Unit]:
    """Those of the plan."""
    quiet = copy(planning)
    quiet.refused = []  # the bounds have said it
    found, most = list(bounds(quiet)), planning.choices.tier.measured
    step = max(1, len(found) / most) if most else 1
    for number in range(min(len(found), most or len(found))):
        yield replace(found[int(number * step)], stage="baseline")


def _held(planning: Planning) -> Iterator[Unit]:
    """Those of the baseline; also of what the kernel takes no longer, which its answer says."""
    held, dtypes = planning.choices.held, planning.choices.dtypes
    if held is None:
        return
    here = architecture(environment(planning.device))
    for variant, asked in held.asked(planning.subject.name, here):
        case = Case.from_json(asked)
        if not dtypes or case.problem.dtype in dtypes:
            yield planning.ask("baseline", case, variant)


def axes_of(planning: Planning) -> dict[str, tuple[Any, ...]]:
    """The axes with those of their values that the kernel takes in some Problem.

    A mask that it refuses in every dtype is kept as one refusal.
    """
    tier = planning.choices.tier
    stored = _stored(planning)
    axes: dict[str, tuple[Any, ...]] = {
        "mask": _masks(planning, stored),
        "score": _scores(planning, stored),
        "stored": stored,
        "backward": _backward(planning),
        "dtype": _dtypes(planning, stored),
        "shape": tuple(SHAPES[tier.sizes_on(planning.device)]),
        "heads": tuple(HEADS),
        "dims": tuple(DIMS),
        "distribution": DISTRIBUTIONS,
    }
    few = {} if tier.wide else _FEW
    return {name: values[: few.get(name, len(values))] for name, values in axes.items()}


def _dtypes(planning: Planning, stored: tuple[str, ...]) -> tuple[str, ...]:
    """Those of attention; a softmax has its own."""
    families = {_FAMILIES.get(mask, mask) for mask in MASKS}
    return tuple(
        dtype
        for dtype in planning.dtypes
        if any(not planning.refusal(f, dtype, _KINDS[how]) for f in families for how in stored)
    )


def _stored(planning: Planning) -> tuple[str, ...]:
    return tuple(
        how for how in STORED if any(_taken(planning, mask, _KINDS[how]) == "" for mask in MASKS)
    )


def _masks(planning: Planning, stored: tuple[str, ...]) -> tuple[str, ...]:
    found = []
    for mask in MASKS:
        reasons = [_taken(planning, mask, _KINDS[how]) for how in stored]
        if "" in reasons:
            found.append(mask)
        elif spoken := [reason for reason in reasons if reason != NOT_CONCERNED]:
            _drop(planning, {"mask": mask}, mask, spoken[0])
    return tuple(found)


def _taken(planning: Planning, mask: str, kind: Kind) -> str:
    """Why no Problem of a mask is taken in any dtype; empty where one is."""
    said = NOT_CONCERNED
    for dtype in planning.dtypes:
        reason = planning.refusal(_FAMILIES.get(mask, mask), dtype, kind)
        if not reason:
            return ""
        said = said if reason == NOT_CONCERNED else reason
    return said


def _backward(planning: Planning) -> tuple[str, ...]:
    kind = Kind(backward=True)
    able = any(_taken(planning, mask, kind) == "" for mask in MASKS)
    return BACKWARD if able else BACKWARD[:1]


def _scores(planning: Planning, stored: tuple[str, ...]) -> tuple[str, ...]:
    """Those that it takes beside some mask."""
    found = ["none"]
    for score in SCORES[1:]:
        if _some(planning, score, stored):
            found.append(score)
        elif planning.dtypes and stored:
            _drop(planning, {"score": score, "stored": stored[0]}, score, planning.reason)
    return tuple(found)


def _some(planning: Planning, score: str, stored: tuple[str, ...]) -> bool:
    return any(
        planning.nearest(_plain(planning, score=score, mask=mask, stored=how, dtype=dtype))
        is not None
        for how in stored
        for mask in ("full", "causal")
        for dtype in planning.dtypes
    )


def _drop(planning: Planning, row: dict[str, str], variant: str, reason: str) -> None:
    problem = _plain(planning, **row)
    planning.drop(_STAGE, Case(problem=problem), variant, reason)


def _plain(planning: Planning, **chosen: str) -> Problem:
    """The plainest Problem with some values chosen."""
    row = {
        "mask": "full",
        "score": "none",
        "stored": "plain",
        "backward": "",
        "dtype": planning.dtypes[0],
        "shape": "even",
        "heads": "one head",
        "dims": "64",
        "distribution": "normal",
    }
    return problem_of(row | chosen, planning.choices.tier.sizes_on(planning.device), 0)


def _softmax(planning: Planning) -> Iterator[Unit]:
    """Row softmax, of a kernel that has one."""
    dtypes = [
        dtype
        for dtype in planning.dtypes
        if dtype in SOFTMAX_DTYPES and not planning.refusal(SOFTMAX, dtype)
    ]
    axes = {"dtype": dtypes, "rows": _ROWS, "distribution": ("normal", "large_logits", "uniform")}
    for number, row in enumerate(covering(axes, 2)):
        rows, columns = row["rows"]
        problem = Problem(
            operation=SOFTMAX,
            query=rows,
            kv=columns,
            dtype=row["dtype"],
            distribution=row["distribution"],
            seed=planning.choices.seed + number,
        )
        unit = planning.asked_nearest(_STAGE, problem, SOFTMAX)
        if unit is not None:
            yield unit
