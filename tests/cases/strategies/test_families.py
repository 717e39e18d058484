"""Families of masks: each draws its own masks for any dimensions and shrinks to the simplest."""

from __future__ import annotations

import pytest

from attncheck.cases import strategies
from attncheck.core.mod_spec import Dimensions, Spec
from attncheck.mods.library import build_mask

SMALL = Dimensions(batch=1, heads=1, query=1, kv=1)
SIMPLEST = {
    "full": Spec.of("full"),
    "causal": Spec.of("causal"),
    "causal_bottom_right": Spec.of("causal_bottom_right"),
    "sliding_window": Spec.of("sliding_window", window=1),
    "prefix_lm": Spec.of("prefix_lm", prefix=0),
    "padding": Spec.of("padding", lengths=[1]),
    "document": Spec.of("document", lengths=[1]),
    "documents": Spec.of("documents", query_lengths=[1], kv_lengths=[1]),
    "packed": Spec.of("documents", query_lengths=[1], kv_lengths=[1]),
    "bottom_right": Spec.of("bottom_right", Spec.of("causal"), lengths=[1]),
    "documents_bottom_right": Spec.of(
        "documents_bottom_right", Spec.of("causal"), query_lengths=[1], kv_lengths=[1]
    ),
    "neighborhood": Spec.of("neighborhood", canvas=[1, 1], kernel=[1, 1]),
    "offset": Spec.of("offset", Spec.of("full"), rows=0),
    "composition": Spec.of("and", Spec.of("full"), Spec.of("full")),
    "expression": Spec.of("expression", text="q_idx >= kv_idx"),
}


DRAWN_NAMES = {
    "composition": {"and", "or", "not"},
    "packed": {"documents", "and"},
    "neighborhood": {"neighborhood", "neighborhood_tiled", "neighborhood_morton"},
}


def test_every_family_has_a_simplest_mask_here() -> None:
    assert list(strategies.MASK_FAMILIES) == list(SIMPLEST)


@pytest.mark.parametrize("name", SIMPLEST)
@pytest.mark.parametrize("sizes", [(1, 1), (1, 40), (40, 1), (33, 17)], ids=str)
def test_family_draws_valid_masks_for_any_dimensions(
    draw, name: str, sizes: tuple[int, int]
) -> None:
    query, kv = sizes
    dimensions = Dimensions(batch=2, heads=3, query=query, kv=kv)
    specs = draw(strategies.family_named(name)(dimensions=dimensions), 40)
    for spec in specs:
        build_mask(spec, dimensions)
    assert {spec.name for spec in specs} <= DRAWN_NAMES.get(name, {name})


@pytest.mark.parametrize("name", SIMPLEST)
def test_family_shrinks_to_its_simplest_mask(shrink, name: str) -> None:
    assert shrink(strategies.family_named(name)(dimensions=SMALL)) == SIMPLEST[name]
