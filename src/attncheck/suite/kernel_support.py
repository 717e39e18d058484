"""Capabilities of a kernel, asked of it once for each problem and each mask family."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from attncheck.cases.mask_samples import PLAIN_KIND, SOFTMAX, ProblemKind, sample_problems
from attncheck.cases.strategies import MASK_FAMILIES
from attncheck.cases.strategies.problems import nearest_supported
from attncheck.inputs.problem import Problem
from attncheck.subjects.capabilities.subject import Subject
from attncheck.verify.executor import Executor, Failure
from attncheck.verify.kernel_hosts import executor_of
from attncheck.verify.question_fit import compares_launches

NOT_APPLICABLE = "such problems do not concern it"


class KernelSupport:
    """Problems that one kernel takes on one device.

    A kernel that raises when it is asked counts as one that takes the problem: it is then called,
    and its answer says what it raised.
    """

    def __init__(self, subject: Subject, device: str, executor: Executor | None = None) -> None:
        self.subject, self.device = subject, device
        self.executor = executor or executor_of(subject)
        # Why it did not take the last Problem that it did not take; empty if it took all.
        self.reason = ""
        self._refusals: dict[tuple[str, str, ProblemKind], str] = {}

    def supports(self, problem: Problem) -> bool:
        """Return whether the kernel takes ``problem``; ``reason`` says why not."""
        answer: str | Failure | None = NOT_APPLICABLE
        if self.executor.concerns(self.subject, problem):
            answer = self.executor.refusal(self.subject, problem, self.device)
        if isinstance(answer, str):
            self.reason = answer
        return not isinstance(answer, str)

    def refusal(self, family: str, dtype: str, kind: ProblemKind = PLAIN_KIND) -> str:
        """Return why it takes no sample of a mask family, nor one near; empty if it takes one.

        ``NOT_APPLICABLE`` where such problems do not concern it.
        """
        key = (family, dtype, kind)
        if key not in self._refusals:
            self._refusals[key] = self._find_refusal(family, dtype, kind)
        return self._refusals[key]

    def _find_refusal(self, family: str, dtype: str, kind: ProblemKind) -> str:
        reasons: Counter[str] = Counter()

        def takes(problem: Problem) -> bool:
            answer = self.executor.refusal(self.subject, problem, self.device)
            # A Failure is no refusal: the kernel is called later, and its answer tells.
            if answer is None or isinstance(answer, Failure):
                return True
            reasons[answer] += 1
            return False

        for problem in sample_problems(family, dtype, kind):
            concerns = self.executor.concerns(self.subject, problem)
            if concerns and nearest_supported(problem, takes, (dtype,)) is not None:
                return ""
        # Shapes were moved until they fit: the rarest reason is not about them.
        return min(reasons, key=lambda reason: reasons[reason], default=NOT_APPLICABLE)

    def refusals(self, dtype: str, kinds: Iterable[ProblemKind]) -> list[str] | None:
        """Return why it takes nothing of a dtype in any family; None if it takes something."""
        reasons = []
        for kind in kinds:
            for family in (*MASK_FAMILIES, SOFTMAX):
                reason = self.refusal(family, dtype, kind)
                if not reason:
                    return None
                reasons += [reason] if reason != NOT_APPLICABLE else []
        return reasons

    def has_launches(self, problem: Problem) -> bool:
        """Return whether the kernel has another launch of ``problem``."""
        try:
            return bool(self.subject.launches(problem, self.device))
        except Exception:  # noqa: BLE001  # foreign code may raise anything: it is asked, and says so
            return True


def is_askable(subject: Subject, questions: Iterable[str]) -> bool:
    """Return whether a kernel has what ``questions`` compare, as far as launches go.

    A kernel that says nothing of other launches is not asked about them.
    """
    # No Problem is needed: before tests are collected there is none.
    return not compares_launches(questions) or subject.has_launches
