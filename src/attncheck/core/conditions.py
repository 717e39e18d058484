"""Exact quantities of rows that the bounds need: oracles compute them, the judge reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Some query rows of some heads.

    Attributes:
        heads: (batch, head) pairs, numbered batch · heads + head; axis ``heads`` below.
        query: int64 indices of query rows, the same of every head; axis ``rows`` below.
    """

    heads: range
    query: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Conditions:
    """Exact quantities of some rows, float64, with every key of the problem.

    A sink is a key like any, after the last: its k and v are 0, and every row sees it. kv below is
    one more then.

    Attributes:
        q: ``(heads, rows, head_dim)`` as meant: fp8's stored numbers times their descale.
        k: ``(heads, kv, head_dim)``, each head with its own kv head's; 0 where it is not finite.
        v: ``(heads, kv, value_dim)``; 0 where it is not finite: the rows that see such a value have
            a result that is not finite either.
        products: ``scale · q·k``, ``(heads, rows, kv)``; of a softmax its scores. 0 where the mask
            hides the key, and in place of −∞.
        scores: After the score mod; 0 where not seen. Of a sink the logit itself.
        seen: bool: what the mask shows and the score mod does not make −∞.
        maximum: Of the seen scores, ``(heads, rows)``; 0 in rows that see no key.
        total: Σ exp(score − maximum) over the seen keys; 0 in rows that see no key.
        out: ``(heads, rows, value_dim)``; of a softmax ``(heads, rows, kv)``.
        lse: ``(heads, rows)``; −∞ in rows that see no key.
        given_scores: Whether the scores were inputs (a softmax): q, k and v are empty then, their
            last axis is 0, and nothing was multiplied.
        has_score_mod: Whether a score mod stands between products and scores.
        has_sink: Whether the last key is a sink.
    """

    rows: Rows
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    products: torch.Tensor
    scores: torch.Tensor
    seen: torch.Tensor
    maximum: torch.Tensor
    total: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    # Of a softmax or an attention without mod and sink, the usual case, nothing more is said.
    given_scores: bool = False
    has_score_mod: bool = False
    has_sink: bool = False


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GradientConditions:
    """Exact quantities of some rows that bounds of gradients need besides; float64.

    As in Conditions a sink is the last key; its value product is 0 and its slope 1.

    Attributes:
        known: Of the forward; with every key of the problem.
        dout: The loss's gradient with respect to out, ``(heads, rows, value_dim)``.
        dlse: With respect to LSE, ``(heads, rows)``; 0 in rows that see no key.
        delta: ``Σ dout · out``, ``(heads, rows)``; 0 in rows that see no key.
        value_products: ``dout · v``, ``(heads, rows, kv)``.
        slope: The score mod's derivative at the products, ``(heads, rows, kv)``; 0 where not seen.
        dx: Gradient with respect to the products, ``P (value_products − delta + dlse) slope``,
            ``(heads, rows, kv)``; 0 where not seen.
        dq: Gradient with respect to q, ``(heads, rows, head_dim)``.
    """

    known: Conditions
    dout: torch.Tensor
    dlse: torch.Tensor
    # Kept apart from dx: a kernel rounds delta before it is subtracted.
    delta: torch.Tensor
    value_products: torch.Tensor
    slope: torch.Tensor
    dx: torch.Tensor
    dq: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScoreModError:
    """Errors of a score mod: of its score's error, and its own; ``(heads, rows, kv)``.

    Nothing of a sink, which it does not see: its error stays as it is.

    Attributes:
        radius: Largest |mod evaluated in fp32 on a score within its radius − exact mod|, on both
            sides of a jump; infinite where nothing is known, as where a kernel may see a key that
            the mod hides or the other way round. 0 where the mask hides the key.
        own: The same on the exact score: the mod's own rounding.
        jump: bool: the score lies within its radius of a jump of the mod.
        falls: bool: the mod's derivative is negative, so that an error of all scores of a row
            changes its sign there; None where that does not matter.
        likely: ``radius`` of errors that are no larger than is likely; None where that does not
            matter. Of a mod that bends, ``radius`` over the whole error says nothing of a small
            one.
    """

    radius: torch.Tensor
    own: torch.Tensor
    jump: torch.Tensor
    # None where nobody reads them: each costs another evaluation of the mod.
    falls: torch.Tensor | None = None
    likely: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReadConditions:
    """One read of captured tensors in a score mod's text, ``(heads, rows, kv)``.

    Nothing of a sink, which reads none.

    Attributes:
        place: Which of all captured numbers, int64.
        slope: The score mod's derivative with respect to that number, float64; 0 where not seen.
        error: What a kernel's may be off by.
    """

    place: torch.Tensor
    slope: torch.Tensor
    error: ScoreModError
