"""Bounds of the gradients of some rows, and their parts of the others: B36–B40 of the manual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.judge.additions import taken
from attncheck.judge.gradients.captured import captured_sums
from attncheck.judge.gradients.recomputed import recomputed
from attncheck.judge.gradients.saved import kept
from attncheck.judge.gradients.score_gradients import score_gradients
from attncheck.judge.gradients.sums import OUTPUT, PARTS, Sums, in_parts, rounded, settled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.conditions import GradientConditions, ReadConditions, Rows, ScoreModError
    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.judge.gradients.recomputed import Recomputed
    from attncheck.judge.gradients.saved import Saved
    from attncheck.judge.gradients.score_gradients import ScoreGradients
    from attncheck.judge.scores import ScoreError

__all__ = ["RowGradients", "query_operand", "row_gradients"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RowGradients:
    """What these rows' gradients may be off by, float64.

    Attributes:
        rows: Which rows.
        scale: Factor of q·k.
        dq: Bound of |error|, ``(heads, rows, head_dim)``; 0 in rows that see no key, infinite where
            nothing is known.
        dq_terms: What it is made of, by name; they sum to it.
        dk: Their part of dk, before the scale, ``(heads, kv, head_dim)``, each head its own.
        dv: Their part of dv, ``(heads, kv, value_dim)``.
        dsink: Their part of the sink's gradient, ``(heads, 1, 1)``; None without a sink.
        dcaptured: Their part of those of captured numbers, ``(numbers, 1, 1)``; None where the
            score mod reads none, or they are not asked for.
    """

    rows: Rows
    scale: float
    dq: torch.Tensor
    dq_terms: dict[str, torch.Tensor]
    dk: Sums
    dv: Sums
    dsink: Sums | None
    dcaptured: Sums | None = None


def row_gradients(
    known: GradientConditions,
    arithmetic: Arithmetic,
    scores: ScoreError,
    saved: Saved,
    mod: ScoreModError | None = None,
    slope: ScoreModError | None = None,
    reads: Sequence[ReadConditions] = (),
    numbers: int = 0,
) -> RowGradients:
    """What no backward of this arithmetic passes in these rows, whatever its tiles and order.

    Args:
        known: Of the rows.
        arithmetic: What the kernel declares.
        scores: ``score_error`` of both.
        saved: How far the kernel's own out and LSE are off in these rows.
        mod: Where the Problem has a score mod.
        slope: Of its derivative, in place of the mod, likewise; None where that has no error.
        reads: What it reads of captured tensors, where those have gradients.
        numbers: How many numbers they hold.

    Source: B30–B40 in ``docs/bounds.md``.
    """
    weights = recomputed(known, arithmetic, scores, saved, mod)
    captured = captured_sums(known, arithmetic, weights, saved, reads, numbers) if reads else None
    if slope is not None:
        weights = weights.without(~torch.isfinite(slope.radius))
    known, saved = kept(known, saved, weights.live.any(-1))
    found = score_gradients(known, arithmetic, weights, saved, slope)
    dq, dq_terms = _of_query(known, arithmetic, weights, found)
    forward = known.known
    return RowGradients(
        rows=forward.rows,
        scale=abs(forward.scale),
        dq=dq,
        dq_terms=dq_terms,
        dk=_of_keys(known, arithmetic, weights, found),
        dv=_of_values(known, arithmetic, weights),
        dsink=_of_sink(arithmetic, weights, found) if forward.has_sink else None,
        dcaptured=captured,
    )


def query_operand(arithmetic: Arithmetic) -> float:
    """Relative error of q or k as the products of dk and dq read them."""
    scaled = arithmetic.scaled_query
    return arithmetic.operand_error + (0.0 if scaled is None else scaled.unit_roundoff)


def _of_query(
    known: GradientConditions, arithmetic: Arithmetic, weights: Recomputed, found: ScoreGradients
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """B36: the bound of dq and its terms."""
    forward, keys = known.known, known.known.k.abs()
    count = weights.live.sum(-1).to(torch.float64)
    error, size = found.error + found.rounded, found.size
    sums = Sums(
        moved=error @ keys,
        size=size @ keys,
        shift=found.shift @ forward.k,
        exact=None,
        parts={name: part.sum(-1) for name, part in found.parts.items()},
        taken=count,
        lost=_lost(arithmetic, count, (error + size).sum(-1), keys),
        unknown=weights.unbounded,
    )
    accumulator, scale = arithmetic.values, abs(forward.scale)
    terms = sums.terms(
        arithmetic,
        accumulator,
        scale=scale,
        operand=query_operand(arithmetic),
        steps=_first(taken(forward, accumulator)),
    )
    if arithmetic.dq_parts > 1:
        terms[PARTS] = in_parts(scale * sums.size, terms, arithmetic.dq_parts, arithmetic.output)
    terms[OUTPUT] = rounded(known.dq, terms, arithmetic.output)
    return settled(terms, ~forward.seen.any(-1, keepdim=True), weights.unbounded[..., None])


def _first(steps: torch.Tensor | None) -> torch.Tensor | None:
    return None if steps is None else steps[..., 0]


def _lost(
    arithmetic: Arithmetic, count: torch.Tensor, total: torch.Tensor, operand: torch.Tensor
) -> torch.Tensor:
    """B36: numbers below the normal range taken for 0, of every product, term and operand."""
    largest = operand.amax((-1, -2))[..., None]
    lost = 2.0**arithmetic.computes.min_exponent * (count * (2 + largest) + total)
    if arithmetic.scaled_query is not None:
        lost = lost + arithmetic.scaled_query.subnormal_spacing / 2 * total
    return lost


def _of_keys(
    known: GradientConditions, arithmetic: Arithmetic, weights: Recomputed, found: ScoreGradients
) -> Sums:
    """B37: these rows' part of dk, before the scale."""
    kv, query = _keys(known), known.known.q.abs()
    error, size = (x[..., kv].mT for x in (found.error + found.rounded, found.size))
    count = _seen(known, weights)
    exact = known.dx[..., kv].mT @ known.known.q if arithmetic.sums_rounded_heads else None
    return Sums(
        moved=error @ query,
        size=size @ query,
        shift=found.shift[..., kv].mT @ known.known.q,
        exact=exact,
        parts={name: part[..., kv].sum(-2) for name, part in found.parts.items()},
        taken=count,
        lost=_lost(arithmetic, count, (error + size).sum(-1), query),
        unknown=_unknown(known, weights),
    )


def _of_values(known: GradientConditions, arithmetic: Arithmetic, weights: Recomputed) -> Sums:
    """B37: these rows' part of dv."""
    kv, dout = _keys(known), known.dout.abs()
    whole = sum(weights.parts.values(), torch.zeros_like(weights.exact))
    each = torch.where(whole > 0, weights.moved / whole, 0.0)
    parts = {name: part * each for name, part in weights.parts.items() if bool(part.any())}
    if arithmetic.weights_error:
        parts["rounding of P"] = weights.rounded
    error, exact = ((x[..., kv]).mT for x in (weights.moved + weights.rounded, weights.exact))
    count = _seen(known, weights)
    return Sums(
        moved=error @ dout,
        size=exact @ dout,
        shift=None,
        exact=exact @ known.dout if arithmetic.sums_rounded_heads else None,
        parts={name: part[..., kv].sum(-2) for name, part in parts.items()},
        taken=count,
        lost=_lost(arithmetic, count, (error + exact).sum(-1), dout),
        unknown=_unknown(known, weights),
    )


def _of_sink(arithmetic: Arithmetic, weights: Recomputed, found: ScoreGradients) -> Sums:
    """B38: these rows' part of the sink's gradient: the sum of dX, in fp32."""
    parts = {
        name: part[..., -1:].sum(-2)
        for name, part in found.parts.items()
        if not (arithmetic.fused and part is found.rounded)
    }
    moved = sum(parts.values(), torch.zeros_like(found.size[:, 0, -1:]))
    size = found.size[..., -1:].sum(-2)
    count = weights.live[..., -1:].sum(-2).to(torch.float64)
    return Sums(
        moved=moved[..., None],
        size=size[..., None],
        shift=found.shift[..., -1:].sum(-2)[..., None],
        exact=None,
        parts=parts,
        taken=count,
        lost=2.0**arithmetic.computes.min_exponent * (2 * count + moved + size),
        unknown=weights.unbounded.any(-1, keepdim=True),
    )


def _keys(known: GradientConditions) -> slice:
    """All keys but a sink."""
    return slice(0, known.dx.shape[-1] - known.known.has_sink)


def _seen(known: GradientConditions, weights: Recomputed) -> torch.Tensor:
    return weights.live[..., _keys(known)].sum(-2).to(torch.float64)


def _unknown(known: GradientConditions, weights: Recomputed) -> torch.Tensor:
    """Keys that a row of which nothing is known may see."""
    exposed = weights.exposed & weights.unbounded[..., None]
    return exposed[..., _keys(known)].any(-2)
