"""Hypothesis strategies for Problems and their parts: plural nouns, keyword-only.

Everything shrinks to the smallest shape, the simplest mask and the plainest values.
"""

from __future__ import annotations

from attncheck.strategies.masks import causal_masks, masks
from attncheck.strategies.parameters import parameters
from attncheck.strategies.problems import problems, scores
from attncheck.strategies.shapes import lengths, shapes

__all__ = ["causal_masks", "lengths", "masks", "parameters", "problems", "scores", "shapes"]
