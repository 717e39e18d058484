"""A failure with all that it takes to see it again, and the same Case run once more."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from attncheck.core.declared_arithmetic import default_arithmetic
from attncheck.core.outputs import Outputs
from attncheck.diagnose.diagnosis import diagnose_failure
from attncheck.diagnose.out_of_bounds_reads import evidence_of_runs
from attncheck.inputs.problem import Case, short_id
from attncheck.records.failures import KeptFailure
from attncheck.subjects.capabilities.subject import Subject, capability
from attncheck.verify.deaths import confirm_death
from attncheck.verify.environment import environment
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.executor import Executor, Failure, Origin
from attncheck.verify.kernel_hosts import executor_of
from attncheck.verify.question_fit import question_summary
from attncheck.verify.run_case import run_case

if TYPE_CHECKING:
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.records.record import Record


def new_failure(
    record: Record, *, kernel: str, device: str, convention: str = "", test: str = ""
) -> KeptFailure:
    """``record`` as a failure that can be kept.

    Raises:
        UnknownName: for a question that there is not.
    """
    identity = {"kernel": kernel, "convention": convention, "device": device, "case": record.case}
    return KeptFailure(
        id=short_id(identity),
        kernel=kernel,
        convention=convention,
        device=device,
        question=question_summary(str(record.case.get("question"))),
        test=test,
        record=record,
        environment=environment(device),
    )


def run_again(subject: Subject, case: Case, *, device: str) -> Record:
    """The Record of ``case``, asked here and now, with what may be wrong where it fails.

    Raises:
        UsageError: for a question that there is not, or that cannot be asked of its Problem.
    """
    where = environment(device).id
    ask = partial(run_case, subject, case, device=device, environment=where)
    record, _ = confirm_death(subject, ask)
    return diagnose_failure(record, subject, device=device)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExactRun:
    """One call that a Case asks for, and what is known of its result."""

    inputs: Inputs  # what the kernel reads
    # The exact result, float64: out ``(batch, heads, query, value_dim)`` and LSE ``(batch, heads,
    # query)``.
    exact: Outputs
    # The deterministic bound of each element; 0 in rows that see no key, infinite in rows that
    # nothing is known of.
    allowed: Outputs


def exact_runs(
    subject: Subject, case: Case, *, device: str, executor: Executor | None = None
) -> tuple[ExactRun, ...]:
    """The calls of ``case`` in their order; one, but for a relation.

    Args:
        subject: The kernel, which is called to learn the arithmetic by which it is judged.
        executor: How to call it; in this process by default.

    Raises:
        UsageError: for a question that there is not, or that cannot be asked of its Problem.
    """
    executor = executor or executor_of(subject)
    return tuple(
        _run(subject, evidence, executor, Origin(case=case, run=number))
        for number, evidence in enumerate(evidence_of_runs(case, device))
    )


def _run(
    subject: Subject, evidence: EvidenceBuilder, executor: Executor, origin: Origin
) -> ExactRun:
    inputs, exact = evidence.inputs, evidence.truth
    result = executor.run(subject, inputs, origin=origin)
    if isinstance(result, Failure):  # it says nothing of its arithmetic either
        arithmetic = default_arithmetic(inputs.problem.formats, capability(evidence.device))
    else:
        arithmetic = result.arithmetic
    bound = evidence.allowance(arithmetic)
    # Exactly 0 in rows without keys, also where nothing is known of the others.
    alive = evidence.alive
    allowed = Outputs(
        torch.where(alive[..., None], bound.out, 0.0), torch.where(alive, bound.lse, 0.0)
    )
    return ExactRun(inputs=inputs, exact=exact, allowed=allowed)
