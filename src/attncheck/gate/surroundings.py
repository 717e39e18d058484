"""Stages memory and determinism: what a kernel reads and writes, and whether bits repeat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncheck.core.errors import ProblemError
from attncheck.core.paged_layout import Paging
from attncheck.gate.planning import moved
from attncheck.gate.sanitizing import sanitizing
from attncheck.inputs.problem import Case, Problem
from attncheck.mods.spec import Spec
from attncheck.relations import RELATIONS
from attncheck.verify import question_fit
from attncheck.verify.question_fit import unfit_reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attncheck.gate.planning import Planning
    from attncheck.inputs.question_parameters import Parameters
    from attncheck.records.run_reports import Stage
    from attncheck.workers.units import Unit

__all__ = ["surroundings"]

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


def surroundings(planning: Planning, stage: Stage) -> Iterator[Unit]:
    """The questions of ``stage``, each on a few layouts, in the dtypes in turn."""
    if stage == "memory":
        yield from sanitizing(planning)
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
    able = (p for dtype in planning.dtypes for p in _problems(planning, dtype, fields))
    problem = next(able, None)
    if problem is not None:
        yield planning.ask(stage, moved(Case(problem=problem, question=question), problem), name)


def _cases(planning: Planning, question: str, dtype: str, turn: int) -> Iterator[tuple[str, Case]]:
    """What is asked on the first layout, from the ``turn``-th on, that the question speaks of.

    Nothing where the kernel takes none: what it does not take the stage bounds has said.
    """
    names = list(_LAYOUTS)
    for step in range(len(names)):
        name = names[(turn + step) % len(names)]
        for problem in _problems(planning, dtype, _LAYOUTS[name]):
            if unfit_reason(question, problem) is None and _launched(planning, question, problem):
                for chosen in _chosen(question, problem):
                    case = Case(problem=problem, question=question, parameters=chosen)
                    yield name, moved(case, problem)
                return


def _chosen(question: str, problem: Problem) -> list[Parameters]:
    """Numbers to ask with; those not among them are the middle ones of what is allowed."""
    each = _EACH.get(question)
    return (
        [{each: value} for value in question_fit.allowed_parameters(question, problem)[each]]
        if each
        else [{}]
    )


def _problems(planning: Planning, dtype: str, fields: dict[str, Any]) -> Sequence[Problem]:
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
