"""One kernel on one Case whose question is a probe gives one Record."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from msgspec.structs import replace

from attncheck.errors import UsageError
from attncheck.examine.executor import InProcess
from attncheck.examine.recorded import recorded
from attncheck.examine.relate import command
from attncheck.oracles.indices import Indices, visible
from attncheck.outputs import Outputs
from attncheck.probes import probe_named
from attncheck.probes.explanation import explained
from attncheck.probes.margins import WeightErrors
from attncheck.problem import Case

if TYPE_CHECKING:
    import torch

    from attncheck.examine.evidence import Evidence
    from attncheck.examine.executor import Execution, Executor
    from attncheck.judgement import Judgement
    from attncheck.probes import Seen
    from attncheck.problem import Problem
    from attncheck.record import Record
    from attncheck.subjects.contract import Subject

__all__ = ["broken", "probe", "replay", "shown"]


def probe(
    subject: Subject,
    evidence: Evidence,
    *,
    variant: str,
    environment: str,
    executor: Executor | None = None,
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

    Never raises for what the kernel does; see ``check.compare``.
    """

    def answer(record: Record, result: Execution) -> Record:
        judgement = _judged(result, evidence)
        return replace(record, status=judgement.status, judgement=judgement)

    return recorded(
        subject,
        evidence,
        variant=variant,
        environment=environment,
        executor=executor or InProcess(),
        timed=False,
        answer=answer,
    )


def broken(kernel: str, record: Record) -> str:
    """A probe's Record that is no pass, in words: what is wrong, the whole Case, how to repeat it.

    Args:
        kernel: The kernel as it was asked for: a name, or ``file.py::name``.
        record: What ``probe`` gave.
    """
    case = Case.from_json(record.case)
    parameters = "".join(f" {name}={number}" for name, number in case.parameters.items())
    judgement = record.judgement
    lines = [
        f"{record.status}: {judgement.reason if judgement else record.reason}",
        f"  kernel    {kernel}",
        f"  problem   {case.problem}",
        f"  question  {case.question}{parameters}: {probe_named(case.question).summary}",
        f"  case      {case.id}",
        f"Reproduce: {command(kernel, case, 'probe')}",
    ]
    return "\n".join(lines)


def replay(kernel: str, case: str, *, device: str | None = None) -> str:
    """What ``probe`` finds for a kernel (a name or ``file.py::name``) and a Case in JSON.

    ``holds`` for a pass. Raises UsageError for a kernel or Case that cannot be.
    """
    from attncheck.examine.environment import default_device, prepare
    from attncheck.examine.evidence import Evidence
    from attncheck.subjects.load import load

    device = device or default_device()
    prepare(device)
    try:
        asked = Case.from_json(json.loads(case))
    except json.JSONDecodeError as error:
        raise UsageError(f"the case is not JSON: {error}.") from None
    probe_named(asked.question).check(asked.problem, asked.parameters)
    evidence = Evidence(asked, device)
    record = probe(load(kernel), evidence, variant=asked.question, environment="")
    return "holds" if record.status == "pass" else broken(kernel, record)


def shown(problem: Problem, device: torch.device | str = "cpu") -> Seen:
    """What the mask of ``problem`` shows to some rows, by its original callable."""
    mask = problem.mask_mod(str(device))
    batch, heads, kv = (range(n) for n in (problem.batch, problem.heads, problem.kv))
    return lambda rows: visible(mask, Indices.of(batch, heads, rows, kv, device))


def _judged(result: Execution, evidence: Evidence) -> Judgement:
    from attncheck.examine.judging import judged

    case, inputs = evidence.case, evidence.inputs
    seen = shown(case.problem, inputs.device)
    arithmetic = result.arithmetic
    errors = WeightErrors(
        exp2_ulps=arithmetic.exp2_ulps,
        cut=arithmetic.weights_error if arithmetic.truncates else 0.0,
    )
    found = probe_named(case.question).read(inputs, result.outputs, seen, errors=errors)
    judgement = judged(result, evidence, structure=found.message if found else "", ideal=False)
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
