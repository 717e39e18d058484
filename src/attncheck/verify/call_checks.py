"""Checks of memory and determinism: what must hold of a call beside its numbers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from attncheck.core.errors import ProblemError, UnknownName
from attncheck.core.judgement import Judgement
from attncheck.inputs import input_tensors as inputs_room
from attncheck.inputs.problem import Case
from attncheck.inputs.question_parameters import Allowed, check_parameters, fits_all, no_parameters
from attncheck.relations import RELATIONS
from attncheck.verify.call_conditions import PLAIN_CALL, CallConditions
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.executor import Failure, Origin, out_of_memory
from attncheck.verify.judging import judge_outputs
from attncheck.verify.memory_patterns import junk
from attncheck.verify.relation_runs import check_relation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from attncheck.capabilities.subject import Subject
    from attncheck.core.judgement import Rule
    from attncheck.core.outputs import Outputs, TensorName
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Problem
    from attncheck.inputs.question_parameters import Parameters
    from attncheck.records.run_reports import Stage
    from attncheck.verify.call_conditions import CallNotes
    from attncheck.verify.executor import Execution, Executor

__all__ = [
    "CHECKS",
    "ELSEWHERE",
    "GUARDS",
    "LEAKS",
    "NEIGHBOURS",
    "REPEATS",
    "SCHEDULES",
    "STATE",
    "STREAMS",
    "UNWRITTEN",
    "Asking",
    "Check",
    "Unanswered",
    "check_named",
    "judge_call",
    "remarks",
]


class Unanswered(Exception):
    """There are no outputs to look at.

    Attributes:
        failure: Why.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(slots=True, kw_only=True)
class Asking:
    """One kernel, asked one check.

    Attributes:
        subject: The kernel.
        case: The Case.
        device: ``cpu`` or ``cuda``.
        executor: How to call the kernel.
    """

    subject: Subject
    case: Case
    device: str
    executor: Executor
    _inputs: Inputs | None = field(default=None, init=False)

    def run(self, under: CallConditions) -> Execution:
        """What the kernel gives ``under`` these circumstances; raises Unanswered."""
        if self._inputs is None:
            self._inputs = inputs_room.draw_inputs(self.case.problem, self.device)
        result = self.executor.run(
            self.subject, self._inputs, origin=Origin(case=self.case), under=under
        )
        if isinstance(result, Failure):
            raise Unanswered(result)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Something that must hold of a call beside its numbers.

    Attributes:
        name: The question of a Case.
        summary: What must hold, in one line.
        stage: The part of a gate that asks it.
        look: Asks, and says what was found; raises Unanswered.
        gpu: Whether it can be asked on a GPU alone.
        unfit: Why the check says nothing of a Problem, in one line; None if it does.
        allowed: The numbers that may be asked of a Problem, by name, smallest first.
    """

    name: str
    summary: str
    stage: Stage
    look: Callable[[Asking], Judgement]
    gpu: bool = False
    unfit: Callable[[Problem], str | None] = fits_all
    allowed: Callable[[Problem], Allowed] = no_parameters

    def check(self, problem: Problem, parameters: Parameters) -> None:
        """Raise ProblemError unless the check can be asked of ``problem`` with these numbers."""
        reason = self.unfit(problem)
        if reason:
            raise ProblemError(f"{self.name} says nothing of {problem}: {reason}.")
        check_parameters(self.name, parameters, self.allowed(problem))


def remarks(*found: str) -> tuple[str, ...]:
    """Those that say something, each once."""
    return tuple(dict.fromkeys(each for each in found if each))


_FILLS = CallConditions(fill="pattern"), CallConditions(fill="inverse")
_RULES: tuple[Rule, ...] = ("memory", "state", "leak")
_WINDOWS = (2, 8, 32)
_UNGUARDED = "no guard bands around {}: torch did not ask Python for that memory"
_UNPOISONED = "{} may have held anything before: torch did not ask Python for that memory"


def _guards(asking: Asking) -> Judgement:
    """Two runs, the second with the inverse pattern: what wrote the pattern itself is seen too."""
    seen = [asking.run(under).noted for under in _FILLS]
    missing = (_UNGUARDED.format(each.unguarded) for each in seen if each.unguarded)
    return _noted(seen, remarks(*missing))


def _noted(seen: list[CallNotes], found: tuple[str, ...] = ()) -> Judgement:
    """The verdict on what was noted around calls."""
    found += remarks(*(each.unchecked for each in seen), *(each.remark for each in seen))
    for each in seen:
        if each.wrong:
            return Judgement(status="fail", rule=_rule(each), reason=each.wrong, warnings=found)
    return Judgement(status="pass", warnings=found)


def _rule(noted: CallNotes) -> Rule:
    return next((rule for rule in _RULES if rule == noted.rule), "memory")


def _unwritten(asking: Asking) -> Judgement:
    plain, *filled = (asking.run(under) for under in (PLAIN_CALL, *_FILLS))
    noted = [each.noted for each in filled]
    unknown = {name for each in noted for name in each.unpoisoned.split(", ") if name}
    found = remarks(_UNPOISONED.format(", ".join(sorted(unknown))) if unknown else "")
    names = plain.outputs.tensors()
    for name in names:
        wrong = _left(name, *(each.outputs for each in filled))
        if wrong:
            return Judgement(status="fail", rule="memory", reason=wrong, warnings=found)
    reads = _reads(plain, filled)
    if reads and not _repeats(asking, filled[0]):
        odd = "two calls on the same inputs differ: what it reads of unwritten memory is not told"
        return Judgement(status="inconclusive", rule="memory", reason=odd, warnings=found)
    if reads:
        return Judgement(status="fail", rule="memory", reason=reads, warnings=found)
    if unknown:
        return Judgement(status="inconclusive", rule="memory", reason=found[0])
    return Judgement(status="pass", warnings=found)


def _left(name: TensorName, one: Outputs, other: Outputs) -> str:
    """What of an output nobody wrote: all its bytes differ as what filled memory does."""
    a, b = (_elements(each, name) for each in (one, other))
    where = (a ^ b == 0xFF).all(-1) | junk(a) & (b == 0).all(-1)
    return f"left {_counted(where, name, one)} unwritten" if bool(where.any()) else ""


def _reads(plain: Execution, filled: list[Execution]) -> str:
    """What of the outputs depends on memory that nobody wrote."""
    for name in plain.outputs.tensors():
        was = _elements(plain.outputs, name)
        where = torch.zeros(len(was), dtype=torch.bool, device=was.device)
        for each in filled:
            where |= (_elements(each.outputs, name) != was).any(-1)
        if bool(where.any()):
            said = _counted(where, name, plain.outputs)
            return f"reads poison: {said} depend on memory that nobody wrote"
    return ""


def _repeats(asking: Asking, first: Execution) -> bool:
    """Whether the same call gives the same bits where memory holds what it did."""
    before, after = first.outputs, asking.run(_FILLS[0]).outputs
    return all(
        bool((_elements(before, name) == _elements(after, name)).all()) for name in before.tensors()
    )


def _elements(outputs: Outputs, name: TensorName) -> torch.Tensor:
    """The bytes of each element of a tensor, ``(elements, bytes)``."""
    tensor = outputs.tensors()[name]
    bits = tensor.detach().contiguous().flatten().view(torch.uint8)
    return bits.view(-1, tensor.element_size())


def _counted(where: torch.Tensor, name: TensorName, outputs: Outputs) -> str:
    shape = outputs.tensors()[name].shape
    first = np.unravel_index(int(where.nonzero()[0, 0]), shape)
    index = ", ".join(str(int(i)) for i in first)
    return f"{int(where.sum())} of {len(where)} elements of {name}, first [{index}],"


def _state(asking: Asking) -> Judgement:
    return _noted([asking.run(CallConditions(state=True)).noted])


def _leaks(asking: Asking) -> Judgement:
    window = int(asking.case.parameters["calls"])
    return _noted([asking.run(CallConditions(window=window)).noted])


def _windows(problem: Problem) -> Allowed:
    del problem
    return {"calls": _WINDOWS}


GUARDS = Check(
    name="guards",
    summary="nothing is written before or after a tensor that the call reads or allocates",
    stage="memory",
    look=_guards,
)
UNWRITTEN = Check(
    name="unwritten",
    summary="every element of the outputs is written, and none depends on memory nobody wrote",
    stage="memory",
    look=_unwritten,
)
STATE = Check(
    name="state",
    summary="a call leaves its process as it was: generators, flags, modes, directory, environment",
    stage="memory",
    look=_state,
)
LEAKS = Check(
    name="leaks",
    summary="the process holds no more descriptors, threads, children or tensors after `calls` "
    "calls, three times over",
    stage="memory",
    look=_leaks,
    allowed=_windows,
)


_CALLS = (8, 32, 128)
_FEWER = (5, 17, 65)
_SETTINGS = 4  # of one relation's numbers, from the smallest to the largest
_UNPROMISED = 3  # pairs of calls compared within bounds, of a kernel that promises no bits
_NEIGHBOURS = ("alone_in_batch", "batch_permutation")
_SCHEDULES = ("launches", "pages", "prefill_rows")


def _repeats_of_determinism(asking: Asking) -> Judgement:
    return _bits(asking, CallConditions(calls=_asked(asking)))


def _elsewhere(asking: Asking) -> Judgement:
    return _bits(asking, CallConditions(calls=_asked(asking), elsewhere=True))


def _streams(asking: Asking) -> Judgement:
    return _bits(asking, CallConditions(calls=_asked(asking), late=True, fill="pattern"))


def _asked(asking: Asking) -> int:
    return int(asking.case.parameters["calls"])


def _bits(asking: Asking, under: CallConditions) -> Judgement:
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
    return _counted_of_determinism(
        differing, noted.further, noted.where, remarks(unasked if loose else "")
    )


def _judged(asking: Asking, under: CallConditions) -> Judgement:
    """Calls that promise no bits: each is attention within the judge's bounds."""
    evidence = EvidenceBuilder(Case(problem=asking.case.problem), asking.device)
    evidence.establish(reference_errors=False)
    wrong = [
        found.reason
        for found in (
            judge_outputs(asking.run(replace(under, calls=calls, last=True)), evidence, brief=True)
            for calls in ((2, 3, 2) if under.late else (2,) * _UNPROMISED)
        )
        if found.status == "fail"
    ]
    return _counted_of_determinism(len(wrong), _UNPROMISED, wrong[0] if wrong else "")


def _counted_of_determinism(
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
        found = check_relation(asking.subject, case, asking.executor, device=asking.device)
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
    return _counted_of_determinism(differing, compared, where, remarks(*silent), "pairs of calls")


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
    look=_repeats_of_determinism,
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


CHECKS: dict[str, Check] = {
    check.name: check
    for check in (
        GUARDS,
        UNWRITTEN,
        STATE,
        LEAKS,
        REPEATS,
        ELSEWHERE,
        STREAMS,
        NEIGHBOURS,
        SCHEDULES,
    )
}


def check_named(name: str) -> Check:
    """The check called ``name``; raises UnknownName with the valid names."""
    if name not in CHECKS:
        raise UnknownName("check", name, CHECKS)
    return CHECKS[name]


def judge_call(
    subject: Subject, case: Case, executor: Executor, *, device: str
) -> Judgement | Failure:
    """Judge a call of ``subject`` by the check that ``case`` names; no oracle is needed.

    A pass says in its ``warnings`` what could not be looked at; of determinism its ``reason`` says
    how many calls were compared. A check that could look at nothing is ``inconclusive``.

    Args:
        subject: The kernel.
        case: A Case whose question is a name in ``CHECKS``.
        executor: How to call the kernel.
        device: ``cpu`` or ``cuda``.

    Returns:
        A Failure where there are no outputs to look at; ``refused`` for a check of streams on a
        CPU, and for a kernel that does not promise what is checked.

    Raises:
        UsageError: for a question that is no check, or that cannot be asked of the Problem.
    """
    check = check_named(case.question)
    check.check(case.problem, case.parameters)
    if check.gpu and device == "cpu":
        return Failure(kind="refused", message="a CPU has no streams")
    refusal = executor.refusal(subject, case.problem, device)
    if refusal is not None:
        return Failure(kind="refused", message=refusal) if isinstance(refusal, str) else refusal
    asking = Asking(subject=subject, case=case, device=device, executor=executor)
    try:
        return check.look(asking)
    except Unanswered as error:
        return error.failure
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return Failure(kind="error", message="out of memory for the check")
