"""What may be wrong with a kernel that fails: its outputs beside what each fault model predicts."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

from msgspec import UNSET
from msgspec.structs import replace

from attncheck.errors import AttncheckError
from attncheck.examine.evidence import Evidence
from attncheck.examine.executor import Execution, Failure, InProcess, Origin, out_of_memory
from attncheck.examine.explaining import NO_FIT, Findings, consistent, explained, pairs, tensors_of
from attncheck.examine.poison import allocator_filled
from attncheck.examine.relate import runs
from attncheck.examine.signs import by_proof, by_signs
from attncheck.hypotheses import MODELS
from attncheck.judge.diagnosis_ranking import equals, joint, told_apart
from attncheck.probes import PROBES
from attncheck.problem import Case
from attncheck.record import Diagnosis, Explanation
from attncheck.relations import RELATIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from attncheck.examine.executor import Executor
    from attncheck.judge.diagnose import Explained
    from attncheck.problem import Problem
    from attncheck.record import Record
    from attncheck.subjects.contract import Subject

__all__ = ["LARGEST", "SHOWN", "Findings", "diagnosed", "diagnosis_of", "findings"]

LARGEST = 2**22
"""Most (row, key) pairs of all heads that a problem has which is looked at."""
_MOST_HEADS = 2**12  # of all sequences: each is worked out by itself, over and over
SHOWN = 3
"""Explanations that a Record keeps."""

_TELLING = 0.5  # below this share a model explains less than it leaves
# Tell those apart that are alike on few: a ragged tile, whole ones, and one that is nearly full.
_MANY_KEYS = (150, 256, 124)
_ROWS = 40
_TWICE = 2
_CALLS = 4  # of what is right, where it was wrong once


def diagnosed(
    record: Record,
    subject: Subject,
    *,
    device: str,
    executor: Executor | None = None,
    before: Findings | None = None,
) -> Record:
    """``record`` with what may be wrong, where a comparison, a probe or a relation has failed.

    The kernel is called again: Records hold no outputs. It is done for what a user is shown, not
    for each failure on the way to the smallest.

    Args:
        record: As judged.
        subject: The kernel.
        device: ``cpu`` or ``cuda``.
        executor: How to call it; in this process by default.
        before: What is known from another failure of it: a smaller problem alone fits more models.

    Never raises for what the kernel does.
    """
    by = executor or InProcess()
    found = findings(record, subject, device=device, executor=by)
    proven = functools.partial(by_proof, record, subject, device=device, executor=by)
    if found is None or not any(one.share >= _TELLING for one in found.ranking):
        # First what is proven: what lies beside an input may be something else another time.
        said = proven(wrong=found is not None, explained=False) or by_signs(
            record, subject, device=device, executor=by
        )
        if said is not None or found is None:
            alone = UNSET if said is None else Diagnosis(ranked=(said,), tied=1, tried=0)
            return replace(record, diagnosis=alone)
        return replace(record, diagnosis=_of_models(record, found, before, subject, device, by)[0])
    told, predicted = _of_models(record, found, before, subject, device, by)
    proof = proven(wrong=True, explained=predicted)
    return replace(record, diagnosis=told if proof is None else _behind(proof, told))


def _of_models(  # a failure, what is known of it, and who is asked
    record: Record,
    found: Findings,
    before: Findings | None,
    subject: Subject,
    device: str,
    executor: Executor,
) -> tuple[Diagnosis, bool]:
    """What fault models say of a failure, and whether one predicts the numbers that were given.

    Of NaN and infinities, and of rows that are left to chance, others may say the same.
    """
    ranking, problems = found.ranking, 1
    if before is not None and before.ranking:
        ranking, problems = joint(before.ranking, found.ranking), 2
    for keys in _MANY_KEYS:
        tied = [one.name for one in ranking[: equals(ranking)]]
        if len(tied) > 1:
            case = Case.from_json(record.case)
            fits = _fits(case.problem, keys, subject, device, executor, tied)
            ranking, problems = told_apart(ranking, fits), problems + bool(fits)
    first = ranking[0] if ranking else None
    certain = first is not None and first.all and not first.loose and found.finite
    return _told(ranking, found, problems), certain


def _behind(proof: Explanation, told: Diagnosis) -> Diagnosis:
    """What is proven, and then what fault models say."""
    ranked = (proof, *told.ranked)[:SHOWN]
    return replace(told, ranked=ranked, tied=1, tried=0)


def _fits(  # who is asked, on what, how
    problem: Problem,
    keys: int,
    subject: Subject,
    device: str,
    executor: Executor,
    among: Collection[str],
) -> set[str]:
    """Which of some models fit what it gives on a larger problem, be that right or wrong.

    Empty where the problem is as large, there is none of so many keys, or it does not take it.
    """
    if problem.kv >= keys:
        return set()
    try:
        case = Case(problem=problem.replace(query=max(problem.query, _ROWS), kv=keys))
        if executor.refusal(subject, case.problem, device) is not None:
            return set()
        evidence = Evidence(case, device)
        evidence.establish(yardsticks=False)
        with allocator_filled("pattern"):
            result = executor.run(subject, evidence.inputs, origin=Origin(case=case, run=0))
        return consistent(result, evidence, among) if isinstance(result, Execution) else set()
    except (*NO_FIT, MemoryError) as error:  # among them: its mask is of so many keys and no more
        if not isinstance(error, AttncheckError) and not out_of_memory(error):
            raise
        return set()


def findings(
    record: Record, subject: Subject, *, device: str, executor: Executor | None = None
) -> Findings | None:
    """What fault models say of a failure; None where there is none that they could speak of.

    Arguments as of ``diagnosed``.
    """
    asked = record.case.get("question")
    if record.status != "fail" or not (asked in RELATIONS or asked in PROBES or asked == "compare"):
        return None
    case = Case.from_json(record.case)
    try:
        for found in _failing(case, subject, device, executor or InProcess()):
            return found
    except (*NO_FIT, MemoryError) as error:
        if not isinstance(error, AttncheckError) and not out_of_memory(error):
            raise
    return None


def diagnosis_of(result: Execution, evidence: Evidence) -> Diagnosis | None:
    """What may be wrong with a result that is there; None where there is nothing to speak of.

    Args:
        result: What was given, and the arithmetic of it.
        evidence: What was asked.
    """
    if _too_large(evidence.case.problem):
        return None
    try:
        found = explained(result, evidence)
    except (*NO_FIT, MemoryError) as error:
        if not isinstance(error, AttncheckError) and not out_of_memory(error):
            raise
        return None
    return None if found is None else _told(found.ranking, found, 1)


def _too_large(problem: Problem) -> bool:
    return pairs(problem) > LARGEST or problem.batch * problem.heads > _MOST_HEADS


def _failing(case: Case, subject: Subject, device: str, executor: Executor) -> Iterator[Findings]:
    """Of each run that is wrong beside the exact result."""
    asked = [Evidence(case, device)]
    if case.question in RELATIONS:
        asked = [Evidence(Case(problem=one.problem), device, one) for one in runs(case, device)]
    for number, evidence in enumerate(asked):
        if _too_large(evidence.case.problem):
            continue
        evidence.establish(yardsticks=False)
        origin = Origin(case=case, run=number)
        # Of several runs that must agree one is wrong: it is not asked how the others round.
        related = case.question in RELATIONS
        call = functools.partial(executor.run, subject, evidence.inputs, origin=origin)
        found = _of_calls(call, evidence, related=related)
        if found is not None:
            yield found


def _of_calls(
    call: Callable[[], Execution | Failure],
    evidence: Evidence,
    *,
    related: bool,
) -> Findings | None:
    """What explains a call that is wrong; of two that gave different things, what explains both.

    Memory holds something else each time: what is never written looks like it. A kernel that is
    wrong now and then is called until it is.
    """
    each: list[Findings] = []
    given: list[Execution] = []
    for number in range(_TWICE if related else _CALLS):
        if number >= _TWICE and each:
            break
        with allocator_filled("inverse" if number % 2 else "pattern"):
            result = call()
        if not isinstance(result, Execution) or (given and not _differ(result, given[-1])):
            continue
        given.append(result)
        found = explained(result, evidence, proven=True)
        each += [] if found is None else [found]
    if len(each) > 1:
        return dataclasses.replace(
            each[0],
            ranking=joint(*(one.ranking for one in each)),
            finite=all(one.finite for one in each),
        )
    if each or related or not given:
        return each[0] if each else None
    return explained(given[0], evidence)


def _differ(one: Execution, other: Execution) -> bool:
    before = tensors_of(other.outputs)
    return any(
        not bool(((x == before[n]) | (x.isnan() & before[n].isnan())).all())
        for n, x in tensors_of(one.outputs).items()
    )


def _told(ranking: list[Explained], found: Findings, problems: int) -> Diagnosis:
    telling = [one for one in ranking if one.share >= _TELLING]
    return Diagnosis(
        ranked=tuple(_explanation(one) for one in telling[:SHOWN]),
        tied=equals(telling),
        tried=found.tried,
        problems=problems,
        tiles=UNSET if found.tiles is None else found.tiles,
    )


def _explanation(one: Explained) -> Explanation:
    return Explanation(
        model=one.name,
        sentence=MODELS[one.name].sentence,
        share=one.share,
        explains_all=one.all,
        parameters=dict(one.parameters),
    )
