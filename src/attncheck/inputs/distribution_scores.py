"""Scores of a softmax for each named distribution.

``(Draws, Sizes) → (batch, heads, query, kv)``.
"""

# ruff: noqa: D103  (the table in ``__init__`` says what each provokes)

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attncheck.inputs.distribution_tensors import ONE_HOT_GAP, sink_logit, with_outliers

if TYPE_CHECKING:
    from attncheck.core.draws import Draws
    from attncheck.inputs.distribution_tensors import Floats, Sizes

__all__ = [
    "constant_rows",
    "large_logits",
    "negative_logits",
    "normal",
    "one_hot",
    "outliers",
    "sink",
    "uniform",
    "zero_q",
]


def normal(draws: Draws, sizes: Sizes) -> Floats:
    return draws.normal("x", sizes.x)


def outliers(draws: Draws, sizes: Sizes) -> Floats:
    return with_outliers(draws, "x", sizes.x)


def uniform(draws: Draws, sizes: Sizes) -> Floats:
    return draws.uniform("x", sizes.x)


def large_logits(draws: Draws, sizes: Sizes) -> Floats:
    return 32.0 * draws.normal("x", sizes.x)


def negative_logits(draws: Draws, sizes: Sizes) -> Floats:
    """−128 ± 17 (|normal| < 8.3): exp of every one is below half of fp32's smallest number."""
    return -2.0 * (64.0 + draws.normal("x", sizes.x))


def one_hot(draws: Draws, sizes: Sizes) -> Floats:
    """0, and in each row one score that stands ``ONE_HOT_GAP`` above."""
    scores = np.zeros(sizes.x)
    chosen = draws.integers("chosen key", sizes.x[:3], sizes.kv)
    np.put_along_axis(scores, chosen[..., None], ONE_HOT_GAP, axis=-1)
    return scores


def constant_rows(draws: Draws, sizes: Sizes) -> Floats:
    return np.broadcast_to(draws.normal("x", (*sizes.x[:3], 1)), sizes.x).copy()


def sink(draws: Draws, sizes: Sizes) -> Floats:
    """Normal but for column 0, which has the logit of ``tensors.sink``."""
    scores = draws.normal("x", sizes.x)
    scores[..., 0] = sink_logit(sizes)
    return scores


def zero_q(draws: Draws, sizes: Sizes) -> Floats:  # noqa: ARG001  # all have one signature
    return np.zeros(sizes.x)
