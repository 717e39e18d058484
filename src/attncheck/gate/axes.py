"""What the problems of the bounds differ in, and the Problem that one value of each makes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from attncheck.core.formats import DTYPES
from attncheck.core.paged_layout import Paging
from attncheck.inputs.problem import Problem
from attncheck.mods.library import FULL, NONE
from attncheck.mods.spec import Spec
from attncheck.runner.variants import FURTHER, VARIANTS, Shape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attncheck.gate.covering import Exclusion

__all__ = [
    "BACKWARD",
    "DIMS",
    "DISTRIBUTIONS",
    "EXCLUSIONS",
    "HEADS",
    "MASKS",
    "SCORES",
    "SHAPES",
    "STORED",
    "problem_of",
    "said",
]

MASKS = (
    "full",
    "causal",
    "causal_bottom_right",
    "sliding_window",
    "prefix_lm",
    "document",
    "padding",
    "varlen",
    "neighborhood",
)
"""By the names that variants have."""
SCORES = ("none", "alibi", "softcap", "relative_bias")
STORED = ("plain", "sink", "paged")
"""What else a call has: nothing, a sink, keys in pages."""
BACKWARD = ("", "backward")

SHAPES: dict[str, dict[str, tuple[int, int]]] = {
    "small": {
        "even": (64, 64),
        "ragged": (77, 93),
        "one row": (1, 129),
        "wide": (33, 127),
        "tall": (99, 40),
        "one key": (5, 1),
    },
    "medium": {
        "even": (256, 256),
        "ragged": (177, 293),
        "one row": (1, 513),
        "wide": (65, 511),
        "tall": (385, 129),
        "one key": (5, 1),
    },
    "large": {
        "even": (2048, 2048),
        "ragged": (1177, 1293),
        "one row": (1, 4097),
        "wide": (129, 4095),
        "tall": (1025, 385),
        "edge": (127, 129),
        "one key": (5, 1),
        "few": (3, 17),
    },
}
"""Query and key lengths: whole tiles, none, one short of and one beyond them, unequal both ways."""

HEADS: dict[str, tuple[int, int, int]] = {
    "one head": (1, 1, 1),
    "two sequences": (2, 2, 2),
    "GQA": (1, 4, 2),
    "MQA": (1, 3, 1),
    "sequences GQA": (2, 6, 2),
}
"""Batch, heads, kv heads; with 6/2, h // group and h % kv_heads differ."""

DIMS: dict[str, tuple[int, int]] = {
    "64": (64, 64),
    "128": (128, 128),
    "80": (80, 80),
    "40/17": (40, 17),
    "96/128": (96, 128),
    "1": (1, 1),
    "256": (256, 256),
}
"""Of q and k, and of v: powers of two, what lies between them, and what fits no vector."""

DISTRIBUTIONS = (
    "normal",
    "large_logits",
    "uniform",
    "outliers",
    "one_hot",
    "negative_logits",
    "sink",
    "constant_rows",
)

EXCLUSIONS: tuple[Exclusion, ...] = (
    (("stored", "backward"), lambda row: row["stored"] == "paged" and bool(row["backward"])),
    (("dtype", "backward"), lambda row: DTYPES[row["dtype"]].scaled and bool(row["backward"])),
    (("mask", "shape"), lambda row: row["mask"] == "sliding_window" and row["shape"] == "one row"),
)
"""No such Problems: gradients with pages, or in fp8; a window of one row, which is causal."""

_PAGE = 16


def problem_of(row: Mapping[str, Any], shapes: str, seed: int) -> Problem:
    """The Problem of one value of each axis.

    Args:
        row: ``mask``, ``score``, ``stored``, ``backward``, ``dtype``, ``shape``, ``heads``,
            ``dims`` and ``distribution``.
        shapes: A name of ``SHAPES``.
        seed: Which draw.
    """
    query, kv = SHAPES[shapes][row["shape"]]
    batch, heads, kv_heads = HEADS[row["heads"]]
    head_dim, value_dim = DIMS[row["dims"]]
    sizes = Shape(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        query=query,
        kv=kv,
        head_dim=head_dim,
        value_dim=value_dim,
    )
    return Problem(
        **dataclasses.asdict(sizes),
        mask=_mask(row["mask"], sizes),
        score=_score(row["score"], sizes),
        dtype=row["dtype"],
        sink=row["stored"] == "sink",
        paging=Paging(size=_PAGE, seed=1) if row["stored"] == "paged" else None,
        backward=bool(row["backward"]),
        distribution=row["distribution"],
        seed=seed,
    )


def said(row: Mapping[str, Any]) -> str:
    """What reports call it: ``causal alibi sink backward``."""
    words = [row["mask"], row["score"], row["stored"], row["backward"]]
    return " ".join(word for word in words if word and word not in {"none", "plain"})


def _mask(name: str, sizes: Shape) -> Spec:
    if name == "causal_bottom_right":
        return Spec.of(name)
    if name == "padding":
        # Of each sequence another number; not none, which would leave nothing to bound.
        cut = [max(1, sizes.kv - 3 * turn * sizes.kv // 8) for turn in range(1, sizes.batch + 1)]
        return Spec.of(name, lengths=cut)
    if name == "sliding_window":
        # Of the shorter length: of few rows and many keys a quarter of the keys hides none.
        return Spec.of(name, window=max(1, min(sizes.query, sizes.kv) // 4))
    mods = (VARIANTS | FURTHER)[name].mods
    return mods(sizes)[0] if mods else FULL


def _score(name: str, sizes: Shape) -> Spec:
    mods = (VARIANTS | FURTHER)[name].mods if name != "none" else None
    return mods(sizes)[1] if mods else NONE
