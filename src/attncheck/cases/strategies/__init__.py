"""Hypothesis strategies for Problems and their parts: plural nouns, keyword-only.

Everything shrinks to the smallest shape, the simplest mask and the plainest values.
"""

from __future__ import annotations

from attncheck.cases.strategies.families import MASK_FAMILIES, MaskFamily, family_named
from attncheck.cases.strategies.mask_strategies import causal_masks, masks
from attncheck.cases.strategies.problems import AMPLITUDES, problems
from attncheck.cases.strategies.score_strategies import (
    captured_scores,
    compositions,
    expressions,
    score_chains,
    score_expressions,
    scores,
)
from attncheck.cases.strategies.sizes import lengths, pagings, parameters, shapes

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
