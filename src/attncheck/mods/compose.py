"""Masks of masks, chains of score mods, later rows; each part is any callable of its signature."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import and_, or_
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from attncheck.mods.signatures import MaskMod, ScoreMod
    from attncheck.mods.spec import Argument, Dimensions

__all__ = ["and_masks", "chain", "later", "not_mask", "offset_mask", "offset_score", "or_masks"]


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


def offset_mask(part: MaskMod, *, rows: int) -> MaskMod:
    """Row i sees what row i + ``rows`` sees in ``part``: decoding behind ``rows`` earlier ones."""

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return part(b, h, q_idx + rows, kv_idx)

    return mask


def offset_score(part: ScoreMod, *, rows: int) -> ScoreMod:
    """Row i gets what row i + ``rows`` gets from ``part``."""

    def scored(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return part(score, b, h, q_idx + rows, kv_idx)

    return scored


def later(values: Mapping[str, Argument], dimensions: Dimensions) -> Dimensions:
    """What an offset's part is asked about: the long problem, whose last rows are these."""
    return replace(dimensions, query=dimensions.query + cast("int", values["rows"]))
