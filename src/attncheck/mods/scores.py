"""Score mods as FlexAttention callables ``score(score, b, h, q_idx, kv_idx) -> score``.

The result has the dtype of the incoming score: captured fp32 tensors are promoted to it before
any arithmetic, so that the float64 oracle computes in float64 (a product of an fp32 tensor with
an integer tensor would be rounded to fp32).
"""

# ruff: noqa: ARG001  (every score mod has FlexAttention's whole signature, whatever it reads)

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.mods.tables import reader

if TYPE_CHECKING:
    from torch import Tensor

    from attncheck.mods.signatures import ScoreMod

__all__ = ["alibi", "bias", "none", "relative_bias", "softcap", "temperature"]


def none(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """The score itself."""
    return score


def alibi(slopes: Tensor) -> ScoreMod:
    """Adds slopes[h] · (kv_idx − q_idx) (Press et al., "Train Short, Test Long", 2022, eq. 1).

    Args:
        slopes: One number a query head, fp32 (heads,).
    """

    def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + slopes[h].to(score.dtype) * (kv_idx - q_idx)

    return biased


def bias(table: Tensor) -> ScoreMod:
    """Adds table[b, h, q_idx, kv_idx], as the float ``attn_mask`` of torch's SDPA.

    Args:
        table: fp32 (batch or 1, heads or 1, query, kv).
    """
    read = reader(table)

    def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + read(b, h, q_idx, kv_idx).to(score.dtype)

    return biased


def softcap(cap: float) -> ScoreMod:
    """Bends scores into (−cap, cap): cap · tanh(score / cap) (Gemma 2 report, 2024, section 2)."""

    def capped(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * (score / cap).tanh()

    return capped


def relative_bias(table: Tensor) -> ScoreMod:
    """Adds table[h, d + distance], d = kv_idx − q_idx clamped to ±distance (the bias of T5, 2020).

    Args:
        table: fp32 (heads, 2·distance + 1).
    """
    distance = table.shape[1] // 2

    def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        column = (kv_idx - q_idx).clamp(-distance, distance) + distance
        return score + table[h, column].to(score.dtype)

    return biased


def temperature(temperature: float) -> ScoreMod:
    """Divides every score by ``temperature``."""

    def tempered(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score / temperature

    return tempered
