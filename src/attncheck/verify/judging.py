"""The judge's verdict on a kernel's outputs, and the map of where they are wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace as replace_struct

from attncheck.core.declared_arithmetic import FP32, Arithmetic
from attncheck.judge.allowance import shares
from attncheck.judge.verdict import (
    KernelResult,
    decide,
    first_tighter_profile,
    heads_with_ensemble,
    heads_with_other_order,
    judge_heads,
    needs_other_orders,
)
from attncheck.records.record import ErrorMap, Record
from attncheck.subjects.ideal import Ideal
from attncheck.verify.allowances import budget, gradient_allowance

if TYPE_CHECKING:
    from attncheck.core.judgement import Judgement
    from attncheck.subjects.capabilities.subject import Tiling
    from attncheck.verify.evidence_builder import EvidenceBuilder
    from attncheck.verify.executor import Execution


def judge_outputs(
    result: Execution,
    evidence: EvidenceBuilder,
    *,
    structure: str = "",
    ideal: bool = True,
    brief: bool = False,
) -> Judgement:
    """The verdict on what a kernel gave on the Case of ``evidence``.

    Args:
        result: What it gave, and the arithmetic and tiling that it declares.
        evidence: The Case. What is costly is kept in it, once per arithmetic or tiling.
        structure: What an exact probe found wrong, in one line; empty where nothing.
        ideal: Whether it is compared with ideal kernels too; of a probe it is not.
        brief: Whether nobody asks what a pass rests on: then only a failure says what its allowance
            is made of, and nothing what the Case could not have shown.
    """
    arithmetic, outputs, tiling = result.arithmetic, result.outputs, result.tiling
    allowance = evidence.allowance(arithmetic, outputs)
    gradients = (
        gradient_allowance(evidence.evidence, arithmetic, outputs, allowance.lse)
        if evidence.case.problem.backward
        else None
    )
    at = _ideal_tiling(evidence, arithmetic, tiling) if ideal else None
    truncates = arithmetic.truncates
    kernel = KernelResult(
        out=outputs.out,
        lse=outputs.lse,
        exact_out=evidence.truth.out,
        exact_lse=evidence.truth.lse,
        alive=evidence.alive,
        allowance=allowance,
        arithmetic=arithmetic,
        generic=evidence.evidence.generic,
        keys=evidence.case.problem.kv,
        tiles=(tiling.block_query, tiling.block_kv) if tiling else None,
        structure=structure,
        ideal=None if at is None else evidence.ideal_outputs(at, truncates=truncates).out,
        gradients=()
        if gradients is None
        else tuple(gradients.compared(outputs, evidence.evidence)),
    )
    judgement = _decide(kernel, at, evidence)
    if judgement.status != "fail":
        if brief:
            return judgement
        # What a pass rests on; a problem that has shown a fault need not say which it would show.
        spot = evidence.blind_spot(arithmetic, exposes_lse=outputs.lse is not None)
        judgement = replace_struct(judgement, blind_spot=spot)
    # What follows explains a failure, and costs as much as finding it.
    worst = judgement.worst
    # Of an allowance that is 0 or infinite there are no parts to name.
    if worst is not None and math.isfinite(worst.allowance) and worst.allowance > 0:
        if gradients is not None and worst.tensor in gradients.bounds:
            terms = gradients.budget(worst.tensor, worst.at)
        else:
            terms = budget(evidence.evidence, arithmetic, worst.at)  # dim −1 says which
        worst = replace_struct(worst, budget=terms)
    # LSE tells fp32 sums from the shorter ones that may be assumed.
    other = replace(arithmetic, scores=FP32, values=FP32)
    tighter = {}
    if other != arithmetic and outputs.lse is not None:
        tighter[str(other)] = evidence.allowance(other, outputs).lse
    return replace_struct(
        judgement, worst=worst, lse_also_within=first_tighter_profile(kernel, tighter)
    )


def _decide(kernel: KernelResult, at: Tiling | None, evidence: EvidenceBuilder) -> Judgement:
    """The verdict, with as many further ideal kernels as it depends on: each costs a forward."""
    truncates, heads = kernel.arithmetic.truncates, judge_heads(kernel)
    if at is not None and heads.needs_ensemble:
        outs = (one.out for one in evidence.ensemble(truncates=truncates))
        heads = heads_with_ensemble(kernel, heads, outs)
    judgement = decide(kernel, heads)
    if at is None or judgement.status == "fail" or not needs_other_orders(kernel, heads):
        return judgement
    for other in evidence.other_orders(at, truncates=truncates):
        heads = heads_with_other_order(kernel, heads, other.out)
        if not needs_other_orders(kernel, heads):
            break
    return decide(kernel, heads)


def _ideal_tiling(
    evidence: EvidenceBuilder, arithmetic: Arithmetic, tiling: Tiling | None
) -> Tiling | None:
    """Tiling of the ideal kernel of this arithmetic; None where it rounds what they do not."""
    problem, own = evidence.case.problem, Ideal(tiling)
    same = ("products", "weights", "weights_scale", "sums_rounded_weights", "scaled_query")
    theirs = own.arithmetic(problem, evidence.device)
    if any(getattr(arithmetic, name) != getattr(theirs, name) for name in same):
        return None
    return own.tiling(problem, evidence.device)


MOST_HEADS, MOST_ROWS = 32, 64  # cells of a map, down and to the right


def with_error_map(record: Record, result: Execution, evidence: EvidenceBuilder) -> Record:
    """``record`` with the map of its errors where it fails.

    Args:
        result: What the kernel gave, and the tiling that it declares: cells are whole tiles of it
            where there are several, and else as few rows as fit.
        evidence: The Case, its exact result and what is allowed.
    """
    if record.status != "fail":
        return record
    allowed = evidence.allowance(result.arithmetic).out
    error = result.outputs.out.to(torch.float64) - evidence.truth.out
    # Nothing is asked where nothing finite is allowed.
    ratio = torch.where(allowed.isfinite(), shares(error, allowed), 0.0)
    largest = ratio.amax(dim=(0, 3))  # (heads, query)
    # Whole tiles, so that a fault of one tile does not smear over two cells.
    tile = result.tiling.block_query if result.tiling else 1
    heads = _step(largest.shape[0], 1, MOST_HEADS)
    rows = _step(largest.shape[1], tile, MOST_ROWS)
    return replace_struct(
        record, error_map=ErrorMap(rows=rows, heads=heads, values=_cells(largest, heads, rows))
    )


def _step(size: int, tile: int, most: int) -> int:
    """The fewest whole tiles, at most ``most`` of which make up ``size``; a single row of one."""
    tile = tile if tile < size else 1
    return tile * math.ceil(math.ceil(size / tile) / most)


def _cells(largest: torch.Tensor, heads: int, rows: int) -> tuple[tuple[float, ...], ...]:
    """The largest of each cell, in three digits: a map is to be looked at."""
    lines = []
    for head in range(0, largest.shape[0], heads):
        line = largest[head : head + heads].amax(dim=0)
        parts = [line[row : row + rows].amax() for row in range(0, len(line), rows)]
        lines.append(tuple(float(f"{float(part):.3g}") for part in parts))
    return tuple(lines)
