"""Judges a kernel's outputs, and maps their errors."""

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
    """Return the verdict on a kernel's outputs on the Case of ``evidence``.

    Args:
        result: The outputs, and the arithmetic and tiling that the kernel declares.
        evidence: The evidence on the Case, which caches costly parts by arithmetic or tiling.
        structure: The fault found by an exact probe, in one line; empty if none.
        ideal: Whether to compare with ideal kernels too; not for a probe.
        brief: Whether to leave out the details of a pass: the parts of its allowance, and the blind
            spot of the Case.
    """
    arithmetic, outputs, tiling = result.arithmetic, result.outputs, result.tiling
    allowance = evidence.allowance(arithmetic, outputs)
    gradients = (
        gradient_allowance(evidence.evidence, arithmetic, outputs, allowance.lse)
        if evidence.case.problem.backward
        else None
    )
    ideal_tiling = _ideal_tiling(evidence, arithmetic, tiling) if ideal else None
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
        ideal=None
        if ideal_tiling is None
        else evidence.ideal_outputs(ideal_tiling, truncates=truncates).out,
        gradients=()
        if gradients is None
        else tuple(gradients.compared(outputs, evidence.evidence)),
    )
    judgement = _decide(kernel, ideal_tiling, evidence)
    if judgement.status != "fail":
        if brief:
            return judgement
        # A Case that has shown a fault need not report which faults it could not have shown.
        spot = evidence.blind_spot(arithmetic, exposes_lse=outputs.lse is not None)
        judgement = replace_struct(judgement, blind_spot=spot)
    # The rest explains the verdict, and costs as much as finding it.
    worst = judgement.worst
    # An allowance that is 0 or infinite has no parts.
    if worst is not None and math.isfinite(worst.allowance) and worst.allowance > 0:
        if gradients is not None and worst.tensor in gradients.bounds:
            terms = gradients.budget(worst.tensor, worst.at)
        else:
            terms = budget(evidence.evidence, arithmetic, worst.at)  # dim −1 means LSE.
        worst = replace_struct(worst, budget=terms)
    # LSE can show that sums are in fp32 where shorter ones are assumed.
    fp32_sums = replace(arithmetic, scores=FP32, values=FP32)
    tighter = {}
    if fp32_sums != arithmetic and outputs.lse is not None:
        tighter[str(fp32_sums)] = evidence.allowance(fp32_sums, outputs).lse
    return replace_struct(
        judgement, worst=worst, lse_also_within=first_tighter_profile(kernel, tighter)
    )


def _decide(kernel: KernelResult, tiling: Tiling | None, evidence: EvidenceBuilder) -> Judgement:
    """Return the verdict, running only as many further ideal kernels as it depends on."""
    truncates, heads = kernel.arithmetic.truncates, judge_heads(kernel)
    if tiling is not None and heads.needs_ensemble:
        outs = (one.out for one in evidence.ensemble(truncates=truncates))
        heads = heads_with_ensemble(kernel, heads, outs)
    judgement = decide(kernel, heads)
    if tiling is None or judgement.status == "fail" or not needs_other_orders(kernel, heads):
        return judgement
    for other in evidence.other_orders(tiling, truncates=truncates):
        heads = heads_with_other_order(kernel, heads, other.out)
        if not needs_other_orders(kernel, heads):
            break
    return decide(kernel, heads)


def _ideal_tiling(
    evidence: EvidenceBuilder, arithmetic: Arithmetic, tiling: Tiling | None
) -> Tiling | None:
    """Return the ideal kernel's tiling; None if it rounds other intermediates than the kernel."""
    problem, kernel = evidence.case.problem, Ideal(tiling)
    fields = ("products", "weights", "weights_scale", "sums_rounded_weights", "scaled_query")
    ideal = kernel.arithmetic(problem, evidence.device)
    if any(getattr(arithmetic, name) != getattr(ideal, name) for name in fields):
        return None
    return kernel.tiling(problem, evidence.device)


MOST_HEADS, MOST_ROWS = 32, 64  # Most cells of a map, vertically and horizontally.


def with_error_map(record: Record, result: Execution, evidence: EvidenceBuilder) -> Record:
    """Return ``record``, with the map of its errors if it fails.

    Args:
        result: The kernel's outputs and declared tiling: cells are whole tiles if there are
            several, else as few rows as fit.
        evidence: The Case, its exact result and the allowance.
    """
    if record.status != "fail":
        return record
    allowed = evidence.allowance(result.arithmetic).out
    error = result.outputs.out.to(torch.float64) - evidence.truth.out
    # An error without a finite bound counts as 0.
    ratio = torch.where(allowed.isfinite(), shares(error, allowed), 0.0)
    largest = ratio.amax(dim=(0, 3))  # (heads, query)
    # Whole tiles, so that a fault in one tile shows in one cell.
    tile = result.tiling.block_query if result.tiling else 1
    heads = _step(largest.shape[0], 1, MOST_HEADS)
    rows = _step(largest.shape[1], tile, MOST_ROWS)
    return replace_struct(
        record, error_map=ErrorMap(rows=rows, heads=heads, values=_cells(largest, heads, rows))
    )


def _step(size: int, tile: int, most: int) -> int:
    """Return a cell's size in whole tiles, or rows if there is one tile, for ``most`` cells."""
    tile = tile if tile < size else 1
    return tile * math.ceil(math.ceil(size / tile) / most)


def _cells(largest: torch.Tensor, heads: int, rows: int) -> tuple[tuple[float, ...], ...]:
    """Return the largest value of each cell, in three digits, which is enough to look at."""
    lines = []
    for head in range(0, largest.shape[0], heads):
        line = largest[head : head + heads].amax(dim=0)
        parts = [line[row : row + rows].amax() for row in range(0, len(line), rows)]
        lines.append(tuple(float(f"{float(part):.3g}") for part in parts))
    return tuple(lines)
