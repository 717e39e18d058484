"""Strategies for library masks: which edge cases are drawn, and what failures shrink to."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from attncheck.cases import strategies
from attncheck.cases.strategies.mask_strategies import NEIGHBORHOODS, PLAIN_MASKS
from attncheck.core.mod_spec import Dimensions, Spec
from attncheck.inputs.problem import Problem
from attncheck.mods.library import build_mask, check_mask
from attncheck.mods.masks import MASKS

if TYPE_CHECKING:
    from collections.abc import Callable

DIMENSIONS = Dimensions(batch=2, heads=1, query=40, kv=50)
LONGEST = 50


def has_empty_row(p: Problem) -> bool:
    """Whether some row sees no key."""
    return bool((~visible_keys(p.mask, p.dimensions).any(-1)).any())


def visible_keys(mask: Spec, dimensions: Dimensions) -> torch.Tensor:
    shape = (dimensions.batch, dimensions.heads, dimensions.query, dimensions.kv)
    return build_mask(mask, dimensions)(
        torch.arange(dimensions.batch)[:, None, None, None],
        torch.arange(dimensions.heads)[:, None, None],
        torch.arange(dimensions.query)[:, None],
        torch.arange(dimensions.kv),
    ).expand(shape)


# Edge cases that masks must reach, as predicates on the arguments of a mask.
EXTREMES: dict[str, Callable[[dict], bool]] = {
    "window of 0": lambda v: v.get("window") == 0,
    "window of all": lambda v: v.get("window") == LONGEST,
    "window beyond": lambda v: v.get("window", 0) > LONGEST,
    "window at a tile": lambda v: v.get("window") in {15, 16, 17, 31, 32, 33},
    "prefix of 0": lambda v: v.get("prefix") == 0,
    "prefix of all": lambda v: v.get("prefix") == DIMENSIONS.kv,
    "prefix beyond": lambda v: v.get("prefix", 0) > DIMENSIONS.kv,
    "empty document first": lambda v: v.get("lengths", (1,))[0] == 0 and sum(v["lengths"]) == 50,
    "empty document within": lambda v: 0 in v.get("lengths", ())[1:-1],
    "empty document last": lambda v: v.get("lengths", (1,))[-1] == 0 and sum(v["lengths"]) == 50,
    "many documents": lambda v: len(v.get("lengths", ())) > 3,
    "only padding": lambda v: 0 in v.get("lengths", ()) and sum(v["lengths"]) < 50,
}


@pytest.fixture
def arguments(draw) -> list[dict]:
    specs = draw(strategies.masks(dimensions=DIMENSIONS), 600)
    for spec in specs:
        check_mask(spec, DIMENSIONS)
    assert {spec.name for spec in specs} == set(PLAIN_MASKS)
    return [spec.values for spec in specs]


def test_every_edge_case_of_masks_is_drawn(arguments) -> None:
    missing = [name for name, wanted in EXTREMES.items() if not any(map(wanted, arguments))]
    assert missing == []


def test_plain_masks_are_the_library_masks_without_another_strategy() -> None:
    composed = {name for name, entry in MASKS.items() if entry.compose}
    others = {"documents", "expression", *NEIGHBORHOODS, *composed}
    assert set(PLAIN_MASKS) == set(MASKS) - others


# Edge cases that neighborhoods must reach, as predicates on the arguments of a mask.
CANVASES: dict[str, Callable[[dict], bool]] = {
    "as many cells as rows": lambda v: math.prod(v["canvas"]) == DIMENSIONS.query,
    "as many cells as keys": lambda v: math.prod(v["canvas"]) == DIMENSIONS.kv,
    "fewer cells": lambda v: math.prod(v["canvas"]) < DIMENSIONS.query,
    "more cells": lambda v: math.prod(v["canvas"]) > DIMENSIONS.kv,
    "one row": lambda v: v["canvas"][0] == 1,
    "one column": lambda v: v["canvas"][1] == 1,
    "wide": lambda v: 1 < v["canvas"][0] < v["canvas"][1],
    "tall": lambda v: v["canvas"][0] > v["canvas"][1] > 1,
    "one cell": lambda v: v["kernel"] == (1, 1),
    "the whole canvas": lambda v: v["kernel"] == v["canvas"] and min(v["canvas"]) > 1,
    "even": lambda v: v["kernel"][0] % 2 == 0 and v["kernel"][1] % 2 == 0,
    "odd, within": lambda v: all(
        1 < n < side and n % 2 for n, side in zip(v["kernel"], v["canvas"], strict=True)
    ),
    "ragged tiles": lambda v: all(
        1 < n < side and side % n
        for n, side in zip(v.get("tile", (1, 1)), v["canvas"], strict=True)
    ),
    "whole tiles": lambda v: all(
        1 < n < side and side % n == 0
        for n, side in zip(v.get("tile", (1, 1)), v["canvas"], strict=True)
    ),
}


def test_every_edge_case_of_neighborhoods_is_drawn(draw) -> None:
    specs = draw(strategies.family_named("neighborhood")(dimensions=DIMENSIONS), 600)
    for spec in specs:
        check_mask(spec, DIMENSIONS)
    assert {spec.name for spec in specs} == set(NEIGHBORHOODS)
    missing = [
        name for name, wanted in CANVASES.items() if not any(wanted(s.values) for s in specs)
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (lambda v: v["canvas"][0] > 1, {"canvas": (40, 1), "kernel": (1, 1)}),
        (lambda v: v["kernel"][0] > 1, {"canvas": (40, 1), "kernel": (2, 1)}),
        (lambda v: min(v["kernel"]) > 1, {"canvas": (20, 2), "kernel": (2, 2)}),
        (lambda v: v.get("tile"), {"canvas": (40, 1), "kernel": (1, 1), "tile": (1, 1)}),
    ],
    ids=["a canvas", "a window", "a window of two sides", "tiles"],
)
def test_neighborhood_shrinks_to_its_cause(shrink, wanted, expected) -> None:
    family = strategies.family_named("neighborhood")(dimensions=DIMENSIONS)
    assert shrink(family, lambda spec: bool(wanted(spec.values))).values == expected


def test_documents_without_rows_or_without_keys_are_drawn(draw) -> None:
    specs = draw(strategies.family_named("documents")(dimensions=DIMENSIONS), 300)
    lengths = [
        list(zip(spec.values["query_lengths"], spec.values["kv_lengths"], strict=True))
        for spec in specs
    ]
    assert {len(each) for each in lengths} == {1, 2, 3, 4}
    documents = [document for each in lengths for document in each]
    assert {(rows > 0, keys > 0) for rows, keys in documents} == {
        (a, b) for a in (True, False) for b in (True, False)
    }


CAUSES: dict[str, tuple[Callable[[Problem], bool], dict]] = {
    "padding": (lambda p: p.mask.name == "padding", {"mask": Spec.of("padding", lengths=[1])}),
    "a window of 0": (
        lambda p: p.mask.values.get("window") == 0,
        {"mask": Spec.of("sliding_window", window=0)},
    ),
    "a window": (
        lambda p: p.mask.name == "sliding_window",
        {"mask": Spec.of("sliding_window", window=1)},
    ),
    "a window beyond the keys": (
        lambda p: p.mask.values.get("window", 0) > p.kv >= p.query,
        {"mask": Spec.of("sliding_window", window=2)},
    ),
    "a prefix of 0": (
        lambda p: p.mask.values.get("prefix") == 0,
        {"mask": Spec.of("prefix_lm", prefix=0)},
    ),
    "a prefix of all keys": (
        lambda p: p.mask.values.get("prefix", 0) >= p.kv,
        {"mask": Spec.of("prefix_lm", prefix=1)},
    ),
    "a prefix beyond": (
        lambda p: p.mask.values.get("prefix", 0) > p.kv,
        {"mask": Spec.of("prefix_lm", prefix=2)},
    ),
    "an empty document": (
        lambda p: p.mask.name == "document" and 0 in p.mask.values["lengths"],
        {"mask": Spec.of("document", lengths=[0, 1])},
    ),
    "two documents that are not empty": (
        lambda p: p.mask.name == "document" and sum(n > 0 for n in p.mask.values["lengths"]) > 1,
        {"kv": 2, "mask": Spec.of("document", lengths=[1, 1])},
    ),
    "an empty row beside others": (
        lambda p: has_empty_row(p) and bool(visible_keys(p.mask, p.dimensions).any()),
        {"query": 2, "mask": Spec.of("causal_bottom_right")},
    ),
    "a sequence of padding": (
        lambda p: p.mask.name == "padding" and 0 in p.mask.values["lengths"],
        {"mask": Spec.of("padding", lengths=[0])},
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_mask_of_a_failing_problem_shrinks_to_its_cause(shrink, cause: str) -> None:
    wanted, changes = CAUSES[cause]
    problem = shrink(
        strategies.problems(shapes=strategies.shapes(longest=40, head_dims=(1,))), wanted
    )
    assert problem == Problem(**{"query": 1, "kv": 1, "head_dim": 1, "dtype": "fp32"} | changes)


def test_empty_row_shrinks_to_one_hidden_key(shrink) -> None:
    """An empty row shrinks to one hidden key, or to two rows under the plainest mask.

    No shrinking step leads from one to the other, and which is reached depends on the constants
    that Hypothesis collects from the code around and tries.
    """
    problem = shrink(strategies.problems(), has_empty_row)
    assert (problem.shape, problem.mask) in {
        ("B1 H1 Q1 K1 D1", Spec.of("sliding_window", window=0)),
        ("B1 H1 Q1 K1 D1", Spec.of("padding", lengths=[0])),
        ("B1 H1 Q2 K1 D1", Spec.of("causal_bottom_right")),
    }
