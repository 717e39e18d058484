"""Questions by name, the Problems that they apply to, and their paged forms."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from attncheck.core.errors import UsageError, look_up
from attncheck.core.paged_layout import Paging
from attncheck.inputs.problem import Case, Problem, Question
from attncheck.probes import PROBES, Probe
from attncheck.relations import RELATIONS
from attncheck.subjects.capabilities.subject import Subject
from attncheck.verify.call_checks import CHECKS
from attncheck.verify.executor import Executor

COMPARE = "compare"  # The question whether every element is exact attention up to rounding.
_DEFINITIONS: dict[str, Question | Probe] = {
    COMPARE: Question(name=COMPARE, summary="every element is exact attention up to rounding"),
    **RELATIONS,
    **PROBES,
    **CHECKS,
}
QUESTIONS = tuple(_DEFINITIONS)

_PAGE_SIZES = (16, 64, 256)  # Usual numbers of keys in a page; a kernel may take only one of them.


def question_named(name: str) -> Question | Probe:
    """Return ``compare``, a relation, a probe or a check; raise UnknownName."""
    return look_up("question", name, _DEFINITIONS)


def question_problem(question: str, problem: Problem) -> Problem:
    """Return ``problem`` as the question changes it: a probe has its own inputs, and no mod."""
    return PROBES[question].problem(problem) if question in PROBES else problem


def compares_launches(questions: Iterable[str]) -> bool:
    """Return whether all of ``questions`` are about other launches of the same kernel."""
    return all(name in RELATIONS and RELATIONS[name].uses_other_launch for name in questions)


def adapted_problems(subject: Subject, problem: Problem, executor: Executor) -> tuple[Problem, ...]:
    """Return ``problem`` alone, or its paged forms if the kernel takes only paged keys.

    There is a paged form for each usual page size, of which a kernel may take only one. Nothing
    else differs, and several sequences share their first page. A backward has no paged form.
    """
    if problem.operation != "attention" or problem.backward or executor.concerns(subject, problem):
        return (problem,)
    shared = int(problem.batch > 1)
    paged = tuple(problem.replace(paging=Paging(size=size, shared=shared)) for size in _PAGE_SIZES)
    # ``concerns`` is asked of one size only; a kernel refuses other sizes that it does not take.
    return paged if executor.concerns(subject, paged[0]) else (problem,)


def taken_problem(
    subject: Subject, problem: Problem, executor: Executor, device: str
) -> Problem | None:
    """Return ``problem``, or its first paged form, that ``subject`` does not refuse; else None."""
    for each in adapted_problems(subject, problem, executor):
        if executor.concerns(subject, each) and executor.refusal(subject, each, device) is None:
            return each
    return None


def adapted_cases(subject: Subject, case: Case, executor: Executor) -> Iterator[Case]:
    """Yield the forms of ``case`` that ``subject`` may take, the likeliest first.

    That is the case itself unless the kernel takes only paged keys (``adapted_problems``) and the
    question applies to them.
    """
    problems = adapted_problems(subject, case.problem, executor)
    if problems == (case.problem,):
        yield case
        return
    cases = [dataclasses.replace(case, problem=problem) for problem in problems]
    fitting = [each for each in cases if can_be_asked(each)]
    # If no form fits, run the case itself, whose Record gives the reason.
    yield from fitting or [case]


def can_be_asked(case: Case) -> bool:
    """Return whether its question applies to its Problem with its parameters."""
    try:
        question_named(case.question).check(case.problem, case.parameters)
    except UsageError:
        return False
    return True


def not_applicable_reason(subject: Subject, problem: Problem, executor: Executor) -> str:
    """Return why ``problem`` does not concern a kernel, in one line."""
    if problem.backward:
        # If the kernel takes the forward, it lacks only gradients, which is the better reason.
        forward = problem.replace(backward=False, dlse=False, dcaptured=False)
        if executor.concerns(subject, forward) or adapted_problems(subject, forward, executor) != (
            forward,
        ):
            return "it gives no gradients"
    if problem.sink and executor.concerns(subject, problem.replace(sink=False)):
        return "it takes no sinks"
    if problem.paging is not None:
        return "it takes no paged keys and values"
    if adapted_problems(subject, problem, executor) != (problem,):
        return "it takes paged keys and values alone"
    return "it takes no sinks" if problem.sink else f"it does not compute {problem.operation}"
