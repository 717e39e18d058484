"""One kernel on one Case gives one Record, whatever the question."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from attncheck.core.errors import UnknownName
from attncheck.core.judgement import Place
from attncheck.core.outputs import Outputs
from attncheck.core.paged_layout import Paging
from attncheck.judge.error_measures import measure_errors
from attncheck.oracles.mod_calls import Indices, visible
from attncheck.probes import PROBES, probe_named
from attncheck.probes.margins import WeightErrors
from attncheck.probes.wrong_rows import explain_row
from attncheck.records.record import GradientErrors, LseErrors, OutErrors, Record
from attncheck.relations import RELATIONS
from attncheck.subjects.ideal import Ideal
from attncheck.verify.call_checks import CHECKS, record_check
from attncheck.verify.evidence import Evidence
from attncheck.verify.executor import InProcess
from attncheck.verify.judging import judge_outputs, with_error_map
from attncheck.verify.new_record import asked, recorded
from attncheck.verify.relation_runs import record_relation
from attncheck.verify.second_opinion import second_opinion

if TYPE_CHECKING:
    import torch

    from attncheck.capabilities.subject import Subject, Tiling
    from attncheck.core.judgement import Judgement
    from attncheck.core.outputs import TensorName
    from attncheck.inputs.problem import Case, Problem
    from attncheck.inputs.question_parameters import Allowed
    from attncheck.probes import Probe, VisibleKeys
    from attncheck.relations import Relation
    from attncheck.verify.call_checks import Check
    from attncheck.verify.executor import Execution, Executor

__all__ = [
    "COMPARE",
    "adapted_problems",
    "allowed_parameters",
    "check_question",
    "compare",
    "mask_rows",
    "not_applicable_reason",
    "question_problem",
    "question_summary",
    "run_case",
    "run_probe",
    "unfit_reason",
]


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
    judgement = judge_outputs(result, evidence, brief=True)
    record = replace(record, status=judgement.status, judgement=judgement)
    return with_error_map(record, result, evidence)


def _compared(record: Record, result: Execution, evidence: Evidence) -> Record:
    problem = evidence.case.problem
    tiling = result.tiling or Ideal().tiling(problem, evidence.device)
    judgement = judge_outputs(result, evidence)
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
    return with_error_map(record, result, evidence)


def _out(outputs: Outputs, evidence: Evidence, tiling: Tiling) -> OutErrors:
    alive = evidence.alive
    found = measure_errors(outputs.out, evidence.truth.out, alive[..., None])
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
    found = measure_errors(outputs.lse, truth, evidence.alive)
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
    found = {
        name: measure_errors(given[name], exact[name], evidence.touched(name)) for name in exact
    }
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


def run_probe(
    subject: Subject,
    evidence: Evidence,
    *,
    variant: str,
    environment: str,
    executor: Executor | None = None,
    brief: bool = False,
) -> Record:
    """Run ``subject`` on the Case of ``evidence``, whose question is a probe, and judge.

    The rules in their order: finite, empty rows, the probe's exact rule, the deterministic bound.
    The last two are both ``structure`` in the Judgement: a probe's inputs leave rounding no room to
    be the reason. What the judge finds odd beside them is not reported.

    Args:
        subject: The kernel.
        evidence: The Case with its inputs, truth and bounds.
        variant: The plan's name for the question.
        environment: Fingerprint of this process.
        executor: How to call the kernel; in this process by default.
        brief: As of ``check.compare``.

    Never raises for what the kernel does; see ``check.compare``.
    """

    def answer(record: Record, result: Execution) -> Record:
        judgement = _judged(result, evidence, brief=brief)
        record = replace(record, status=judgement.status, judgement=judgement)
        return second_opinion(with_error_map(record, result, evidence), evidence)

    return recorded(
        subject,
        evidence,
        variant=variant,
        environment=environment,
        executor=executor or InProcess(),
        timed=False,
        answer=answer,
        brief=brief,
    )


def mask_rows(problem: Problem, device: torch.device | str = "cpu") -> VisibleKeys:
    """What the mask of ``problem`` shows to some rows, by its original callable."""
    mask = problem.mask_mod(str(device))
    batch, heads, kv = (range(n) for n in (problem.batch, problem.heads, problem.kv))
    return lambda rows: visible(mask, Indices.of(batch, heads, rows, kv, device))


def _judged(result: Execution, evidence: Evidence, *, brief: bool) -> Judgement:
    from attncheck.verify.judging import judge_outputs

    case, inputs = evidence.case, evidence.inputs
    seen = mask_rows(case.problem, inputs.device)
    arithmetic = result.arithmetic
    errors = WeightErrors(
        exp2_ulps=arithmetic.exp2_ulps,
        cut=arithmetic.weights_error if arithmetic.truncates else 0.0,
    )
    found = probe_named(case.question).read(inputs, result.outputs, seen, errors=errors)
    judgement = judge_outputs(
        result, evidence, structure=found.message if found else "", ideal=False, brief=brief
    )
    if judgement.status == "warn":
        return replace(judgement, status="pass", rule="", reason="", warnings=())
    judgement = replace(judgement, warnings=())
    if judgement.status != "fail" or judgement.rule == "structure":
        return judgement
    if judgement.rule != "bound":
        more = f"; {found.message}" if found else ""
        return replace(judgement, reason=judgement.reason + more)
    reason = f"{_explanation(result, evidence, seen)}; {judgement.reason}"
    return replace(judgement, rule="structure", reason=reason)


def _explanation(result: Execution, evidence: Evidence, seen: VisibleKeys) -> str:
    """What best explains the first row, by batch, head and row, that is beyond its bound."""
    given, truth = result.outputs, evidence.truth
    allowance = evidence.allowance(result.arithmetic)
    beyond = ((given.out.double() - truth.out).abs() > allowance.out).any(-1)
    if given.lse is not None and truth.lse is not None:
        beyond |= (given.lse.double() - truth.lse).abs() > allowance.lse
    b, h, i = (beyond & evidence.alive).nonzero()[0].tolist()
    rows = seen(range(i, i + 1)).expand(*given.out.shape[:2], 1, evidence.case.problem.kv)
    allowed = Outputs(allowance.out, allowance.lse)
    _, said = explain_row(evidence.inputs, given, truth, allowed, rows[b, h, 0], (b, h, i))
    return f"batch {b}, head {h}, row {i} is {said}"


COMPARE = "compare"


def check_question(name: str) -> None:
    """Raises UnknownName for what is neither ``compare`` nor a relation, a probe or a check."""
    if name != COMPARE and not any(name in known for known in (RELATIONS, PROBES, CHECKS)):
        raise UnknownName("question", name, (COMPARE, *RELATIONS, *PROBES, *CHECKS))


def question_summary(question: str) -> str:
    """What a question asks, in one line; raises UnknownName."""
    check_question(question)
    if question == COMPARE:
        return "every element is exact attention up to rounding"
    return _named(question).summary


def question_problem(question: str, problem: Problem) -> Problem:
    """What is asked in place of ``problem``: a probe has no score mod, and its own inputs."""
    return PROBES[question].problem(problem) if question in PROBES else problem


def unfit_reason(question: str, problem: Problem) -> str | None:
    """Why the question says nothing of ``problem``, in one line; None if it does."""
    check_question(question)
    if question == COMPARE:
        return None
    return _named(question).unfit(problem)


def allowed_parameters(question: str, problem: Problem) -> Allowed:
    """The numbers that the question may be asked with, by name."""
    check_question(question)
    if question == COMPARE:
        return {}
    return _named(question).allowed(problem)


def _named(question: str) -> Relation | Probe | Check:
    """What is asked by a name that was checked, and is not ``compare``."""
    if question in RELATIONS:
        return RELATIONS[question]
    return CHECKS[question] if question in CHECKS else PROBES[question]


_SIZES = (16, 64, 256)


def adapted_problems(
    subject: Subject, problem: Problem, executor: Executor | None = None
) -> tuple[Problem, ...]:
    """``problem``, or the same in pages for a kernel that takes keys in pages alone.

    Then once for each of some usual sizes, of which a kernel may take one; nothing else differs,
    and with several sequences they share their first page. There are no gradients of keys in pages:
    a backward stays what it is.

    Args:
        subject: The kernel.
        problem: What it is to be asked.
        executor: How to ask it; in this process by default.
    """
    executor = executor or InProcess()
    if problem.operation != "attention" or problem.backward or executor.concerns(subject, problem):
        return (problem,)
    shared = int(problem.batch > 1)
    paged = tuple(problem.replace(paging=Paging(size=size, shared=shared)) for size in _SIZES)
    return paged if executor.concerns(subject, paged[0]) else (problem,)


def not_applicable_reason(subject: Subject, problem: Problem, executor: Executor) -> str:
    """Why ``problem`` does not concern a kernel, in one line."""
    if problem.backward:
        forward = problem.replace(backward=False, dlse=False, dcaptured=False)
        if executor.concerns(subject, forward) or adapted_problems(subject, forward, executor) != (
            forward,
        ):
            return "it gives no gradients"
    if problem.sink and executor.concerns(subject, problem.replace(sink=False)):
        return "it is not about sinks"
    if problem.paging is not None:
        return "it is not about keys in pages"
    if adapted_problems(subject, problem, executor) != (problem,):
        return "it is about keys in pages, and these are in none"
    return "it is not about sinks" if problem.sink else f"it is not about {problem.operation}"


def run_case(
    subject: Subject,
    case: Case,
    *,
    device: str,
    variant: str = "",
    environment: str = "",
    executor: Executor | None = None,
    brief: bool = False,
) -> Record:
    """Ask ``case`` of ``subject``.

    Args:
        subject: The kernel.
        case: Its question is ``compare``, a relation, a probe or a check.
        device: ``cpu`` or ``cuda``.
        variant: A name for the question in a report.
        environment: Fingerprint of this process.
        executor: How to call the kernel; in this process by default.
        brief: Whether the verdict alone is asked for, as of ``check.compare``: half the time.

    Never raises for what the kernel does; see ``check.compare``.

    Raises:
        UsageError: for a question that there is not, or that cannot be asked of the Problem.
    """
    check_question(case.question)
    said = {"variant": variant, "environment": environment}
    executor = executor or InProcess()
    if not executor.concerns(subject, case.problem):
        record = asked(subject, case, device, variant, environment)
        reason = not_applicable_reason(subject, case.problem, executor)
        return replace(record, status="unsupported", reason=reason)
    if case.question in RELATIONS:
        return record_relation(subject, case, device=device, executor=executor, **said)
    if case.question in CHECKS:
        return record_check(subject, case, device=device, executor=executor, **said)
    evidence = Evidence(case, device)
    if case.question in PROBES:
        return run_probe(subject, evidence, executor=executor, brief=brief, **said)
    return compare(subject, evidence, executor=executor, timed=False, brief=brief, **said)
