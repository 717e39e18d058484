"""How far rounding alone can take a kernel's outputs: proofs, and what holds with p > 1 − 1e-6."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.judge.exponents import exponents
from attncheck.judge.row_sums import log_sum_terms, sum_error
from attncheck.judge.softmax_bounds import softmax_terms
from attncheck.judge.spacing import half_ulp
from attncheck.judge.value_bounds import value_terms
from attncheck.judge.weights import weights

if TYPE_CHECKING:
    from attncheck.conditions import Conditions, ScoreModError
    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.judge.scores import ScoreError

__all__ = ["OUTPUT", "Bound", "deterministic", "finished"]

OUTPUT = "output rounding"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Bound:
    """Bounds of |error|, float64; infinite where there is none, 0 in rows that see no key.

    Attributes:
        out: ``(heads, rows, value_dim)``.
        lse: ``(heads, rows)``.
        out_terms: What ``out`` is made of, by name, each of its shape; they sum to it.
        lse_terms: What ``lse`` is made of.
    """

    out: torch.Tensor
    lse: torch.Tensor
    out_terms: dict[str, torch.Tensor]
    lse_terms: dict[str, torch.Tensor]


def deterministic(
    conditions: Conditions,
    arithmetic: Arithmetic,
    scores: ScoreError,
    mod: ScoreModError | None = None,
) -> Bound:
    """What no kernel of this arithmetic passes on these inputs, whatever its tiles and order.

    Args:
        conditions: Of the rows.
        arithmetic: What the kernel declares.
        scores: ``score_error`` of both.
        mod: Where the Problem has a score mod.

    Source: B9–B19 in ``docs/bounds.md``.
    """
    errors = exponents(conditions, arithmetic, scores, mod)
    moved = weights(conditions, arithmetic, errors)
    sums = sum_error(conditions, arithmetic, moved)
    if conditions.given_scores:
        out = softmax_terms(conditions, arithmetic, moved, sums)
    else:
        out = value_terms(conditions, arithmetic, errors, moved, sums)
    lse = log_sum_terms(conditions, arithmetic, errors, moved, sums)
    return finished(conditions, arithmetic, errors.unbounded, out, lse)


def finished(
    conditions: Conditions,
    arithmetic: Arithmetic,
    unbounded: torch.Tensor,
    out: dict[str, torch.Tensor],
    lse: dict[str, torch.Tensor],
) -> Bound:
    """B19: output rounding added; 0 where no key is seen, infinite where nothing is known."""
    # The sums of this bound are float64 themselves.
    inflation = 1 + 8 * conditions.seen.shape[-1] * 2.0**-53
    out = {name: term * inflation for name, term in out.items()}
    lse = {name: term * inflation for name, term in lse.items()}
    exact = conditions.out.abs()
    out[OUTPUT] = half_ulp(exact + sum(out.values()), arithmetic.output)
    dead = ~conditions.seen.any(-1)
    unknown_out = unbounded[..., None] | ~torch.isfinite(conditions.out)
    unknown_lse = unbounded | ~torch.isfinite(conditions.lse)
    out = {n: _settled(t, dead[..., None], unknown_out) for n, t in out.items()}
    lse = {n: _settled(t, dead, unknown_lse) for n, t in lse.items()}
    return Bound(
        out=torch.stack(list(out.values())).sum(0),
        lse=torch.stack(list(lse.values())).sum(0),
        out_terms=out,
        lse_terms=lse,
    )


def _settled(term: torch.Tensor, dead: torch.Tensor, unknown: torch.Tensor) -> torch.Tensor:
    known = torch.where(unknown | torch.isnan(term), torch.inf, term)
    return torch.where(dead, 0.0, known)
