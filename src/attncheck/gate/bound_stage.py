"""Stage bounds: comparisons that cover every pair, or triple, of what problems differ in.

And stage baseline, which measures some of the same cases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

from msgspec.structs import replace

from attncheck.cases.covering import (
    ALONE,
    AXES,
    EXCLUSIONS,
    MASKS,
    PLAIN_ROW,
    SHAPES,
    STORED,
    Row,
    alone_rows,
    compiled_rows,
    covering_rows,
    restore_lost_pairs,
    row_name,
    row_problem,
    row_values,
)
from attncheck.cases.mask_samples import SOFTMAX, ProblemKind
from attncheck.gate.planning import Planning
from attncheck.inputs.problem import SOFTMAX_DTYPES, Case, Problem
from attncheck.records.baseline_entries import architecture
from attncheck.suite.kernel_support import NOT_APPLICABLE
from attncheck.verify.environment import environment
from attncheck.workers.units import Unit

AGAIN = "again"
"""How variants end whose kernel has been compiled for another: of these the verdict is enough."""

# Of an axis with many values the first few, where there is little time: those that find most.
_FEW = {"score": 6, "stored": 6, "heads": 6, "dims": 4, "distribution": 4}
# Of an axis with many values those that are asked in threes too.
_CORE = {"extent": 1, "score": 4, "scale": 1, "stored": 3, "backward": 2}
# The mask family that tells whether a kernel takes a mask, where it is not the mask's own name.
_FAMILIES = {"varlen": "documents", "window_bottom_right": "offset"}
_KINDS = {"plain": ProblemKind(), "sink": ProblemKind(sink=True), "paged": ProblemKind(paged=True)}
# A whole tile, a ragged row, a single column (of weight 1), and one key beyond a tile.
_SOFTMAX_ROWS = ((4, 64), (3, 77), (64, 1), (1, 129))


def bound_units(planning: Planning) -> Iterator[Unit]:
    """Yield the questions; what the kernel does not take is moved to the nearest that it does.

    Pairs that are lost on the way have a row of their own, where the kernel takes one.
    """
    if planning.bounds is None:  # two stages need them, and they take seconds
        planning.bounds = [*_bound_units(planning)]
    yield from planning.bounds


def _bound_units(planning: Planning) -> Iterator[Unit]:
    tier, seed = planning.choices.tier, planning.choices.seed
    shapes, axes = tier.sizes_on(planning.device), axes_of(planning)
    together = {
        name: tuple(value for value in values if value not in ALONE.get(name, ()))
        for name, values in axes.items()
    }
    rows, again = [*covering_rows(together, 2, EXCLUSIONS), *alone_rows(axes)], list[Row]()
    if tier.strength > 2:  # of every value they would be thousands
        core = {name: values[: _CORE.get(name, len(values))] for name, values in together.items()}
        # Where nothing is compiled a row of one kernel costs what one of another does.
        if planning.device == "cpu" or not tier.threes_gpu:
            rows += covering_rows(core, tier.strength, EXCLUSIONS)
        else:
            first, again = compiled_rows(core, shapes, tier.threes_gpu, EXCLUSIONS)
            rows += first
    # Two rows may move to the same problem, which is asked once.
    covered, known = [], set()
    for number, row in enumerate([*rows, *again]):
        problem = row_problem(row, shapes, seed + number)
        name = row_name(row) + (f" {AGAIN}" if number >= len(rows) else "")
        unit = planning.nearest_unit("bounds", problem, name.strip())
        if unit is None:
            continue
        # What was moved may have lost values that its row was there to cover.
        covered.append(row_values(row, Case.from_json(unit.case).problem, shapes))
        if unit.id not in known:
            known.add(unit.id)
            yield unit
    lost = restore_lost_pairs(together, covered, shapes, planning.supports)
    # Seeds go on from those of the rows, so that no draw comes twice.
    for number, row in enumerate(lost, len(rows) + len(again)):
        problem = row_problem(row, shapes, seed + number)
        yield planning.unit_of("bounds", Case(problem=problem), row_name(row))
    yield from _softmax_units(planning)


def _softmax_units(planning: Planning) -> Iterator[Unit]:
    dtypes = [
        dtype
        for dtype in planning.dtypes
        if dtype in SOFTMAX_DTYPES and not planning.refusal(SOFTMAX, dtype)
    ]
    # Of those that draw scores: a softmax has no q and k.
    distributions = ("normal", "large_logits", "uniform")
    axes = {"dtype": dtypes, "rows": _SOFTMAX_ROWS, "distribution": distributions}
    for number, row in enumerate(covering_rows(axes, 2)):
        rows, columns = row["rows"]
        problem = Problem(
            operation=SOFTMAX,
            query=rows,
            kv=columns,
            dtype=row["dtype"],
            distribution=row["distribution"],
            seed=planning.choices.seed + number,
        )
        unit = planning.nearest_unit("bounds", problem, SOFTMAX)
        if unit is not None:
            yield unit


# ------------------------------------------------------------ the axes that a kernel has


def axes_of(planning: Planning) -> dict[str, tuple[Any, ...]]:
    """Return the axes with those of their values that the kernel takes in some Problem.

    A mask that it refuses in every dtype is kept as one refusal.
    """
    tier = planning.choices.tier
    kinds = tuple(
        name
        for name, kind in _KINDS.items()
        if any(_mask_refusal(planning, mask, kind) == "" for mask in MASKS)
    )
    families = {_FAMILIES.get(mask, mask) for mask in MASKS}
    # A kernel without a backward would refuse every row with gradients, one by one.
    gradients = any(
        _mask_refusal(planning, mask, ProblemKind(backward=True)) == "" for mask in MASKS
    )
    masks = _masks(planning, kinds)
    axes = AXES | {
        "mask": masks,
        "stored": kinds,
        "backward": AXES["backward"] if gradients else AXES["backward"][:1],
        # Those of attention; a softmax has its own.
        "dtype": tuple(
            dtype
            for dtype in planning.dtypes
            if any(not planning.refusal(f, dtype, _KINDS[name]) for f in families for name in kinds)
        ),
        "shape": tuple(SHAPES[tier.sizes_on(planning.device)]),
    }
    # Sinks and pages of a kind that it takes may be refused one by one.
    more = [n for n in AXES["stored"][len(_KINDS) :] if kinds and _kind_of(n) in kinds]
    axes |= {
        "extent": _taken_values(planning, "extent", axes, AXES["extent"][1:]),
        "score": _taken_values(planning, "score", axes, AXES["score"][1:]),
        "scale": _taken_values(planning, "scale", axes, AXES["scale"][1:]),
        "stored": kinds + _taken_values(planning, "stored", axes, more)[1:],
        "backward": _taken_values(planning, "backward", axes, axes["backward"][1:]),
    }
    few = {} if tier.all_values else _FEW
    return {name: values[: few.get(name, len(values))] for name, values in axes.items()}


def _kind_of(stored: str) -> str:
    return "paged" if "paging" in STORED[stored] else "sink"


def _taken_values(
    planning: Planning, axis: str, axes: dict[str, tuple[Any, ...]], values: Sequence[Any]
) -> tuple[Any, ...]:
    """Return the first value of an axis, and those that it takes in some plain Problem."""
    shapes = planning.choices.tier.sizes_on(planning.device)
    taken = [AXES[axis][0]]
    for value in values if axes["dtype"] and axes["stored"] else ():
        rows = [
            PLAIN_ROW | {"shape": "even", "mask": mask, "stored": name, "dtype": dtype, axis: value}
            for name in axes["stored"]
            for mask in (axes["mask"] if axis == "extent" else ("full", "causal"))
            for dtype in axes["dtype"]
        ]
        rows = [row for row in rows if not any(cannot_be(row) for _, cannot_be in EXCLUSIONS)]
        for row in rows:
            moved = planning.nearest(row_problem(row, shapes, 0))
            # Without its sink, say, or at the usual scale it is another question.
            if moved is not None and row_values(row, moved, shapes)[axis] == value:
                taken.append(value)
                break
        else:
            if rows:
                _drop_value(planning, str(value), planning.reason, **{axis: value})
    return tuple(taken)


def _masks(planning: Planning, stored: tuple[str, ...]) -> tuple[str, ...]:
    supported = []
    for mask in MASKS:
        refusals = [_mask_refusal(planning, mask, _KINDS[name]) for name in stored]
        if "" in refusals:
            supported.append(mask)
        # A mask that does not concern the kernel at all is no refusal.
        elif reasons := [reason for reason in refusals if reason != NOT_APPLICABLE]:
            _drop_value(planning, mask, reasons[0], mask=mask)
    return tuple(supported)


def _mask_refusal(planning: Planning, mask: str, kind: ProblemKind) -> str:
    """Return why no Problem of a mask is taken in any dtype; empty where one is."""
    reason = NOT_APPLICABLE
    for dtype in planning.dtypes:
        refusal = planning.refusal(_FAMILIES.get(mask, mask), dtype, kind)
        if not refusal:
            return ""
        reason = reason if refusal == NOT_APPLICABLE else refusal
    return reason


def _drop_value(planning: Planning, variant: str, reason: str, **values: str) -> None:
    planning.drop("bounds", Case(problem=_plain_problem(planning, **values)), variant, reason)


def _plain_problem(planning: Planning, **values: str) -> Problem:
    """Return the plainest Problem with some values of axes chosen."""
    row = PLAIN_ROW | {"shape": "even", "dtype": planning.dtypes[0]}
    return row_problem(row | values, planning.choices.tier.sizes_on(planning.device), 0)


# ------------------------------------------------------------ stage baseline


def baseline_units(planning: Planning) -> Iterator[Unit]:
    """Yield some of the bounds' cases, evenly, measured so that runs can be compared.

    Where there is a baseline, its own cases too: which ones a plan has depends on all that the
    kernel takes. Where there is another commit, each is asked of it too, right after.
    """
    tree = planning.choices.tree
    units = [*_sampled_units(planning)]
    known = {Case.from_json(unit.case).id for unit in units}
    units += [unit for unit in _kept_units(planning) if Case.from_json(unit.case).id not in known]
    for unit in units:
        yield unit
        # Right after its own, so that a run that is interrupted has whole pairs to compare.
        if tree is not None:
            yield replace(unit, commit=tree.commit)


def _sampled_units(planning: Planning) -> Iterator[Unit]:
    quiet = copy(planning)
    quiet.refused = []  # the bounds have said it
    units, most = list(bound_units(quiet)), planning.choices.tier.measured
    # Evenly over the plan, which is sorted from plain to unusual: not its plain beginning alone.
    step = max(1, len(units) / most) if most else 1
    for number in range(min(len(units), most or len(units))):
        yield replace(units[int(number * step)], stage="baseline")


def _kept_units(planning: Planning) -> Iterator[Unit]:
    """Yield those of the baseline, also where the kernel refuses them now: its answer says so."""
    held, dtypes = planning.choices.held, planning.choices.dtypes
    if held is None:
        return
    # Another architecture rounds otherwise: its numbers are no baseline here.
    here = architecture(environment(planning.device))
    for variant, spelled in held.of_kernel(planning.subject.name, here):
        case = Case.from_json(spelled)
        if not dtypes or case.problem.dtype in dtypes:
            yield planning.unit_of("baseline", case, variant)
