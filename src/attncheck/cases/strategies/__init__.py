"""Hypothesis strategies for Problems and their parts: functions named by plural nouns.

All shrink to the smallest shape, the simplest mask and the plainest values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from hypothesis.strategies import SearchStrategy

from attncheck.cases.strategies.mask_strategies import (
    NEIGHBORHOODS,
    PLAIN_MASKS,
    causal_masks,
    masks,
    packings,
)
from attncheck.cases.strategies.problems import AMPLITUDES, problems
from attncheck.cases.strategies.score_strategies import (
    captured_scores,
    compositions,
    expressions,
    offsets,
    score_chains,
    score_expressions,
    scores,
)
from attncheck.cases.strategies.sizes import lengths, pagings, parameters, shapes
from attncheck.core.errors import look_up
from attncheck.core.mod_spec import Spec

__all__ = [
    "AMPLITUDES",
    "MASK_FAMILIES",
    "MaskFamily",
    "captured_scores",
    "causal_masks",
    "compositions",
    "expressions",
    "family_named",
    "lengths",
    "masks",
    "pagings",
    "parameters",
    "problems",
    "score_chains",
    "score_expressions",
    "scores",
    "shapes",
]

MaskFamily: TypeAlias = "Callable[..., SearchStrategy[Spec]]"
"""``family(dimensions=…)`` returns masks of these dimensions: an argument of ``problems``."""

MASK_FAMILIES: dict[str, MaskFamily] = {
    **{name: partial(masks, names=(name,)) for name in PLAIN_MASKS},
    "documents": partial(masks, names=("documents",)),
    "packed": packings,
    "bottom_right": partial(masks, names=("bottom_right",)),
    "documents_bottom_right": partial(masks, names=("documents_bottom_right",)),
    "neighborhood": partial(masks, names=NEIGHBORHOODS),
    "offset": offsets,
    "composition": compositions,
    "expression": expressions,
}
"""Each mask of the library, then compositions of them, then expressions; simplest first."""


def family_named(name: str) -> MaskFamily:
    """Return the family called ``name``; raises UnknownName with the valid names."""
    return look_up("mask family", name, MASK_FAMILIES)
