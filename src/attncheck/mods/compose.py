"""Masks of masks and chains of score mods; each part is any callable of its signature."""

from __future__ import annotations

from functools import reduce
from operator import and_, or_
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from attncheck.mods.signatures import MaskMod, ScoreMod

__all__ = ["and_masks", "chain", "not_mask", "or_masks"]


def and_masks(first: MaskMod, *rest: MaskMod) -> MaskMod:
    """A row sees the keys that every part lets it see."""

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return reduce(and_, (part(b, h, q_idx, kv_idx) for part in (first, *rest)))

    return mask


def or_masks(first: MaskMod, *rest: MaskMod) -> MaskMod:
    """A row sees the keys that any part lets it see."""

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return reduce(or_, (part(b, h, q_idx, kv_idx) for part in (first, *rest)))

    return mask


def not_mask(part: MaskMod) -> MaskMod:
    """A row sees the keys that ``part`` hides from it."""

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return part(b, h, q_idx, kv_idx).logical_not()

    return mask


def chain(first: ScoreMod, *rest: ScoreMod) -> ScoreMod:
    """Applies the parts from left to right: ``chain(f, g)`` is g(f(score))."""

    def chained(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        for part in (first, *rest):
            score = part(score, b, h, q_idx, kv_idx)
        return score

    return chained
