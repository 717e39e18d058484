"""The fixture ``kernel`` of properties, with which they ask Cases and check the answers."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any, NoReturn

import pytest

from attncheck.cases.tier import TIERS, Tier
from attncheck.diagnose.diagnosis import diagnose_failure, explain_failure, explained_by
from attncheck.diagnose.explanations import Findings
from attncheck.inputs.problem import Case
from attncheck.records.failure_causes import symptom
from attncheck.records.record import UNTRUSTED_STATUSES, Record
from attncheck.records.run_reports import Tally
from attncheck.subjects.capabilities.subject import Subject
from attncheck.suite.kernel_support import KernelSupport
from attncheck.suite.wrong_answers import WrongAnswer
from attncheck.verify.deaths import confirm_death
from attncheck.verify.executor import Executor, lost_gpu
from attncheck.verify.isolated import IsolatedExecutor
from attncheck.verify.kernel_server import Compiling
from attncheck.verify.run_case import run_case


class UnderTest(KernelSupport):
    """A kernel on one device, with the dtype and mask family of a test.

    Attributes:
        name: Name as given by the user: a name, or ``file.py::name``.
        dtype: The dtype of the test; empty for a test that is not a property.
        family: The mask family of the test; empty for a test that is not a property.
        failed: The last Record that failed the test.
        lost: The Record of the Case that made the GPU unusable for this process; None for none.
        share: Largest error ÷ bound of the answers since it was last set to 0.
        odd: The first violated relation that the kernel does not promise; empty for none.
    """

    def __init__(
        self,
        name: str,
        subject: Subject,
        device: str,
        *,
        dtype: str = "",
        family: str = "",
        tier: Tier = TIERS["smoke"],
        executor: Executor | None = None,
        compiling: Compiling | None = None,
    ) -> None:
        super().__init__(subject, device, executor)
        self._how: dict[str, Any] = {"device": device, "executor": self.executor}
        self.name = name
        self.dtype, self.family, self.tier = dtype, family, tier
        self.failed: Record | None = None
        # The first failure of a search, its explanation, and whether this also explains the
        # failures of other Cases, by their ids.
        self._first: Record | None = None
        self._findings: Findings | None = None
        self._alike: dict[str, bool] = {}
        self.lost: Record | None = None
        self.share = 0.0
        self.tally = Tally()
        self.odd = ""
        self._compiling = compiling or Compiling()

    def __repr__(self) -> str:
        return f"UnderTest({self.name!r}, device={self.device!r})"

    def begin(self) -> None:
        """Reset the state of the previous test; ``lost`` stays."""
        self.reason, self.failed, self.share, self.tally = "", None, 0.0, Tally()
        self._first, self._findings, self._alike = None, None, {}
        self.odd = ""

    def answer(self, case: Case) -> Record:
        """Ask one Case, count it, and return its Record."""
        start, compiled = time.perf_counter(), self._compiled()
        # Only the verdict, which is quick: a diagnosis is made when the text is read.
        ask = partial(run_case, self.subject, case, brief=True, **self._how)
        record, _ = confirm_death(self.subject, ask)
        seconds = time.perf_counter() - start
        compiling = self._compiled() - compiled
        self.tally.add(Tally(problems={record.status: 1}, seconds=seconds, compiling=compiling))
        if record.status == "unsupported":
            self.reason = record.reason
        if record.status == "warn" and record.judgement and record.judgement.rule == "relation":
            self.odd = self.odd or record.judgement.reason
        return record

    def _compiled(self) -> float:
        """Return the seconds that compilers took so far, here and in the kernel's process."""
        there = self.executor.compiling if isinstance(self.executor, IsolatedExecutor) else 0.0
        return self._compiling.seconds + there

    def must_hold(self, case: Case) -> None:
        """Raise WrongAnswer, with a diagnosis, unless the kernel answers correctly.

        A Case that the kernel does not take is rejected, or skips a test without Hypothesis.

        Raises:
            WrongAnswer: an AssertionError, also for a kernel that raised.
        """
        __tracebackhide__ = True
        # Once the GPU is unusable every call fails, so nothing more is asked.
        record = self.lost or self.answer(case)
        self._guide_search(record)
        if record.status in UNTRUSTED_STATUSES:
            import hypothesis  # slow, see below

            # A search must not shrink one failure to an unrelated one.
            if hypothesis.currently_in_test_context() and self._is_another(record):
                hypothesis.reject()
            self.failed = record
            if record.status == "error" and self.device == "cuda" and lost_gpu():
                self.lost = record  # the cause of all later failures
            raise WrongAnswer(record, kernel=self.name, device=self.device, diagnose=self._diagnose)

    def _diagnose(self, record: Record) -> Record:
        return diagnose_failure(record, self.subject, before=self._findings, **self._how)

    def _is_another(self, record: Record) -> bool:
        """Return whether a failure differs from the first one, by its symptom or its cause.

        The result for a Case never changes, since Hypothesis would call the test flaky.
        """
        if self._first is None:
            self._first = record
            self._findings = explain_failure(record, self.subject, **self._how)
            return False
        if symptom(record) != symptom(self._first):
            return True
        models = self._findings.equals if self._findings else []
        if not models or record.case_id == self._first.case_id:
            return False
        if record.case_id not in self._alike:
            explanation = explained_by(record, models, self.subject, **self._how)
            self._alike[record.case_id] = explanation is not None
        return not self._alike[record.case_id]

    def skip(self) -> NoReturn:
        """Skip the test with the reason of the kernel's last refusal."""
        pytest.skip(f"{self.name} takes no such problem on {self.device}: {self.reason}")

    def _guide_search(self, record: Record) -> None:
        """Reject a refused Case, and report the error and suspicious statuses to Hypothesis."""
        share = record.judgement.out_over_bound if record.judgement else None
        # Hypothesis is guided towards errors near their bound.
        if share and math.isfinite(share):
            self.share = max(self.share, share)
        import hypothesis  # slow, and not needed by tests without Hypothesis

        if not hypothesis.currently_in_test_context():
            if record.status == "unsupported":
                self.skip()
            return
        if record.status == "unsupported":
            hypothesis.reject()
        if record.status in {"warn", "inconclusive"}:
            hypothesis.event(record.status)
