"""Runs the calls of a relation, and judges whether it holds between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from attncheck import oracles, probes
from attncheck.core import strided_alloc
from attncheck.core.errors import UsageError
from attncheck.core.judgement import Judgement, Place, Worst
from attncheck.core.outputs import Outputs
from attncheck.core.tensor_names import TensorName
from attncheck.inputs import input_tensors
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Case
from attncheck.judge.verdict_rules import tile
from attncheck.relations import RELATIONS, Relation, relation_named
from attncheck.relations.relation import Finding, compare_outputs, describe_turn
from attncheck.subjects.capabilities.subject import Subject
from attncheck.verify.allowances import deterministic_bounds, gradient_allowance
from attncheck.verify.call_conditions import CallConditions
from attncheck.verify.evidence import Evidence
from attncheck.verify.executor import Execution, Executor, Failure, Origin, failure, lacked_memory
from attncheck.verify.kernel_hosts import executor_of

# What a refusal begins with if the question, not the kernel, needs more memory than is free.
TOO_SMALL = "this machine is too small for it"
_UNBOUNDED = "no element of {} has a finite bound: nothing can be said of it"
_OF_KEYS = ("dk", "dv", "dsink", "dcaptured")


def relation_inputs(case: Case, device: str) -> tuple[Inputs, ...]:
    """Return the inputs of each run of the Case's relation, in order.

    Raises:
        UsageError: for a question that is no relation, or that does not apply to the Problem.
    """
    relation = relation_named(case.question)
    relation.check(case.problem, case.parameters)
    return relation.runs(input_tensors.draw_inputs(case.problem, device), case.parameters)


def judge_relation(
    subject: Subject, case: Case, executor: Executor, *, device: str
) -> Judgement | Failure:
    """Judge whether the Case's relation holds between the outputs of ``subject`` in its runs.

    The status is ``pass`` if it holds, ``fail`` by the rule ``relation`` if it does not, ``warn``
    if NaN comes out from behind the mask and the kernel promises nothing about that, and
    ``inconclusive`` if any output would be within the bounds. Bits are compared if the kernel
    promises them; otherwise runs may differ by the judge's bounds of each.

    Args:
        case: A Case whose question is a name in ``relations.RELATIONS``.

    Returns:
        A Failure if there are no outputs: ``refused`` if the kernel does not take the Problem of a
        run, does not make the promise that the relation tests, or has no other launches to compare.

    Raises:
        UsageError: as ``relation_inputs``.
    """
    finding: Finding | Failure | None
    try:
        finding = check_relation(subject, case, executor, device=device)
    except (RuntimeError, MemoryError) as error:
        finding = lacked_memory(error, "the relation")
    # torch would keep the gibibytes, which a kernel's process may need.
    if relation_named(case.question).needs_much_memory:
        strided_alloc.release_cached_memory(device)
    if isinstance(finding, Failure):
        if finding.kind != "unbounded":
            return finding
        return Judgement(status="inconclusive", rule="relation", reason=finding.message)
    if finding is None:
        return Judgement(status="pass")
    launches = _launches(subject, case, executor, device, 1)
    last = subject if isinstance(launches, Failure) else launches[-1]  # The finding is about it.
    return _judgement(finding, last, case, device)


def check_relation(
    subject: Subject, case: Case, executor: Executor | None = None, *, device: str = "cpu"
) -> Finding | Failure | None:
    """Return where the relation does not hold; arguments are as in ``judge_relation``.

    If bits are compared, those of dcaptured are not, because kernels may sum it in any order. It is
    then compared within bounds, in a second comparison.

    Returns:
        None if the relation holds, else the Finding. A Failure if there are no outputs, or, of the
        kind ``unbounded``, if any output would be within the bounds.
    """
    relation = relation_named(case.question)
    if relation.only_promised and not relation.only_promised & subject.promises:
        return Failure(kind="refused", message=f"does not promise {relation.promise!r}")
    runs = _run_all(subject, case, executor or executor_of(subject), device)
    if isinstance(runs, Failure):
        return runs
    inputs, executions = runs
    outputs = [each.outputs for each in executions]
    if relation.needs_lse and any(each.lse is None for each in outputs):
        return Failure(kind="refused", message="gives no LSE")
    by_bits = _promises_bits(relation, subject, inputs)
    if by_bits:
        of_bits = [dataclasses.replace(each, dcaptured=None) for each in outputs]
        finding = relation.holds(inputs, of_bits, case.parameters, None)
        if finding is None and relation.consecutive_calls:
            finding = _second_call_fault(inputs, executions, device)
        if finding or not case.problem.dcaptured:
            return finding
    # No bound is known for the last run, which has poisoned inputs: it gets that of the first.
    bounded = [*zip(inputs, executions, strict=True)][: 1 if relation.only_promised else None]
    bounds = [_truth_and_bounds(read, execution, device)[1] for read, execution in bounded]
    finding = relation.holds(inputs, outputs, case.parameters, bounds)
    if finding is None and relation.consecutive_calls and not by_bits:
        finding = _second_call_fault(inputs, executions, device)
    unbounded = [name for each in bounds for name in _unbounded(each)]
    if by_bits:  # Bits of all other outputs were compared.
        unbounded = [name for name in unbounded if name == "dcaptured"]
    if finding is None and unbounded:
        return Failure(kind="unbounded", message=_UNBOUNDED.format(unbounded[0]))
    return finding


def _run_all(
    subject: Subject, case: Case, executor: Executor, device: str
) -> tuple[tuple[Inputs, ...], list[Execution]] | Failure:
    """Return the inputs and Executions of all runs; a Failure if one has no outputs."""
    needs_much_memory = relation_named(case.question).needs_much_memory
    try:
        inputs = relation_inputs(case, device)
        runs = _run_each(subject, case, inputs, executor, device)
    except (MemoryError, torch.OutOfMemoryError) as error:
        if not needs_much_memory:
            raise
        runs = failure(error)
    if not isinstance(runs, Failure):
        return inputs, runs
    if not needs_much_memory or runs.kind != "oom":
        return runs
    # The relation itself, not the kernel, needs more memory than there is.
    return Failure(kind="refused", message=f"{TOO_SMALL}: {runs.message}")


def _run_each(
    subject: Subject, case: Case, inputs: Sequence[Inputs], executor: Executor, device: str
) -> list[Execution] | Failure:
    # The kernel is asked for its launches only if it takes every run's Problem.
    if refusal := _refusal([subject] * len(inputs), inputs, executor):
        return refusal
    subjects = _launches(subject, case, executor, device, len(inputs))
    if isinstance(subjects, Failure):
        return subjects
    if refusal := _refusal(subjects, inputs, executor):
        return refusal
    executions = []
    for run, (launch, each) in enumerate(zip(subjects, inputs, strict=True)):
        under = CallConditions(guarded=True)
        if relation_named(case.question).consecutive_calls:
            # The last call gets another pattern, so that reads of unwritten memory differ.
            last = run + 1 == len(inputs)
            under = CallConditions(turn=run + 1, fill="inverse" if last else "pattern")
        result = executor.run(launch, each, origin=Origin(case=case, run=run), under=under)
        if isinstance(result, Failure):
            return result
        if result.notes.wrong:
            message = f"call {run + 1} of {len(inputs)}: {result.notes.wrong}"
            return Failure(kind=result.notes.rule, message=message)
        executions.append(result)
    return executions


def _refusal(
    subjects: Sequence[Subject], inputs: Sequence[Inputs], executor: Executor
) -> Failure | None:
    """Return why a kernel does not take one of the runs; None if it takes all."""
    for subject, each in zip(subjects, inputs, strict=True):
        if refusal := executor.refusal(subject, each.problem, each.device.type):
            return refusal
    return None


def _launches(
    subject: Subject, case: Case, executor: Executor, device: str, count: int
) -> list[Subject] | Failure:
    """Return each run's Subject: the kernel, or in the last run its other launch if compared."""
    if not relation_named(case.question).uses_other_launch:
        return [subject] * count
    launches = executor.launches(subject, case.problem, device)
    if isinstance(launches, Failure):
        message = f"asked for its launches it raised {launches.message}"
        if launches.kind == "error":
            launches = dataclasses.replace(launches, message=message)
        return launches
    others = list(launches.values())
    if not others:
        return Failure(kind="refused", message="has no launch but its own")
    # Modulo, because Cases are drawn before a kernel's number of launches is known.
    last = others[int(case.parameters["launch"]) % len(others)]
    return [*[subject] * (count - 1), last]


def _promises_bits(relation: Relation, subject: Subject, inputs: Sequence[Inputs]) -> bool:
    """Return whether the kernel promises the bits that the relation compares."""
    if any(run.problem.backward for run in inputs) and not subject.promises_gradients:
        return False
    repeats = len(inputs) == 1 or "repeat" in subject.promises
    return repeats and (not relation.promise or relation.promise in subject.promises)


def _truth_and_bounds(read: Inputs, execution: Execution, device: str) -> tuple[Outputs, Outputs]:
    """Return a run's exact result, and the judge's deterministic bound of the distance to it."""
    evidence = Evidence(
        case=Case(problem=read.problem),
        device=device,
        inputs=read,
        # Each run has its own exact result, because a relation changes the inputs.
        truth=oracles.truth(read),
    )
    bounds = deterministic_bounds(evidence, execution.arithmetic)
    if read.problem.backward:
        gradients = gradient_allowance(evidence, execution.arithmetic, execution.outputs)
        bounds = dataclasses.replace(bounds, **gradients.bounds)
    return evidence.truth, bounds


def _second_call_fault(
    inputs: Sequence[Inputs], executions: Sequence[Execution], device: str
) -> Finding | None:
    """Return the fault of the second call; None if it has none, or if the first is wrong too."""

    def wrong(run: int) -> Finding | None:
        truth, bounds = _truth_and_bounds(inputs[run], executions[run], device)
        return compare_outputs(executions[run].outputs, truth, [bounds])

    finding = wrong(1)
    if finding is None or wrong(0) is not None:
        return None
    fault = "is not exact attention as call 1 was"
    first, second = (each.outputs for each in executions[:2])
    if first.out.shape == second.out.shape and compare_outputs(second, first, None) is None:
        fault = "returns the result of an earlier call on the same tensors"
    what = f"{describe_turn(inputs, 1)}, {fault}"
    return dataclasses.replace(finding, what=what)


def _unbounded(bounds: Outputs) -> list[TensorName]:
    """Return tensors without any finite bound, except LSE, whose bounds are finite with out's."""
    tensors = bounds.tensors().items()
    return [name for name, one in tensors if name != "lse" and not bool(one.isfinite().any())]


def _judgement(finding: Finding, subject: Subject, case: Case, device: str) -> Judgement:
    tiling = subject.tiling(case.problem, device)
    tiles = (tiling.block_query, tiling.block_kv) if tiling else None
    at = Place.of(finding.place)
    relation, reason = relation_named(case.question), finding.message
    promised = not relation.only_promised or relation.promise in subject.promises
    if not promised:
        reason = f"hidden keys must be finite: 0 · NaN reaches row {at.query}; {reason}"
    return Judgement(
        status="fail" if promised else "warn",
        rule="relation",
        reason=reason,
        worst=Worst(
            tensor=finding.tensor,
            at=at,
            tile=tile(at, tiles, case.problem.query) if finding.tensor not in _OF_KEYS else "",
            got=finding.value,
            exact=finding.expected,
            allowance=finding.allowed,
            budget={},
        ),
        wrong=finding.count,
        compared=finding.compared,
    )


def draw_case_inputs(origin: Origin, device: str) -> Inputs:
    """Return the inputs of ``origin``, which are equal to the bit in every process.

    Raises:
        UsageError: for a question that does not apply to its Problem, or an unknown run.
    """
    case = origin.case
    if case.question in RELATIONS:
        each = relation_inputs(case, device)
        if not 0 <= origin.run < len(each):
            raise UsageError(f"{case.question} has no run {origin.run}.")
        return each[origin.run]
    if case.question in probes.PROBES:
        return probes.inputs(case, device)
    return input_tensors.draw_inputs(case.problem, device)
