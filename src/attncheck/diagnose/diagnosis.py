"""Diagnose a failing kernel: call it again and rank the faults that may cause the failure.

Fault models predict the numbers of a call (``explanations``). No model predicts results that change
from call to call, or with a tensor's layout or surroundings: further calls show these signs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from msgspec import UNSET
from msgspec.structs import replace

from attncheck.core.errors import AttncheckError
from attncheck.core.outputs import same_numbers
from attncheck.diagnose.confirmation import confirm, contradicted_models
from attncheck.diagnose.explanations import (
    Findings,
    explain,
    float64_tensors,
    pair_count,
)
from attncheck.diagnose.failing_kernel import FailingKernel, is_too_large, skip_unfit
from attncheck.diagnose.observation import is_finite, nan_everywhere, observe
from attncheck.diagnose.out_of_bounds_reads import (
    changes_between_calls,
    misread_strides,
    out_of_bounds_reads,
    unwritten_memory,
)
from attncheck.fault_models import FAULT_MODELS
from attncheck.fault_models.fault_model import FAMILIES, MOST_GRID_PLACES, SIGNS
from attncheck.inputs.problem import Case, Problem
from attncheck.judge.fault_explanation import combine_rankings, count_ties, words_of
from attncheck.probes import PROBES
from attncheck.records.failure_causes import certain_explanations, symptom
from attncheck.records.problem_summary import problem_of
from attncheck.records.record import FAILED_STATUSES, Diagnosis, Explanation, Record
from attncheck.relations import RELATIONS
from attncheck.relations.same_numbers import STRIDED_TENSORS
from attncheck.verify.executor import Execution, Executor, Failure, InProcess, Origin
from attncheck.verify.kernel_hosts import end_process_of, executor_of
from attncheck.verify.memory_patterns import allocator_filled

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from attncheck.judge.fault_explanation import FaultExplanation
    from attncheck.subjects.capabilities.subject import Subject
    from attncheck.verify.evidence_builder import EvidenceBuilder

EXPLANATIONS_SHOWN = 3
"""Explanations that a Record keeps; more where several explain the whole error equally well."""
_MOST_EQUALS = 12  # equally good explanations that are kept, to recognise failures of one cause

_LIKELY = 0.05  # share from which a model is checked where no number is beyond its bound
_TELLING = 0.5  # A model that explains a smaller share leaves more than it explains.
_FITTED = 2  # order of models with a fitted number: they describe a family, not one mistake
_MOST_PASSED, _SMALL = 24, 2**15  # most passed questions kept, and most (row, key) pairs of each
_FILLS = 2  # calls with different contents of free memory: one for each way to fill it
_CALLS = 4  # most calls to see a failure again that does not happen in every call

_MOST_PROCESSES = 20  # most new processes in which questions are asked again
_MOST_BEFORE = 3  # most earlier questions of which each is asked first in a new process

_REPEATING = ("repeat", "repeats")
_BATCHES = ("alone_in_batch", "batch_permutation", "neighbours")
_REPEATS = 2  # times that a question is repeated
_FAR = "strides_far"
_LAYOUTS = tuple(name for name in RELATIONS if name.startswith("strides_"))
# Both runs of these have the plain call's numbers: if it is right, only the layout is at fault.
_SAME_NUMBERS = ("strides_heads_last", "strides_gapped", "strides_packed", "strides_transposed")
_ALONE = "strides_alone"
# Questions whose runs can each be compared with the exact result.
_WITH_RUNS = frozenset({*RELATIONS, *PROBES, "compare"})
# Signs that one pair of calls suffices for, once many calls have proven them for another failure.
_SHOWN_AGAIN = {
    "free-memory-read": unwritten_memory,
    "reads-beside-an-input": out_of_bounds_reads,
}


def diagnose_failure(
    record: Record,
    subject: Subject,
    *,
    device: str,
    executor: Executor | None = None,
    before: Findings | None = None,
    passed: Sequence[Case] = (),
) -> Record:
    """Return ``record`` with its diagnosis, if a comparison, probe or relation has failed.

    The kernel is called again, since Records hold no outputs. Meant for failures shown to a user,
    not for each one on the way to the smallest. Never raises for what the kernel does.

    Args:
        executor: How to call the kernel; in this process by default.
        before: Findings on another failure of the kernel: one small problem fits more models.
        passed: Cases that the kernel passed in the same run: models that predict a failure there
            are ruled out.
    """
    failure = _Failure(record, subject, device, executor or executor_of(subject))
    findings = failure.findings()
    diagnosis = None if findings is None else failure.by_models(findings, before, passed)
    named = diagnosis is not None and diagnosis.level == "named"
    # A proof outranks models, which only fit the numbers. Several models may fit NaN and
    # infinities, or leave the same rows open.
    certain = named and findings is not None and findings.finite and not findings.ranking[0].loose
    proof = failure.proof(wrong=findings is not None, explained=certain)
    if proof is None and not named and findings is not None and findings.varies:
        proof = failure.unwritten_memory_sign()
    if proof is None and (diagnosis is None or diagnosis.level == "unknown"):
        proof = failure.sign()
    if proof is not None:
        models = diagnosis.ranked if named and diagnosis is not None else ()
        tiles = UNSET if diagnosis is None else diagnosis.tiles
        ranked = (proof, *models)[:EXPLANATIONS_SHOWN]
        diagnosis = Diagnosis(ranked=ranked, tied=1, tried=0, tiles=tiles)
    elif diagnosis is not None and findings is not None and not named:
        diagnosis = failure.observed(diagnosis, findings)
    return replace(record, diagnosis=UNSET if diagnosis is None else diagnosis)


def certain_causes(record: Record) -> list[str]:
    """Return the fault models, or the sign, that certainly explain a failure, the best first."""
    names = (one.model for one in certain_explanations(record))
    return [name for name in names if name in FAULT_MODELS or name in _SHOWN_AGAIN]


def explain_failure(
    record: Record,
    subject: Subject,
    *,
    device: str,
    executor: Executor | None = None,
    among: Collection[str] = FAULT_MODELS,
) -> Findings | None:
    """Return the fault models' findings on a failure; None where there is none to explain.

    Arguments are those of ``diagnose_failure``; ``among`` are the models to try.
    """
    return _Failure(record, subject, device, executor or executor_of(subject)).findings(among)


class CauseSearch:
    """The search for causes of one kernel's failures, many of which share a few causes.

    Causes found earlier are tried on a failure first, which takes as long as one question. If they
    do not explain it, and it is a new kind of failure, all models are tried.

    Args:
        most: Number of failures on which all models are tried.
    """

    def __init__(self, most: int = 24) -> None:
        self._remaining = most
        self._processes = _MOST_PROCESSES
        self._passed: deque[Case] = deque(maxlen=_MOST_PASSED)
        self._answered: list[Record] = []  # Records of all questions that were answered, in order
        self._causes: dict[str, None] = {}
        self._closed: set[tuple[object, ...]] = set()

    def note(self, record: Record) -> None:
        """Remember a question of the run, which may have left what a later one fails by.

        If it passed, models that predict its failure are ruled out.
        """
        self._answered += [record] if record.judgement is not None else []
        problem = Case.from_json(record.case).problem if record.status == "pass" else None
        plain = record.case.get("question") in {"compare", *PROBES}
        if plain and problem is not None and pair_count(problem) <= _SMALL:
            self._passed.append(Case.from_json(record.case))

    def diagnose(
        self, record: Record, subject: Subject, *, device: str, executor: Executor | None = None
    ) -> Record:
        """Return ``record``, of a failure, with its diagnosis; as it is if its kind is closed."""
        diagnosis = explained_by(record, self._causes, subject, device=device, executor=executor)
        if diagnosis is not None:
            return replace(record, diagnosis=diagnosis)
        # A hundred unexplained failures of one kind say no more than the first, and proving a sign
        # takes many calls, some of which need gibibytes.
        problem = record.case["problem"]
        kind = (*symptom(record), *map(record.case.get, ("question",)))
        kind += tuple(map(problem.get, ("backward", "dtype")))
        if kind in self._closed or not self._remaining:
            return record
        self._remaining -= 1
        record = diagnose_failure(
            record, subject, device=device, executor=executor, passed=tuple(self._passed)
        )
        causes = certain_causes(record)
        self._causes |= dict.fromkeys(causes)
        if not causes:
            self._closed.add(kind)
        return record

    def diagnose_all(
        self, records: Sequence[Record], subject: Subject, *, device: str, first: Record
    ) -> tuple[Record, ...]:
        """Return ``records``, of one run, with a diagnosis of each failure.

        ``first``, one of them, is diagnosed first. Causes that are found late are tried on the
        earlier failures, too.
        """
        results = [*records]
        cause_counts: dict[int, int] = {}  # number of causes known after each failure's diagnosis
        pairs = enumerate(records)
        failed = [i for i, one in pairs if one is first or one.status in FAILED_STATUSES]
        failed.sort(key=lambda i: records[i] is not first)
        for i in failed:
            results[i] = self.diagnose(records[i], subject, device=device)
            cause_counts[i] = len(self._causes)
        for i in failed:
            later = [*self._causes][cause_counts[i] :]
            if later and not certain_explanations(results[i]):
                late = explained_by(records[i], later, subject, device=device)
                results[i] = replace(results[i], diagnosis=late) if late is not None else results[i]
        # Last, since it ends the kernel's process. Where results change from call to call, a
        # question may pass by chance.
        unexplained = [i for i in failed if not certain_explanations(results[i])]
        signs = {one.model for record in results for one in certain_explanations(record)}
        for i in unexplained if "not-the-same-again" not in signs else ():
            failure = _Failure(records[i], subject, device, executor_of(subject))
            sign = self._after_earlier_calls(failure)
            results[i] = results[i] if sign is None else replace(results[i], diagnosis=sign)
        return tuple(results)

    def _after_earlier_calls(self, failure: _Failure) -> Diagnosis | None:
        """Return the sign that earlier calls cause an unexplained failure; None if they do not.

        They do if its question passes in a new process, and fails there after an earlier one, or
        else passes in one more. What a kernel keeps is mostly kept by the sizes of its inputs:
        earlier questions of the same sizes are tried.
        """
        in_process = isinstance(failure.executor, InProcess)
        if in_process or self._processes <= 0 or not failure.is_of_numbers:
            return None
        is_first = self._processes == _MOST_PROCESSES
        if is_first and failure.status(failure.case) != "fail":
            self._processes = 0
        if self._status_in_new_process(failure, failure.case) != "pass":
            self._processes = 0  # the others will hardly be of another kind
            return None
        alike = self._alike(failure.record)
        after = next((one.variant for one in alike if self._fails_after(failure, one)), "")
        if not after and self._status_in_new_process(failure, failure.case) != "pass":
            return None
        sign = _sign("depends-on-earlier-calls")
        return Diagnosis(ranked=(sign,), tied=1, tried=0, after=after)

    def _alike(self, record: Record) -> list[Record]:
        """Return answers before ``record`` to questions of the same sizes, the latest first."""

        def sizes(one: Record) -> tuple[int, int, int]:
            problem = problem_of(one)
            return problem.batch, problem.query, problem.kv

        before = itertools.takewhile(lambda one: one.variant != record.variant, self._answered)
        alike = [one for one in before if sizes(one) == sizes(record)]
        return alike[: -_MOST_BEFORE - 1 : -1]

    def _fails_after(self, failure: _Failure, earlier: Record) -> bool:
        first = Case.from_json(earlier.case)
        return self._status_in_new_process(failure, first, failure.case) == "fail"

    def _status_in_new_process(self, failure: _Failure, *cases: Case) -> str:
        """Return the status of the last case, asked after the others in a new process.

        It is empty where the kernel has no process of its own, or where too many were used up.
        """
        if self._processes <= 0 or not end_process_of(failure.subject):
            return ""
        self._processes -= 1
        try:
            return [failure.status(case) for case in cases][-1]
        except AttncheckError:  # the new process does not start, or the question cannot be repeated
            return ""


def explained_by(
    record: Record,
    causes: Collection[str],
    subject: Subject,
    *,
    device: str,
    executor: Executor | None = None,
) -> Diagnosis | None:
    """Return the diagnosis by those of ``causes`` that explain a failure wholly; None if none.

    Arguments are those of ``diagnose_failure``; ``causes`` are models and signs of other failures.
    """
    if not causes or record.status != "fail" or record.case.get("question") == _FAR:
        return None
    failure = _Failure(record, subject, device, executor or executor_of(subject))
    models = [name for name in causes if name in FAULT_MODELS]
    findings = failure.findings(models) if models else None
    # A model that leaves rows free fits whatever they hold: the full search comes first.
    if findings is not None and count_ties(findings.ranking) and not findings.ranking[0].loose:
        return _as_diagnosis(findings.ranking, findings, Case.from_json(record.case).problem)
    sign = failure.repeated_sign([name for name in causes if name in _SHOWN_AGAIN])
    return None if sign is None else Diagnosis(ranked=(sign,), tied=1, tried=0)


def diagnose_result(result: Execution, evidence: EvidenceBuilder) -> Diagnosis | None:
    """Return the diagnosis of a result by its numbers alone; None where there are no findings."""
    findings = None
    if not is_too_large(evidence.case.problem):
        with skip_unfit():
            findings = explain(result, evidence)
    if findings is None:
        return None
    # Without a kernel to call again, no model can be confirmed.
    diagnosis = _as_diagnosis(findings.ranking, findings, evidence.case.problem)
    if findings.response is not None and (fact := nan_everywhere(findings.response)):
        return replace(diagnosis, level="unknown", ranked=(), tied=0, facts=(fact,))
    return diagnosis if diagnosis.tied else replace(diagnosis, level="unknown")


@dataclass(frozen=True, slots=True)
class _Failure(FailingKernel):
    """A failing kernel, with what explains its failure."""

    @property
    def is_of_numbers(self) -> bool:
        """Return whether the kernel gave outputs that are wrong, not something of another form."""
        judgement = self.record.judgement
        return (
            self.record.status == "fail"
            and judgement is not None
            and (judgement.rule != "contract")
        )

    @skip_unfit()
    def findings(self, among: Collection[str] = FAULT_MODELS) -> Findings | None:
        """Return the findings of fault models; None where no run of the Case can be explained."""
        if self.record.status != "fail" or self.record.case.get("question") not in _WITH_RUNS:
            return None
        return next(self._wrong_runs(self.case, among), None)

    def _wrong_runs(self, case: Case, among: Collection[str]) -> Iterator[Findings]:
        """Yield the findings on each run of a question that is wrong against the exact result."""
        for number, evidence in self.runs(case):
            origin = Origin(case=case, run=number)
            call = partial(self.executor.run, self.subject, evidence.inputs, origin=origin)
            # In a relation one run is wrong; errors within bounds of the others are not explained.
            explain_result = partial(explain, evidence=evidence, among=among)
            related = case.question in RELATIONS
            most = _FILLS if related else _CALLS
            # A result that varies from call to call hardly fits a model from another failure.
            most = most if among is FAULT_MODELS else 1
            findings = _explain_calls(call, explain_result, most=most, related=related)
            if findings is not None:
                yield findings

    def by_models(
        self, findings: Findings, before: Findings | None, passed: Sequence[Case]
    ) -> Diagnosis:
        """Return the diagnosis by fault models: a confirmed one, the family of several, or unknown.

        Models that other problems refute are left out.
        """
        ranking, problems = findings.ranking, 1
        if before is not None and before.ranking:
            # Take the shares of the problem that is shown, where no model explains both.
            shares = {one.name: one.share for one in ranking}
            ranking = [
                dataclasses.replace(one, share=shares[one.name]) if one.all else one
                for one in combine_rankings(ranking, before.ranking)
            ]
            problems += bool({one.name for one in ranking} & {one.name for one in before.ranking})
        case = self.case
        equals = ranking[: count_ties(ranking)]
        # Where only the mean is too far off and no number is beyond its bound, try other problems.
        if findings.response is not None and not findings.response.error.proven:
            likely = [one for one in ranking if one.share >= _LIKELY and not one.loose]
            equals = [dataclasses.replace(one, all=True) for one in likely[:_MOST_EQUALS]]
            ranking = equals
        models = [
            one.name
            for one in equals
            # Models that leave rows free need a result that changes with the contents of memory.
            if FAULT_MODELS[one.name].applies(case.problem) and (findings.varies or not one.loose)
        ]
        with skip_unfit():
            refuted = set()
            if models and findings.response is not None:
                refuted = contradicted_models(models, passed, findings.response, self.device)
            models = [name for name in models if name not in refuted]
        confirmation = confirm(models, self, varies=findings.varies)
        # A model that brings the result within the bound but never explains much is not the cause.
        ranking = [
            dataclasses.replace(one, share=max(one.share, confirmation.shares.get(one.name, 0.0)))
            for one in ranking
        ]
        convincing = {one.name for one in ranking if one.share >= _TELLING}
        rest = [name for name in confirmation.unrefuted if name in convincing]
        # Unused pages hold NaN: a wrong read of one gives NaN without any overflow.
        if findings.response is not None and not is_finite(findings.response.call):
            rest = [n for n in rest if FAULT_MODELS[n].family != "overflow"] or rest
        fixed = [name for name in rest if FAULT_MODELS[name].order < _FITTED]
        candidates, families = fixed or rest, {FAULT_MODELS[name].family for name in rest}
        ranking = [
            confirmation.with_common_size(confirmation.with_remaining_forms(one))
            for one in ranking
            if one.name in candidates
        ]
        diagnosis = _as_diagnosis(ranking, findings, case.problem, problems + confirmation.problems)
        # Several models that predict the very same numbers describe one fault in several words.
        one = len(fixed) == 1 or (
            len(fixed) > 1 and len(families) == 1 and confirmation.are_alike(fixed)
        )
        if confirmation.confirmed and one:
            return replace(diagnosis, family=FAMILIES[FAULT_MODELS[candidates[0]].family])
        if confirmation.confirmed and len(families) == 1:
            return replace(diagnosis, level="family", family=FAMILIES[families.pop()])
        # Whatever makes NaN of everything explains it, and nothing of one model in particular.
        if findings.response is not None and nan_everywhere(findings.response):
            diagnosis = replace(diagnosis, ranked=())
        return replace(diagnosis, level="unknown", tied=0)

    def observed(self, diagnosis: Diagnosis, findings: Findings) -> Diagnosis:
        """Return ``diagnosis`` with facts observed on the failure, and the family they suggest."""
        result = None
        if findings.response is not None:
            with skip_unfit():
                result = observe(findings.response, self, varies=findings.varies)
        if result is None:
            return diagnosis
        if result.sign:
            proof = (_sign(result.sign),)
            return replace(
                diagnosis, level="named", ranked=proof, tied=1, tried=0, facts=result.facts
            )
        if diagnosis.level == "family" or result.family is None:
            return replace(diagnosis, facts=result.facts)
        # Models of that family that nothing refuted stay in the ranking.
        ranked = tuple(o for o in diagnosis.ranked if FAULT_MODELS[o.model].family == result.family)
        family = FAMILIES[result.family]
        return replace(diagnosis, ranked=ranked, level="family", family=family, facts=result.facts)

    @skip_unfit()
    def proof(self, *, wrong: bool, explained: bool) -> Explanation | None:
        """Return the fault that other layouts and surroundings prove; None if they prove none.

        Args:
            wrong: Whether a run is beyond its bound, and not only unlike another run.
            explained: Whether a fault model predicts the kernel's numbers: then only layouts are
                tried, and only where the question is about one.
        """
        if not self.is_of_numbers:
            return None
        case, kernel = self.case, (self.subject, self.device, self.executor)
        right = False
        if case.question in _LAYOUTS:
            right, names = misread_strides(case, *kernel)
            if names:
                return _sign("strides-not-taken", of=names)
        # Numbers beside an input also change with its layout, so that these reads come first.
        if not explained and case.question in _WITH_RUNS:
            names = out_of_bounds_reads(case, *kernel)
            if names:
                return _sign("reads-beside-an-input", of=names)
        return self._layout_sign(case) if right and wrong else None

    def _layout_sign(self, case: Case) -> Explanation | None:
        """Explain a failing layout relation where no single input's strides are misread."""
        if case.question not in (_FAR, _ALONE, *_SAME_NUMBERS):
            return None
        status = self.status(case)  # Far rows take gibibytes: repeat it only once.
        if status != "fail":
            return _sign("not-the-same-again") if status == "pass" else None
        of = "k" if case.question == "strides_transposed" else ""
        if "tensor" in case.parameters:
            of = STRIDED_TENSORS[int(case.parameters["tensor"])]
        return _sign("far-offsets-wrap" if case.question == _FAR else "strides-not-taken", of=of)

    @skip_unfit()
    def unwritten_memory_sign(self) -> Explanation | None:
        """Return the sign that outputs hold unwritten memory; None where that is not certain."""
        names = unwritten_memory(self.case, self.subject, self.device, self.executor)
        return _sign("free-memory-read", of=names) if names else None

    @skip_unfit()
    def repeated_sign(self, signs: Sequence[str]) -> Explanation | None:
        """Return the first of ``signs`` that one pair of calls shows; None if it shows none."""
        case = self.case
        for name in signs if self.is_of_numbers and case.question in _WITH_RUNS else ():
            names = _SHOWN_AGAIN[name](case, self.subject, self.device, self.executor, pairs=1)
            if names:
                return _sign(name, of=names)
        return None

    def sign(self) -> Explanation | None:
        """Return the sign that repeated or smaller calls show; None if they show none."""
        if not self.is_of_numbers:
            return None
        try:
            name = self._sign_name(self.case)
        except AttncheckError:  # The question cannot be repeated.
            return None
        return None if name is None else _sign(name)

    def _sign_name(self, case: Case) -> str | None:
        def passes(again: Case) -> bool:
            return self.status(again) == "pass"

        question, problem = case.question, case.problem
        if question in _REPEATING:
            return "not-the-same-again"
        if question in _BATCHES and passes(Case(problem=problem)):
            return None if passes(case) else "depends-on-the-batch"
        times = 1 if question == _FAR else _REPEATS  # Far rows take gibibytes each time.
        if question in _WITH_RUNS and (
            any(passes(case) for _ in range(times))
            or changes_between_calls(case, self.subject, self.device, self.executor)
        ):
            return "not-the-same-again"
        # Try as many sequences as fit along one axis of a grid.
        fits = problem.batch * problem.heads <= MOST_GRID_PLACES
        if question in RELATIONS and not fits and problem.heads <= MOST_GRID_PLACES:
            fewer = problem.replace(batch=MOST_GRID_PLACES // problem.heads)
            smaller = Case(problem=fewer, question=question, parameters=case.parameters)
            return "grid-axis-exceeded" if passes(smaller) else None
        return None


def _explain_calls(
    call: Callable[[], Execution | Failure],
    explain_result: Callable[..., Findings | None],
    *,
    most: int,
    related: bool,
) -> Findings | None:
    """Explain a wrong call; if two calls gave different results, explain both at once.

    Memory is filled differently each time, to show unwritten outputs. A kernel that is wrong only
    sometimes is called until it is wrong, at most ``most`` times.
    """
    each: list[Findings] = []
    results: list[Execution] = []
    for number in range(most):
        if number >= _FILLS and each:
            break
        with allocator_filled("inverse" if number % 2 else "pattern"):
            result = call()
        if not isinstance(result, Execution) or (results and not _differ(result, results[-1])):
            continue
        results.append(result)
        findings = explain_result(result, proven=True)
        each += [] if findings is None else [findings]
    if len(each) > 1:
        # A model with one fixed prediction that does not fit every call is not the cause.
        names = [{one.name for one in findings.ranking} for findings in each]
        combined = combine_rankings(*(one.ranking for one in each))
        return dataclasses.replace(
            each[0],
            ranking=[o for o in combined if o.loose or all(o.name in some for some in names)],
            finite=all(one.finite for one in each),
            varies=True,
        )
    if each or related or not results:
        return dataclasses.replace(each[0], varies=len(results) > 1) if each else None
    return explain_result(results[0])


def _differ(one: Execution, other: Execution) -> bool:
    before = float64_tensors(other.outputs)
    return any(
        not same_numbers(x, before[name]) for name, x in float64_tensors(one.outputs).items()
    )


def _sign(name: str, of: str = "") -> Explanation:
    return Explanation(
        model=name,
        sentence=SIGNS[name],
        share=1.0,
        explains_all=True,
        parameters={"of": of} if of else {},
    )


def _as_diagnosis(
    ranking: list[FaultExplanation], findings: Findings, problem: Problem, problems: int = 1
) -> Diagnosis:
    # Leave out models of a mask, sink or backward that the problem shown does not have.
    ranking = [one for one in ranking if FAULT_MODELS[one.name].applies(problem)]
    # A model that explains less than half is not shown: it would read like the cause.
    convincing = [one for one in ranking if one.share >= _TELLING]
    shown_count = max(EXPLANATIONS_SHOWN, min(count_ties(convincing), _MOST_EQUALS))
    return Diagnosis(
        ranked=tuple(
            Explanation(
                model=one.name,
                sentence=FAULT_MODELS[one.name].sentence,
                share=one.share,
                explains_all=one.all,
                parameters=dict(one.parameters),
                others=_other_words(one),
            )
            for one in convincing[:shown_count]
        ),
        tied=count_ties(convincing),
        tried=findings.tried,
        problems=problems,
        tiles=UNSET if findings.tiles is None else findings.tiles,
    )


def _other_words(one: FaultExplanation) -> tuple[dict[str, int | float | str], ...]:
    """Return an explanation's other forms, one of each set of words."""
    forms = {words_of(form): form for form in reversed((one.parameters, *one.others))}
    return tuple(dict(form) for words, form in forms.items() if words != words_of(one.parameters))
