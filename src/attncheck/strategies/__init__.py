"""Hypothesis strategies for Problems and their parts: plural nouns, keyword-only.

Everything shrinks to the smallest shape, the simplest mask and the plainest values.
"""

from __future__ import annotations

from attncheck.strategies.compositions import compositions, score_chains
from attncheck.strategies.expressions import expressions, score_expressions
from attncheck.strategies.families import MASK_FAMILIES, MaskFamily, family_named
from attncheck.strategies.lengths import lengths
from attncheck.strategies.masks import causal_masks, masks
from attncheck.strategies.paged import pagings
from attncheck.strategies.parameters import parameters
from attncheck.strategies.problems import AMPLITUDES, problems
from attncheck.strategies.scores import captured_scores, scores
from attncheck.strategies.shapes import shapes

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
