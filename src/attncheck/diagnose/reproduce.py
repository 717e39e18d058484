"""Failures with all that is needed to reproduce them, and repeated runs of a Case."""

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
from attncheck.records.failures import StoredFailure
from attncheck.subjects.capabilities.subject import Subject, capability
from attncheck.verify.deaths import confirm_death
from attncheck.verify.environment import environment
from attncheck.verify.executor import Executor, Failure, Origin
from attncheck.verify.kernel_hosts import executor_of
from attncheck.verify.question_fit import question_named
from attncheck.verify.run_case import run_case

if TYPE_CHECKING:
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.records.record import Record


def new_failure(
    record: Record, *, kernel: str, device: str, convention: str = "", test: str = ""
) -> StoredFailure:
    """Return ``record`` as a failure that can be stored.

    Raises:
        UnknownName: for an unknown question.
    """
    identity = {"kernel": kernel, "convention": convention, "device": device, "case": record.case}
    return StoredFailure(
        id=short_id(identity),
        kernel=kernel,
        convention=convention,
        device=device,
        question=question_named(str(record.case.get("question"))).summary,
        test=test,
        record=record,
        environment=environment(device),
    )


def run_again(subject: Subject, case: Case, *, device: str) -> Record:
    """Run ``case`` once more and return its Record, with a diagnosis if it fails.

    Raises:
        UsageError: for an unknown question, or one that does not suit its Problem.
    """
    where = environment(device).id
    ask = partial(run_case, subject, case, device=device, environment=where)
    record, _ = confirm_death(subject, ask)
    return diagnose_failure(record, subject, device=device)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExactRun:
    """One call of a Case, its exact result and the bounds of its error."""

    inputs: Inputs  # what the kernel reads
    # The exact result, float64: out ``(batch, heads, query, value_dim)`` and LSE ``(batch, heads,
    # query)``.
    exact: Outputs
    # The deterministic bound of each element; 0 in rows that see no key, infinite in rows with no
    # known bound.
    allowed: Outputs


def exact_runs(
    subject: Subject, case: Case, *, device: str, executor: Executor | None = None
) -> tuple[ExactRun, ...]:
    """Return the calls of ``case`` in order: several for a relation, else one.

    Args:
        subject: The kernel, which is called to learn the arithmetic by which it is judged.
        executor: How to call the kernel; in this process by default.

    Raises:
        UsageError: for an unknown question, or one that does not suit its Problem.
    """
    executor, runs = executor or executor_of(subject), []
    for number, evidence in enumerate(evidence_of_runs(case, device)):
        inputs, alive = evidence.inputs, evidence.alive
        result = executor.run(subject, inputs, origin=Origin(case=case, run=number))
        if isinstance(result, Failure):  # A failed call does not report its arithmetic.
            arithmetic = default_arithmetic(inputs.problem.formats, capability(evidence.device))
        else:
            arithmetic = result.arithmetic
        bound = evidence.allowance(arithmetic)
        # Exactly 0 in rows without keys, even if other rows have no known bound.
        allowed = Outputs(
            torch.where(alive[..., None], bound.out, 0.0), torch.where(alive, bound.lse, 0.0)
        )
        runs.append(ExactRun(inputs=inputs, exact=evidence.truth, allowed=allowed))
    return tuple(runs)
