"""AssertionErrors for wrong answers of a kernel, with the diagnosis as their text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from msgspec.structs import replace

from attncheck.diagnose.reproduce import new_failure
from attncheck.inputs.problem import Case
from attncheck.records.failures import keep_failure
from attncheck.records.record import UNTRUSTED_STATUSES, Record, Report
from attncheck.reporting.check_document import failures_document, worst_record
from attncheck.reporting.diagnosis_text import diagnosis_text, kept_failure_text, repro_command
from attncheck.reporting.rendering import render
from attncheck.verify.question_fit import question_named


class WrongAnswer(AssertionError):
    """A kernel gives a wrong answer to a Case.

    Hypothesis raises one for every failing example while it shrinks. Therefore the failure is only
    diagnosed when the text is read or ``keep`` is called.

    Args:
        diagnose: (Record of a failure) → the Record with a diagnosis.
    """

    def __init__(
        self,
        record: Record,
        *,
        kernel: str,
        device: str,
        remark: str = "",
        diagnose: Callable[[Record], Record] | None = None,
    ) -> None:
        super().__init__(record.case_id)
        self.record = record
        self.kernel = kernel  # The kernel's name as given by the user.
        self.device = device
        self.remark = remark  # A further line of the text; empty for none.
        self.kept_id = ""  # The id for ``attncheck repro``; empty until ``keep`` is called.
        self._kept = ""
        self._diagnose = diagnose

    def diagnosed(self) -> Record:
        """Return the Record with a diagnosis, which is made on the first call."""
        if self._diagnose is not None:
            self.record, self._diagnose = self._diagnose(self.record), None
        return self.record

    def __str__(self) -> str:
        if self._kept:
            return self._kept
        question = question_named(str(self.record.case["question"])).summary
        text = diagnosis_text(
            self.diagnosed(), kernel=self.kernel, device=self.device, question_summary=question
        )
        return self._with_remark(text)

    def keep(self, test: str) -> tuple[str, list[tuple[str, object]]]:
        """Store the failure for ``attncheck repro``.

        Returns:
            The text with the failure's id, and (name, value) properties for a JUnit report.
        """
        failure = new_failure(self.diagnosed(), kernel=self.kernel, device=self.device, test=test)
        keep_failure(failure)
        self.kept_id = failure.id
        # Cached, since the text must contain the id, and must not be diagnosed again.
        self._kept = self._with_remark(kept_failure_text(failure))
        return self._kept, list(self._facts(failure.id))

    def _facts(self, identifier: str) -> Iterator[tuple[str, object]]:
        problem = Case.from_json(self.record.case).problem
        yield "attncheck_failure", identifier
        yield "attncheck_kernel", self.kernel
        yield "attncheck_device", self.device
        yield "attncheck_problem", problem.id
        yield "attncheck_seed", problem.seed
        judgement = self.record.judgement
        if judgement and judgement.out_over_bound is not None:
            yield "attncheck_error_over_bound", judgement.out_over_bound

    def _with_remark(self, text: str) -> str:
        return f"{text}\n{self.remark}" if self.remark else text


class WrongAnswers(AssertionError):
    """A kernel gives wrong answers to some of several Cases; the text groups them by cause.

    Args:
        failures: The wrong answers, in the order of the Cases.
        report: The Records of all Cases that were asked.
    """

    def __init__(self, failures: Sequence[WrongAnswer], report: Report) -> None:
        super().__init__(len(failures))
        self.failures = tuple(failures)
        self._report = report

    def __str__(self) -> str:
        diagnosed = iter([failure.diagnosed() for failure in self.failures])
        records = tuple(
            next(diagnosed) if record.status in UNTRUSTED_STATUSES else record
            for record in self._report.records
        )
        if worst_record(records) is None:  # the oracles disagree, which has no cause in the kernel
            return "\n\n".join(map(str, self.failures))
        kept = {failure.record.case_id: failure.kept_id for failure in self.failures}

        def repeat(record: Record) -> str:
            return repro_command(kept[record.case_id]) if kept[record.case_id] else ""

        page = partial(failures_document, repeat=repeat)
        return render(replace(self._report, records=records), "table", page).rstrip()

    def keep(self, test: str) -> tuple[str, list[tuple[str, object]]]:
        """Store each failure like WrongAnswer; return the properties of the first."""
        facts = [failure.keep(test)[1] for failure in self.failures]
        return str(self), facts[0]
