"""Diagnose a failing kernel: call it again and rank what may be wrong.

Fault models predict the numbers of a call (``explanations``). What differs from call to call, or
with a tensor's layout and surroundings, no model predicts: such signs are found by asking again.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from msgspec import UNSET
from msgspec.structs import replace

from attncheck.core.errors import AttncheckError
from attncheck.core.outputs import same_numbers
from attncheck.diagnose.confirmation import confirm, contradicted
from attncheck.diagnose.explanations import (
    NO_FIT,
    Findings,
    Response,
    explain,
    float64_tensors,
    observed_error,
    pair_count,
)
from attncheck.diagnose.observation import observe
from attncheck.diagnose.out_of_bounds_reads import (
    changes_between_calls,
    evidence_of_runs,
    misread_strides,
    out_of_bounds_reads,
    unwritten_memory,
)
from attncheck.fault_models import FAULT_MODELS
from attncheck.fault_models.fault_model import FAMILIES, MOST_GRID_PLACES, SIGNS
from attncheck.inputs.problem import Case, Problem
from attncheck.judge.fault_explanation import combine_rankings, count_equals
from attncheck.probes import PROBES
from attncheck.records.failure_causes import certain_explanations, symptom
from attncheck.records.record import FAILED_STATUSES, Diagnosis, Explanation, Record
from attncheck.relations import RELATIONS
from attncheck.relations.same_numbers import STRIDED_TENSORS
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.executor import Execution, Executor, Failure, Origin, out_of_memory
from attncheck.verify.kernel_hosts import executor_of
from attncheck.verify.memory_patterns import allocator_filled
from attncheck.verify.run_case import run_case

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from attncheck.inputs.input_tensors import Inputs
    from attncheck.judge.fault_explanation import FaultExplanation
    from attncheck.subjects.capabilities.subject import Subject

LARGEST_DIAGNOSED = 2**22  # most (row, key) pairs of all heads of a problem that is diagnosed
EXPLANATIONS_SHOWN = 3
"""Explanations that a Record keeps, and more of those that explain all equally."""
_MOST_EQUALS = 12  # by these failures of one cause know each other

_MOST_HEADS = 2**12  # of all sequences: each is worked out by itself, over and over
_LIKELY = 0.05  # above it one may be asked about, where nothing is beyond its bound
_TELLING = 0.5  # below this share a model explains less than it leaves
# Seconds that a model's confirmation on independent problems takes, and looking where none is left.
_CONFIRMING, _OBSERVING = 1.0, 0.5
_FITTED = 2  # the order of models with a number to fit: they describe a family, and no mistake
_MOST_PASSED, _SMALL = 24, 2**15  # questions that passed, and their pairs, that models must fit
_TWICE = 2
_CALLS = 4  # of what is right, where it was wrong once

_REPEATING = ("repeat", "repeats")
_BATCHES = ("alone_in_batch", "batch_permutation", "neighbours")
_AGAIN = 2  # times that a question is asked again
_FAR = "strides_far"
_LAYOUTS = tuple(name for name in RELATIONS if name.startswith("strides_"))
# Of these both runs have the numbers of the plain call: where that is right, it is the layout.
_SAME_NUMBERS = ("strides_heads_last", "strides_gapped", "strides_packed", "strides_transposed")
_ALONE = "strides_alone"
# Questions of which each run can be compared with the exact result.
_WITH_RUNS = frozenset({*RELATIONS, *PROBES, "compare"})
# Signs that a pair of calls shows again, once many have proven it of another failure.
_SHOWN_AGAIN = {
    "free-memory-read": unwritten_memory,
    "reads-beside-an-input": out_of_bounds_reads,
}


@contextmanager
def _skip_unfit() -> Iterator[None]:
    """Go on after what raises because it cannot be asked of a Problem, or has no memory."""
    try:
        yield
    except (*NO_FIT, MemoryError) as error:
        if not isinstance(error, AttncheckError) and not out_of_memory(error):
            raise


def diagnose_failure(
    record: Record,
    subject: Subject,
    *,
    device: str,
    executor: Executor | None = None,
    before: Findings | None = None,
    passed: Sequence[Case] = (),
) -> Record:
    """Return ``record`` with what may be wrong, where a comparison, probe or relation has failed.

    The kernel is called again: Records hold no outputs. It is done for what a user is shown, not
    for each failure on the way to the smallest. Never raises for what the kernel does.

    Args:
        executor: How to call it; in this process by default.
        before: What is known from another failure of it: a smaller problem alone fits more models.
        passed: What the kernel answered rightly in the same run: no model is named that says that
            it would not.
    """
    failure = _Failure(record, subject, device, executor or executor_of(subject))
    findings = failure.findings()
    diagnosis = None if findings is None else failure.by_models(findings, before, passed)
    named = diagnosis is not None and diagnosis.level == "named"
    # A proof goes before models, which only fit the numbers; of NaN and infinities, and of rows
    # that are left to chance, others may say the same.
    certain = named and findings is not None and findings.finite and not findings.ranking[0].loose
    proof = failure.proof(wrong=findings is not None, explained=certain)
    if proof is None and not named and findings is not None and findings.varies:
        proof = failure.of_memory()
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
    known = (one.model for one in certain_explanations(record))
    return [name for name in known if name in FAULT_MODELS or name in _SHOWN_AGAIN]


def explain_failure(
    record: Record,
    subject: Subject,
    *,
    device: str,
    executor: Executor | None = None,
    among: Collection[str] = FAULT_MODELS,
) -> Findings | None:
    """Return what fault models say of a failure; None where there is none that they speak of.

    Arguments as of ``diagnose_failure``, and the models that are tried.
    """
    return _Failure(record, subject, device, executor or executor_of(subject)).findings(among)


class CauseSearch:
    """The search for causes of one kernel's failures, of which many have the same few.

    What explains one failure is tried on the next by itself, which takes as long as a question.
    All models are tried where that explains nothing, on a kind of failure that is new.

    Args:
        most: Failures on which all models are tried.
    """

    def __init__(self, most: int = 24) -> None:
        self._left = most
        self._passed: deque[Case] = deque(maxlen=_MOST_PASSED)
        self._causes: dict[str, None] = {}
        self._closed: set[tuple[object, ...]] = set()

    def note(self, record: Record) -> None:
        """Remember a question that passed: no model is named that says that it would not."""
        problem = Case.from_json(record.case).problem if record.status == "pass" else None
        plain = record.case.get("question") in {"compare", *PROBES}
        if plain and problem is not None and pair_count(problem) <= _SMALL:
            self._passed.append(Case.from_json(record.case))

    def diagnose(
        self, record: Record, subject: Subject, *, device: str, executor: Executor | None = None
    ) -> Record:
        """Return ``record``, of a failure, with what may be wrong, as far as it is looked for."""
        known = explained_by(record, self._causes, subject, device=device, executor=executor)
        if known is not None:
            return replace(record, diagnosis=known)
        # A hundred failures of which no model explains one say no more than the first, and a sign
        # takes many calls to prove, some of them of gibibytes.
        problem = record.case["problem"]
        kind = (*symptom(record), *map(record.case.get, ("question",)))
        kind += tuple(map(problem.get, ("backward", "dtype")))
        if kind in self._closed or not self._left:
            return record
        self._left -= 1
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
        """Return ``records``, of one run, with what may be wrong in those that failed.

        What explains ``first``, one of them, is tried on the others, and what was found late on
        those before it.
        """
        results = [*records]
        known: dict[int, int] = {}  # causes that had been found by then
        pairs = enumerate(records)
        failed = [i for i, one in pairs if one is first or one.status in FAILED_STATUSES]
        failed.sort(key=lambda i: records[i] is not first)
        for i in failed:
            results[i] = self.diagnose(records[i], subject, device=device)
            known[i] = len(self._causes)
        for i in failed:
            later = [*self._causes][known[i] :]
            if later and not certain_explanations(results[i]):
                late = explained_by(records[i], later, subject, device=device)
                results[i] = replace(results[i], diagnosis=late) if late is not None else results[i]
        return tuple(results)


def explained_by(
    record: Record,
    causes: Collection[str],
    subject: Subject,
    *,
    device: str,
    executor: Executor | None = None,
) -> Diagnosis | None:
    """Return the diagnosis by those of ``causes`` that explain all of a failure; None if none.

    Arguments as of ``diagnose_failure``, and the models and signs that explain others of it.
    """
    if not causes or record.status != "fail" or record.case.get("question") == _FAR:
        return None
    failure = _Failure(record, subject, device, executor or executor_of(subject))
    models = [name for name in causes if name in FAULT_MODELS]
    findings = failure.findings(models) if models else None
    # What leaves rows free would explain them whatever they hold: all others are asked first.
    if findings is not None and count_equals(findings.ranking) and not findings.ranking[0].loose:
        return _as_diagnosis(findings.ranking, findings, Case.from_json(record.case).problem)
    sign = failure.shown_again([name for name in causes if name in _SHOWN_AGAIN])
    return None if sign is None else Diagnosis(ranked=(sign,), tied=1, tried=0)


def diagnose_result(result: Execution, evidence: EvidenceBuilder) -> Diagnosis | None:
    """Return what may be wrong with a result that is there; None where nothing is to be said."""
    findings = None
    if not _is_too_large(evidence.case.problem):
        with _skip_unfit():
            findings = explain(result, evidence)
    if findings is None:
        return None
    # By these numbers alone, for there is no kernel to ask again.
    diagnosis = _as_diagnosis(findings.ranking, findings, evidence.case.problem)
    return diagnosis if diagnosis.tied else replace(diagnosis, level="unknown")


def _is_too_large(problem: Problem) -> bool:
    return pair_count(problem) > LARGEST_DIAGNOSED or problem.batch * problem.heads > _MOST_HEADS


@dataclass(frozen=True, slots=True)
class _Failure:
    """A Record of a failure, and the kernel that can be asked again."""

    record: Record
    subject: Subject
    device: str
    executor: Executor

    @property
    def case(self) -> Case:
        """What it failed."""
        return Case.from_json(self.record.case)

    @property
    def is_of_numbers(self) -> bool:
        """True where outputs were there, and wrong."""
        return self.record.status == "fail" and self.record.judgement is not None

    def status(self, case: Case) -> str:
        """The verdict alone of ``case``."""
        return run_case(
            self.subject, case, device=self.device, executor=self.executor, brief=True
        ).status

    def findings(self, among: Collection[str] = FAULT_MODELS) -> Findings | None:
        """Return what fault models say; None where they could speak of nothing."""
        if self.record.status != "fail" or self.record.case.get("question") not in _WITH_RUNS:
            return None
        with _skip_unfit():
            return next(self._wrong_runs(self.case, among), None)
        return None

    def _runs(self, case: Case) -> Iterator[tuple[int, EvidenceBuilder]]:
        """The evidence on each run of a question, by its number."""
        for number, evidence in enumerate(evidence_of_runs(case, self.device)):
            if not _is_too_large(evidence.case.problem):
                evidence.establish(reference_errors=False)
                yield number, evidence

    def _wrong_runs(self, case: Case, among: Collection[str]) -> Iterator[Findings]:
        """Of each run of a question that is wrong beside the exact result."""
        for number, evidence in self._runs(case):
            origin = Origin(case=case, run=number)
            call = partial(self.executor.run, self.subject, evidence.inputs, origin=origin)
            # Of several runs that must agree one is wrong: it is not asked how the others round.
            tell = partial(explain, evidence=evidence, among=among)
            related = case.question in RELATIONS
            most = _TWICE if related else _CALLS
            # What varies from call to call is hardly what a model known from another failure says.
            most = most if among is FAULT_MODELS else 1
            findings = _explain_calls(call, tell, most=most, related=related)
            if findings is not None:
                yield findings

    def takes(self, problem: Problem) -> bool:
        """Return whether it is asked ``problem``: any, where it failed beyond what it takes.

        And the one that it failed with other numbers, which is all that a claim may take of it.
        """
        refusal = partial(self.executor.refusal, self.subject, device=self.device)
        own = self.case.problem
        numbers = {"seed": own.seed, "scale": own.scale, "distribution": own.distribution}
        alike = problem.replace(**numbers) == own
        return alike or refusal(problem) is None or refusal(own) is not None

    def ask(self, case: Case) -> list[Response]:
        """Return what it gives in each run of ``case``; nothing where it does not take it."""
        with _skip_unfit():
            if not self.takes(case.problem):
                return []
            runs = []
            for number, evidence in self._runs(case):
                run = self._response(evidence, Origin(case=case, run=number))
                if run is None:
                    return []
                runs.append(run)
            return runs
        return []

    def call(self, inputs: Inputs) -> Response | None:
        """Return what it gives of ``inputs``; None where it does not take them."""
        with _skip_unfit():
            evidence = EvidenceBuilder(
                Case(problem=inputs.problem), self.device, inputs.to(self.device)
            )
            evidence.establish(reference_errors=False)
            return self._response(evidence)
        return None

    def _response(self, evidence: EvidenceBuilder, origin: Origin | None = None) -> Response | None:
        with allocator_filled("pattern"):
            result = self.executor.run(self.subject, evidence.inputs, origin=origin)
        return observed_error(result, evidence) if isinstance(result, Execution) else None

    def by_models(
        self, findings: Findings, before: Findings | None, passed: Sequence[Case]
    ) -> Diagnosis:
        """Return what fault models say: one that is confirmed, the family of several, or nothing.

        Those that other problems refute are told nowhere.
        """
        ranking, problems = findings.ranking, 1
        if before is not None and before.ranking:
            # By the problem that is shown, where no model explains both.
            shares = {one.name: one.share for one in ranking}
            ranking = [
                dataclasses.replace(one, share=shares[one.name]) if one.all else one
                for one in combine_rankings(ranking, before.ranking)
            ]
            problems += bool({one.name for one in ranking} & {one.name for one in before.ranking})
        case = self.case
        equals = ranking[: count_equals(ranking)]
        # Too far off in the mean, and no number is beyond its bound: other problems may tell.
        if findings.response is not None and not findings.response.error.proven:
            likely = [one for one in ranking if one.share >= _LIKELY and not one.loose]
            equals = [dataclasses.replace(one, all=True) for one in likely[:_MOST_EQUALS]]
            ranking = equals
        models = [
            one.name
            for one in equals
            # Rows that hold what memory held are others where it holds something else.
            if FAULT_MODELS[one.name].applies(case.problem) and (findings.varies or not one.loose)
        ]
        with _skip_unfit():
            wrong = set()
            if models and findings.response is not None:
                wrong = contradicted(models, passed, findings.response, self.device)
            models = [name for name in models if name not in wrong]
        confirmation = confirm(models, case, self.ask, seconds=_CONFIRMING, takes=self.takes)
        # What is within the bound with a model, and nowhere plainly nearer than without, is not it.
        ranking = [
            dataclasses.replace(one, share=max(one.share, confirmation.shares.get(one.name, 0.0)))
            for one in ranking
        ]
        plainly = {one.name for one in ranking if one.share >= _TELLING}
        rest = [name for name in confirmation.left if name in plainly]
        plain = [name for name in rest if FAULT_MODELS[name].order < _FITTED]
        left, families = plain or rest, {FAULT_MODELS[name].family for name in rest}
        ranking = [one for one in ranking if one.name in left]
        diagnosis = _as_diagnosis(ranking, findings, case.problem, problems + confirmation.problems)
        # Of several that predict the very same it is each of them: one fault in several words.
        one = len(plain) == 1 or (
            len(plain) > 1 and len(families) == 1 and confirmation.are_alike(plain)
        )
        if confirmation.confirmed and one:
            return replace(diagnosis, family=FAMILIES[FAULT_MODELS[left[0]].family])
        if confirmation.confirmed and len(families) == 1:
            return replace(diagnosis, level="family", family=FAMILIES[families.pop()])
        return replace(diagnosis, level="unknown", tied=0)

    def observed(self, diagnosis: Diagnosis, findings: Findings) -> Diagnosis:
        """Return ``diagnosis`` with what is seen of the failure, and the family that this tells."""
        seen = None
        if findings.response is not None:
            with _skip_unfit():
                seen = observe(
                    findings.response,
                    self.case,
                    self.ask,
                    self.call,
                    varies=findings.varies,
                    seconds=_OBSERVING,
                    takes=self.takes,
                )
        if seen is None:
            return diagnosis
        if seen.sign:
            proof = (_sign(seen.sign),)
            return replace(
                diagnosis, level="named", ranked=proof, tied=1, tried=0, facts=seen.facts
            )
        if diagnosis.level == "family" or seen.family is None:
            return replace(diagnosis, facts=seen.facts)
        # Models that nothing refuted stay beside it where they are of that family.
        ranked = tuple(o for o in diagnosis.ranked if FAULT_MODELS[o.model].family == seen.family)
        family = FAMILIES[seen.family]
        return replace(diagnosis, ranked=ranked, level="family", family=family, facts=seen.facts)

    def proof(self, *, wrong: bool, explained: bool) -> Explanation | None:
        """Return what other layouts and surroundings prove; None where that is nothing.

        Args:
            wrong: Whether a run of its question is beyond its bound, not only unlike another one.
            explained: Whether a fault model predicts the numbers it gives: only the layout is asked
                about then, and only where the question is of one.
        """
        if not self.is_of_numbers:
            return None
        with _skip_unfit():
            case, kernel = self.case, (self.subject, self.device, self.executor)
            right, names = False, ""
            if case.question in _LAYOUTS:
                right, names = misread_strides(case, *kernel)
                if names:
                    return _sign("strides-not-taken", of=names)
            # What is read beside an input changes with its layout, too: it is asked about first.
            if not explained and case.question in _WITH_RUNS:
                names = out_of_bounds_reads(case, *kernel)
            if names:
                return _sign("reads-beside-an-input", of=names)
            return self._of_layout(case) if right and wrong else None
        return None

    def _of_layout(self, case: Case) -> Explanation | None:
        """Explain a failing relation of layouts where no input alone is wrong laid out near."""
        if case.question not in (_FAR, _ALONE, *_SAME_NUMBERS):
            return None
        status = self.status(case)  # far rows take gibibytes: once more is to do
        if status != "fail":
            return _sign("not-the-same-again") if status == "pass" else None
        of = "k" if case.question == "strides_transposed" else ""
        if "tensor" in case.parameters:
            of = STRIDED_TENSORS[int(case.parameters["tensor"])]
        return _sign("far-offsets-wrap" if case.question == _FAR else "strides-not-taken", of=of)

    def of_memory(self) -> Explanation | None:
        """Return the sign that it gives what memory held; None where that is not certain."""
        with _skip_unfit():
            names = unwritten_memory(self.case, self.subject, self.device, self.executor)
            return _sign("free-memory-read", of=names) if names else None
        return None

    def shown_again(self, signs: Sequence[str]) -> Explanation | None:
        """Return the first of ``signs`` that a pair of calls shows; None where there is none."""
        if not self.is_of_numbers:
            return None
        with _skip_unfit():
            case = self.case
            for name in signs if case.question in _WITH_RUNS else ():
                of = _SHOWN_AGAIN[name](case, self.subject, self.device, self.executor, pairs=1)
                if of:
                    return _sign(name, of=of)
        return None

    def sign(self) -> Explanation | None:
        """Return the sign that calls differ; None where there is none."""
        if not self.is_of_numbers:
            return None
        try:
            name = self._sign_name(self.case)
        except AttncheckError:  # asked of nothing that can be asked again
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
        times = 1 if question == _FAR else _AGAIN  # gibibytes each time
        if question in _WITH_RUNS and (
            any(passes(case) for _ in range(times))
            or changes_between_calls(case, self.subject, self.device, self.executor)
        ):
            return "not-the-same-again"
        # As many sequences as an axis of a grid has room for.
        fits = problem.batch * problem.heads <= MOST_GRID_PLACES
        if question in RELATIONS and not fits and problem.heads <= MOST_GRID_PLACES:
            fewer = problem.replace(batch=MOST_GRID_PLACES // problem.heads)
            smaller = Case(problem=fewer, question=question, parameters=case.parameters)
            return "grid-axis-exceeded" if passes(smaller) else None
        return None


def _explain_calls(
    call: Callable[[], Execution | Failure],
    tell: Callable[..., Findings | None],
    *,
    most: int,
    related: bool,
) -> Findings | None:
    """Explain a call that is wrong; of two that gave different things, both at once.

    Memory holds something else each time: what is never written looks like it. A kernel that is
    wrong now and then is called until it is, at most ``most`` times.
    """
    each: list[Findings] = []
    results: list[Execution] = []
    for number in range(most):
        if number >= _TWICE and each:
            break
        with allocator_filled("inverse" if number % 2 else "pattern"):
            result = call()
        if not isinstance(result, Execution) or (results and not _differ(result, results[-1])):
            continue
        results.append(result)
        findings = tell(result, proven=True)
        each += [] if findings is None else [findings]
    if len(each) > 1:
        # What predicts one thing, and does not fit each call, is no mistake that is made in each.
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
    return tell(results[0])


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
    # Nobody is told of a mask, sink or backward that the problem shown does not have.
    ranking = [one for one in ranking if FAULT_MODELS[one.name].applies(problem)]
    # What explains less than half is shown to nobody: it would read like a reason.
    telling = [one for one in ranking if one.share >= _TELLING]
    kept = max(EXPLANATIONS_SHOWN, min(count_equals(telling), _MOST_EQUALS))
    return Diagnosis(
        ranked=tuple(
            Explanation(
                model=one.name,
                sentence=FAULT_MODELS[one.name].sentence,
                share=one.share,
                explains_all=one.all,
                parameters=dict(one.parameters),
            )
            for one in telling[:kept]
        ),
        tied=count_equals(telling),
        tried=findings.tried,
        problems=problems,
        tiles=UNSET if findings.tiles is None else findings.tiles,
    )
