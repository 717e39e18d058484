"""Proofs that a kernel reads beside its inputs, leaves memory unwritten, or misreads strides."""

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

_REPEATS = 2
# Pairs of calls: a kernel that gives one of two results by chance agrees with all 2 · 4 calls once
# in 128, and is tested twice. Kernels that do not promise repeatable results get more pairs.
_PAIRS, _PAIRS_UNPROMISED = 4, 8
_LARGEST = 2**22  # most (row, key) pairs of a problem that is run many times
_CONTENTS: tuple[Contents, ...] = ("others", "nan")
_LAID_OUT = ("q", "k", "v", "dout")


class _CallComparison:
    """Calls of one kernel on one run of a Case, with different surroundings of the inputs."""

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
        # Memory that the kernel allocates is filled alike each time: else it would hold what lay
        # beside an input of the previous call.
        result = self._executor.run(
            self._subject,
            self.evidence.inputs,
            origin=self._origin,
            under=CallConditions(fill=fill, surroundings=by),
        )
        return result if isinstance(result, Execution) else None

    def changed_outputs(self, by: Surroundings, fill: Fill = "pattern") -> tuple[str, ...]:
        """Return the outputs that always change between ordinary and the given conditions.

        Args:
            by: Contents of memory around the inputs.
            fill: Contents of memory that the kernel allocates.
        """
        sides: tuple[tuple[Surroundings, Fill], ...] = (Surroundings(), "pattern"), (by, fill)
        first = tuple(self._outputs(*side) for side in sides)
        names = _differing_outputs(*first)
        for turn in range(1, self._times):
            # Vary the order: a result that alternates from call to call would fit a fixed one.
            order = (1, 0) if turn.bit_count() % 2 else (0, 1)
            for side in order:
                again = self._outputs(*sides[side])
                if not names or again is None or _differing_outputs(again, first[side]):
                    return ()
        return names

    def changes(self) -> bool:
        """Return whether repeated calls under the same conditions give different bits."""
        first, *more = (self._outputs(Surroundings()) for _ in range(1 + self._times))
        return any(_differing_outputs(again, first) for again in more)

    def _outputs(self, by: Surroundings, fill: Fill = "pattern") -> Outputs | None:
        result = self.execution(by, fill)
        return None if result is None else result.outputs


def changes_between_calls(case: Case, subject: Subject, device: str, executor: Executor) -> bool:
    """Return whether a kernel that promises repeatable results gives different bits at times.

    Uncleared memory does not show here, because it has the same contents each time.

    Arguments are those of ``out_of_bounds_reads``.
    """
    runs = _comparisons(case, subject, device, executor)
    return any(run.promised and run.changes() for run in runs)


def out_of_bounds_reads(
    case: Case, subject: Subject, device: str, executor: Executor, *, pairs: int | None = None
) -> str:
    """Return the inputs beside which the kernel reads, comma-separated; empty if none is proven.

    Nothing is proven if the result ignores memory beside the inputs, or changes with every call.

    Args:
        pairs: Pairs of calls in ordinary and other conditions that must agree; by default too many
            to agree by chance. One is enough where another failure has proven the sign.
    """
    for run in _comparisons(case, subject, device, executor, pairs):
        for contents in _CONTENTS:
            if not run.changed_outputs(Surroundings(contents=contents)):
                continue
            alone = [
                name
                for name in run.evidence.inputs.tensors()
                if run.changed_outputs(Surroundings(contents=contents, of=name))
            ]
            # A change that no single input's surroundings reproduce may be chance.
            if alone:
                return ", ".join(alone)
    return ""


def unwritten_memory(
    case: Case, subject: Subject, device: str, executor: Executor, *, pairs: int | None = None
) -> str:
    """Return the outputs, comma-separated, that hold unwritten memory; empty if none is proven.

    The memory is an output's own or that of a buffer between kernels; the outputs change with its
    contents, and with nothing else. Arguments are those of ``out_of_bounds_reads``.
    """
    for run in _comparisons(case, subject, device, executor, pairs):
        if names := run.changed_outputs(Surroundings(), "inverse"):
            return ", ".join(names)
    return ""


def misread_strides(
    case: Case, subject: Subject, device: str, executor: Executor
) -> tuple[bool, str]:
    """Return whether a kernel is right on contiguous inputs, and the inputs with misread strides.

    Args:
        case: The Case whose Problem is run; its question does not matter.
    """
    if pair_count(case.problem) > _LARGEST:
        return False, ""
    plain = Case(problem=case.problem)
    evidence = EvidenceBuilder(plain, device)
    comparison = _CallComparison(subject, executor, Origin(case=plain), evidence)

    def verdicts(by: Surroundings) -> Iterator[str]:
        for _ in range(_REPEATS):
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
    """Yield one for each run; none where calls take gibibytes, or many of them would take long."""
    needs_much_memory = (
        case.question in RELATIONS and relation_named(case.question).needs_much_memory
    )
    if needs_much_memory or pair_count(case.problem) > _LARGEST:
        return
    for number, evidence in enumerate(evidence_of_runs(case, device)):
        yield _CallComparison(subject, executor, Origin(case=case, run=number), evidence, pairs)


def evidence_of_runs(case: Case, device: str) -> Iterator[EvidenceBuilder]:
    """Yield the evidence on each run of a question: several for a relation, else one."""
    if case.question in RELATIONS:
        for inputs in relation_inputs(case, device):
            yield EvidenceBuilder(Case(problem=inputs.problem), device, inputs)
    else:
        yield EvidenceBuilder(case, device)


def _differing_outputs(one: Outputs | None, before: Outputs | None) -> tuple[str, ...]:
    """Return the outputs that differ, save dcaptured, which sums in any order; NaN equals NaN."""
    # A call that failed proves nothing about memory beside its inputs.
    if one is None or before is None:
        return ()
    previous = before.tensors()
    return tuple(
        name
        for name, x in one.tensors().items()
        if name in previous and name != "dcaptured" and not same_numbers(x, previous[name])
    )
