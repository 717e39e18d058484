"""Covering arrays: few problems in which every pair, or triple, of values occurs.

A row that a kernel refuses is moved to the nearest Problem that it takes: it loses values on the
way.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any, cast

import covertable

from attncheck.cases.variants import FURTHER, VARIANTS, Shape
from attncheck.core.errors import ProblemError
from attncheck.core.formats import DTYPES
from attncheck.core.mod_spec import FULL, NONE, Spec
from attncheck.core.paged_layout import Paging
from attncheck.inputs.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

Exclusion = tuple[tuple[str, ...], "Callable[[Mapping[str, Any]], bool]"]
"""Names of axes, and whether values of theirs cannot be together."""


def covering_rows(
    axes: Mapping[str, Sequence[Hashable]], strength: int, exclusions: Sequence[Exclusion] = ()
) -> list[dict[str, Any]]:
    """Return rows that have every possible choice of values of any ``strength`` axes.

    They follow from the arguments: the same rows every time, on any machine.

    Args:
        axes: The values of each; one without values makes no rows.
        strength: 2 for pairs, 3 for triples; of fewer axes all their combinations.
        exclusions: What cannot be together: no row has it, and nothing is to cover it.
    """
    if not all(axes.values()):
        return []
    # By number: which values they are is not covertable's concern, nor how they are hashed.
    numbers = {name: list(range(len(values))) for name, values in axes.items()}
    rows = covertable.make(
        numbers,
        strength=min(strength, len(axes)),
        constraints=[_constraint(axes, each) for each in exclusions if set(each[0]) <= set(axes)],
    )
    results = [{name: row[name] for name in axes} for row in rows]
    # Plainest first: the first values of the axes, as a reader would ask them.
    results.sort(key=lambda row: tuple(row.values()))
    return [{name: axes[name][number] for name, number in row.items()} for row in results]


def _constraint(axes: Mapping[str, Sequence[Hashable]], exclusion: Exclusion) -> dict[str, Any]:
    names, cannot_be = exclusion

    def allowed(row: Mapping[str, int]) -> bool:
        return not cannot_be({name: axes[name][row[name]] for name in names})

    return {"operator": "fn", "requires": list(names), "evaluate": allowed}


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

# The smallest that engines use, so that even a short sequence has several.
_PAGE = 16


def row_problem(row: Mapping[str, Any], shapes: str, seed: int) -> Problem:
    """Return the Problem of one value of each axis.

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


def row_name(row: Mapping[str, Any]) -> str:
    """Return what reports call a row: ``causal alibi sink backward``."""
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


Row = dict[str, Any]


def row_values(row: Mapping[str, Any], problem: Problem, shapes: str) -> Row:
    """Return what ``problem``, moved from ``row``, has of each axis; None for no value of it."""
    row_was = row_problem(row, shapes, 0)
    stored = "paged" if problem.paging is not None else "sink" if problem.sink else "plain"
    return {
        "mask": row["mask"] if _has_mask(problem, row_was.mask.name) else None,
        # Not as ``row_problem`` has it: a score mod that it dropped would count as had.
        "score": row["score"] if problem.score.name == row["score"] else None,
        "stored": stored,
        "backward": "backward" if problem.backward else "",
        "dtype": problem.dtype,
        "shape": _name_of(SHAPES[shapes], (problem.query, problem.kv)),
        "heads": _name_of(HEADS, (problem.batch, problem.heads, problem.kv_heads)),
        "dims": _name_of(DIMS, (problem.head_dim, problem.value_dim)),
        "distribution": problem.distribution,
    }


def _has_mask(problem: Problem, name: str) -> bool:
    """Return whether it has this mask: a window that hides nothing causal is no window."""
    if problem.mask.name == "sliding_window" and problem.query <= cast(
        "int", problem.mask.values["window"]
    ):
        return False
    return problem.mask.name == name


def restore_lost_pairs(
    axes: Mapping[str, Sequence[Any]],
    had: Sequence[Row],
    shapes: str,
    supports: Callable[[Problem], bool],
) -> Iterator[Row]:
    """Yield a row for each pair that ``had`` lacks and some Problem near the plainest has.

    Args:
        axes: The values of each; the first are the plainest.
        had: Values of the Problems that are asked already.
        shapes: A name of ``axes.SHAPES``.
        supports: Whether the kernel takes a Problem.
    """
    if not all(axes.values()):
        return
    seen: set[tuple[tuple[str, Any], ...]] = set()
    for row in had:
        seen.update(_pairs_of(row))
    taken: dict[tuple[Any, ...], bool] = {}
    for pair in _all_pairs(axes):
        if pair in seen:
            continue
        seen.add(pair)
        candidates = list(_candidates(axes, had, dict(pair)))
        # Those first that make up for most; where as many, the plainest.
        candidates.sort(key=lambda row: sum(each in seen for each in _pairs_of(row)))
        for row in candidates:
            # Each question to a kernel costs time, and pairs share candidates.
            key = tuple(row.values())
            if key not in taken:
                excluded = any(cannot_be(row) for _, cannot_be in EXCLUSIONS)
                taken[key] = not excluded and _supported(row, shapes, supports)
            if taken[key]:
                seen.update(_pairs_of(row))
                yield row
                break


def _candidates(axes: Mapping[str, Sequence[Any]], had: Sequence[Row], pair: Row) -> Iterator[Row]:
    """Yield rows with ``pair``: the plainest, those one value away, and those asked."""
    plain = {name: values[0] for name, values in axes.items()} | pair
    yield plain
    for name, values in axes.items():
        if name not in pair:
            yield from (plain | {name: value} for value in values[1:])
    for row in had:
        if all(row[name] in axes[name] for name in axes):
            yield {name: row[name] for name in axes} | pair


def _all_pairs(
    axes: Mapping[str, Sequence[Any]],
) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    for one, other in itertools.combinations(axes, 2):
        for value, other_value in itertools.product(axes[one], axes[other]):
            yield (one, value), (other, other_value)


def _pairs_of(row: Row) -> Iterator[tuple[tuple[str, Any], ...]]:
    return itertools.combinations(row.items(), 2)


def _supported(row: Row, shapes: str, supports: Callable[[Problem], bool]) -> bool:
    try:
        return supports(row_problem(row, shapes, 0))
    except ProblemError:
        return False


def _name_of(values: Mapping[str, Any], value: Any) -> str | None:
    return next((name for name, each in values.items() if each == value), None)
