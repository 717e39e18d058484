"""Compares the exact result with that of another oracle before a kernel fails by it.

This is also done if the verdict is inconclusive, or if the exact result is itself not finite.

The exact result is by the oracle ``streaming``, which skips tiles without visible keys, evaluates
masks once, and subtracts no maximum from small scores. The second oracle has no such shortcuts:
FlashAttention-2's recurrence calls mask and score mod for every pair and rescales at every step; a
softmax is torch's own. Both share the inputs, the mods' callables and float64 on the device, which
are not checked. Nor is a pass: an error that kernel and oracle have in common is not detected.
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
"""Rules that compare with the exact result."""

_BLOCK = 128  # Queries and keys in a tile of the second backward.


def second_opinion(record: Record, evidence: Evidence) -> Record:
    """Return ``record``, or one without a verdict on the kernel if the oracles disagree.

    The oracles agree if they differ by no more than the judge's deterministic bounds of their
    float64 errors. They are compared in the row of the worst element and the sampled rows of its
    head, or of every head if the rule is about whole heads; gradients as a whole, with the forward.

    Returns:
        If they disagree, a Record of the status ``oracle disagrees`` without errors and judgement,
        whose reason has the element. If the second oracle does not fit into memory, ``record``.
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
    """Return an element in which the oracles differ by more than rounding, in one line.

    Empty if there is none, if ``judgement`` does not rest on the exact result, or if the second
    oracle does not fit into memory.
    """
    if not _rests_on_truth(judgement, evidence.truth):
        return ""
    try:
        return _disagreement(judgement, evidence)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return ""


def _rests_on_truth(judgement: Judgement, truth: Outputs) -> bool:
    """Return whether the judgement depends on the exact result, or that has NaN or +∞."""
    if judgement.status == "inconclusive" or (
        judgement.status == "fail" and judgement.rule in BY_THE_TRUTH
    ):
        return True
    return any(bool((one.isnan() | one.isposinf()).any()) for one in truth.tensors().values())


def _disagreement(judgement: Judgement, evidence: Evidence) -> str:
    of_element = judgement.status == "fail" and judgement.rule != "precision"
    worst = judgement.worst if of_element else None
    # A failure of out or LSE depends on the forward alone, of which some rows are enough.
    forward = worst is not None and worst.tensor not in GRADIENTS
    if evidence.case.problem.backward and not forward:
        return _compare_gradients(evidence)
    exact = (evidence.truth.out, evidence.lse)
    empty = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in exact)
    other = dataclasses.replace(evidence, truth=Outputs(*empty))
    for rows in _compared_rows(None if worst is None else worst.at, evidence):
        difference = _compare_rows(evidence, other, rows)
        if difference:
            return difference
    return ""


def _compared_rows(worst: Place | None, evidence: Evidence) -> Iterator[Rows]:
    """Yield the rows to compare in pieces that fit into memory; without ``worst`` of all heads."""
    problem, device = evidence.case.problem, evidence.inputs.device
    if worst is None:
        yield from sampled_rows(problem, device)
        return
    number = worst.batch * problem.heads + worst.head
    head = range(number, number + 1)
    # The sample may not contain the worst element's row.
    if not samples_all_rows(problem, device):
        yield Rows(head, torch.tensor([worst.query], device=device))
    for rows in sampled_rows(problem, device):
        if number in rows.heads:
            yield Rows(head, rows.query)


def _compare_rows(evidence: Evidence, other: Evidence, rows: Rows) -> str:
    """Compare rows by both oracles; write the second's into the truth of ``other``."""
    problem, inputs = evidence.case.problem, evidence.inputs
    for head in rows.heads:
        out, lse = _second_oracle(inputs, head, rows.query)
        other.truth.out.flatten(0, 1)[head, rows.query] = out
        other.lse.flatten(0, 1)[head, rows.query] = lse
    bounds = row_bounds(other, FP64_ORACLE, rows)
    sides: tuple[tuple[TensorName, Tensor, Tensor, Tensor], ...] = (
        ("out", evidence.truth.out, other.truth.out, bounds[0]),
        ("lse", evidence.lse, other.lse, bounds[1]),
    )
    for name, first, value, bound in sides:
        index = _furthest_apart(at_rows(rows, first), at_rows(rows, value), bound)
        if index is not None:
            # Twice the bound, because each oracle may have an error of one bound.
            whole, within = rows.index(index, problem.heads), 2 * float(bound[index])
            one, other_one = float(first[whole]), float(value[whole])
            return _describe(name, Place.of(whole), one, other_one, within, problem)
    return ""


def _compare_gradients(evidence: Evidence) -> str:
    """Compare every tensor of a backward as a whole.

    Errors of an oracle's forward change its gradients; the bound allows for the difference between
    the two forwards.
    """
    truth, inputs = evidence.truth, evidence.inputs
    numbers = Float64(inputs.device)
    second = flash2_backward(numbers, inputs, block_query=_BLOCK, block_kv=_BLOCK).rounded(numbers)
    other = dataclasses.replace(evidence, truth=second)
    of_gradients = gradient_allowance(other, FP64_ORACLE, truth).bounds
    bounds = dataclasses.replace(deterministic_bounds(other, FP64_ORACLE), **of_gradients).tensors()
    for name, tensor in second.tensors().items():
        first, bound = truth.tensors()[name], bounds[name]
        index = _furthest_apart(first, tensor, bound)
        if index is not None:
            one, other_one, within = (float(of[index]) for of in (first, tensor, 2 * bound))
            return _describe(name, Place.of(index), one, other_one, within, evidence.case.problem)
    return ""


def _second_oracle(inputs: Inputs, head: int, query: Tensor) -> tuple[Tensor, Tensor]:
    """Return out ``(rows, value_dim)`` and LSE ``(rows,)`` of one (batch, head) pair."""
    if inputs.problem.operation == "softmax":
        scores = inputs.scores().flatten(0, 1)[head, query].double()
        lse = torch.logsumexp(scores, -1)
        return torch.softmax(scores, -1).masked_fill(torch.isneginf(lse)[:, None], 0.0), lse
    result = one_head(Float64(inputs.device), inputs, head, query)
    return result.out[0, 0], result.lse[0, 0, :, 0]


def _furthest_apart(first: Tensor, second: Tensor, bound: Tensor) -> tuple[int, ...] | None:
    """Return the index of the largest difference relative to its bound; None if all are within.

    NaNs and infinities must agree exactly.
    """
    same = (first == second) | (first.isnan() & second.isnan())
    finite = first.isfinite() & second.isfinite()
    size = shares(first - second, 2 * bound)
    # A bound applies only if both are finite.
    differ = ~same & ~(finite & (size <= 1))
    if not bool(differ.any()):
        return None
    size = torch.where(differ, size.nan_to_num(nan=math.inf), -1.0)
    flat = int(size.argmax())
    return tuple(int(i) for i in np.unravel_index(flat, size.shape))


def _describe(
    name: TensorName, place: Place, first: float, second: float, within: float, problem: Problem
) -> str:
    softmax = problem.operation == "softmax"
    theirs = "torch's softmax" if softmax else "FlashAttention-2's recurrence in float64"
    ours = "the safe softmax" if softmax else "the streaming oracle"
    limit = f"at most {number(within, within)}" if math.isfinite(within) else "nothing"
    return (
        f"{element(name, place)} is {number(first, within)} by {ours} and {number(second, within)} "
        f"by {theirs}, but they should differ by {limit}"
    )
