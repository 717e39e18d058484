"""A failure with all that it takes to see it again, and the same Case asked once more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.examine.answer import answered
from attncheck.examine.diagnosis import diagnosed
from attncheck.examine.environment import environment, fingerprint
from attncheck.examine.evidence import Evidence
from attncheck.examine.executor import Executor, Failure, InProcess, Origin
from attncheck.examine.questions import summary
from attncheck.examine.relate import runs as runs_of
from attncheck.failure_record import Failed
from attncheck.judge.arithmetic import default
from attncheck.outputs import Outputs
from attncheck.problem import Case, short_id
from attncheck.relations import RELATIONS
from attncheck.subjects.contract import capability

if TYPE_CHECKING:
    from attncheck.inputs import Inputs
    from attncheck.record import Record
    from attncheck.subjects.contract import Subject

__all__ = ["Run", "again", "failed", "runs"]


def failed(
    record: Record, *, kernel: str, device: str, convention: str = "", test: str = ""
) -> Failed:
    """``record`` as a failure that can be kept.

    Args:
        record: What the kernel answered.
        kernel: As it was asked for.
        device: ``cpu`` or ``cuda``.
        convention: A name of a calling convention; empty for the first that fits.
        test: The property's test.

    Raises:
        UnknownName: for a question that there is not.
    """
    asked = {"kernel": kernel, "convention": convention, "device": device, "case": record.case}
    return Failed(
        id=short_id(asked),
        kernel=kernel,
        convention=convention,
        device=device,
        question=summary(str(record.case.get("question"))),
        test=test,
        record=record,
        environment=environment(device),
    )


def again(subject: Subject, case: Case, *, device: str) -> Record:
    """The Record of ``case``, asked here and now, with what may be wrong where it fails.

    Raises:
        UsageError: for a question that there is not, or that cannot be asked of its Problem.
    """
    record = answered(subject, case, device=device, environment=fingerprint(environment(device)))
    return diagnosed(record, subject, device=device)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Run:
    """One call that a Case asks for, and what is known of its result.

    Attributes:
        inputs: What the kernel reads.
        exact: The exact result, float64: out ``(batch, heads, query, value_dim)`` and LSE
            ``(batch, heads, query)``.
        allowed: The deterministic bound of each element; 0 in rows that see no key, infinite in
            rows that nothing is known of.
    """

    inputs: Inputs
    exact: Outputs
    allowed: Outputs


def runs(
    subject: Subject, case: Case, *, device: str, executor: Executor | None = None
) -> tuple[Run, ...]:
    """The calls of ``case`` in their order; one, but for a relation.

    Args:
        subject: The kernel, which is called to learn the arithmetic by which it is judged.
        case: What is asked.
        device: ``cpu`` or ``cuda``.
        executor: How to call it; in this process by default.

    Raises:
        UsageError: for a question that there is not, or that cannot be asked of its Problem.
    """
    executor = executor or InProcess()
    if case.question in RELATIONS:
        each = runs_of(case, device)
        return tuple(
            _run(
                subject,
                Evidence(Case(problem=one.problem), device, one),
                executor,
                Origin(case=case, run=number),
            )
            for number, one in enumerate(each)
        )
    return (_run(subject, Evidence(case, device), executor, Origin(case=case)),)


def _run(subject: Subject, evidence: Evidence, executor: Executor, origin: Origin) -> Run:
    inputs, exact = evidence.inputs, evidence.truth
    result = executor.run(subject, inputs, origin=origin)
    if isinstance(result, Failure):  # it says nothing of its arithmetic either
        arithmetic = default(inputs.problem.formats, capability(evidence.device))
    else:
        arithmetic = result.arithmetic
    bound = evidence.allowance(arithmetic)
    alive = evidence.alive
    allowed = Outputs(
        torch.where(alive[..., None], bound.out, 0.0), torch.where(alive, bound.lse, 0.0)
    )
    return Run(inputs=inputs, exact=exact, allowed=allowed)
