"""The library of masks and score mods by name: checks a Spec and builds its callable.

``masks`` and ``scores`` hold the two tables. Importing this module does not import torch.
"""

from __future__ import annotations

from functools import lru_cache

from attncheck.core.errors import ProblemError
from attncheck.core.formats import fp32
from attncheck.core.mod_spec import (
    Dimensions,
    Spec,
    build_entry,
    check_spec,
    positive_number,
)
from attncheck.mods.masks import MASKS
from attncheck.mods.scores import SCORES
from attncheck.mods.signatures import MaskMod, ScoreMod

BUILT_IN = frozenset({*MASKS, *SCORES})
"""Names whose meaning never changes, unlike those of files, recordings and tensors."""


def check_mask(spec: Spec, dimensions: Dimensions) -> None:
    """Raise UnknownName or ProblemError unless ``spec`` is a mask for these dimensions."""
    check_spec("mask", MASKS, spec, dimensions)


def check_score(spec: Spec, dimensions: Dimensions) -> None:
    """Raise UnknownName or ProblemError unless ``spec`` is a score mod for these dimensions."""
    check_spec("score mod", SCORES, spec, dimensions)


def check_captures(spec: Spec, dimensions: Dimensions) -> None:
    """Raise ProblemError unless a checked score mod reads a captured float tensor.

    The mod must have a derivative with respect to the numbers read; others have no gradients.
    """
    # Cache the check for built-in names alone, since the meaning of others may change.
    built_in = all(part.name in BUILT_IN for part in spec.walk())
    (_check_captures_once if built_in else _check_captures)(spec, dimensions)


def _check_captures(spec: Spec, dimensions: Dimensions) -> None:
    from attncheck.mods.captured_gradients import captured_tensors

    if not captured_tensors(build_entry(SCORES, spec, dimensions, "cpu")):
        raise ProblemError(
            f"dcaptured=True has no meaning for score mod {str(spec)!r}: it reads no float tensor "
            "that it captures."
        )


_check_captures_once = lru_cache(maxsize=64)(_check_captures)


def in_fp32(spec: Spec) -> Spec:
    """Return a checked score mod with its real numbers rounded to fp32; 50 becomes 50.0."""
    if not spec.arguments and not spec.parts:
        return spec
    checks = SCORES[spec.name].arguments
    # Seeds and distances are whole numbers, and not rounded.
    arguments = {
        name: fp32(float(value)) if checks[name] is positive_number else value  # type: ignore[arg-type]  # a number
        for name, value in spec.arguments
    }
    return Spec.of(spec.name, *map(in_fp32, spec.parts), **arguments)


def build_mask(spec: Spec, dimensions: Dimensions, device: str = "cpu") -> MaskMod:
    """Return the mask as a FlexAttention callable, tensors on ``device``; raise as check_mask."""
    check_mask(spec, dimensions)
    return build_entry(MASKS, spec, dimensions, device)


def build_score(spec: Spec, dimensions: Dimensions, device: str = "cpu") -> ScoreMod:
    """Return the score mod as a FlexAttention callable, as build_mask; raise as check_score."""
    check_score(spec, dimensions)
    return build_entry(SCORES, spec, dimensions, device)


def is_additive(spec: Spec) -> bool:
    """Return whether the score mod adds something that does not depend on the score."""
    return all(SCORES[part.name].additive for part in spec.walk())
