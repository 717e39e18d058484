"""Measures the accuracy of a kernel on a Case, for comparison with later runs."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import torch
from msgspec.structs import replace

from attncheck.core.outputs import Outputs
from attncheck.core.tensor_names import TensorName
from attncheck.inputs.problem import Case, Problem
from attncheck.judge.error_measures import (
    ErrorMeasures,
    measure_errors,
    relative_error,
    rounding_squares,
    row_squares,
    row_units,
)
from attncheck.records.record import FAILED_STATUSES, Accuracy, Record
from attncheck.subjects.capabilities.subject import Subject, Tiling
from attncheck.subjects.ideal import Ideal
from attncheck.verify.evidence_builder import EvidenceBuilder, ensemble_tilings
from attncheck.verify.executor import Execution, Executor, lacked_memory
from attncheck.verify.kernel_hosts import executor_of
from attncheck.verify.question_fit import not_applicable_reason
from attncheck.verify.run_case import new_record, run_on_evidence, without_outputs

RUNS = 5  # Runs of a kernel that does not promise the same bits each time.

# A tiling with longer sums than the judge's four: in fp32 the length of sums determines the errors.
_LONG = Tiling(block_query=128, block_kv=256)


def measure_accuracy(
    subject: Subject,
    case: Case,
    *,
    device: str,
    variant: str = "",
    environment: str = "",
    executor: Executor | None = None,
    runs: int = RUNS,
    place: str = "",
) -> Record:
    """Run ``subject`` on ``case`` as ``run_case`` does, and return the Record with its accuracy.

    The Record has a ``digest`` and an ``accuracy``. A kernel that promises the same bits each time
    is run once. Any other is run ``runs`` times: the Record is that of the worst run, the accuracy
    of each tensor is that of its largest error, and the digest is left out unless all bits agreed.
    As in ``run_case``, nothing is raised for what the kernel does.

    Args:
        case: A Case whose question is ``compare``.
        executor: How to call the kernel; by default in the process that it is in.
        runs: Runs of a kernel that does not promise the same bits each time.
        place: As in ``run_case``.
    """
    # One builder for all runs, so that they differ only in the kernel's outputs.
    evidence = EvidenceBuilder(case, device, place=place)
    executor = executor or executor_of(subject)
    worst: Record | None = None
    for _ in range(1 if promises_same_bits(subject, case.problem) else runs):
        blank = new_record(subject, case, device=device, variant=variant, environment=environment)
        if not executor.concerns(subject, case.problem):
            reason = not_applicable_reason(subject, case.problem, executor)
            return replace(blank, status="unsupported", reason=reason)
        record, execution = run_on_evidence(blank, subject, evidence, executor)
        if execution is not None and record.judgement is not None:
            try:
                record = replace(record, accuracy=accuracies(execution, evidence))
            except (RuntimeError, MemoryError) as error:
                return without_outputs(blank, lacked_memory(error, "the accuracy"))
        worst = record if worst is None else _worse(worst, record)
        # Without errors to compare, further runs would change nothing.
        if record.status in FAILED_STATUSES or record.status == "unsupported":
            break
    assert worst is not None, "it ran at least once"
    return worst


def promises_same_bits(subject: Subject, problem: Problem) -> bool:
    """Return whether ``subject`` promises the same bits in each run of ``problem``."""
    return "repeat" in subject.promises and (subject.promises_gradients or not problem.backward)


def accuracy_tilings(problem: Problem) -> tuple[Tiling, ...]:
    """Return the tilings of the ideal kernels with which errors are compared."""
    tilings = ensemble_tilings(problem)
    return tilings if problem.operation == "softmax" else (*tilings, _LONG)


def accuracies(result: Execution, evidence: EvidenceBuilder) -> dict[TensorName, Accuracy]:
    """Return the accuracy of every tensor whose errors are finite numbers."""
    exact, by_name = evidence.truth.tensors(), {}
    tensors = result.outputs.tensors()
    ensemble = [one.tensors() for one in _ensemble(result, evidence)]
    for name, values in tensors.items():
        # Outputs that were not requested, such as gradients of a forward, have no exact values.
        if name not in exact:
            continue
        measured = evidence.touched(name).expand_as(exact[name])
        whole = measure_errors(values, exact[name], measured)
        if not whole.nonfinite:
            rows = [row_squares(one[name], exact[name], measured) for one in (tensors, *ensemble)]
            least = _one_rounding(name, evidence, measured)
            each = least is not None and evidence.evidence.generic
            by_name[name] = _accuracy(whole, rows, row_units(rows[1:], least, each=each), each=each)
    return by_name


def _accuracy(
    whole: ErrorMeasures, rows: list[torch.Tensor], unit: torch.Tensor, *, each: bool
) -> Accuracy:
    # Errors in a row without units of its own may be dependent: it counts as one element at most.
    most = whole.elements if each else unit.numel()
    own, *ensemble = (relative_error(one, unit, most) for one in rows)
    return Accuracy(
        rmse=whole.rmse,
        relative=own.size,
        freedom=own.freedom,
        ensemble=tuple(one.size for one in ensemble),
    )


def _one_rounding(
    name: TensorName, evidence: EvidenceBuilder, counted: torch.Tensor
) -> torch.Tensor | None:
    """Return each row's mean square error of one rounding; None if rows are single elements."""
    exact, formats = evidence.truth.tensors()[name], evidence.case.problem.formats
    if exact.ndim < 4:
        return None
    output = formats.output if name == "out" else formats.storage
    return rounding_squares(exact, counted, output)


def _ensemble(result: Execution, evidence: EvidenceBuilder) -> Iterator[Outputs]:
    """Yield the outputs of ideal kernels, with gradients in a backward."""
    problem = evidence.case.problem
    for tiling in accuracy_tilings(problem):
        if problem.backward:
            # The builder caches only forwards, so ideal gradients are computed here.
            yield Ideal(tiling).run(evidence.inputs)
        else:
            yield evidence.ideal_outputs(tiling, truncates=result.arithmetic.truncates)


def _worse(one: Record, other: Record) -> Record:
    """Return the worse of two Records of one question, with the larger error of each tensor."""
    same_bits = one.digest == other.digest
    worse = max((one, other), key=_badness)
    if one.accuracy is not msgspec.UNSET and other.accuracy is not msgspec.UNSET:
        # By tensor, because the run with the worst out need not have the worst LSE.
        larger = {
            name: max(accuracy, other.accuracy.get(name, accuracy), key=lambda a: a.relative)
            for name, accuracy in one.accuracy.items()
        }
        worse = replace(worse, accuracy=larger)
    # A digest is left out if runs gave different bits.
    return worse if same_bits else replace(worse, digest=msgspec.UNSET)


def _badness(record: Record) -> tuple[int, float]:
    order = ("pass", "warn", "inconclusive", "fail")
    # A status without a verdict, such as a crash, is worse than any verdict.
    rank = order.index(record.status) if record.status in order else len(order)
    return rank, record.out.rmse if record.out is not None else 0.0
