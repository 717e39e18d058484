"""The calls that a relation asks for, and whether it holds of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from attncheck import oracles, probes
from attncheck.core import strided_alloc
from attncheck.core.errors import UsageError
from attncheck.core.judgement import Judgement, Place, Worst
from attncheck.inputs import input_tensors as inputs_room
from attncheck.inputs.problem import Case
from attncheck.judge.verdict_rules import tile
from attncheck.relations import RELATIONS, relation_named
from attncheck.verify.allowances import deterministic_bounds, gradient_allowance
from attncheck.verify.evidence import Evidence
from attncheck.verify.executor import Execution, Executor, Failure, InProcess, Origin, failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.capabilities.subject import Subject
    from attncheck.core.outputs import Outputs, TensorName
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.relations import Relation
    from attncheck.relations.relation import Finding

__all__ = ["check_relation", "draw_case_inputs", "judge_relation", "relation_inputs"]


_UNBOUNDED = "no element of {} has a finite bound: nothing can be said of it"
_OF_KEYS = ("dk", "dv", "dsink", "dcaptured")


def relation_inputs(case: Case, device: str) -> tuple[Inputs, ...]:
    """The inputs of each run that the Case's relation asks for, in order.

    Raises:
        UsageError: for a question that is no relation, or that cannot be asked of the Problem.
    """
    relation = relation_named(case.question)
    relation.check(case.problem, case.parameters)
    return relation.runs(inputs_room.draw_inputs(case.problem, device), case.parameters)


def judge_relation(
    subject: Subject, case: Case, executor: Executor, *, device: str
) -> Judgement | Failure:
    """Judge whether the Case's relation holds between what ``subject`` gives on its runs.

    ``pass`` where it holds, ``fail`` by the rule ``relation`` where it does not, ``inconclusive``
    where any output would be within the bounds. Bits are compared where the kernel promises them;
    else the runs may be as far apart as the judge's bounds of each allow.

    Args:
        subject: The kernel.
        case: A Case whose question is a name in ``relations.RELATIONS``.
        executor: How to call the kernel.
        device: ``cpu`` or ``cuda``.

    Returns:
        A Failure where there are no outputs; ``refused`` for a kernel that does not take the
        Problem of a run, does not promise what the relation is about, or has no other launches
        where it compares those.

    Raises:
        UsageError: as ``relation_inputs``.
    """
    found = check_relation(subject, case, executor, device=device)
    if relation_named(case.question).spacious:
        strided_alloc.release_cached_memory(device)
    if isinstance(found, Failure) and found.kind == "unbounded":
        return Judgement(status="inconclusive", rule="relation", reason=found.message)
    if isinstance(found, Failure):
        return found
    return _judgement(found, _last(subject, case, executor, device), case, device)


def check_relation(
    subject: Subject,
    case: Case,
    executor: Executor | None = None,
    *,
    device: str = "cpu",
) -> Finding | Failure | None:
    """What is wrong with what ``subject`` gives; arguments as of ``related``.

    Where bits are compared, those of dcaptured are not: kernels add it up in whatever order. It is
    compared within bounds then, in a second turn.

    Returns:
        None where the relation holds. A Failure, which is not None, where there are no outputs, or
        (kind ``unbounded``) where any output would be within the bounds.
    """
    relation = relation_named(case.question)
    unpromised = _unpromised(relation, subject)
    if unpromised:
        return Failure(kind="refused", message=unpromised)
    answers = _answers(subject, case, executor or InProcess(), device)
    if isinstance(answers, Failure):
        return answers
    asked_runs, done = answers
    if relation.needs_lse and any(each.outputs.lse is None for each in done):
        return Failure(kind="refused", message="gives no LSE")
    exact = _exact(relation, subject, asked_runs)
    outputs = [each.outputs for each in done]
    if exact:
        of_bits = [dataclasses.replace(each, dcaptured=None) for each in outputs]
        found = relation.holds(asked_runs, of_bits, case.parameters, None)
        if found or not case.problem.dcaptured:
            return found
    # Of what poison does to the last run no bound speaks: it may be off by what the first may.
    bounded = 1 if relation.only_promised else len(done)
    errors = _errors(asked_runs[:bounded], done[:bounded], device)
    found = relation.holds(asked_runs, outputs, case.parameters, errors)
    unknown = [name for each in errors for name in _unbounded(each)]
    if exact:  # of all others every bit was compared
        unknown = [name for name in unknown if name == "dcaptured"]
    if found is None and unknown:
        return Failure(kind="unbounded", message=_UNBOUNDED.format(unknown[0]))
    return found


def _answers(
    subject: Subject, case: Case, executor: Executor, device: str
) -> tuple[tuple[Inputs, ...], list[Execution]] | Failure:
    """The inputs of every run, and what came of them."""
    spacious = relation_named(case.question).spacious
    try:
        asked_runs = relation_inputs(case, device)
    except (MemoryError, torch.OutOfMemoryError) as error:
        if not spacious:
            raise
        return _too_small(failure(error))
    done = _done(subject, case, asked_runs, executor, device)
    if isinstance(done, Failure):
        return _too_small(done) if spacious and done.kind == "oom" else done
    return asked_runs, done


def _too_small(lacking: Failure) -> Failure:
    """What the question takes, not the kernel, is more memory than there is."""
    return Failure(kind="refused", message=f"this machine is too small for it: {lacking.message}")


def _done(
    subject: Subject, case: Case, asked_runs: Sequence[Inputs], executor: Executor, device: str
) -> list[Execution] | Failure:
    """Every run. The kernel is asked for its launches only where it takes the Problem."""
    refused = _refused((subject,) * len(asked_runs), asked_runs, executor)
    if refused is not None:
        return refused
    subjects = _subjects(subject, case, executor, device, len(asked_runs))
    if isinstance(subjects, Failure):
        return subjects
    return _executed(subjects, case, asked_runs, executor)


def _unpromised(relation: Relation, subject: Subject) -> str:
    """Why the relation is not asked of this kernel; empty where it is."""
    if relation.only_promised and relation.promise not in subject.promises:
        return f"does not promise {relation.promise!r}"
    return ""


def _unbounded(allowed: Outputs) -> list[TensorName]:
    """Tensors of which no element has a finite bound; LSE aside, which goes with out."""
    given = allowed.tensors().items()
    return [name for name, one in given if name != "lse" and not bool(one.isfinite().any())]


def _exact(relation: Relation, subject: Subject, asked_runs: Sequence[Inputs]) -> bool:
    """Whether bits are compared."""
    if any(run.problem.backward for run in asked_runs) and not subject.promises_gradients:
        return False
    repeats = len(asked_runs) == 1 or "repeat" in subject.promises
    return repeats and (not relation.promise or relation.promise in subject.promises)


def _subjects(
    subject: Subject, case: Case, executor: Executor, device: str, count: int
) -> tuple[Subject, ...] | Failure:
    """Who makes each run: the kernel, and of some relations at last another launch of it."""
    if not relation_named(case.question).relaunched:
        return (subject,) * count
    found = executor.launches(subject, case.problem, device)
    if isinstance(found, Failure):
        said = f"asked for its launches it raised {found.message}"
        return dataclasses.replace(found, message=said) if found.kind == "error" else found
    others = list(found.values())
    if not others:
        return Failure(kind="refused", message="has no launch but its own")
    return (*(subject,) * (count - 1), others[int(case.parameters["launch"]) % len(others)])


def _last(subject: Subject, case: Case, executor: Executor, device: str) -> Subject:
    """Who made the last run, which a Finding is about."""
    subjects = _subjects(subject, case, executor, device, 1)
    return subject if isinstance(subjects, Failure) else subjects[-1]


def _refused(
    subjects: Sequence[Subject], asked_runs: Sequence[Inputs], executor: Executor
) -> Failure | None:
    """Why a run is not taken by the kernel that makes it; None where all are."""
    for subject, inputs in zip(subjects, asked_runs, strict=True):
        refusal = executor.refusal(subject, inputs.problem, inputs.device.type)
        if isinstance(refusal, str):
            return Failure(kind="refused", message=refusal)
        if refusal is not None:
            return refusal
    return None


def _executed(
    subjects: Sequence[Subject], case: Case, asked_runs: Sequence[Inputs], executor: Executor
) -> list[Execution] | Failure:
    refused = _refused(subjects, asked_runs, executor)
    if refused is not None:
        return refused
    done = []
    for run, (subject, inputs) in enumerate(zip(subjects, asked_runs, strict=True)):
        result = executor.run(subject, inputs, origin=Origin(case=case, run=run))
        if isinstance(result, Failure):
            return result
        done.append(result)
    return done


def _errors(asked_runs: Sequence[Inputs], done: Sequence[Execution], device: str) -> list[Outputs]:
    """How far each run may be from the exact result, by the judge's deterministic bound."""
    allowed = []
    for inputs, result in zip(asked_runs, done, strict=True):
        evidence = Evidence(
            case=Case(problem=inputs.problem),
            device=device,
            inputs=inputs,
            truth=oracles.truth(inputs),
        )
        bounds = deterministic_bounds(evidence, result.arithmetic)
        if inputs.problem.backward:
            found = gradient_allowance(evidence, result.arithmetic, result.outputs)
            bounds = dataclasses.replace(bounds, **found.bounds)
        allowed.append(bounds)
    return allowed


def _judgement(found: Finding | None, subject: Subject, case: Case, device: str) -> Judgement:
    if found is None:
        return Judgement(status="pass")
    tiling = subject.tiling(case.problem, device)
    tiles = (tiling.block_query, tiling.block_kv) if tiling else None
    at = Place.of(found.place)
    return Judgement(
        status="fail",
        rule="relation",
        reason=found.message,
        worst=Worst(
            tensor=found.tensor,
            at=at,
            tile=tile(at, tiles, case.problem.query) if found.tensor not in _OF_KEYS else "",
            got=found.value,
            exact=found.expected,
            allowance=found.allowed,
            budget={},
        ),
        wrong=found.count,
        compared=found.compared,
    )


def draw_case_inputs(origin: Origin, device: str) -> Inputs:
    """The same bits as those that ``origin`` was said of, in whatever process.

    Raises:
        UsageError: for a question that cannot be asked of its Problem, or a run that it has not.
    """
    case = origin.case
    if case.question in RELATIONS:
        each = relation_inputs(case, device)
        if not 0 <= origin.run < len(each):
            raise UsageError(f"{case.question} has no run {origin.run}.")
        return each[origin.run]
    if case.question in probes.PROBES:
        return probes.inputs(case, device)
    return inputs_room.draw_inputs(case.problem, device)
