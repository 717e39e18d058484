"""A kernel as a property sees it: what it takes, and that what is asked of it holds."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NoReturn

import pytest

from attncheck.diagnose.diagnosis import diagnose_failure
from attncheck.records.record import UNTRUSTED_STATUSES
from attncheck.records.run_reports import Tally
from attncheck.suite import gpu
from attncheck.suite.diagnosed import DoesNotHold
from attncheck.suite.tiers import TIERS, Tier
from attncheck.verify.executor import Executor, Failure, InProcess
from attncheck.verify.kernel_server import Compiling
from attncheck.verify.run_case import run_case

if TYPE_CHECKING:
    from attncheck.capabilities.subject import Subject
    from attncheck.inputs.problem import Case, Problem
    from attncheck.records.record import Record

__all__ = ["UnderTest"]


class UnderTest:
    """A subject on one device, and which part of the suite is asked of it.

    Attributes:
        name: What it was asked for by: a name, or ``file.py::name``.
        subject: The kernel.
        device: ``cpu`` or ``cuda``.
        dtype: The dtype that a test is about; empty where it is about none.
        family: The mask family that a test is about; empty where it is about none.
        tier: How hard it is asked.
        refused: Why it did not take the last Problem that it did not take; empty if it took all.
        failed: The last Record that was no pass.
        lost: The Record of the Case that took the GPU from this process; None where none did.
        share: Largest error ÷ bound of the answers since it was last set to 0.
        tally: What the test that runs asked of it.
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
        self.name = name
        self.subject = subject
        self.device = device
        self.dtype = dtype
        self.family = family
        self.tier = tier
        self.refused = ""
        self.failed: Record | None = None
        self.lost: Record | None = None
        self.share = 0.0
        self.tally = Tally()
        self._compiling = compiling or Compiling()
        self._executor = executor or InProcess()

    def __repr__(self) -> str:
        return f"UnderTest({self.name!r}, device={self.device!r})"

    def begin(self) -> None:
        """Forget what was asked before: another test begins."""
        self.refused, self.failed, self.share, self.tally = "", None, 0.0, Tally()

    def supports(self, problem: Problem) -> bool:
        """Whether the kernel takes ``problem``: for ``strategies.problems(supports=…)``.

        Where even asking raises it is asked the question, and the answer says what it raised.
        """
        reason: str | Failure | None = "such problems do not concern it"
        if self._executor.concerns(self.subject, problem):
            reason = self._executor.refusal(self.subject, problem, self.device)
        if isinstance(reason, str):
            self.refused = reason
        return not isinstance(reason, str)

    def answer(self, case: Case) -> Record:
        """The Record of one Case."""
        start, before = time.perf_counter(), self._compiling.seconds
        record = run_case(
            self.subject, case, device=self.device, executor=self._executor, brief=True
        )
        seconds = time.perf_counter() - start
        compiling = self._compiling.seconds - before
        self.tally.add(Tally(problems={record.status: 1}, seconds=seconds, compiling=compiling))
        if record.status == "unsupported":
            self.refused = record.reason
        return record

    def must_hold(self, case: Case) -> None:
        """Raises DoesNotHold, which reads like a diagnosis, unless the kernel answers rightly.

        A Case that the kernel does not take is drawn anew, and skips a test without Hypothesis.

        Raises:
            DoesNotHold: an AssertionError, also for a kernel that raised.
        """
        __tracebackhide__ = True
        record = self.lost or self.answer(case)
        self._guide(record)
        if record.status in UNTRUSTED_STATUSES:
            self.failed = record
            if record.status == "error" and self.device == "cuda" and gpu.is_gone():
                self.lost = record  # whatever is asked now fails alike: this one did it
            raise DoesNotHold(
                record, kernel=self.name, device=self.device, diagnose=self._diagnosed
            )

    def _diagnosed(self, record: Record) -> Record:
        return diagnose_failure(record, self.subject, device=self.device, executor=self._executor)

    def skip(self) -> NoReturn:
        """Skip the test, with what the kernel said when it last refused a Problem."""
        pytest.skip(f"{self.name} takes no such problem on {self.device}: {self.refused}")

    def _guide(self, record: Record) -> None:
        """Tell Hypothesis what happened: refusals are drawn anew, what is odd is counted."""
        share = record.judgement.out_over_bound if record.judgement else None
        if share and math.isfinite(share):
            self.share = max(self.share, share)
        import hypothesis

        if not hypothesis.currently_in_test_context():
            if record.status == "unsupported":
                self.skip()
            return
        if record.status == "unsupported":
            hypothesis.reject()
        if record.status in {"warn", "inconclusive"}:
            hypothesis.event(record.status)
