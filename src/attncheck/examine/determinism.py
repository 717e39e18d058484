"""Checks of determinism, in classes: what may change between two calls and must not be seen."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from attncheck.examine.asking import Asking, Check, Unanswered, remarks
from attncheck.examine.circumstances import Circumstances
from attncheck.examine.evidence import Evidence
from attncheck.examine.executor import Failure
from attncheck.examine.judging import judged
from attncheck.examine.relate import relate
from attncheck.judgement import Judgement
from attncheck.problem import Case
from attncheck.relations import RELATIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from attncheck.problem import Problem
    from attncheck.question import Allowed

__all__ = ["ELSEWHERE", "NEIGHBOURS", "REPEATS", "SCHEDULES", "STREAMS"]

_CALLS = (8, 32, 128)
_FEWER = (5, 17, 65)
_SETTINGS = 4  # of one relation's numbers, from the smallest to the largest
_UNPROMISED = 3  # pairs of calls compared within bounds, of a kernel that promises no bits
_NEIGHBOURS = ("alone_in_batch", "batch_permutation")
_SCHEDULES = ("launches", "pages", "prefill_rows")


def _repeats(asking: Asking) -> Judgement:
    return _bits(asking, Circumstances(calls=_asked(asking)))


def _elsewhere(asking: Asking) -> Judgement:
    return _bits(asking, Circumstances(calls=_asked(asking), elsewhere=True))


def _streams(asking: Asking) -> Judgement:
    return _bits(asking, Circumstances(calls=_asked(asking), late=True, fill="pattern"))


def _asked(asking: Asking) -> int:
    return int(asking.case.parameters["calls"])


def _bits(asking: Asking, under: Circumstances) -> Judgement:
    """All calls gave the bits of the first, where the kernel promises that; else within bounds."""
    if "repeat" not in asking.subject.promises:
        if under.elsewhere or under.late:
            return _judged(asking, under)
        return _related(asking, [("repeat", {})] * _UNPROMISED)
    noted = asking.run(under).noted
    if noted.wrong:
        return Judgement(status="fail", rule="memory", reason=noted.wrong)
    gradients = asking.case.problem.backward and asking.subject.promises_gradients
    differing = max(noted.differing, noted.gradients_differing if gradients else 0)
    loose = asking.case.problem.backward and not gradients
    unasked = "does not promise the bits of gradients: out and LSE alone were compared"
    return _counted(differing, noted.further, noted.where, remarks(unasked if loose else ""))


def _judged(asking: Asking, under: Circumstances) -> Judgement:
    """Calls that promise no bits: each is attention within the judge's bounds."""
    evidence = Evidence(Case(problem=asking.case.problem), asking.device)
    evidence.establish(yardsticks=False)
    wrong = [
        found.reason
        for found in (
            judged(asking.run(replace(under, calls=calls, last=True)), evidence, brief=True)
            for calls in ((2, 3, 2) if under.late else (2,) * _UNPROMISED)
        )
        if found.status == "fail"
    ]
    return _counted(len(wrong), _UNPROMISED, wrong[0] if wrong else "")


def _counted(
    differing: int, further: int, where: str, found: tuple[str, ...] = (), what: str = "calls"
) -> Judgement:
    """The verdict on ``differing`` of ``further``, never asked again until it is none."""
    if differing:
        reason = f"nondeterministic {differing}/{further} {what}: {where}"
        return Judgement(status="fail", rule="determinism", reason=reason, warnings=found)
    reason = f"0/{further} {what} differ: with 95 % confidence fewer than 3/{further} of all do"
    return Judgement(status="pass", reason=reason, warnings=found)


def _neighbours(asking: Asking) -> Judgement:
    return _related(asking, list(_settings(_NEIGHBOURS, asking.case.problem)))


def _schedules(asking: Asking) -> Judgement:
    return _related(asking, list(_settings(_SCHEDULES, asking.case.problem)))


def _settings(names: tuple[str, ...], problem: Problem) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Relations that fit ``problem``, each with a few of the numbers it may be asked with."""
    for name in names:
        if RELATIONS[name].unfit(problem):
            continue
        allowed = RELATIONS[name].allowed(problem)
        every = [
            dict(zip(allowed, values, strict=True))
            for values in itertools.product(*allowed.values())
        ]
        last = len(every) - 1
        few = min(_SETTINGS, len(every))
        for i in sorted({i * last // max(1, few - 1) for i in range(few)}):
            yield name, every[i]


def _related(asking: Asking, asked: list[tuple[str, Mapping[str, int]]]) -> Judgement:
    """Relations asked one after the other: how many of them did not hold, and the first."""
    compared = differing = 0
    where, silent = "", []
    for name, numbers in asked:
        case = Case(problem=asking.case.problem, question=name, parameters=numbers)
        found = relate(asking.subject, case, asking.executor, device=asking.device)
        if isinstance(found, Failure):
            if found.kind not in {"refused", "unbounded"}:
                raise Unanswered(found)
            silent.append(f"{name}: {found.message}")
            continue
        compared += 1
        if found is not None:
            differing += 1
            where = where or f"{_said(name, numbers)}: {found.message}"
    if not compared:
        raise Unanswered(Failure(kind="refused", message="; ".join(remarks(*silent))))
    return _counted(differing, compared, where, remarks(*silent), "pairs of calls")


def _said(name: str, numbers: Mapping[str, int]) -> str:
    said = ", ".join(f"{key}={value}" for key, value in numbers.items())
    return f"{name}({said})" if said else name


def _unfit(names: tuple[str, ...]) -> Callable[[Problem], str | None]:
    """Why none of these relations says anything of a Problem."""

    def unfit(problem: Problem) -> str | None:
        reasons = [RELATIONS[name].unfit(problem) for name in names]
        return None if None in reasons else "; ".join(remarks(*(r or "" for r in reasons)))

    return unfit


def _calls(counts: tuple[int, ...]) -> Callable[[Problem], Allowed]:
    def allowed(problem: Problem) -> Allowed:
        del problem
        return {"calls": counts}

    return allowed


REPEATS = Check(
    name="repeats",
    summary="`calls` calls on the same inputs give the same bits",
    stage="determinism",
    look=_repeats,
    allowed=_calls(_CALLS),
)
"""D1: atomics add up in whatever order; what is right only on the first call differs from it."""

ELSEWHERE = Check(
    name="elsewhere",
    summary="`calls` calls at other addresses, on a busy GPU or with other threads, give the same "
    "bits",
    stage="determinism",
    look=_elsewhere,
    allowed=_calls(_FEWER),
)
"""D2: where memory lies, and what else the device does, is no part of the inputs."""

STREAMS = Check(
    name="streams",
    summary="`calls` calls on streams of their own, where inputs come late, give the same bits",
    stage="determinism",
    look=_streams,
    gpu=True,
    allowed=_calls(_FEWER),
)
"""D2: a kernel launched on another stream than the current one, and not waited for, reads what was
not yet written, or is read before it has written."""

NEIGHBOURS = Check(
    name="neighbours",
    summary="a sequence gives the same alone, in its batch, and at another place in it",
    stage="determinism",
    look=_neighbours,
    unfit=_unfit(_NEIGHBOURS),
)
"""D3, by the relations ``alone_in_batch`` and ``batch_permutation``: bits where the kernel promises
``batch``, else within the bounds of both."""

SCHEDULES = Check(
    name="schedules",
    summary="other tiles, splits or pages, or the last rows alone, give the same",
    stage="determinism",
    look=_schedules,
    unfit=_unfit(_SCHEDULES),
)
"""D4, by the relations ``launches``, ``pages`` and ``prefill_rows``: within the bounds of both, and
bits of pages where the kernel promises ``layout``."""
