"""What does this kernel take? Tiny Problems, each asked and judged as any other."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from attncheck.capabilities.capability_table import ALIGNMENTS, EMPTY_ROWS, Capabilities
from attncheck.capabilities.declared import Declared
from attncheck.capabilities.subject import Subject
from attncheck.conventions.convention import ConventionOptions
from attncheck.core.errors import UsageError
from attncheck.inputs import input_tensors as inputs_room
from attncheck.inputs.problem import Case, Problem
from attncheck.inputs.question_parameters import PROMISES
from attncheck.relations import RELATIONS
from attncheck.runner import probe_questions
from attncheck.runner.probe_answers import Tried, as_tried, of_failure, verdict_of
from attncheck.verify.executor import Failure, InProcess
from attncheck.verify.question_fit import adapted_problems
from attncheck.verify.run_case import run_case

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from attncheck.records.record import Record
    from attncheck.runner.probe_answers import Verdict

__all__ = ["Make", "Probed", "probed"]

Make = Callable[[str, ConventionOptions], Subject]
"""(convention, options) → the kernel, called so; raises UsageError where it cannot be."""


class Probed(msgspec.Struct, frozen=True, kw_only=True):
    """What a kernel takes.

    Attributes:
        convention: By which it was called.
        options: What it differs in from that, as found out or as said.
        base: The Problem that all others were changes of; None where it takes none.
        exposes_lse: Whether it gives LSE.
        tried: In the order of asking.
    """

    convention: str
    options: ConventionOptions
    base: Problem | None
    exposes_lse: bool
    tried: tuple[Tried, ...]


def probed(
    make: Make,
    conventions: Sequence[str],
    options: ConventionOptions,
    *,
    device: str,
    advance: Callable[[str], None],
) -> Probed:
    """Try a kernel on some seventy Problems of at most 256 keys.

    Args:
        make: How it is called.
        conventions: Those that it may have: the first by which it is right, else by which it gives
            an answer at all.
        options: What is known of it.
        device: ``cpu`` or ``cuda``.
        advance: Called with a word before each question; what it raises ends the probe.
    """
    probe = _Probe(make, options, device, advance)
    base = probe.begin(conventions)
    if base is None:
        return probe.found(None)
    probe.lse(base)
    probe.causal(base)
    trials = probe_questions.trials(base, device)
    for each in (*trials, *probe_questions.lengths(base.query)):
        probe.ask(each.aspect, each.what, each.of(base))
    probe.rectangular(base)
    probe.empty_rows(base)
    probe.strides()
    for promise in PROMISES:
        probe.promise(promise)
    return probe.found(base)


class _Probe:
    """A kernel while it is being tried."""

    def __init__(
        self,
        make: Make,
        options: ConventionOptions,
        device: str,
        advance: Callable[[str], None],
    ) -> None:
        self._make, self._options = make, options
        self._device, self._advance = device, advance
        self._convention = ""
        self._subject: Subject | None = None
        self._exposes_lse = False
        self._tried: list[Tried] = []
        self._taken: list[Problem] = []

    def found(self, base: Problem | None) -> Probed:
        """Everything so far."""
        return Probed(
            convention=self._convention,
            options=self._options,
            base=base,
            exposes_lse=self._exposes_lse,
            tried=tuple(self._tried),
        )

    def begin(self, conventions: Sequence[str]) -> Problem | None:
        """Settle the convention, LSE's base and the Problem to begin with; None: it takes none."""
        answers: list[tuple[str, Problem]] = []
        for convention in conventions:
            self._called(convention, self._options)
            base, verdict = self._first_taken(convention)
            if base is not None and verdict == "takes":
                return base
            if base is not None:
                answers.append((convention, base))
        if not answers:
            return None
        convention, base = answers[0]
        self._called(convention, self._options)
        return base

    def _first_taken(self, convention: str) -> tuple[Problem | None, Verdict]:
        """The first Problem that gets an answer; else what was said to the first of all."""
        first: Tried | None = None
        assert self._subject is not None, "a convention comes first"
        asked = [
            adapted_problems(self._subject, each, InProcess()) for each in probe_questions.bases()
        ]
        for problem in itertools.chain.from_iterable(asked):
            answer = self._refusal(convention, problem) or self._begun(convention, problem)
            if answer.verdict in {"takes", "wrong"}:
                self._tried.append(answer)
                return problem, answer.verdict
            first = first or answer
        assert first is not None, "there are Problems to begin with"
        self._tried.append(first)
        return None, first.verdict

    def _begun(self, convention: str, problem: Problem) -> Tried:
        record = self._record(problem, "base")
        if record.status == "fail" and _of_lse(record) and not self._options.lse:
            record = self._settled("lse", ("base2",), problem) or record
        self._exposes_lse = record.lse is not None
        return as_tried("convention", convention, record, problem)

    def _refusal(self, convention: str, problem: Problem) -> Tried | None:
        """What a kernel says that takes it not; without the exact result, which takes longer."""
        subject, executor = self._subject, InProcess()
        assert subject is not None, "a convention comes first"
        self._advance("base")
        said = executor.refusal(subject, problem, self._device)
        if said is None:
            given = executor.run(subject, inputs_room.draw_inputs(problem, self._device))
            said = given if isinstance(given, Failure) else None
        return None if said is None else of_failure("convention", convention, said, problem)

    def lse(self, base: Problem) -> None:
        """Whether it gives one, as the first answer has shown."""
        base_of = self._options.lse or "natural"
        self._tried.append(
            Tried(
                aspect="lse",
                what=base_of if self._exposes_lse else "",
                verdict="takes" if self._exposes_lse else "refuses",
                reason="" if self._exposes_lse else "it gives out alone",
                problem=str(base),
            )
        )

    def ask(self, aspect: str, what: str, problem: Problem) -> Verdict:
        """Try one Problem."""
        answer = as_tried(aspect, what, self._record(problem, what), problem)
        self._tried.append(answer)
        if answer.verdict == "takes":
            self._taken.append(problem)
        return answer.verdict

    def causal(self, base: Problem) -> None:
        """How the causal flag is aligned where lengths differ: where it is wrong, the other way."""
        aligned = dict(zip(ALIGNMENTS, probe_questions.causal(base), strict=True))
        for alignment, trial in aligned.items():
            wrong = self.ask(trial.aspect, trial.what, trial.of(base)) == "wrong"
            if wrong and not self._options.causal:
                other = next(name for name in ALIGNMENTS if name != alignment)
                self._try_again("causal", (other,), aligned[other].of(base))

    def rectangular(self, base: Problem) -> None:
        """Lengths that differ; a single query where a length of 1 is taken at all."""
        one = any(t.aspect == "lengths" and t.what == "1" and not t.reason for t in self._tried)
        for each in probe_questions.rectangular(base):
            if one or each.changes["query"] > 1:
                self.ask(each.aspect, each.what, each.of(base))

    def empty_rows(self, base: Problem) -> None:
        """What rows that see no key give: 0, or what else is known of kernels."""
        for each in probe_questions.empty_rows(base):
            problem = each.of(base)
            verdict = self.ask(each.aspect, each.what, problem)
            if verdict == "wrong" and not self._options.empty_row:
                self._try_again("empty_row", EMPTY_ROWS[:-1], problem)
            if verdict != "refuses":
                return

    def promise(self, promise: str) -> None:
        """Whether it is kept where it was tried, to the last bit."""
        subject = self._subject
        assert subject is not None, "promises come last"
        table = Capabilities(entry=subject.name, promises=PROMISES)
        promising = Declared(subject, table, subject.name)
        answers: list[Tried] = []
        for relation, problem in self._relations(promise):
            record = self._record(problem, relation, promising)
            answers.append(as_tried("promises", promise, record, f"{relation} of {problem}"))
        broken = [one for one in answers if one.verdict != "takes"]
        self._tried += (broken or answers)[:1]

    def strides(self) -> None:
        """Inputs that are no contiguous tensors: the numbers, and not their bits."""
        for relation, problem in self._relations("layout"):
            record = self._record(problem, relation)
            self._tried.append(as_tried("strides", relation, record, f"{relation} of {problem}"))

    def _relations(self, promise: str) -> Iterator[tuple[str, Problem]]:
        """Those that a promise makes exact, each with what is taken and it can be asked of."""
        # Not the shortest, of which there is one tile.
        long = [p for p in self._taken if min(p.query, p.kv) >= min(probe_questions.LENGTHS)]
        long.sort(key=_work)
        for relation in RELATIONS.values():
            fitting = (p for p in long if relation.unfit(p) is None)
            problem = next(fitting, None) if relation.promise == promise else None
            if problem is not None:
                yield relation.name, problem

    def _try_again(self, option: str, values: Iterable[str], problem: Problem) -> None:
        """Replace the last answer, which was wrong, where another option makes it right."""
        record = self._settled(option, values, problem)
        if record is not None:
            last = self._tried.pop()
            found = f'{last.what}: right as {option} = "{getattr(self._options, option)}"'
            self._tried.append(as_tried(last.aspect, found, record, problem))

    def _settled(self, option: str, values: Iterable[str], problem: Problem) -> Record | None:
        """The answer by the first of ``values`` that is right, which then holds; None: by none."""
        before = self._options
        for value in values:
            changed: dict[str, Any] = {option: value}
            try:
                self._called(self._convention, dataclasses.replace(before, **changed))
            except UsageError:  # a Subject says itself what it gives
                break
            record = self._record(problem, f'{option} = "{value}"')
            if verdict_of(record) == "takes":
                return record
        self._called(self._convention, before)
        return None

    def _called(self, convention: str, options: ConventionOptions) -> None:
        self._subject = self._make(convention, options)
        self._convention, self._options = convention, options

    def _record(self, problem: Problem, what: str, subject: Subject | None = None) -> Record:
        self._advance(what)
        asked = subject or self._subject
        assert asked is not None, "a convention comes first"
        relation = RELATIONS.get(what)
        numbers = relation.allowed(problem).items() if relation else ()
        case = Case(
            problem=problem,
            question=relation.name if relation else "compare",
            parameters={name: values[0] for name, values in numbers},
        )
        return run_case(asked, case, device=self._device)


def _work(problem: Problem) -> int:
    """Products of a call: what an interpreter's time goes with."""
    pairs = problem.batch * problem.heads * problem.query * problem.kv
    return pairs * (problem.head_dim + problem.value_dim)


def _of_lse(record: Record) -> bool:
    judgement = record.judgement
    return bool(judgement and judgement.worst and judgement.worst.tensor == "lse")
