"""One kernel on one Case gives one Record."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from attncheck.examine.error_map import mapped
from attncheck.examine.executor import InProcess
from attncheck.examine.judging import judged
from attncheck.examine.recorded import recorded
from attncheck.examine.second_opinion import second_opinion
from attncheck.judge.metrics import errors
from attncheck.judgement import Place
from attncheck.record import GradientErrors, LseErrors, OutErrors, Record
from attncheck.subjects.ideal import Ideal

if TYPE_CHECKING:
    from attncheck.examine.evidence import Evidence
    from attncheck.examine.executor import Execution, Executor
    from attncheck.outputs import Outputs
    from attncheck.subjects.contract import Subject, Tiling
    from attncheck.tensor_names import TensorName

__all__ = ["compare"]


def compare(
    subject: Subject,
    evidence: Evidence,
    *,
    variant: str,
    environment: str,
    executor: Executor | None = None,
    timed: bool = True,
    brief: bool = False,
) -> Record:
    """Run ``subject`` on the Case of ``evidence``, compare it with the exact result, and judge.

    Args:
        subject: The kernel.
        evidence: The Case with its inputs, truth and yardsticks.
        variant: The plan's name for the mask and score mod.
        environment: Fingerprint of this process.
        executor: How to call the kernel; in this process by default.
        timed: Whether it is called until its median time is known.
        brief: Whether the verdict alone is asked for: without errors beside their yardsticks, and
            as ``judging.judged`` says.

    Never raises for what the kernel does: a kernel without outputs becomes a Record as
    ``recorded.without_outputs`` says, and a Case whose exact result does not fit into memory one
    with status ``error``.
    """
    return recorded(
        subject,
        evidence,
        variant=variant,
        environment=environment,
        executor=executor or InProcess(),
        timed=timed,
        answer=lambda record, result: second_opinion(
            (_verdict if brief else _compared)(record, result, evidence), evidence
        ),
        brief=brief,
    )


def _verdict(record: Record, result: Execution, evidence: Evidence) -> Record:
    judgement = judged(result, evidence, brief=True)
    record = replace(record, status=judgement.status, judgement=judgement)
    return mapped(record, result, evidence)


def _compared(record: Record, result: Execution, evidence: Evidence) -> Record:
    problem = evidence.case.problem
    tiling = result.tiling or Ideal().tiling(problem, evidence.device)
    judgement = judged(result, evidence)
    gradients = _gradients(result.outputs, evidence, tiling)
    record = replace(
        record,
        status=judgement.status,
        judgement=judgement,
        out=_out(result.outputs, evidence, tiling),
        lse=_lse(result.outputs, evidence),
        gradients=gradients if problem.backward else msgspec.UNSET,
        seconds=result.seconds,
        tiling=str(tiling) if problem.operation == "attention" else "",
    )
    return mapped(record, result, evidence)


def _out(outputs: Outputs, evidence: Evidence, tiling: Tiling) -> OutErrors:
    alive = evidence.alive
    found = errors(outputs.out, evidence.truth.out, alive[..., None])
    wrong = ~alive & (outputs.out != 0).any(-1)  # NaN != 0 holds: a NaN row is wrong too
    return OutErrors(
        rmse=found.rmse,
        floor_rmse=evidence.floor_rmse,
        ideal_rmse=evidence.ideal_rmse(tiling),
        input_rmse=evidence.input_rmse,
        max_error=found.max_error,
        max_at=_place(found.max_at),
        bias=found.bias,
        elements=found.elements,
        nonfinite=found.nonfinite,
        dead_rows=int((~alive).sum()),
        dead_rows_wrong=int(wrong.sum()),
    )


def _lse(outputs: Outputs, evidence: Evidence) -> LseErrors | None:
    truth = evidence.truth.lse
    if outputs.lse is None or truth is None:
        return None
    found = errors(outputs.lse, truth, evidence.alive)
    wrong = ~evidence.alive & ~outputs.lse.isneginf()
    return LseErrors(
        rmse=found.rmse,
        max_error=found.max_error,
        max_at=_place(found.max_at),
        nonfinite=found.nonfinite,
        dead_rows_wrong=int(wrong.sum()),
    )


def _gradients(
    outputs: Outputs, evidence: Evidence, tiling: Tiling
) -> dict[TensorName, GradientErrors]:
    exact = evidence.truth.gradients()
    if not exact:
        return {}
    given = outputs.gradients()
    floors, ideal = evidence.gradient_floors, evidence.ideal_gradients(tiling)
    found = {name: errors(given[name], exact[name], evidence.touched(name)) for name in exact}
    return {
        name: GradientErrors(
            rmse=one.rmse,
            floor_rmse=floors[name],
            ideal_rmse=ideal[name],
            max_error=one.max_error,
            max_at=_place(one.max_at),
            bias=one.bias,
            elements=one.elements,
            nonfinite=one.nonfinite,
        )
        for name, one in found.items()
    }


def _place(index: tuple[int, ...] | None) -> Place | None:
    return None if index is None else Place.of(index)
