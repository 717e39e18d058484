"""A kernel as a property sees it: what it takes, and that its answers hold."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NoReturn

import pytest

from attncheck.cases.tier import TIERS, Tier
from attncheck.diagnose.diagnosis import diagnose_failure
from attncheck.records.record import UNTRUSTED_STATUSES
from attncheck.records.run_reports import Tally
from attncheck.suite.kernel_support import KernelSupport
from attncheck.suite.wrong_answers import WrongAnswer
from attncheck.verify.kernel_server import Compiling
from attncheck.verify.run_case import run_case

if TYPE_CHECKING:
    from attncheck.inputs.problem import Case
    from attncheck.records.record import Record
    from attncheck.subjects.capabilities.subject import Subject
    from attncheck.verify.executor import Executor

__all__ = ["UnderTest", "gpu_is_lost"]


class UnderTest(KernelSupport):
    """A subject on one device, and which part of the suite is asked of it.

    Attributes:
        name: What it was asked for by: a name, or ``file.py::name``.
        dtype: The dtype that a test is about; empty where it is about none.
        family: The mask family that a test is about; empty where it is about none.
        tier: How much is asked.
        failed: The last Record that was no pass.
        lost: The Record of the Case that took the GPU from this process; None where none did.
        share: Largest error ÷ bound of the answers since it was last set to 0.
        tally: What the current test asked of it.
        odd: First thing that was no failure, because it promises no better; empty for nothing.
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
        self.name = name
        self.dtype, self.family, self.tier = dtype, family, tier
        self.failed: Record | None = None
        self.lost: Record | None = None
        self.share = 0.0
        self.tally = Tally()
        self.odd = ""
        self._compiling = compiling or Compiling()

    def __repr__(self) -> str:
        return f"UnderTest({self.name!r}, device={self.device!r})"

    def begin(self) -> None:
        """Forget what was asked before: another test begins."""
        self.reason, self.failed, self.share, self.tally = "", None, 0.0, Tally()
        self.odd = ""

    def answer(self, case: Case) -> Record:
        """Return the Record of one Case, and count it."""
        start, compiled = time.perf_counter(), self._compiling.seconds
        # The verdict alone, which is quick: a diagnosis is made when the text is read.
        record = run_case(
            self.subject, case, device=self.device, executor=self.executor, brief=True
        )
        seconds = time.perf_counter() - start
        compiling = self._compiling.seconds - compiled
        self.tally.add(Tally(problems={record.status: 1}, seconds=seconds, compiling=compiling))
        if record.status == "unsupported":
            self.reason = record.reason
        if record.status == "warn" and record.judgement and record.judgement.rule == "relation":
            self.odd = self.odd or record.judgement.reason
        return record

    def must_hold(self, case: Case) -> None:
        """Raise WrongAnswer, which reads like a diagnosis, unless the kernel answers rightly.

        A Case that the kernel does not take is drawn anew, and skips a test without Hypothesis.

        Raises:
            WrongAnswer: an AssertionError, also for a kernel that raised.
        """
        __tracebackhide__ = True
        # Once the GPU is lost every call fails alike, so nothing more is asked.
        record = self.lost or self.answer(case)
        self._guide_search(record)
        if record.status in UNTRUSTED_STATUSES:
            self.failed = record
            if record.status == "error" and self.device == "cuda" and gpu_is_lost():
                self.lost = record  # whatever is asked now fails alike: this one did it
            raise WrongAnswer(record, kernel=self.name, device=self.device, diagnose=self._diagnose)

    def _diagnose(self, record: Record) -> Record:
        return diagnose_failure(record, self.subject, device=self.device, executor=self.executor)

    def skip(self) -> NoReturn:
        """Skip the test, with what the kernel said when it last refused a Problem."""
        pytest.skip(f"{self.name} takes no such problem on {self.device}: {self.reason}")

    def _guide_search(self, record: Record) -> None:
        """Tell Hypothesis what happened: refusals are drawn anew, what is odd is counted."""
        share = record.judgement.out_over_bound if record.judgement else None
        # Hypothesis is steered to where errors come near their bound.
        if share and math.isfinite(share):
            self.share = max(self.share, share)
        import hypothesis  # heavy, and not needed by a test without it

        if not hypothesis.currently_in_test_context():
            if record.status == "unsupported":
                self.skip()
            return
        if record.status == "unsupported":
            hypothesis.reject()
        if record.status in {"warn", "inconclusive"}:
            hypothesis.event(record.status)


def gpu_is_lost() -> bool:
    """Return whether CUDA works no more in this process.

    An illegal or a misaligned address ends every later call with the same words.
    """
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
