"""Find out which problems and mask families a kernel takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from attncheck.cases.mask_samples import PLAIN_KIND, SOFTMAX, ProblemKind, sample_problems
from attncheck.cases.strategies import MASK_FAMILIES
from attncheck.cases.strategies.problems import nearest_supported
from attncheck.inputs.problem import Problem
from attncheck.subjects.capabilities.subject import Subject
from attncheck.verify.executor import Executor
from attncheck.verify.kernel_hosts import executor_of
from attncheck.verify.question_fit import compares_launches

NOT_APPLICABLE = "such problems do not concern it"


class KernelSupport:
    """Finds out which problems one kernel takes on one device.

    A kernel that raises when it is asked counts as taking the problem; the later call then reports
    the error.
    """

    def __init__(self, subject: Subject, device: str, executor: Executor | None = None) -> None:
        self.subject, self.device = subject, device
        self.executor = executor or executor_of(subject)
        # Reason of the last refusal; empty if there was none.
        self.reason = ""
        self._refusals: dict[tuple[str, str, ProblemKind], str] = {}

    def supports(self, problem: Problem) -> bool:
        """Return whether the kernel takes ``problem``; ``reason`` says why not."""
        concerns = self.executor.concerns(self.subject, problem)
        reason = self._refusal(problem) if concerns else NOT_APPLICABLE
        self.reason = reason or self.reason
        return not reason

    def _refusal(self, problem: Problem) -> str:
        """Return why the kernel refuses ``problem``; empty if it does not, or if asking fails."""
        answer = self.executor.refusal(self.subject, problem, self.device)
        return answer.message if answer is not None and answer.kind == "refused" else ""

    def refusal(self, family: str, dtype: str, kind: ProblemKind = PLAIN_KIND) -> str:
        """Return why the kernel takes no problem near a mask family's samples; empty if it does.

        ``NOT_APPLICABLE`` if such problems do not concern the kernel.
        """
        key = (family, dtype, kind)
        if key not in self._refusals:
            self._refusals[key] = self._find_refusal(family, dtype, kind)
        return self._refusals[key]

    def _find_refusal(self, family: str, dtype: str, kind: ProblemKind) -> str:
        reasons: Counter[str] = Counter()

        def takes(problem: Problem) -> bool:
            if reason := self._refusal(problem):
                reasons[reason] += 1
            return not reason

        for problem in sample_problems(family, dtype, kind):
            concerns = self.executor.concerns(self.subject, problem)
            if concerns and nearest_supported(problem, takes, (dtype,)) is not None:
                return ""
        # Reasons about shapes are frequent, since shapes are varied: the rarest is more specific.
        return min(reasons, key=lambda reason: reasons[reason], default=NOT_APPLICABLE)

    def refusals(self, dtype: str, kinds: Iterable[ProblemKind]) -> list[str] | None:
        """Return why the kernel takes nothing in a dtype; None if it takes some problem."""
        reasons = []
        for kind in kinds:
            for family in (*MASK_FAMILIES, SOFTMAX):
                reason = self.refusal(family, dtype, kind)
                if not reason:
                    return None
                reasons += [reason] if reason != NOT_APPLICABLE else []
        return reasons

    def has_launches(self, problem: Problem) -> bool:
        """Return whether the kernel has further launches of ``problem``."""
        try:
            return bool(self.subject.launches(problem, self.device))
        except Exception:  # noqa: BLE001  # foreign code; the later call reports it
            return True


def is_askable(subject: Subject, questions: Iterable[str]) -> bool:
    """Return whether ``questions`` can be asked: those that compare launches need several.

    This does not depend on a Problem, since there is none before tests are collected.
    """
    return not compares_launches(questions) or subject.has_launches
