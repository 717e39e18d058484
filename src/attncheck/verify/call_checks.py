"""Checks of memory and determinism: properties of a call beside the accuracy of its outputs.

| check | class | what it finds |
|---|---|---|
| ``guards``, ``unwritten``, ``state``, ``leaks`` | memory | writes out of bounds, reads of memory \
that was never written, changes of the process's state, resource leaks |
| ``repeats`` | D1 | atomics that add up in any order; results right in the first call only |
| ``elsewhere`` | D2 | results that depend on addresses, or on other work of the device |
| ``streams`` | D2 | launches on a stream other than the current one without synchronisation |
| ``neighbours`` | D3 | results of a sequence that depend on the others of its batch |
| ``schedules`` | D4 | results that depend on tiles, splits or pages |
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from attncheck.core.errors import look_up
from attncheck.core.judgement import Judgement, Rule
from attncheck.core.outputs import Outputs
from attncheck.core.tensor_names import TensorName
from attncheck.inputs import input_tensors
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Case, Problem, Question
from attncheck.records.run_reports import Stage
from attncheck.relations import RELATIONS
from attncheck.subjects.capabilities.subject import Subject
from attncheck.verify.call_conditions import PLAIN_CALL, CallConditions, CallNotes
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.executor import Execution, Executor, Failure, Origin, lacked_memory
from attncheck.verify.further_calls import element_bytes
from attncheck.verify.judging import judge_outputs
from attncheck.verify.memory_patterns import junk
from attncheck.verify.relation_runs import check_relation

# Allowed numbers of calls; fewer (1 + 4, 16 or 64) if each needs inputs or a stream of its own.
_CALLS, _FEWER_CALLS = (8, 32, 128), (5, 17, 65)
_WINDOWS = (2, 8, 32)  # Allowed numbers of calls in a window in which leaks are counted.
_SETTINGS = 4  # Settings tried of one relation, spread from its smallest numbers to its largest.
_PAIRS = 3  # Pairs of calls compared within bounds if a kernel does not promise equal bits.
_NEIGHBOURS = ("alone_in_batch", "batch_permutation")
_SCHEDULES = ("launches", "pages", "prefill_rows")
# The patterns differ in every byte: a write that happens to equal one of them shows in the other.
_FILLS = CallConditions(fill="pattern"), CallConditions(fill="inverse")
_RULES: tuple[Rule, ...] = ("memory", "state", "leak")
_UNGUARDED = "no guard bands around {}: torch did not ask Python for that memory"
_UNPOISONED = "{} may have held anything before: torch did not ask Python for that memory"


class Unanswered(Exception):
    """Raised when a kernel gave no outputs to check."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(slots=True, kw_only=True)
class CheckedKernel:
    """A kernel and the Case that it is checked on."""

    subject: Subject
    case: Case
    device: str
    executor: Executor
    _inputs: Inputs | None = field(default=None, init=False)

    def run(self, under: CallConditions) -> Execution:
        """Return the result of a call ``under`` these conditions; raise Unanswered if it fails."""
        if self._inputs is None:
            self._inputs = input_tensors.draw_inputs(self.case.problem, self.device)
        result = self.executor.run(
            self.subject, self._inputs, origin=Origin(case=self.case), under=under
        )
        if isinstance(result, Failure):
            raise Unanswered(result)
        return result

    @property
    def calls(self) -> int:
        """The Case's number of calls."""
        return int(self.case.parameters["calls"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Check(Question):
    """A property that calls must have beside the accuracy of their outputs."""

    stage: Stage  # the stage of a gate that includes the check
    # Calls the kernel and returns the verdict; raises Unanswered.
    look: Callable[[CheckedKernel], Judgement]
    gpu: bool = False  # whether the check needs a GPU


def _distinct(*remarks: str) -> tuple[str, ...]:
    """Return the remarks that are not empty, without repetitions."""
    return tuple(dict.fromkeys(remark for remark in remarks if remark))


def _judge_notes(notes: list[CallNotes], warnings: tuple[str, ...] = ()) -> Judgement:
    """Return the verdict on the notes of some calls: the first fault fails."""
    warnings += _distinct(*(each.unchecked for each in notes), *(each.remark for each in notes))
    for each in notes:
        if each.wrong:
            rule: Rule = next((name for name in _RULES if name == each.rule), "memory")
            return Judgement(status="fail", rule=rule, reason=each.wrong, warnings=warnings)
    return Judgement(status="pass", warnings=warnings)


def _judge_guards(kernel: CheckedKernel) -> Judgement:
    notes = [kernel.run(under).notes for under in _FILLS]
    missing = (_UNGUARDED.format(each.unguarded) for each in notes if each.unguarded)
    return _judge_notes(notes, _distinct(*missing))


def _judge_unwritten(kernel: CheckedKernel) -> Judgement:
    plain, *filled = (kernel.run(under) for under in (PLAIN_CALL, *_FILLS))
    unknown = {n for each in filled for n in each.notes.unpoisoned.split(", ") if n}
    warnings = _distinct(_UNPOISONED.format(", ".join(sorted(unknown))) if unknown else "")
    names = list(plain.outputs.tensors())
    reason = next(filter(None, (_unwritten_elements(name, filled) for name in names)), "")
    if reason:
        return Judgement(status="fail", rule="memory", reason=reason, warnings=warnings)
    reason = next(filter(None, (_poisoned_elements(name, plain, filled) for name in names)), "")
    # Outputs that differ between equally filled calls are nondeterministic, not proof of poison.
    repeated = kernel.run(_FILLS[0]).outputs.tensors() if reason else {}
    first = filled[0].outputs.tensors()
    if any(bool((element_bytes(repeated[n]) != element_bytes(first[n])).any()) for n in repeated):
        reason = "two calls on the same inputs differ: whether it reads unwritten memory is unknown"
        return Judgement(status="inconclusive", rule="memory", reason=reason, warnings=warnings)
    if reason:
        return Judgement(status="fail", rule="memory", reason=reason, warnings=warnings)
    if unknown:
        return Judgement(status="inconclusive", rule="memory", reason=warnings[0])
    return Judgement(status="pass", warnings=warnings)


def _unwritten_elements(name: TensorName, filled: list[Execution]) -> str:
    """Describe the unwritten elements of an output: those that still hold both fills."""
    one, other = (element_bytes(each.outputs.tensors()[name]) for each in filled)
    # The patterns are inverse to each other; torch's CPU allocator can only fill junk and zeros.
    where = (one ^ other == 0xFF).all(-1) | junk(one) & (other == 0).all(-1)
    return f"left {_count(where, name, filled[0].outputs)} unwritten" if bool(where.any()) else ""


def _poisoned_elements(name: TensorName, plain: Execution, filled: list[Execution]) -> str:
    """Describe the elements of an output that change with the contents of unwritten memory."""
    unfilled = element_bytes(plain.outputs.tensors()[name])
    where = torch.zeros(len(unfilled), dtype=torch.bool, device=unfilled.device)
    for each in filled:
        where |= (element_bytes(each.outputs.tensors()[name]) != unfilled).any(-1)
    count = _count(where, name, plain.outputs) if bool(where.any()) else ""
    return f"reads poison: {count} depend on memory that nobody wrote" if count else ""


def _count(where: torch.Tensor, name: TensorName, outputs: Outputs) -> str:
    first = np.unravel_index(int(where.nonzero()[0, 0]), outputs.tensors()[name].shape)
    index = ", ".join(str(int(i)) for i in first)
    return f"{int(where.sum())} of {len(where)} elements of {name}, first [{index}],"


def _judge_repeats(kernel: CheckedKernel, under: CallConditions) -> Judgement:
    """Judge whether calls repeat the first's bits if promised, else whether they are in bounds."""
    backward = kernel.case.problem.backward
    if "repeat" not in kernel.subject.promises:
        if under.elsewhere or under.late:
            return _judge_within_bounds(kernel, under)
        return _judge_relations(kernel, [("repeat", {})] * _PAIRS)
    notes = kernel.run(under).notes
    if notes.wrong:
        return Judgement(status="fail", rule="memory", reason=notes.wrong)
    differing = notes.differing
    warnings: tuple[str, ...] = ()
    if backward and kernel.subject.promises_gradients:
        differing = max(differing, notes.gradients_differing)
    elif backward:
        warnings = ("does not promise the bits of gradients: out and LSE alone were compared",)
    return _judge_counts(differing, notes.further, notes.where, warnings)


def _judge_within_bounds(kernel: CheckedKernel, under: CallConditions) -> Judgement:
    """Judge whether each call's outputs are within bounds, for kernels that promise no bits."""
    evidence = EvidenceBuilder(Case(problem=kernel.case.problem), kernel.device)
    evidence.establish(reference_errors=False)
    wrong = []
    # Odd and even calls delay different streams: the last call, which is judged, covers both.
    for calls in (2, 3, 2) if under.late else (2,) * _PAIRS:
        execution = kernel.run(replace(under, calls=calls, last=True))
        judgement = judge_outputs(execution, evidence, brief=True)
        if judgement.status == "fail":
            wrong.append(judgement.reason)
    return _judge_counts(len(wrong), _PAIRS, wrong[0] if wrong else "")


def _judge_counts(
    differing: int, further: int, where: str, warnings: tuple[str, ...] = (), what: str = "calls"
) -> Judgement:
    """Return the verdict on ``differing`` of ``further`` calls: one that differs fails."""
    if differing:
        reason = f"nondeterministic {differing}/{further} {what}: {where}"
        return Judgement(status="fail", rule="determinism", reason=reason, warnings=warnings)
    # The rule of three: 0 of n bounds the true rate by 3/n at 95 % confidence.
    reason = f"0/{further} {what} differ: with 95 % confidence fewer than 3/{further} of all do"
    return Judgement(status="pass", reason=reason, warnings=warnings)


def _judge_relations(
    kernel: CheckedKernel, relations: Iterable[tuple[str, Mapping[str, int]]]
) -> Judgement:
    """Judge relations, each with its parameters; the reason counts those that do not hold."""
    compared = differing = 0
    where, inapplicable = "", []
    for name, numbers in relations:
        case = Case(problem=kernel.case.problem, question=name, parameters=numbers)
        finding = check_relation(kernel.subject, case, kernel.executor, device=kernel.device)
        if isinstance(finding, Failure):
            # A relation that does not apply to this kernel leaves the verdict to the others.
            if finding.kind not in {"refused", "unbounded"}:
                raise Unanswered(finding)
            inapplicable.append(f"{name}: {finding.message}")
            continue
        compared += 1
        if finding is not None:
            differing += 1
            with_numbers = ", ".join(f"{key}={value}" for key, value in numbers.items())
            place = f"{name}({with_numbers})" if numbers else name
            where = where or f"{place}: {finding.message}"
    if not compared:
        raise Unanswered(Failure(kind="refused", message="; ".join(_distinct(*inapplicable))))
    return _judge_counts(differing, compared, where, _distinct(*inapplicable), "pairs of calls")


def _settings(names: tuple[str, ...], problem: Problem) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Yield the relations that fit ``problem``, each with a few of its allowed parameters."""
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


def _by_relations(names: tuple[str, ...], *, name: str, summary: str) -> Check:
    """Return a check that judges relations, for Problems that fit at least one of them."""

    def unfit(problem: Problem) -> str | None:
        reasons = [RELATIONS[name].unfit(problem) for name in names]
        # One fitting relation is enough.
        return None if None in reasons else "; ".join(_distinct(*(r or "" for r in reasons)))

    return Check(
        name=name,
        summary=summary,
        stage="determinism",
        look=lambda kernel: _judge_relations(kernel, _settings(names, kernel.case.problem)),
        unfit=unfit,
    )


CHECKS: dict[str, Check] = {
    check.name: check
    for check in (
        Check(
            name="guards",
            summary="nothing is written before or after a tensor that the call reads or allocates",
            stage="memory",
            look=_judge_guards,
        ),
        Check(
            name="unwritten",
            summary="every element of the outputs is written, and none depends on memory nobody "
            "wrote",
            stage="memory",
            look=_judge_unwritten,
        ),
        Check(
            name="state",
            summary="a call leaves its process as it was: generators, flags, modes, directory, "
            "environment",
            stage="memory",
            look=lambda kernel: _judge_notes([kernel.run(CallConditions(state=True)).notes]),
        ),
        Check(
            name="leaks",
            summary="the process holds no more descriptors, threads, children or tensors after "
            "`calls` calls, three times over",
            stage="memory",
            look=lambda kernel: _judge_notes(
                [kernel.run(CallConditions(window=kernel.calls)).notes]
            ),
            allowed=lambda _: {"calls": _WINDOWS},
        ),
        Check(
            name="repeats",
            summary="`calls` calls on the same inputs give the same bits",
            stage="determinism",
            look=lambda kernel: _judge_repeats(kernel, CallConditions(calls=kernel.calls)),
            allowed=lambda _: {"calls": _CALLS},
        ),
        Check(
            name="elsewhere",
            summary="`calls` calls at other addresses, on a busy GPU or with other threads, give "
            "the same bits",
            stage="determinism",
            look=lambda kernel: _judge_repeats(
                kernel, CallConditions(calls=kernel.calls, elsewhere=True)
            ),
            allowed=lambda _: {"calls": _FEWER_CALLS},
        ),
        Check(
            name="streams",
            summary="`calls` calls on streams of their own, where inputs come late, give the same "
            "bits",
            stage="determinism",
            look=lambda kernel: _judge_repeats(
                kernel, CallConditions(calls=kernel.calls, late=True, fill="pattern")
            ),
            gpu=True,
            allowed=lambda _: {"calls": _FEWER_CALLS},
        ),
        # Bits are compared if the kernel promises them for batch or layout, else within bounds.
        _by_relations(
            _NEIGHBOURS,
            name="neighbours",
            summary="a sequence gives the same alone, in its batch, and at another place in it",
        ),
        _by_relations(
            _SCHEDULES,
            name="schedules",
            summary="other tiles, splits or pages, or the last rows alone, give the same",
        ),
    )
}


def check_named(name: str) -> Check:
    """Return the check called ``name``; raise UnknownName, which lists the valid names."""
    return look_up("check", name, CHECKS)


def judge_call(
    subject: Subject, case: Case, executor: Executor, *, device: str
) -> Judgement | Failure:
    """Judge calls of ``subject`` by the check that ``case`` names; no oracle is needed.

    A pass lists in its ``warnings`` what could not be checked, and for determinism gives in its
    ``reason`` the number of calls compared. A check that saw nothing is ``inconclusive``.

    Args:
        case: A Case whose question is a name in ``CHECKS``.

    Returns:
        A Failure if there are no outputs to check: ``refused`` for a check of streams on a CPU,
        and for a kernel that does not promise the property checked.

    Raises:
        UsageError: for a question that is no check, or that does not apply to the Problem.
    """
    check = check_named(case.question)
    check.check(case.problem, case.parameters)
    if check.gpu and device == "cpu":
        return Failure(kind="refused", message="a CPU has no streams")
    if refusal := executor.refusal(subject, case.problem, device):
        return refusal
    kernel = CheckedKernel(subject=subject, case=case, device=device, executor=executor)
    try:
        return check.look(kernel)
    except Unanswered as error:
        return error.failure
    except (RuntimeError, MemoryError) as error:
        # The kernel running out of memory gives a Failure: here the judge did.
        return lacked_memory(error, "the check")
