"""Proofs that a kernel reads what is no input, never writes, or takes its strides for others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.core.outputs import same_numbers
from attncheck.diagnose.explanations import pair_count
from attncheck.inputs.problem import Case
from attncheck.relations import RELATIONS, relation_named
from attncheck.verify.call_conditions import CallConditions, Contents, Surroundings
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.executor import Execution, Executor, Origin
from attncheck.verify.judging import judge_outputs
from attncheck.verify.relation_runs import relation_inputs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.core.outputs import Outputs
    from attncheck.subjects.capabilities.subject import Subject
    from attncheck.verify.memory_patterns import Fill

_AGAIN = 2
# Pairs of calls: what gives one of two things by chance agrees with 2 · 4 of them once in 128, and
# is asked so twice. Of what does not promise to repeat itself more are made.
_PAIRS, _PAIRS_UNPROMISED = 4, 8
_LARGEST = 2**22  # (row, key) pairs of a problem of which many calls are made
_CONTENTS: tuple[Contents, ...] = ("others", "nan")
_LAID_OUT = ("q", "k", "v", "dout")


class _CallComparison:
    """One kernel on one run of a Case, among other surroundings each time."""

    def __init__(
        self,
        subject: Subject,
        executor: Executor,
        origin: Origin,
        evidence: EvidenceBuilder,
        pairs: int | None = None,
    ) -> None:
        self._subject, self._executor, self._origin = subject, executor, origin
        self.evidence = evidence
        promised = "repeat" in subject.promises
        backward = evidence.case.problem.backward
        self.promised = promised and (subject.promises_gradients or not backward)
        self._times = pairs or (_PAIRS if self.promised else _PAIRS_UNPROMISED)

    def execution(self, by: Surroundings, fill: Fill = "pattern") -> Execution | None:
        # What it allocates holds the same each time: else it would hold what lay beside an input
        # of the call before.
        result = self._executor.run(
            self._subject,
            self.evidence.inputs,
            origin=self._origin,
            under=CallConditions(fill=fill, surroundings=by),
        )
        return result if isinstance(result, Execution) else None

    def differ(self, by: Surroundings, fill: Fill = "pattern") -> tuple[str, ...]:
        """Return the outputs that are one thing in ordinary conditions, and always another so.

        Args:
            by: What lies around the inputs.
            fill: What it allocates holds.
        """
        sides: tuple[tuple[Surroundings, Fill], ...] = (Surroundings(), "pattern"), (by, fill)
        first = tuple(self._outputs(*side) for side in sides)
        names = _differ(*first)
        for turn in range(1, self._times):
            # Not in turns alone: what changes from call to call would agree with them.
            order = (1, 0) if turn.bit_count() % 2 else (0, 1)
            for side in order:
                again = self._outputs(*sides[side])
                if not names or again is None or _differ(again, first[side]):
                    return ()
        return names

    def changes(self) -> bool:
        """Return whether calls that are alike in all that we decide give other bits."""
        first, *more = (self._outputs(Surroundings()) for _ in range(1 + self._times))
        return any(_differ(again, first) for again in more)

    def _outputs(self, by: Surroundings, fill: Fill = "pattern") -> Outputs | None:
        result = self.execution(by, fill)
        return None if result is None else result.outputs


def changes_between_calls(case: Case, subject: Subject, device: str, executor: Executor) -> bool:
    """Return whether a kernel that promises to repeat itself gives other bits at times.

    Of memory that it does not clear nothing is told: that holds the same each time.

    Arguments as of ``out_of_bounds_reads``.
    """
    runs = _comparisons(case, subject, device, executor)
    return any(run.promised and run.changes() for run in runs)


def out_of_bounds_reads(
    case: Case, subject: Subject, device: str, executor: Executor, *, pairs: int | None = None
) -> str:
    """Return names of inputs, with commas between, beside which it reads; empty if none is known.

    Of a kernel that gives the same whatever lies there nothing is said, nor of one that gives
    something else each time.

    Args:
        pairs: Calls in ordinary conditions and in others that must agree; by default as many as
            chance does not let agree. One is enough where another failure has proven the sign.
    """
    for run in _comparisons(case, subject, device, executor, pairs):
        for contents in _CONTENTS:
            if not run.differ(Surroundings(contents=contents)):
                continue
            alone = [
                name
                for name in run.evidence.inputs.tensors()
                if run.differ(Surroundings(contents=contents, of=name))
            ]
            # What shows beside all inputs and beside none alone may be chance.
            if alone:
                return ", ".join(alone)
    return ""


def unwritten_memory(
    case: Case, subject: Subject, device: str, executor: Executor, *, pairs: int | None = None
) -> str:
    """Return outputs, with commas between, that hold what memory held that nothing has written.

    That is an output's own, or a buffer's between kernels: they change with it, and with nothing
    else. Empty where none is known. Arguments as of ``out_of_bounds_reads``.
    """
    for run in _comparisons(case, subject, device, executor, pairs):
        if names := run.differ(Surroundings(), "inverse"):
            return ", ".join(names)
    return ""


def misread_strides(
    case: Case, subject: Subject, device: str, executor: Executor
) -> tuple[bool, str]:
    """Return whether it is right on contiguous inputs, and which it has wrong laid out otherwise.

    Args:
        case: Its question is not looked at.
    """
    if pair_count(case.problem) > _LARGEST:
        return False, ""
    plain = Case(problem=case.problem)
    evidence = EvidenceBuilder(plain, device)
    comparison = _CallComparison(subject, executor, Origin(case=plain), evidence)

    def verdicts(by: Surroundings) -> Iterator[str]:
        for _ in range(_AGAIN):
            result = comparison.execution(by)
            yield "" if result is None else judge_outputs(result, evidence, brief=True).status

    if not all(status == "pass" for status in verdicts(Surroundings())):
        return False, ""
    wrong = [
        name
        for name in _LAID_OUT
        if name in evidence.inputs.tensors()
        and all(status == "fail" for status in verdicts(Surroundings(apart=name)))
    ]
    return True, ", ".join(wrong)


def _comparisons(
    case: Case, subject: Subject, device: str, executor: Executor, pairs: int | None = None
) -> Iterator[_CallComparison]:
    """Yield one for each run; none where many calls would take long or, each, gibibytes."""
    spacious = case.question in RELATIONS and relation_named(case.question).spacious
    if spacious or pair_count(case.problem) > _LARGEST:
        return
    for number, evidence in enumerate(evidence_of_runs(case, device)):
        yield _CallComparison(subject, executor, Origin(case=case, run=number), evidence, pairs)


def evidence_of_runs(case: Case, device: str) -> Iterator[EvidenceBuilder]:
    """Yield the evidence on each run that a question asks for: one, but for a relation."""
    if case.question in RELATIONS:
        for inputs in relation_inputs(case, device):
            yield EvidenceBuilder(Case(problem=inputs.problem), device, inputs)
    else:
        yield EvidenceBuilder(case, device)


def _differ(one: Outputs | None, before: Outputs | None) -> tuple[str, ...]:
    """Return what differs in any number; NaN is NaN. Dcaptured is added up in whatever order."""
    # A call that failed says nothing of what lies beside its inputs.
    if one is None or before is None:
        return ()
    then = before.tensors()
    return tuple(
        name
        for name, x in one.tensors().items()
        if name in then and name != "dcaptured" and not same_numbers(x, then[name])
    )
