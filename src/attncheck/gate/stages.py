"""The stages of a gate: contract, probes, bounds, properties, memory and determinism."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from attncheck.capabilities.capability_table import ALIASES
from attncheck.capabilities.configuration import read_configuration
from attncheck.cases.check_cases import check_cases
from attncheck.cases.covering import (
    BACKWARD,
    DIMS,
    DISTRIBUTIONS,
    EXCLUSIONS,
    HEADS,
    MASKS,
    SCORES,
    SHAPES,
    STORED,
    covering_rows,
    restore_lost_pairs,
    row_name,
    row_problem,
    row_values,
)
from attncheck.cases.mask_samples import NOT_APPLICABLE, ProblemKind
from attncheck.core.errors import ProblemError
from attncheck.core.formats import DTYPES, FORMATS
from attncheck.core.paged_layout import Paging
from attncheck.gate.planning import move_case
from attncheck.inputs.problem import SOFTMAX_DTYPES, Case, Problem
from attncheck.mods.library import FULL
from attncheck.mods.spec import Spec
from attncheck.records.baseline_entries import architecture
from attncheck.records.run_reports import Answer
from attncheck.relations import RELATIONS
from attncheck.suite.pytest_options import SOFTMAX
from attncheck.verify import question_fit, sanitizer
from attncheck.verify.environment import environment
from attncheck.verify.question_fit import COMPARE, unfit_reason
from attncheck.workers.units import Done

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attncheck.cases.check_cases import CheckCase
    from attncheck.gate.planning import Planning
    from attncheck.inputs.question_parameters import Parameters
    from attncheck.records.run_reports import Stage
    from attncheck.workers.units import Unit

__all__ = [
    "SANITIZER_VARIANT",
    "axes_of",
    "baseline_units",
    "bound_units",
    "contract_units",
    "probe_units",
    "sanitize_kernel",
    "sanitizer_units",
    "surrounding_units",
]


SANITIZER_VARIANT = "compute-sanitizer"
"""With a tool's name after it, the variant of its units."""

_STAGE: Stage = "memory"
_TOOLS = ("memcheck", "racecheck", "synccheck")
_ON_A_CPU = "compute-sanitizer sees nothing of a CPU"
# No multiples of a tile, since what reads too far does so there. Small: a tool takes tens of times
# as long, and torch is imported under it.
_PROBLEMS: tuple[dict[str, Any], ...] = (
    {"query": 77, "kv": 93, "heads": 2, "mask": Spec.of("causal")},
    {"query": 1, "kv": 129},
    {"query": 40, "kv": 70, "mask": Spec.of("causal"), "backward": True},
)


def sanitizer_units(planning: Planning) -> Iterator[Unit]:
    """A unit for each tool, each with all problems: most of its time its process takes to begin.

    Where there is none, nothing is asked: one answer says so, and fails nothing.
    """
    if not planning.choices.sanitizer:
        return
    found = _sanitizer_cases(planning)
    if not found:
        return
    why = _ON_A_CPU if planning.device == "cpu" else ""
    why = why or ("" if sanitizer.sanitizer() else sanitizer.ABSENT)
    if why:
        planning.drop(_STAGE, found[0], SANITIZER_VARIANT, why)
        return
    for tool in _TOOLS:
        yield planning.ask(_STAGE, found[0], f"{SANITIZER_VARIANT} {tool}")


def sanitize_kernel(unit: Unit, planning: Planning) -> Done:
    """What the tool of ``unit`` says of the kernel: an answer for each problem."""
    tool = unit.variant.removeprefix(SANITIZER_VARIANT).strip()
    records = sanitizer.sanitized(
        unit.kernel,
        _sanitizer_cases(planning),
        tool,
        convention=unit.convention,
        device=unit.device,
    )
    named = {
        "kernel": planning.subject.name,
        "variant": unit.variant,
        "environment": planning.environment,
    }
    answers = tuple(
        Answer(unit=unit.id, stage=unit.stage, record=replace(record, **named))
        for record in records
    )
    return Done(unit=unit.id, answers=answers)


def _sanitizer_cases(planning: Planning) -> list[Case]:
    """The problems, as the kernel takes them, each once."""
    if not planning.dtypes:
        return []
    problems = (Problem(dtype=_dtype(planning), **fields) for fields in _PROBLEMS)
    found = (planning.nearest(each) for problem in problems for each in planning.concerned(problem))
    return [Case(problem=each) for each in dict.fromkeys(found) if each is not None]


def _dtype(planning: Planning) -> str:
    """One with gradients, where there is one."""
    return next((d for d in planning.dtypes if d in {"bf16", "fp16"}), planning.dtypes[0])


_CONTRACT: Stage = "contract"
_SMALL: dict[str, dict[str, Any]] = {
    "smallest": {"query": 1, "kv": 1},
    "a tile": {"query": 16, "kv": 16},
}
# Whether it takes these is the kernel's own affair: it says so cleanly, or it answers rightly.
# Those of one mask are beside each other: for each kind kernels are compiled.
_UNUSUAL: dict[str, dict[str, Any]] = {
    "other scale": {"query": 5, "kv": 7, "scale": 0.3},
    # Of one size and no larger: a path without bounds, chosen for the tiles that there once were.
    "whole tiles of 16": {"query": 48, "kv": 48},
    "whole tiles of 32": {"query": 96, "kv": 96},
    "whole tiles of 64": {"query": 192, "kv": 192},
    "three heads to a key head": {"query": 5, "kv": 7, "heads": 6, "kv_heads": 2},
    "rows that see nothing": {
        "query": 7,
        "kv": 5,
        "mask": Spec.of("causal_bottom_right"),
    },
    # More than a tile of rows of every kernel of ours, and a diagonal within a tile of keys.
    "a diagonal beyond a tile": {
        "query": 177,
        "kv": 293,
        "mask": Spec.of("causal_bottom_right"),
    },
    "more rows than keys": {"query": 7, "kv": 5, "mask": Spec.of("causal")},
    "more keys than rows": {"query": 5, "kv": 7, "mask": Spec.of("causal")},
    # A first tile that the mask empties, before scores that are all far below 0.
    "a window over negative scores": {
        "query": 100,
        "kv": 100,
        "mask": Spec.of("sliding_window", window=17),
        "distribution": "negative_logits",
    },
    "odd head_dim": {"query": 5, "kv": 7, "head_dim": 17},
    "other value_dim": {"query": 5, "kv": 7, "value_dim": 32},
    "a window beyond a tile": {
        "query": 177,
        "kv": 293,
        "mask": Spec.of("sliding_window", window=73),
    },
    # Of up to 256 rows: those of a GPU are larger than an interpreter's.
    "a prefix beyond the diagonal's tiles": {
        "query": 20,
        "kv": 330,
        "mask": Spec.of("prefix_lm", prefix=300),
    },
    "a prefix beside padding": {
        "query": 9,
        "kv": 20,
        "mask": Spec.of("and", Spec.of("prefix_lm", prefix=4), Spec.of("padding", lengths=[15])),
    },
    "negative scores backward": {
        "query": 40,
        "kv": 40,
        "distribution": "negative_logits",
        "backward": True,
    },
    "rows that see nothing backward": {
        "query": 7,
        "kv": 5,
        "mask": Spec.of("causal_bottom_right"),
        "backward": True,
    },
    "a window backward": {
        "query": 9,
        "kv": 9,
        "mask": Spec.of("sliding_window", window=2),
        "backward": True,
    },
    "the gradient of a table": {
        "query": 140,
        "kv": 70,
        "score": Spec.of("relative_bias", distance=4, seed=0),
        "backward": True,
        "dcaptured": True,
    },
}
# The smallest there is: times a descale it is 0, and 0 times a score of −∞ is NaN.
_NO_SCALE: dict[str, Any] = {
    "query": 4,
    "kv": 70,
    "mask": Spec.of("causal"),
    "scale": FORMATS["fp32"].subnormal_spacing,
}
# More than the 65 535 places of a grid's second axis. Of so many heads exact attention takes
# minutes, and a row of one key none: it is that key's value.
_MANY: dict[str, Any] = {"batch": 65_537, "query": 1, "kv": 2, "mask": Spec.of("causal")}
_DECLARED_MASKS = {
    "full": FULL,
    "causal": Spec.of("causal"),
    "causal_bottom_right": Spec.of("causal_bottom_right"),
    "sliding_window": Spec.of("sliding_window", window=3),
    "prefix_lm": Spec.of("prefix_lm", prefix=3),
    "padding": Spec.of("padding", lengths=[9]),
    "document": Spec.of("document", lengths=[9, 7]),
}


def contract_units(planning: Planning) -> Iterator[Unit]:
    """The questions, in every dtype that the kernel takes."""
    asked: set[str] = set()
    # Backwards last: each has kernels of its own to be compiled, and forwards are wrong more often.
    for name, problem in sorted(_problems(planning), key=lambda named: named[1].backward):
        unit = planning.ask(_CONTRACT, Case(problem=problem), name)
        if unit.id not in asked:
            asked.add(unit.id)
            yield unit
    yield from _many_sequences(planning)


def _many_sequences(planning: Planning) -> Iterator[Unit]:
    """More than a grid may hold; on a CPU there are no grids."""
    if planning.device != "cuda":
        return
    for dtype in planning.dtypes[:1]:
        problem = Problem(dtype=dtype, **_MANY)
        if planning.executor.concerns(planning.subject, problem):
            case = Case(problem=problem, question="first_row")
            yield planning.ask(_CONTRACT, case, "more sequences than a grid holds")


def _problems(planning: Planning) -> Iterator[tuple[str, Problem]]:
    for turn, dtype in enumerate(planning.dtypes):
        for name, fields in _SMALL.items():
            for backward in (False, True):
                yield from _taken(planning, name, fields, dtype, backward=backward)
        if turn == 0:
            yield from _unusual(planning, dtype, _UNUSUAL)
        if DTYPES[dtype].scaled:
            yield from _unusual(planning, dtype, {"no scale": _NO_SCALE})
    yield from _declared(planning)
    for dtype in planning.dtypes:
        if not planning.refusal(SOFTMAX, dtype):
            yield SOFTMAX, Problem(operation=SOFTMAX, query=2, kv=16, dtype=dtype)


def _taken(
    planning: Planning, name: str, fields: dict[str, Any], dtype: str, *, backward: bool
) -> Iterator[tuple[str, Problem]]:
    """The smallest Problem of its kind that the kernel takes."""
    if backward and DTYPES[dtype].scaled:
        return
    problem = Problem(dtype=dtype, backward=backward, **fields)
    found = planning.nearest(problem)
    if found is not None:
        yield f"{name} backward" if backward else name, found


def _unusual(
    planning: Planning, dtype: str, problems: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, Problem]]:
    for name, fields in problems.items():
        if DTYPES[dtype].scaled and fields.get("backward"):
            continue
        problem = Problem(dtype=dtype, **fields)
        if planning.executor.concerns(planning.subject, problem):
            yield name, problem


def _declared(planning: Planning) -> Iterator[tuple[str, Problem]]:
    """Each dtype, head_dim and mask of the kernel's table, whatever the kernel itself says."""
    table = read_configuration().kernels.get(planning.unit.kernel)
    if table is None:
        return
    first = planning.dtypes[0] if planning.dtypes else "bf16"
    wanted = planning.choices.dtypes or table.dtypes or ()
    dims = table.head_dims if isinstance(table.head_dims, tuple) else ()
    for title, fields in (
        *((f"declared {dtype}", {"dtype": dtype}) for dtype in table.dtypes or ()),
        *((f"declared head_dim {_shown(dim)}", _dims(dim)) for dim in dims),
        *((f"declared {mask}", _mask(mask)) for mask in table.masks or ()),
    ):
        try:
            usual: dict[str, Any] = {"query": 16, "kv": 16, "dtype": first}
            problem = Problem(**usual | fields)
        except ProblemError:
            continue
        known = planning.executor.concerns(planning.subject, problem)
        if known and (not wanted or problem.dtype in wanted):
            yield title, problem


def _dims(dim: int | tuple[int, int]) -> dict[str, Any]:
    keys, values = dim if isinstance(dim, tuple) else (dim, dim)
    return {"head_dim": keys, "value_dim": values}


def _shown(dim: int | tuple[int, int]) -> str:
    return "/".join(map(str, dim)) if isinstance(dim, tuple) else str(dim)


def _mask(name: str) -> dict[str, Any]:
    return {"mask": _DECLARED_MASKS.get(ALIASES.get(name, name), FULL)}


_PROBES: Stage = "probes"


def probe_units(planning: Planning) -> Iterator[Unit]:
    """Each probe of ``attncheck check``: in one of the dtypes in turn, or in every one.

    Moved to the nearest layout that the kernel takes, as far as the probe may be asked there.
    """
    dtypes, asked = planning.dtypes, set()
    every = planning.choices.tier.each_dtype
    for turn, dtype in enumerate(dtypes):
        for number, question in enumerate(_probes(dtype)):
            if not every and number % len(dtypes) != turn:
                continue
            unit = _unit(planning, question)
            if unit is not None and unit.id not in asked:
                asked.add(unit.id)
                yield unit


def _probes(dtype: str) -> list[CheckCase]:
    return [one for one in check_cases(dtype) if one.case.question != COMPARE]


def _unit(planning: Planning, question: CheckCase) -> Unit | None:
    case = question.case
    for problem in planning.concerned(case.problem):
        (found,) = planning.fitting(case.question, [problem]) or (None,)
        if found is not None:
            return planning.ask(_PROBES, move_case(case, found), question.name)
    planning.drop(_PROBES, case, question.name, planning.reason)
    return None


_BOUNDS: Stage = "bounds"
# Of an axis with many values the first few, where there is little time: those that find most.
_FEW = {"heads": 5, "dims": 4, "distribution": 4}
_FAMILIES = {"varlen": "documents"}
_KINDS = {"plain": ProblemKind(), "sink": ProblemKind(sink=True), "paged": ProblemKind(paged=True)}
_ROWS = ((4, 64), (3, 77), (64, 1), (1, 129))


def bound_units(planning: Planning) -> Iterator[Unit]:
    """The questions; what the kernel does not take is moved to the nearest that it does.

    Pairs that are lost on the way have a row of their own, where the kernel takes one.
    """
    tier, asked = planning.choices.tier, set()
    shapes, axes = tier.sizes_on(planning.device), axes_of(planning)
    rows, had = covering_rows(axes, tier.strength, EXCLUSIONS), []
    for number, row in enumerate(rows):
        problem = row_problem(row, shapes, planning.choices.seed + number)
        unit = planning.asked_nearest(_BOUNDS, problem, row_name(row))
        if unit is None:
            continue
        had.append(row_values(row, Case.from_json(unit.case).problem, shapes))
        if unit.id not in asked:
            asked.add(unit.id)
            yield unit
    lost = restore_lost_pairs(axes, had, shapes, planning.supports)
    for number, row in enumerate(lost, len(rows)):
        problem = row_problem(row, shapes, planning.choices.seed + number)
        yield planning.ask(_BOUNDS, Case(problem=problem), row_name(row))
    yield from _softmax(planning)


def baseline_units(planning: Planning) -> Iterator[Unit]:
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
    found, most = list(bound_units(quiet)), planning.choices.tier.measured
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
        how
        for how in STORED
        if any(_taken_of_bounds(planning, mask, _KINDS[how]) == "" for mask in MASKS)
    )


def _masks(planning: Planning, stored: tuple[str, ...]) -> tuple[str, ...]:
    found = []
    for mask in MASKS:
        reasons = [_taken_of_bounds(planning, mask, _KINDS[how]) for how in stored]
        if "" in reasons:
            found.append(mask)
        elif spoken := [reason for reason in reasons if reason != NOT_APPLICABLE]:
            _drop(planning, {"mask": mask}, mask, spoken[0])
    return tuple(found)


def _taken_of_bounds(planning: Planning, mask: str, kind: ProblemKind) -> str:
    """Why no Problem of a mask is taken in any dtype; empty where one is."""
    said = NOT_APPLICABLE
    for dtype in planning.dtypes:
        reason = planning.refusal(_FAMILIES.get(mask, mask), dtype, kind)
        if not reason:
            return ""
        said = said if reason == NOT_APPLICABLE else reason
    return said


def _backward(planning: Planning) -> tuple[str, ...]:
    kind = ProblemKind(backward=True)
    able = any(_taken_of_bounds(planning, mask, kind) == "" for mask in MASKS)
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
    planning.drop(_BOUNDS, Case(problem=problem), variant, reason)


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
    return row_problem(row | chosen, planning.choices.tier.sizes_on(planning.device), 0)


def _softmax(planning: Planning) -> Iterator[Unit]:
    """Row softmax, of a kernel that has one."""
    dtypes = [
        dtype
        for dtype in planning.dtypes
        if dtype in SOFTMAX_DTYPES and not planning.refusal(SOFTMAX, dtype)
    ]
    axes = {"dtype": dtypes, "rows": _ROWS, "distribution": ("normal", "large_logits", "uniform")}
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
        unit = planning.asked_nearest(_BOUNDS, problem, SOFTMAX)
        if unit is not None:
            yield unit


_RELATIONS: dict[Stage, tuple[str, ...]] = {
    "memory": (
        "hidden_keys_nan",
        "hidden_keys_huge",
        "future_keys_nan",
        "future_keys_huge",
        *(name for name in RELATIONS if name.startswith("strides")),
        "pages",
        "call_order",
        "mask_order",
    ),
    "determinism": ("repeat", "alone_in_batch", "batch_permutation", "launches"),
}
# Several sequences, tiles and heads of each kind of hiding; small, since each is run several times.
_LAYOUTS: dict[str, dict[str, Any]] = {
    "causal GQA": {
        "batch": 2,
        "heads": 2,
        "kv_heads": 1,
        "query": 77,
        "kv": 93,
        "mask": Spec.of("causal"),
    },
    "padding": {
        "batch": 2,
        "heads": 2,
        "query": 35,
        "kv": 70,
        "head_dim": 128,
        "mask": Spec.of("padding", lengths=[70, 7]),
    },
    "sliding window": {"query": 100, "mask": Spec.of("sliding_window", window=17)},
    "one row": {"batch": 2, "heads": 2, "query": 1, "kv": 129},
    "document": {"query": 96, "mask": Spec.of("document", lengths=[33, 50, 13])},
    "backward": {
        "batch": 2,
        "heads": 2,
        "kv_heads": 1,
        "query": 40,
        "kv": 70,
        "mask": Spec.of("causal"),
        "backward": True,
    },
    "paged": {
        "batch": 2,
        "heads": 2,
        "kv_heads": 1,
        "query": 3,
        "kv": 70,
        "mask": Spec.of("causal_bottom_right"),
        "paging": Paging(size=16, seed=1),
    },
}
# Asked for each value of this parameter: which tensor is read wrongly nobody knows.
_EACH = {"strides_far": "tensor"}
# Asked whatever the turn. The slope of this score mod at a NaN is NaN: 0 times it is no gradient.
# And keys are cut into parts where they are many and rows few.
_ALSO: dict[str, tuple[str, dict[str, Any]]] = {
    "hidden_keys_nan": (
        "backward through a softcap",
        {
            "query": 9,
            "kv": 9,
            "mask": Spec.of("causal"),
            "score": Spec.of("softcap", cap=5.0),
            "backward": True,
        },
    ),
    "neighbours": (
        "a row of many keys",
        {"batch": 2, "heads": 2, "query": 1, "kv": 2049},
    ),
}


def surrounding_units(planning: Planning, stage: Stage) -> Iterator[Unit]:
    """The questions of ``stage``, each on a few layouts, in the dtypes in turn."""
    if stage == "memory":
        yield from sanitizer_units(planning)
    dtypes, layouts = planning.dtypes, planning.choices.tier.layouts
    asked: set[str] = set()
    for number, question in enumerate(_questions(stage)):
        for turn in range(number, number + layouts if dtypes else number):
            for name, case in _cases(planning, question, dtypes[turn % len(dtypes)], turn):
                unit = planning.ask(stage, case, name)
                if unit.id not in asked:
                    asked.add(unit.id)
                    yield unit
        yield from _also(planning, stage, question)


def _questions(stage: Stage) -> tuple[str, ...]:
    """The checks of the stage, then its relations."""
    checks = question_fit.CHECKS
    return (*(n for n, check in checks.items() if check.stage == stage), *_RELATIONS[stage])


def _also(planning: Planning, stage: Stage, question: str) -> Iterator[Unit]:
    """Another question of one that needs more than layouts, of a kernel that takes it."""
    if question not in _ALSO:
        return
    name, fields = _ALSO[question]
    able = (
        p for dtype in planning.dtypes for p in _problems_of_surroundings(planning, dtype, fields)
    )
    problem = next(able, None)
    if problem is not None:
        yield planning.ask(
            stage, move_case(Case(problem=problem, question=question), problem), name
        )


def _cases(planning: Planning, question: str, dtype: str, turn: int) -> Iterator[tuple[str, Case]]:
    """What is asked on the first layout, from the ``turn``-th on, that the question speaks of.

    Nothing where the kernel takes none: what it does not take the stage bounds has said.
    """
    names = list(_LAYOUTS)
    for step in range(len(names)):
        name = names[(turn + step) % len(names)]
        for problem in _problems_of_surroundings(planning, dtype, _LAYOUTS[name]):
            if unfit_reason(question, problem) is None and _launched(planning, question, problem):
                for chosen in _chosen(question, problem):
                    case = Case(problem=problem, question=question, parameters=chosen)
                    yield name, move_case(case, problem)
                return


def _chosen(question: str, problem: Problem) -> list[Parameters]:
    """Numbers to ask with; those not among them are the middle ones of what is allowed."""
    each = _EACH.get(question)
    return (
        [{each: value} for value in question_fit.allowed_parameters(question, problem)[each]]
        if each
        else [{}]
    )


def _problems_of_surroundings(
    planning: Planning, dtype: str, fields: dict[str, Any]
) -> Sequence[Problem]:
    try:
        problem = Problem(dtype=dtype, **fields)
    except ProblemError:  # no gradients in fp8
        return ()
    found = (planning.nearest(each) for each in planning.concerned(problem))
    return [each for each in found if each is not None]


def _launched(planning: Planning, question: str, problem: Problem) -> bool:
    """Whether the kernel has another launch, where one is asked for."""
    if question not in RELATIONS or not RELATIONS[question].relaunched:
        return True
    try:
        return bool(planning.subject.launches(problem, planning.device))
    except Exception:  # noqa: BLE001  # foreign code may raise anything: it is asked, and says so
        return True
