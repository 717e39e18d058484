"""Diagnose a failing kernel: call it again and rank what may be wrong."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

from msgspec import UNSET
from msgspec.structs import replace

from attncheck.core.errors import AttncheckError
from attncheck.diagnose.explanations import (
    NO_FIT,
    Findings,
    consistent_models,
    explain,
    float64_tensors,
    pair_count,
)
from attncheck.diagnose.out_of_bounds_reads import (
    changes_between_calls,
    misread_strides,
    out_of_bounds_reads,
)
from attncheck.fault_models import FAULT_MODELS
from attncheck.fault_models.fault_model import MOST_GRID_PLACES, SIGNS
from attncheck.inputs.problem import Case
from attncheck.judge.fault_explanation import combine_rankings, count_equals, keep_fitting
from attncheck.probes import PROBES
from attncheck.records.record import Diagnosis, Explanation
from attncheck.relations import RELATIONS
from attncheck.relations.same_numbers import STRIDED_TENSORS
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.executor import Execution, Failure, InProcess, Origin, out_of_memory
from attncheck.verify.memory_patterns import allocator_filled
from attncheck.verify.relation_runs import relation_inputs
from attncheck.verify.run_case import run_case

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from attncheck.capabilities.subject import Subject
    from attncheck.inputs.problem import Problem
    from attncheck.judge.fault_explanation import FaultExplanation
    from attncheck.records.record import Record
    from attncheck.verify.executor import Executor

__all__ = [
    "EXPLANATIONS_SHOWN",
    "LARGEST_DIAGNOSED",
    "Findings",
    "diagnose_failure",
    "diagnose_result",
    "explain_by_proof",
    "explain_by_signs",
    "explain_failure",
]


_OF_REPEATING = ("repeat", "repeats")
_OF_BATCHES = ("alone_in_batch", "batch_permutation", "neighbours")
_AGAIN = 2  # times that a question is asked again
_FAR = "strides_far"
_LAYOUTS = tuple(name for name in RELATIONS if name.startswith("strides_"))
# Of these both runs have the numbers of the plain call: where that is right, it is the layout.
_SAME_NUMBERS = ("strides_heads_last", "strides_gapped", "strides_packed", "strides_transposed")


def explain_by_signs(
    record: Record, subject: Subject, *, device: str, executor: Executor
) -> Explanation | None:
    """What the failure says of calls that differ; None where that is nothing.

    Args:
        record: Of status ``fail``, of numbers that were wrong.
        subject: The kernel, which is asked again.
        device: ``cpu`` or ``cuda``.
        executor: How to call it.
    """
    if record.status != "fail" or record.judgement is None:
        return None
    try:
        name = _sign(Case.from_json(record.case), subject, device, executor)
    except AttncheckError:  # asked of nothing that can be asked again
        return None
    return None if name is None else _told(name)


def explain_by_proof(  # what is asked, of whom, and what is known already
    record: Record,
    subject: Subject,
    *,
    device: str,
    executor: Executor,
    wrong: bool,
    explained: bool,
) -> Explanation | None:
    """What other layouts and surroundings prove of it; None where that is nothing.

    Args:
        record: As of ``by_signs``.
        subject: The kernel, which is asked again.
        device: ``cpu`` or ``cuda``.
        executor: How to call it.
        wrong: Whether a run of its question is beyond its bound, not only unlike another one.
        explained: Whether a fault model predicts the numbers it gives: only the layout is asked
            about then, and only where the question is of one.
    """
    if record.status != "fail" or record.judgement is None:
        return None
    try:
        case = Case.from_json(record.case)
        right = False
        if case.question in _LAYOUTS:
            right, names = misread_strides(case, subject, device, executor)
            if names:
                return _told("strides-not-taken", of=names)
        # What is read beside an input changes with its layout, too: it is asked about first.
        names = ""
        if not explained and case.question in (*RELATIONS, *PROBES, "compare"):
            names = out_of_bounds_reads(case, subject, device, executor)
        if right and wrong and not names:
            return _of_layout(case, subject, device, executor)
    except (*NO_FIT, MemoryError) as error:
        if not isinstance(error, AttncheckError) and not out_of_memory(error):
            raise
        return None
    return _told("reads-beside-an-input", of=names) if names else None


def _told(name: str, **parameters: str) -> Explanation:
    given: dict[str, int | float | str] = {key: value for key, value in parameters.items() if value}
    return Explanation(
        model=name, sentence=SIGNS[name], share=1.0, explains_all=True, parameters=given
    )


def _of_layout(case: Case, subject: Subject, device: str, executor: Executor) -> Explanation | None:
    """What a relation of layouts says that fails, where no input alone is wrong laid out near."""
    if case.question not in (_FAR, *_SAME_NUMBERS):
        return None
    # Far rows take gibibytes: once more is to do.
    again = run_case(subject, case, device=device, executor=executor, brief=True).status
    if again != "fail":
        return _told("not-the-same-again") if again == "pass" else None
    if case.question == _FAR:
        return _told("far-offsets-wrap", of=STRIDED_TENSORS[int(case.parameters["tensor"])])
    return _told("strides-not-taken", of="k" if case.question == "strides_transposed" else "")


def _passes(case: Case, subject: Subject, device: str, executor: Executor) -> bool:
    found = run_case(subject, case, device=device, executor=executor, brief=True)
    return found.status == "pass"


def _sign(case: Case, subject: Subject, device: str, executor: Executor) -> str | None:
    def passes(question: Case) -> bool:
        return _passes(question, subject, device, executor)

    asked = case.question
    if asked in _OF_REPEATING:
        return "not-the-same-again"
    if asked in _OF_BATCHES and passes(Case(problem=case.problem)):
        return None if passes(case) else "depends-on-the-batch"
    times = 1 if asked == _FAR else _AGAIN  # gibibytes each time
    if asked in (*RELATIONS, *PROBES, "compare") and (
        any(passes(case) for _ in range(times))
        or changes_between_calls(case, subject, device, executor)
    ):
        return "not-the-same-again"
    if asked in RELATIONS and (fewer := _that_fit(case.problem)) is not None:
        smaller = Case(problem=fewer, question=asked, parameters=case.parameters)
        return "grid-axis-exceeded" if passes(smaller) else None
    return None


def _that_fit(problem: Problem) -> Problem | None:
    """As many sequences as an axis of a grid has room for; None where all have."""
    if problem.batch * problem.heads <= MOST_GRID_PLACES or problem.heads > MOST_GRID_PLACES:
        return None
    return problem.replace(batch=MOST_GRID_PLACES // problem.heads)


LARGEST_DIAGNOSED = 2**22
"""Most (row, key) pairs of all heads that a problem has which is looked at."""
_MOST_HEADS = 2**12  # of all sequences: each is worked out by itself, over and over
EXPLANATIONS_SHOWN = 3
"""Explanations that a Record keeps."""

_TELLING = 0.5  # below this share a model explains less than it leaves
# Tell those apart that are alike on few: a ragged tile, whole ones, and one that is nearly full.
_MANY_KEYS = (150, 256, 124)
_ROWS = 40
_TWICE = 2
_CALLS = 4  # of what is right, where it was wrong once


def diagnose_failure(
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
    found = explain_failure(record, subject, device=device, executor=by)
    proven = functools.partial(explain_by_proof, record, subject, device=device, executor=by)
    if found is None or not any(one.share >= _TELLING for one in found.ranking):
        # First what is proven: what lies beside an input may be something else another time.
        said = proven(wrong=found is not None, explained=False) or explain_by_signs(
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
        ranking, problems = combine_rankings(before.ranking, found.ranking), 2
    for keys in _MANY_KEYS:
        tied = [one.name for one in ranking[: count_equals(ranking)]]
        if len(tied) > 1:
            case = Case.from_json(record.case)
            fits = _fits(case.problem, keys, subject, device, executor, tied)
            ranking, problems = keep_fitting(ranking, fits), problems + bool(fits)
    first = ranking[0] if ranking else None
    certain = first is not None and first.all and not first.loose and found.finite
    return _told_of_diagnosis(ranking, found, problems), certain


def _behind(proof: Explanation, told: Diagnosis) -> Diagnosis:
    """What is proven, and then what fault models say."""
    ranked = (proof, *told.ranked)[:EXPLANATIONS_SHOWN]
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
        evidence = EvidenceBuilder(case, device)
        evidence.establish(reference_errors=False)
        with allocator_filled("pattern"):
            result = executor.run(subject, evidence.inputs, origin=Origin(case=case, run=0))
        return (
            consistent_models(result, evidence, among) if isinstance(result, Execution) else set()
        )
    except (*NO_FIT, MemoryError) as error:  # among them: its mask is of so many keys and no more
        if not isinstance(error, AttncheckError) and not out_of_memory(error):
            raise
        return set()


def explain_failure(
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


def diagnose_result(result: Execution, evidence: EvidenceBuilder) -> Diagnosis | None:
    """What may be wrong with a result that is there; None where there is nothing to speak of.

    Args:
        result: What was given, and the arithmetic of it.
        evidence: What was asked.
    """
    if _too_large(evidence.case.problem):
        return None
    try:
        found = explain(result, evidence)
    except (*NO_FIT, MemoryError) as error:
        if not isinstance(error, AttncheckError) and not out_of_memory(error):
            raise
        return None
    return None if found is None else _told_of_diagnosis(found.ranking, found, 1)


def _too_large(problem: Problem) -> bool:
    return pair_count(problem) > LARGEST_DIAGNOSED or problem.batch * problem.heads > _MOST_HEADS


def _failing(case: Case, subject: Subject, device: str, executor: Executor) -> Iterator[Findings]:
    """Of each run that is wrong beside the exact result."""
    asked = [EvidenceBuilder(case, device)]
    if case.question in RELATIONS:
        asked = [
            EvidenceBuilder(Case(problem=one.problem), device, one)
            for one in relation_inputs(case, device)
        ]
    for number, evidence in enumerate(asked):
        if _too_large(evidence.case.problem):
            continue
        evidence.establish(reference_errors=False)
        origin = Origin(case=case, run=number)
        # Of several runs that must agree one is wrong: it is not asked how the others round.
        related = case.question in RELATIONS
        call = functools.partial(executor.run, subject, evidence.inputs, origin=origin)
        found = _of_calls(call, evidence, related=related)
        if found is not None:
            yield found


def _of_calls(
    call: Callable[[], Execution | Failure],
    evidence: EvidenceBuilder,
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
        found = explain(result, evidence, proven=True)
        each += [] if found is None else [found]
    if len(each) > 1:
        return dataclasses.replace(
            each[0],
            ranking=combine_rankings(*(one.ranking for one in each)),
            finite=all(one.finite for one in each),
        )
    if each or related or not given:
        return each[0] if each else None
    return explain(given[0], evidence)


def _differ(one: Execution, other: Execution) -> bool:
    before = float64_tensors(other.outputs)
    return any(
        not bool(((x == before[n]) | (x.isnan() & before[n].isnan())).all())
        for n, x in float64_tensors(one.outputs).items()
    )


def _told_of_diagnosis(
    ranking: list[FaultExplanation], found: Findings, problems: int
) -> Diagnosis:
    telling = [one for one in ranking if one.share >= _TELLING]
    return Diagnosis(
        ranked=tuple(_explanation(one) for one in telling[:EXPLANATIONS_SHOWN]),
        tied=count_equals(telling),
        tried=found.tried,
        problems=problems,
        tiles=UNSET if found.tiles is None else found.tiles,
    )


def _explanation(one: FaultExplanation) -> Explanation:
    return Explanation(
        model=one.name,
        sentence=FAULT_MODELS[one.name].sentence,
        share=one.share,
        explains_all=one.all,
        parameters=dict(one.parameters),
    )
