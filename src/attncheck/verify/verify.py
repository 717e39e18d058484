"""Runs each subject on each case, giving a Record each, and all of them a Report.

Command line, gate, properties and Python API all use ``run_case`` (one step) or ``iter_records``
(the loop), so that a case gives the same Record in each.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from attncheck.probes import PROBES
from attncheck.records.record import Report
from attncheck.subjects.capabilities.named_kernels import BUILTIN
from attncheck.subjects.capabilities.subject import Subject
from attncheck.subjects.ideal import Ideal
from attncheck.verify.compile_ahead import load_compilers
from attncheck.verify.deaths import confirm_death
from attncheck.verify.environment import environment, prepare
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.executor import InProcess
from attncheck.verify.isolated import IsolatedExecutor
from attncheck.verify.kernel_hosts import executor_of
from attncheck.verify.question_fit import COMPARE
from attncheck.verify.run_case import run_case

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from attncheck.core.declared_arithmetic import Arithmetic
    from attncheck.inputs.problem import Case, Problem
    from attncheck.records.record import Record
    from attncheck.subjects.capabilities.subject import Tiling
    from attncheck.verify.executor import Executor

    NamedCase = tuple[str, Case]

_MOST_PAIRS_AHEAD = 2**22  # (row, key) pairs of a problem that may run while another is judged.

__all__ = ["iter_records", "verify"]


def verify(
    subjects: Subject | Sequence[Subject],
    cases: Iterable[Case | NamedCase],
    *,
    device: str,
    executor: Executor | None = None,
    command: str = "",
    applicable_only: bool = False,
    timed: bool = False,
    brief: bool = False,
) -> Report:
    """Run every case on every subject and return the Report.

    Args:
        subjects: One kernel or several; those of a case share its inputs and exact results.
        cases: Cases, each alone or with the name that its Records have in a report.
        device: ``cpu`` or ``cuda``.
        executor: How to call the kernels; by default each in the process that it is in.
        command: The command line, for the Report.
        applicable_only: Whether a pair is left out where the kernel is absent on this machine or
            the case does not concern it; otherwise the case is adapted to the kernel, and each
            pair has a Record.
        timed: Whether comparisons are called until their median time is known, except the ideal
            kernel's forward.
        brief: Whether to return verdicts alone, without errors and reference errors.

    Raises:
        UsageError: for an unknown question, or one that does not apply to its Problem.
    """
    subjects = [subjects] if isinstance(subjects, Subject) else [*subjects]
    cases = [*cases]
    concerned = subjects
    if applicable_only:
        concerned = applicable_subjects([each.problem for _, each in _named(cases)], subjects)
    # Before the environment is read, which includes the repairs of Triton.
    prepare(device)
    # Made first, because Records name the environment by its key.
    report = assemble_report(concerned, (), device=device, command=command)
    (key,) = report.environments
    records = iter_records(
        subjects,
        cases,
        device=device,
        executor=executor,
        environment_key=key,
        applicable_only=applicable_only,
        timed=timed,
        brief=brief,
    )
    return replace(report, records=tuple(records))


def iter_records(  # noqa: PLR0913  # what is asked, and how
    subjects: Sequence[Subject],
    cases: Iterable[Case | NamedCase],
    *,
    device: str,
    executor: Executor | None = None,
    environment_key: str = "",
    applicable_only: bool = False,
    timed: bool = False,
    brief: bool = False,
    stage: Callable[[str], None] = lambda _: None,
) -> Iterator[Record]:
    """Yield the Records that ``verify`` reports, each as soon as it is made.

    Callers can show or store each at once, and may stop between two. Arguments are as in
    ``verify``; ``environment_key`` is that of the Report, by default of this process's environment;
    ``stage`` is called with the name of each stage.
    """
    prepare(device)
    key = environment_key or environment(device).id
    if applicable_only:
        absent = absence_reasons(subjects, device)
        subjects = [subject for subject in subjects if subject.name not in absent]
    named = [*_named(cases)]
    for (name, case), following in zip(named, [*(one for _, one in named[1:]), None], strict=True):
        # Not if calls are timed, because a call ahead would share the machine with them.
        ahead = following and not timed and _calls_once(case) and _calls_once(following)
        chosen = applicable_subjects([case.problem], subjects) if applicable_only else subjects
        # A single kernel shares no evidence, and may run a paged form of the case.
        evidence = None
        if len(chosen) > 1:
            evidence = EvidenceBuilder(
                case,
                device,
                expected=own_arithmetics(chosen, case.problem, device),
                tilings=_own_tilings(chosen, case.problem, device),
                meanwhile=partial(load_compilers, chosen, device),
            )
        for subject in chosen:
            caller = executor or executor_of(subject)
            if isinstance(caller, IsolatedExecutor):
                caller.expect(subject, following if ahead and len(chosen) == 1 else None)
            ask = partial(
                run_case,
                subject,
                case,
                device=device,
                executor=executor,
                variant=name,
                environment=key,
                timed=timed,
                brief=brief,
                evidence=evidence,
                stage=partial(_name_stage, stage, f"{subject.name} {name}"),
            )
            yield confirm_death(subject, ask)[0]


def own_arithmetics(
    subjects: Sequence[Subject], problem: Problem, device: str
) -> tuple[Arithmetic, ...]:
    """Return the arithmetics of those of attncheck's own kernels that take ``problem``."""
    own = _own_kernels(subjects, problem, device)
    return tuple(dict.fromkeys(each.arithmetic(problem, device) for each in own))


def _own_tilings(subjects: Sequence[Subject], problem: Problem, device: str) -> tuple[Tiling, ...]:
    """Return the tilings of the ideal kernels that they are compared with."""
    default = Ideal().tiling(problem, device)
    own = _own_kernels(subjects, problem, device)
    return tuple(dict.fromkeys(each.tiling(problem, device) or default for each in own))


def _own_kernels(subjects: Sequence[Subject], problem: Problem, device: str) -> list[Subject]:
    own = [subject for subject in subjects if subject.name in BUILTIN]
    return [subject for subject in own if not InProcess().refusal(subject, problem, device)]


def _name_stage(stage: Callable[[str], None], cell: str, what: str) -> None:
    stage(f"{cell}: {what}")


def assemble_report(
    subjects: Sequence[Subject], records: Iterable[Record], *, device: str, command: str
) -> Report:
    """Return a Report of Records made in this process on ``device``, with its environment."""
    env = environment(device)
    return Report(
        command=command,
        environments={env.id: env},
        kernels={subject.name: subject.summary for subject in subjects},
        absent=absence_reasons(subjects, device),
        records=tuple(records),
    )


def absence_reasons(subjects: Sequence[Subject], device: str) -> dict[str, str]:
    """Return why subjects can run nothing on ``device``, by name; those that can are left out."""
    reasons = {s.name: executor_of(s).absence(s, device) for s in subjects}
    return {name: reason for name, reason in reasons.items() if reason}


def applicable_subjects(problems: Sequence[Problem], subjects: Sequence[Subject]) -> list[Subject]:
    """Return the subjects that at least one of ``problems`` concerns."""
    return [s for s in subjects if any(executor_of(s).concerns(s, each) for each in problems)]


def case_subjects(
    problems: Sequence[Problem], subjects: Sequence[Subject], device: str
) -> list[list[Subject]]:
    """Return for each Problem the subjects that it concerns, of those that can run here."""
    absent = absence_reasons(subjects, device)
    present = [subject for subject in subjects if subject.name not in absent]
    return [applicable_subjects([problem], present) for problem in problems]


def _calls_once(case: Case) -> bool:
    """Return whether ``case`` is a single call, on tensors so small that two calls may overlap."""
    problem = case.problem
    small = problem.batch * problem.heads * problem.query * problem.kv <= _MOST_PAIRS_AHEAD
    return small and case.question in {COMPARE, *PROBES}


def _named(cases: Iterable[Case | NamedCase]) -> Iterator[NamedCase]:
    for each in cases:
        yield each if isinstance(each, tuple) else ("", each)
