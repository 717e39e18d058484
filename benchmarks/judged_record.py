"""Judge a kernel on evidence that several kernels share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.verify.run_case import new_record, run_on_evidence

if TYPE_CHECKING:
    from attncheck.records.record import Record
    from attncheck.subjects.capabilities.subject import Subject
    from attncheck.verify.evidence_builder import EvidenceBuilder
    from attncheck.verify.executor import Executor

__all__ = ["judged_record"]


def judged_record(
    subject: Subject, evidence: EvidenceBuilder, executor: Executor, *, brief: bool = False
) -> Record:
    """Run ``subject`` on the inputs of ``evidence``, and return the judged Record."""
    record = new_record(
        subject, evidence.case, device=str(evidence.device), variant="", environment=""
    )
    return run_on_evidence(record, subject, evidence, executor, brief=brief)[0]
