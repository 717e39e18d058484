"""Runs one kernel on one Case of any question, and returns the Record."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeGuard

import msgspec
import torch
from msgspec.structs import replace

from attncheck.core.judgement import Judgement, Place, Rule
from attncheck.core.outputs import Outputs
from attncheck.core.tensor_names import TensorName
from attncheck.inputs.problem import Case, Problem, head_arrangement
from attncheck.judge.error_measures import ErrorMeasures, measure_errors
from attncheck.oracles.mod_calls import Indices, call_mask
from attncheck.probes import PROBES, VisibleKeys, check_tied_keys
from attncheck.probes.margins import WeightErrors
from attncheck.records.record import GradientErrors, LseErrors, OutErrors, Record, Status
from attncheck.relations import RELATIONS
from attncheck.subjects.capabilities.subject import Subject, Tiling
from attncheck.subjects.ideal import Ideal
from attncheck.verify.call_checks import CHECKS, judge_call
from attncheck.verify.call_conditions import CallConditions, judged_conditions
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.executor import (
    Execution,
    Executor,
    Failure,
    InProcess,
    Origin,
    failure,
    lacked_memory,
)
from attncheck.verify.judging import judge_outputs, with_error_map
from attncheck.verify.kernel_hosts import executor_of
from attncheck.verify.obligations import outputs_digest
from attncheck.verify.question_fit import adapted_cases, not_applicable_reason, question_named
from attncheck.verify.relation_runs import judge_relation
from attncheck.verify.second_opinion import second_opinion

__all__ = ["run_case"]

# The broken rule, or below the status, for each kind of Failure.
_BROKEN_RULES: dict[str, Rule] = {
    "contract": "contract",
    "alias": "alias",
    "mutation": "mutation",
    "memory": "memory",
}
_LARGE_OUTPUTS = 1 << 20  # Bytes; larger outputs are hashed in a thread of their own.
_STATUSES: dict[str, Status] = {
    "refused": "unsupported",
    "crash": "crash",
    "timeout": "timeout",
    "oom": "oom",
}


def run_case(  # noqa: PLR0913  # one case, and how it is run
    subject: Subject,
    case: Case,
    *,
    device: str,
    executor: Executor | None = None,
    variant: str = "",
    environment: str = "",
    timed: bool = False,
    brief: bool = False,
    evidence: EvidenceBuilder | None = None,
    place: str = "",
    stage: Callable[[str], None] = lambda _: None,
) -> Record:
    """Run ``case`` on ``subject`` and return the Record, whatever the kernel does.

    A kernel that takes only paged keys gets the same Problem in pages of a usual size; the Record
    has the Case as it was run.

    Args:
        subject: The kernel.
        case: Its question is ``compare``, a relation, a probe or a check.
        device: ``cpu`` or ``cuda``.
        executor: How to call the kernel; by default in the process that it is in.
        variant: A name for the Case in a report.
        environment: Fingerprint of this process.
        timed: Whether a comparison is called until its median time is known, except the forward of
            the ideal kernel, which is the reference of others.
        brief: Whether to return the verdict alone, without errors and reference errors, which takes
            half the time.
        evidence: The evidence on this Case, if several kernels share it.
        place: Where a comparison or a probe of a kernel in another process is judged: ``cpu`` or
            ``cuda``; by default where the kernel runs.
        stage: Called with the name of each stage of a comparison or probe; what it raises ends it.

    Raises:
        UsageError: for an unknown question, or one that does not apply to the Problem.
    """
    question_named(case.question)
    executor = executor or executor_of(subject)
    for adapted in adapted_cases(subject, case, executor):
        record = new_record(
            subject, adapted, device=device, variant=variant, environment=environment
        )
        if not executor.concerns(subject, adapted.problem):
            reason = not_applicable_reason(subject, adapted.problem, executor)
            record = replace(record, status="unsupported", reason=reason)
        elif adapted.question in RELATIONS:
            record = _judged(record, judge_relation(subject, adapted, executor, device=device))
        elif adapted.question in CHECKS:
            record = _judged(record, judge_call(subject, adapted, executor, device=device))
        else:
            # Shared evidence is on the original case, not on its paged form.
            if evidence is None or evidence.case != adapted:
                evidence = EvidenceBuilder(adapted, device, place=place)
            record, _ = run_on_evidence(
                record, subject, evidence, executor, timed=timed, brief=brief, stage=stage
            )
        # The next case, if any, has another page size.
        if record.status != "unsupported":
            break
    return record


def _judged(record: Record, judgement: Judgement | Failure) -> Record:
    if isinstance(judgement, Failure):
        return without_outputs(record, judgement)
    return replace(record, status=judgement.status, judgement=judgement)


def run_on_evidence(
    record: Record,
    subject: Subject,
    evidence: EvidenceBuilder,
    executor: Executor,
    *,
    timed: bool = False,
    brief: bool = False,
    stage: Callable[[str], None] = lambda _: None,
) -> tuple[Record, Execution | None]:
    """Run ``subject`` on the inputs of ``evidence``, a comparison or a probe, and judge it.

    Args:
        timed: As in ``run_case``.
        brief: As in ``run_case``.
        stage: As in ``run_case``.

    Returns:
        The Record, and the Execution, or None if there are no outputs. If the exact result does not
        fit into memory, the status is ``error``.
    """
    problem = evidence.case.problem
    if refusal := executor.refusal(subject, problem, evidence.device):
        return without_outputs(record, refusal), None
    try:
        # Before any kernel has run: nothing that it does can change the truth.
        stage("the exact result")
        evidence.establish(reference_errors=not brief)
        stage("the kernel")
        if timed and _is_ideal(subject, executor) and not problem.backward:
            execution = _ideal_execution(subject, evidence)
        else:
            execution = executor.run(
                subject,
                evidence.inputs,
                origin=Origin(case=evidence.case),
                under=CallConditions(timed=True) if timed else judged_conditions(evidence.case),
            )
        if isinstance(execution, Failure):
            return without_outputs(record, execution), None
        if execution.notes.wrong:
            failure = Failure(kind=execution.notes.rule, message=execution.notes.wrong)
            return without_outputs(record, failure), None
        stage("the verdict")
        digest: Callable[[], str] = partial(outputs_digest, execution.outputs)
        with ThreadPoolExecutor(1) as pool:
            # Hashing needs no GPU and no interpreter lock; a thread costs more than a short hash.
            if sum(each.nbytes for each in execution.outputs.tensors().values()) > _LARGE_OUTPUTS:
                digest = pool.submit(digest).result
            if evidence.case.question in PROBES:
                record = _judged(record, _probe_judgement(execution, evidence, brief=brief))
            elif brief:
                record = _judged(record, judge_outputs(execution, evidence, brief=True))
            else:
                record = record_comparison(record, execution, evidence)
            record = replace(record, digest=digest())
        record = second_opinion(with_error_map(record, execution, evidence), evidence.evidence)
    except (RuntimeError, MemoryError) as error:
        # The judge's: a kernel that runs out of memory gives a Failure instead.
        return without_outputs(record, lacked_memory(error, "the exact result")), None
    return record, execution


def _is_ideal(subject: Subject, executor: Executor) -> TypeGuard[Ideal]:
    """Return whether this is the ideal kernel, in this process and without a planted fault."""
    if not isinstance(subject, Ideal) or not isinstance(executor, InProcess):
        return False
    return subject.is_plain and not (subject.reverse_sums or subject.scale_first)


def _ideal_execution(subject: Ideal, evidence: EvidenceBuilder) -> Execution | Failure:
    """Return the ideal kernel's forward, the reference of other kernels, without its time.

    Its time is no reference, and at 16,384 rows on a GPU it takes a hundred times as long as a fast
    kernel.
    """
    problem = evidence.case.problem
    tiling = subject.tiling(problem, evidence.device)
    arithmetic = subject.arithmetic(problem, evidence.device)
    try:
        outputs = evidence.ideal_outputs(tiling, truncates=arithmetic.truncates)
    except Exception as error:  # noqa: BLE001  # as an executor does
        return failure(error)
    return Execution(outputs=outputs, seconds=None, tiling=tiling, arithmetic=arithmetic)


def new_record(
    subject: Subject, case: Case, *, device: str, variant: str, environment: str
) -> Record:
    """Return the Record of a Case before ``subject`` has run."""
    return blank_record(
        case,
        kernel=subject.name,
        interpreted=subject.triton and device == "cpu",
        variant=variant,
        environment=environment,
    )


def blank_record(
    case: Case, *, kernel: str, status: Status = "error", variant: str = "", **more: Any
) -> Record:
    """Return a Record of ``case`` without results; its status is ``error`` by default.

    Args:
        kernel: The kernel's name, or what the user typed.
        more: Other fields.
    """
    return Record(
        case_id=case.id,
        case=case.to_json(),
        kernel=kernel,
        variant=variant,
        heads=head_arrangement(case.problem),
        status=status,
        **{"environment": ""} | more,
    )


def without_outputs(record: Record, failure: Failure) -> Record:
    """Return ``record`` with the outcome of a kernel that gave no outputs to judge.

    The kinds ``contract``, ``alias``, ``mutation`` and ``memory`` have the status ``fail`` by the
    rule of that name; ``refused`` is ``unsupported``; ``crash``, ``timeout`` and ``oom`` are
    statuses themselves; anything else is an ``error``.
    """
    if failure.kind in _BROKEN_RULES:
        rule = _BROKEN_RULES[failure.kind]
        judgement = Judgement(status="fail", rule=rule, reason=failure.message)
        return replace(record, status="fail", judgement=judgement)
    status = _STATUSES.get(failure.kind, "error")
    frames = tuple(failure.trace.splitlines()) if status == "error" else ()
    return replace(record, status=status, reason=failure.message, frames=frames or msgspec.UNSET)


def record_comparison(record: Record, execution: Execution, evidence: EvidenceBuilder) -> Record:
    """Return ``record`` with the verdict on a comparison, its errors and their reference errors."""
    problem, outputs = evidence.case.problem, execution.outputs
    # A kernel may declare no tiles, but its ideal kernel needs some.
    tiling = execution.tiling or Ideal().tiling(problem, evidence.device)
    judgement = judge_outputs(execution, evidence)
    gradients = _gradient_errors(outputs, evidence, tiling)
    return replace(
        record,
        status=judgement.status,
        judgement=judgement,
        out=_out_errors(outputs, evidence, tiling),
        lse=_lse_errors(outputs, evidence),
        gradients=gradients if problem.backward else msgspec.UNSET,
        seconds=execution.seconds,
        tiling=str(tiling) if problem.operation == "attention" else "",
    )


def _out_errors(outputs: Outputs, evidence: EvidenceBuilder, tiling: Tiling) -> OutErrors:
    alive = evidence.alive
    errors = measure_errors(outputs.out, evidence.truth.out, alive[..., None])
    wrong = ~alive & (outputs.out != 0).any(-1)  # NaN != 0 holds: a NaN row is wrong too
    return OutErrors(
        **_measured(errors),
        floor_rmse=evidence.floor_rmse,
        ideal_rmse=evidence.ideal_rmse(tiling),
        input_rmse=evidence.input_rmse,
        bias=errors.bias,
        elements=errors.elements,
        dead_rows=int((~alive).sum()),
        dead_rows_wrong=int(wrong.sum()),
    )


def _lse_errors(outputs: Outputs, evidence: EvidenceBuilder) -> LseErrors | None:
    truth = evidence.truth.lse
    if outputs.lse is None or truth is None:
        return None
    errors = measure_errors(outputs.lse, truth, evidence.alive)
    wrong = ~evidence.alive & ~outputs.lse.isneginf()
    return LseErrors(**_measured(errors), dead_rows_wrong=int(wrong.sum()))


def _gradient_errors(
    outputs: Outputs, evidence: EvidenceBuilder, tiling: Tiling
) -> dict[TensorName, GradientErrors]:
    gradients = outputs.gradients()
    by_name = {}
    for name, truth in evidence.truth.gradients().items():
        errors = measure_errors(gradients[name], truth, evidence.touched(name))
        by_name[name] = GradientErrors(
            **_measured(errors),
            floor_rmse=evidence.gradient_floors[name],
            ideal_rmse=evidence.ideal_gradients(tiling)[name],
            bias=errors.bias,
            elements=errors.elements,
        )
    return by_name


def _measured(errors: ErrorMeasures) -> dict[str, Any]:
    """Return the fields that the errors of all tensors have."""
    return {
        "rmse": errors.rmse,
        "max_error": errors.max_error,
        "max_at": None if errors.max_at is None else Place.of(errors.max_at),
        "nonfinite": errors.nonfinite,
    }


def mask_rows(problem: Problem, device: torch.device | str = "cpu") -> VisibleKeys:
    """Return a function that evaluates the mask of ``problem``, by its own callable, for rows."""
    mask = problem.mask_mod(str(device))
    batch, heads, kv = (range(n) for n in (problem.batch, problem.heads, problem.kv))
    return lambda rows: call_mask(mask, Indices.of(batch, heads, rows, kv, device))


def _probe_judgement(execution: Execution, evidence: EvidenceBuilder, *, brief: bool) -> Judgement:
    """Judge an exact probe: finite, empty rows, the probe's exact rule, the deterministic bound.

    The last two are both ``structure`` in the Judgement, because with a probe's inputs rounding
    cannot be the reason. Warnings of the judge are not reported.
    """
    case, inputs = evidence.case, evidence.inputs
    seen = mask_rows(case.problem, inputs.device)
    errors = WeightErrors.of(execution.arithmetic)
    finding = check_tied_keys(inputs, execution.outputs, seen, errors=errors)
    structure = finding.message if finding else ""
    judgement = judge_outputs(execution, evidence, structure=structure, ideal=False, brief=brief)
    # Warnings are about the spread of rounding errors; exact answers have none.
    if judgement.status == "warn":
        return replace(judgement, status="pass", rule="", reason="", warnings=())
    judgement = replace(judgement, warnings=())
    if judgement.status != "fail" or judgement.rule == "structure":
        return judgement
    # NaN, or an empty row that is not empty, is the plainer reason: the probe's follows it.
    if judgement.rule != "bound":
        more = f"; {structure}" if structure else ""
        return replace(judgement, reason=judgement.reason + more)
    return replace(judgement, rule="structure")
