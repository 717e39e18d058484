"""The library of masks and score mods by name: checks a Spec and builds its callable."""

from __future__ import annotations

from functools import lru_cache
from typing import cast

from attncheck.core.errors import ProblemError
from attncheck.core.formats import fp32
from attncheck.mods import spec as check
from attncheck.mods import spec as entries
from attncheck.mods.masks import MASKS
from attncheck.mods.scores import SCORES, alibi_slopes
from attncheck.mods.spec import Dimensions, Entry, MaskMod, ScoreMod, Spec

__all__ = [
    "BUILT_IN",
    "FULL",
    "MASKS",
    "NONE",
    "SCORES",
    "Entry",
    "MaskMod",
    "ScoreMod",
    "alibi_slopes",
    "build_mask",
    "build_score",
    "check_captures",
    "check_mask",
    "check_score",
    "in_fp32",
    "is_additive",
]

FULL = Spec.of("full")
NONE = Spec.of("none")

BUILT_IN = frozenset({*MASKS, *SCORES})
"""Names that mean the same for good: others come and go, of files, recordings and given tensors."""


def check_mask(spec: Spec, dimensions: Dimensions) -> None:
    """Raises UnknownName or ProblemError unless ``spec`` is a mask for these dimensions."""
    entries.check_spec("mask", "--mask", MASKS, spec, dimensions)


def check_score(spec: Spec, dimensions: Dimensions) -> None:
    """Raises UnknownName or ProblemError unless ``spec`` is a score mod for these dimensions."""
    entries.check_spec("score mod", "--score", SCORES, spec, dimensions)


def check_captures(spec: Spec, dimensions: Dimensions) -> None:
    """Raises ProblemError unless a checked score mod reads a float tensor that it captures.

    One with a derivative to what it reads: there are no gradients with respect to others.
    """
    stays = all(part.name in BUILT_IN for part in spec.walk())
    (_captures_once if stays else _captures)(spec, dimensions)


def _captures(spec: Spec, dimensions: Dimensions) -> None:
    from attncheck.mods.captured_gradients import captured_tensors

    if not captured_tensors(entries.build_entry(SCORES, spec, dimensions, "cpu")):
        raise ProblemError(
            f"dcaptured=True has no meaning for score mod {str(spec)!r}: it reads no float tensor "
            "that it captures."
        )


_captures_once = lru_cache(maxsize=64)(_captures)


def in_fp32(spec: Spec) -> Spec:
    """A checked score mod with its real numbers as a kernel receives them; 50 becomes 50.0."""
    if not spec.arguments and not spec.parts:
        return spec
    real = {
        name
        for name, passes in SCORES[spec.name].arguments.items()
        if passes is check.positive_number
    }
    arguments = {k: fp32(float(cast("float", v))) if k in real else v for k, v in spec.arguments}
    return Spec.of(spec.name, *map(in_fp32, spec.parts), **arguments)


def build_mask(spec: Spec, dimensions: Dimensions, device: str = "cpu") -> MaskMod:
    """The mask as a FlexAttention callable, tensors on ``device``; raises as check_mask."""
    check_mask(spec, dimensions)
    return entries.build_entry(MASKS, spec, dimensions, device)


def build_score(spec: Spec, dimensions: Dimensions, device: str = "cpu") -> ScoreMod:
    """The score mod as a FlexAttention callable, tensors on ``device``; raises as check_score."""
    check_score(spec, dimensions)
    return entries.build_entry(SCORES, spec, dimensions, device)


def is_additive(spec: Spec) -> bool:
    """Whether the score mod adds something that does not depend on the score."""
    return all(SCORES[part.name].additive for part in spec.walk())
