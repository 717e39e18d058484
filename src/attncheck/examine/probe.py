"""One kernel on one Case whose question is a probe gives one Record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from attncheck.examine.error_map import mapped
from attncheck.examine.executor import InProcess
from attncheck.examine.recorded import recorded
from attncheck.examine.second_opinion import second_opinion
from attncheck.oracles.indices import Indices, visible
from attncheck.outputs import Outputs
from attncheck.probes import probe_named
from attncheck.probes.explanation import explained
from attncheck.probes.margins import WeightErrors

if TYPE_CHECKING:
    import torch

    from attncheck.examine.evidence import Evidence
    from attncheck.examine.executor import Execution, Executor
    from attncheck.judgement import Judgement
    from attncheck.probes import Seen
    from attncheck.problem import Problem
    from attncheck.record import Record
    from attncheck.subjects.contract import Subject

__all__ = ["probe", "shown"]


def probe(
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
        return second_opinion(mapped(record, result, evidence), evidence)

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


def shown(problem: Problem, device: torch.device | str = "cpu") -> Seen:
    """What the mask of ``problem`` shows to some rows, by its original callable."""
    mask = problem.mask_mod(str(device))
    batch, heads, kv = (range(n) for n in (problem.batch, problem.heads, problem.kv))
    return lambda rows: visible(mask, Indices.of(batch, heads, rows, kv, device))


def _judged(result: Execution, evidence: Evidence, *, brief: bool) -> Judgement:
    from attncheck.examine.judging import judged

    case, inputs = evidence.case, evidence.inputs
    seen = shown(case.problem, inputs.device)
    arithmetic = result.arithmetic
    errors = WeightErrors(
        exp2_ulps=arithmetic.exp2_ulps,
        cut=arithmetic.weights_error if arithmetic.truncates else 0.0,
    )
    found = probe_named(case.question).read(inputs, result.outputs, seen, errors=errors)
    judgement = judged(
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


def _explanation(result: Execution, evidence: Evidence, seen: Seen) -> str:
    """What best explains the first row, by batch, head and row, that is beyond its bound."""
    given, truth = result.outputs, evidence.truth
    allowance = evidence.allowance(result.arithmetic)
    beyond = ((given.out.double() - truth.out).abs() > allowance.out).any(-1)
    if given.lse is not None and truth.lse is not None:
        beyond |= (given.lse.double() - truth.lse).abs() > allowance.lse
    b, h, i = (beyond & evidence.alive).nonzero()[0].tolist()
    rows = seen(range(i, i + 1)).expand(*given.out.shape[:2], 1, evidence.case.problem.kv)
    allowed = Outputs(allowance.out, allowance.lse)
    _, said = explained(evidence.inputs, given, truth, allowed, rows[b, h, 0], (b, h, i))
    return f"batch {b}, head {h}, row {i} is {said}"
