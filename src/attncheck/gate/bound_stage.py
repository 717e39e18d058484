"""Stage bounds: comparisons that cover every pair, or triple, of values of the problems' axes.

Also the stage baseline, which measures the accuracy of some of these cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any, TypeVar

from msgspec.structs import replace

from attncheck.cases.covering import (
    ALONE,
    AXES,
    MASKS,
    PLAIN_ROW,
    SHAPES,
    STORED,
    Row,
    alone_rows,
    compiled_rows,
    covering_rows,
    is_excluded,
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

REUSE_SUFFIX = "again"
"""Suffix of variants that reuse a compiled kernel; for these only the verdict is computed."""

# Number of leading values, which find most faults, of long axes in tiers with little time.
_LEADING_VALUES = {"score": 6, "stored": 6, "heads": 6, "dims": 4, "distribution": 4}
# Number of leading values of long axes that are also covered in triples.
_CORE = {"extent": 1, "score": 4, "scale": 1, "stored": 3, "backward": 2}
# Mask families by which support of a mask is determined, if their names differ from the mask's.
_FAMILIES = {
    "varlen": "documents",
    "window_bottom_right": "offset",
}
_KINDS = {"plain": ProblemKind(), "sink": ProblemKind(sink=True), "paged": ProblemKind(paged=True)}
# A whole tile, a ragged row, a single column (of weight 1), and one key beyond a tile.
_SOFTMAX_ROWS = ((4, 64), (3, 77), (64, 1), (1, 129))


def bound_units(planning: Planning) -> Iterator[Unit]:
    """Yield the questions, each moved to the nearest problem that the kernel takes.

    A pair of values that is lost by moving gets a row of its own, if the kernel takes one.
    """
    if planning.bounds is None:  # cached, since two stages need them and they take seconds
        planning.bounds = [*_bound_units(planning)]
    yield from planning.bounds


def _bound_units(planning: Planning) -> Iterator[Unit]:
    tier, seed = planning.choices.tier, planning.choices.seed
    shapes, axes = tier.sizes_on(planning.device), axes_of(planning)
    together = {
        name: tuple(value for value in values if value not in ALONE.get(name, ()))
        for name, values in axes.items()
    }
    rows, repeated = [*covering_rows(together, 2), *alone_rows(axes)], list[Row]()
    if tier.strength > 2:  # triples of all values would be thousands
        core = {name: values[: _CORE.get(name, len(values))] for name, values in together.items()}
        # Without compilation all rows cost the same.
        if planning.device == "cpu" or not tier.threes_gpu:
            rows += covering_rows(core, tier.strength)
        else:
            first, repeated = compiled_rows(core, shapes, tier.threes_gpu)
            rows += first
    # Rows that move to the same problem are asked only once.
    covered, seen_ids = [], set()
    for number, row in enumerate([*rows, *repeated]):
        problem = row_problem(row, shapes, seed + number)
        name = row_name(row) + (f" {REUSE_SUFFIX}" if number >= len(rows) else "")
        unit = planning.nearest_unit(problem, name.strip())
        if unit is None:
            continue
        # A moved problem may lack values that its row was meant to cover.
        covered.append(row_values(row, Case.from_json(unit.case).problem, shapes))
        if unit.id not in seen_ids:
            seen_ids.add(unit.id)
            yield unit
    restored = restore_lost_pairs(together, covered, shapes, planning.supports)
    # Seeds continue after those of the rows, so that no draw is repeated.
    for number, row in enumerate(restored, len(rows) + len(repeated)):
        problem = row_problem(row, shapes, seed + number)
        yield planning.unit_of("bounds", Case(problem=problem), row_name(row))
    yield from _softmax_units(planning)


def _softmax_units(planning: Planning) -> Iterator[Unit]:
    dtypes = [
        dtype
        for dtype in planning.dtypes
        if dtype in SOFTMAX_DTYPES and not planning.refusal(SOFTMAX, dtype)
    ]
    # Only distributions that can draw scores, since a softmax has no q and k.
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
        unit = planning.nearest_unit(problem, SOFTMAX)
        if unit is not None:
            yield unit


# ------------------------------------------------------------ the axes that a kernel has


def axes_of(planning: Planning) -> dict[str, tuple[Any, ...]]:
    """Return the axes, reduced to values that the kernel takes in some Problem.

    A mask that it refuses in every dtype is recorded as a single refusal.
    """
    tier = planning.choices.tier
    kinds = tuple(
        name
        for name, kind in _KINDS.items()
        if any(_mask_refusal(planning, mask, kind) == "" for mask in MASKS)
    )
    families = {_FAMILIES.get(mask, mask) for mask in MASKS}
    # Avoids one refusal for each row with gradients of a kernel without a backward.
    gradients = any(
        _mask_refusal(planning, mask, ProblemKind(backward=True)) == "" for mask in MASKS
    )
    masks = _masks(planning, kinds)
    axes = AXES | {
        "mask": masks,
        "stored": kinds,
        "backward": AXES["backward"] if gradients else AXES["backward"][:1],
        # Dtypes of attention; a softmax has its own.
        "dtype": tuple(
            dtype
            for dtype in planning.dtypes
            if any(not planning.refusal(f, dtype, _KINDS[name]) for f in families for name in kinds)
        ),
        "shape": tuple(SHAPES[tier.sizes_on(planning.device)]),
    }
    # A kernel that takes sinks or pages may still refuse some of their variants.
    further = AXES["stored"][len(_KINDS) :]
    more = [name for name in further if ("paged" if "paging" in STORED[name] else "sink") in kinds]
    axes |= {
        "extent": _taken_values(planning, "extent", axes, AXES["extent"][1:]),
        "score": _taken_values(planning, "score", axes, AXES["score"][1:]),
        "scale": _taken_values(planning, "scale", axes, AXES["scale"][1:]),
        "stored": kinds + _taken_values(planning, "stored", axes, more)[1:],
        "backward": _taken_values(planning, "backward", axes, axes["backward"][1:]),
    }
    limits = {} if tier.all_values else _LEADING_VALUES
    return {name: values[: limits.get(name, len(values))] for name, values in axes.items()}


def _taken_values(
    planning: Planning, axis: str, axes: dict[str, tuple[Any, ...]], values: Sequence[Any]
) -> tuple[Any, ...]:
    """Return the first value of an axis, and those that the kernel takes in a plain Problem."""
    shapes = planning.choices.tier.sizes_on(planning.device)
    accepted = [AXES[axis][0]]
    for value in values if axes["dtype"] and axes["stored"] else ():
        rows = [
            PLAIN_ROW | {"shape": "even", "mask": mask, "stored": name, "dtype": dtype, axis: value}
            for name in axes["stored"]
            for mask in (axes["mask"] if axis == "extent" else ("full", "causal"))
            for dtype in axes["dtype"]
        ]
        rows = [row for row in rows if not is_excluded(row)]
        for row in rows:
            moved = planning.nearest(row_problem(row, shapes, 0))
            # A moved problem may have lost the value, such as a sink or an unusual scale.
            if moved is not None and row_values(row, moved, shapes)[axis] == value:
                accepted.append(value)
                break
        else:
            if rows:
                _drop_value(planning, str(value), planning.reason, **{axis: value})
    return tuple(accepted)


def _masks(planning: Planning, stored: tuple[str, ...]) -> tuple[str, ...]:
    supported = []
    for mask in MASKS:
        refusals = [_mask_refusal(planning, mask, _KINDS[name]) for name in stored]
        if "" in refusals:
            supported.append(mask)
        # A mask that does not concern the kernel is not reported as a refusal.
        elif reasons := [reason for reason in refusals if reason != NOT_APPLICABLE]:
            _drop_value(planning, mask, reasons[0], mask=mask)
    return tuple(supported)


def _mask_refusal(planning: Planning, mask: str, kind: ProblemKind) -> str:
    """Return why the kernel takes no Problem with a mask in any dtype; empty if it takes one."""
    reason = NOT_APPLICABLE
    for dtype in planning.dtypes:
        refusal = planning.refusal(_FAMILIES.get(mask, mask), dtype, kind)
        if not refusal:
            return ""
        reason = reason if refusal == NOT_APPLICABLE else refusal
    return reason


def _drop_value(planning: Planning, variant: str, reason: str, **values: str) -> None:
    """Record that no Problem with these values is asked, with the plainest one of them."""
    row = PLAIN_ROW | {"shape": "even", "dtype": planning.dtypes[0]} | values
    problem = row_problem(row, planning.choices.tier.sizes_on(planning.device), 0)
    planning.drop("bounds", Case(problem=problem), variant, reason)


# ------------------------------------------------------------ stage baseline

_Kind = TypeVar("_Kind")


def baseline_units(planning: Planning) -> Iterator[Unit]:
    """Yield evenly chosen cases of the stage bounds, whose accuracy is measured for comparison.

    With a baseline, its cases are added, since the plan varies with the kernel's capabilities. With
    another commit, each case is also asked of that commit's kernel.
    """
    tree = planning.choices.tree
    units = [*_sampled_units(planning)]
    ids = {Case.from_json(unit.case).id for unit in units}
    units += [unit for unit in _baseline_cases(planning) if Case.from_json(unit.case).id not in ids]
    for unit in units:
        yield unit
        # In pairs, so that an interrupted run has cases to compare.
        if tree is not None:
            yield replace(unit, commit=tree.commit)


def _sampled_units(planning: Planning) -> Iterator[Unit]:
    quiet = copy(planning)
    quiet.refused = []  # the stage bounds reports refusals
    units, most = list(bound_units(quiet)), planning.choices.tier.measured
    for number in fair_sample([_kind_of(unit) for unit in units], most or len(units)):
        yield replace(units[number], stage="baseline")


def _kind_of(unit: Unit) -> tuple[str, bool]:
    problem = Case.from_json(unit.case).problem
    return problem.dtype, problem.backward


def fair_sample(kinds: Sequence[tuple[str, bool]], most: int) -> list[int]:
    """Return the positions of up to ``most`` of ``kinds``, in order.

    Each dtype has an equal share, and of that forwards and backwards; what a kind is too rare to
    use is left to others. Each share is spread evenly over the plan, which is sorted from plain to
    unusual problems.
    """
    dtypes = Counter(dtype for dtype, _ in kinds)
    shares: dict[tuple[str, bool], int] = {}
    for dtype, count in _equal_shares(dtypes, most).items():
        # Forwards first, so that they get an odd one.
        directions = {each: kinds.count(each) for each in ((dtype, False), (dtype, True))}
        shared = _equal_shares(directions, count)
        shares |= {kind: share for kind, share in shared.items() if share}
    chosen = []
    for turn, (kind, count) in enumerate(shares.items()):
        places = [number for number, each in enumerate(kinds) if each == kind]
        # Shifted from kind to kind, or small shares would all be the plainest problems.
        start = turn / len(shares)
        chosen += [places[int((number + start) * len(places) / count)] for number in range(count)]
    return sorted(chosen)


def _equal_shares(sizes: Mapping[_Kind, int], most: int) -> dict[_Kind, int]:
    """Divide ``most``, or as many as there are, as equally as ``sizes`` allow."""
    shares, left = dict.fromkeys(sizes, 0), min(most, sum(sizes.values()))
    while left:
        for kind in [each for each in sizes if shares[each] < sizes[each]][:left]:
            shares[kind] += 1
            left -= 1
    return shares


def _baseline_cases(planning: Planning) -> Iterator[Unit]:
    """Yield the cases of the baseline, including those that the kernel refuses now."""
    baseline, dtypes = planning.choices.baseline_cases, planning.choices.dtypes
    if baseline is None:
        return
    # Other architectures round differently and cannot be compared.
    here = architecture(environment(planning.device))
    for variant, case_json in baseline.of_kernel(planning.subject.name, here):
        case = Case.from_json(case_json)
        if not dtypes or case.problem.dtype in dtypes:
            yield planning.unit_of("baseline", case, variant)
