"""Before a kernel is failed by the truth: does another oracle say the same?

It is asked too where the truth leaves it open, or is itself not finite: NaN fails nobody.

The truth is ``streaming``: tiles that see nothing are left out, masks are evaluated once, and where
scores are small no maximum is subtracted. The second opinion has none of that: FlashAttention-2's
recurrence calls mask and score mod for every pair and rescales at every step; of a softmax it is
torch's own. What both share is not doubted: the inputs, the mods' callables, float64 on the device.
Nor is a pass asked about again: that a kernel errs as a broken oracle does cannot be told.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from attncheck.core.conditions import Rows
from attncheck.core.declared_arithmetic import FP64_ORACLE
from attncheck.core.judgement import Judgement, Place, Rule
from attncheck.core.outputs import Outputs
from attncheck.core.tensor_names import GRADIENTS, TensorName
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Problem
from attncheck.judge.allowance import at_rows, shares
from attncheck.judge.verdict_rules import element, number
from attncheck.oracles.backward_recurrences import flash2_backward
from attncheck.oracles.float64_numbers import Float64
from attncheck.oracles.forward_recurrences import one_head
from attncheck.oracles.row_conditions import sampled_rows, samples_all_rows
from attncheck.records.record import Record
from attncheck.verify.allowances import deterministic_bounds, gradient_allowance, row_bounds
from attncheck.verify.evidence import Evidence
from attncheck.verify.executor import out_of_memory

BY_THE_TRUTH: frozenset[Rule] = frozenset(
    {"finite", "empty rows", "structure", "bound", "improbable", "precision"}
)
"""Rules that rest on the exact result; what others find it has no part in."""

_BLOCK = 128  # of the second backward


def second_opinion(record: Record, evidence: Evidence) -> Record:
    """``record``, or one that says nothing of the kernel where the oracles disagree.

    A failure that rests on the truth is kept where another oracle gives the same within what both
    may be off by, as the judge's deterministic bound for float64 says: in the rows that the judge
    samples of the head of the worst element, and in that element's own row; of a rule that looks at
    whole heads in those of every head. Gradients are compared as a whole, with their forward.

    Returns:
        With status ``oracle disagrees`` and without errors or a judgement where they are further
        apart; the reason says where. A second opinion that does not fit into memory is none.
    """
    judgement = record.judgement
    difference = disagreement(judgement, evidence) if judgement is not None else ""
    if not difference:
        return record
    return replace(
        record,
        status="oracle disagrees",
        reason=f"{difference}: nothing is said of the kernel",
        judgement=None,
        out=None,
        lse=None,
        gradients=msgspec.UNSET,
        error_map=msgspec.UNSET,
    )


def disagreement(judgement: Judgement, evidence: Evidence) -> str:
    """Return where the oracles are further apart than they may be, in a line.

    Empty where nowhere, where ``judgement`` does not rest on the truth, and where the second
    opinion does not fit into memory.
    """
    if not _doubtful(judgement, evidence.truth):
        return ""
    try:
        return _disagreement(judgement, evidence)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return ""


def _doubtful(judgement: Judgement, truth: Outputs) -> bool:
    """Return whether the judgement rests on the truth's being true."""
    if judgement.status == "inconclusive" or (
        judgement.status == "fail" and judgement.rule in BY_THE_TRUTH
    ):
        return True
    return any(bool((one.isnan() | one.isposinf()).any()) for one in truth.tensors().values())


def _disagreement(judgement: Judgement, evidence: Evidence) -> str:
    worst = (
        judgement.worst if judgement.status == "fail" and judgement.rule != "precision" else None
    )
    # A failure of out or LSE rests on the forward alone, of which some rows are enough.
    forward = worst is not None and worst.tensor not in GRADIENTS
    if evidence.case.problem.backward and not forward:
        return _of_gradients(evidence)
    other = dataclasses.replace(evidence, truth=_empty_truth(evidence.truth))
    for rows in _compared_rows(None if worst is None else worst.at, evidence):
        difference = _of_rows(evidence, other, rows)
        if difference:
            return difference
    return ""


def _compared_rows(worst: Place | None, evidence: Evidence) -> Iterator[Rows]:
    """Yield the rows to compare, in pieces that fit into memory; without a place of all heads."""
    problem, device = evidence.case.problem, evidence.inputs.device
    if worst is None:
        yield from sampled_rows(problem, device)
        return
    number = worst.batch * problem.heads + worst.head
    head = range(number, number + 1)
    # The sample may miss the very row that is doubted.
    if not samples_all_rows(problem, device):
        yield Rows(head, torch.tensor([worst.query], device=device))
    for rows in sampled_rows(problem, device):
        if number in rows.heads:
            yield Rows(head, rows.query)


def _of_rows(evidence: Evidence, other: Evidence, rows: Rows) -> str:
    """``other`` is the Evidence whose truth is the second opinion: these rows of it are written."""
    problem, inputs = evidence.case.problem, evidence.inputs
    truth, second = evidence.truth, other.truth
    assert truth.lse is not None, "the oracle always gives LSE"
    assert second.lse is not None, "the oracle always gives LSE"
    for head in rows.heads:
        out, lse = _second_truth(inputs, head, rows.query)
        second.out.flatten(0, 1)[head, rows.query] = out
        second.lse.flatten(0, 1)[head, rows.query] = lse
    bounds = row_bounds(other, FP64_ORACLE, rows)
    sides: tuple[tuple[TensorName, Tensor, Tensor, Tensor], ...] = (
        ("out", truth.out, second.out, bounds[0]),
        ("lse", truth.lse, second.lse, bounds[1]),
    )
    for name, first, again, bound in sides:
        index = _furthest_apart(at_rows(rows, first), at_rows(rows, again), bound)
        if index is not None:
            # Twice the bound, because each of the oracles may be off by it.
            place, within = _place(index, rows, problem), 2 * float(bound[index])
            whole = place.index(name)
            return _describe(name, place, float(first[whole]), float(again[whole]), within, problem)
    return ""


def _of_gradients(evidence: Evidence) -> str:
    """Every tensor of a backward as a whole.

    What an oracle's own forward is off by moves its gradients: the bound takes it as the difference
    of the two, which is what it makes the gradients differ by.
    """
    truth, inputs = evidence.truth, evidence.inputs
    numbers = Float64(inputs.device)
    second = flash2_backward(numbers, inputs, block_query=_BLOCK, block_kv=_BLOCK).rounded(numbers)
    other = dataclasses.replace(evidence, truth=second)
    of_gradients = gradient_allowance(other, FP64_ORACLE, truth).bounds
    bounds = dataclasses.replace(deterministic_bounds(other, FP64_ORACLE), **of_gradients).tensors()
    for name, again in second.tensors().items():
        first, bound = truth.tensors()[name], bounds[name]
        index = _furthest_apart(first, again, bound)
        if index is not None:
            one, other_one, within = (float(of[index]) for of in (first, again, 2 * bound))
            return _describe(name, Place.of(index), one, other_one, within, evidence.case.problem)
    return ""


def _second_truth(inputs: Inputs, head: int, query: Tensor) -> tuple[Tensor, Tensor]:
    """Out ``(rows, value_dim)`` and LSE ``(rows,)`` of one (batch, head) pair."""
    if inputs.problem.operation == "softmax":
        scores = inputs.scores().flatten(0, 1)[head, query].double()
        lse = torch.logsumexp(scores, -1)
        return torch.softmax(scores, -1).masked_fill(torch.isneginf(lse)[:, None], 0.0), lse
    result = one_head(Float64(inputs.device), inputs, head, query)
    return result.out[0, 0], result.lse[0, 0, :, 0]


def _furthest_apart(first: Tensor, again: Tensor, bound: Tensor) -> tuple[int, ...] | None:
    """The index at which two oracles are furthest apart for what each may be off; None if none is.

    NaN and infinities are to be the same ones.
    """
    same = (first == again) | (first.isnan() & again.isnan())
    finite = first.isfinite() & again.isfinite()
    size = shares(first - again, 2 * bound)
    # Where one of them is not finite no bound makes them agree.
    differ = ~same & ~(finite & (size <= 1))
    if not bool(differ.any()):
        return None
    size = torch.where(differ, size.nan_to_num(nan=math.inf), -1.0)
    flat = int(size.argmax())
    return tuple(int(i) for i in np.unravel_index(flat, size.shape))


def _describe(
    name: TensorName, place: Place, first: float, again: float, within: float, problem: Problem
) -> str:
    softmax = problem.operation == "softmax"
    theirs = "torch's softmax" if softmax else "FlashAttention-2's recurrence in float64"
    ours = "the safe softmax" if softmax else "the streaming oracle"
    apart = f"at most {number(within, within)}" if math.isfinite(within) else "nothing"
    return (
        f"{element(name, place)} is {number(first, within)} by {ours} and {number(again, within)} "
        f"by {theirs}, but they should differ by {apart}"
    )


def _empty_truth(truth: Outputs) -> Outputs:
    assert truth.lse is not None, "the oracle always gives LSE"
    out, lse = (
        torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (truth.out, truth.lse)
    )
    return Outputs(out, lse)


def _place(index: tuple[int, ...], rows: Rows, problem: Problem) -> Place:
    """Of an element of these rows."""
    head, row, *dim = index
    batch, head = divmod(rows.heads[head], problem.heads)
    return Place(batch=batch, head=head, query=int(rows.query[row]), dim=dim[0] if dim else -1)
