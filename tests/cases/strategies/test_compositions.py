"""Strategies for composed masks and chains of score mods: what they draw and shrink to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from attncheck.cases import strategies
from attncheck.cases.strategies.mask_strategies import PLAIN_MASKS
from attncheck.core.mod_spec import Dimensions, Spec
from attncheck.mods.library import build_mask, build_score

if TYPE_CHECKING:
    from collections.abc import Callable

DIMENSIONS = Dimensions(batch=2, heads=3, query=40, kv=50)
COMPOSED = {"and", "or", "not"}
FULL, NONE = Spec.of("full"), Spec.of("none")


def depth(spec: Spec) -> int:
    return 1 + max(map(depth, spec.parts), default=-1)


def test_compositions_reach_every_operator_mask_and_depth(draw) -> None:
    specs = draw(strategies.compositions(dimensions=DIMENSIONS))
    for spec in specs:
        build_mask(spec, DIMENSIONS)
    assert {spec.name for spec in specs} == COMPOSED
    assert {depth(spec) for spec in specs} == {1, 2, 3, 4}  # 4 inside an offset
    parts = {part.name for spec in specs for part in spec.walk()}
    assert parts == COMPOSED | {"offset", *PLAIN_MASKS}
    assert {len(spec.parts) for spec in specs if spec.name != "not"} == {2, 3}


def test_chains_reach_library_and_expression_score_mods(draw) -> None:
    specs = draw(strategies.score_chains())
    for spec in specs:
        build_score(spec, DIMENSIONS)
    assert {len(spec.parts) for spec in specs} == {2, 3}
    parts = {part.name for spec in specs for part in spec.parts}
    assert parts == {
        "none", "alibi", "softcap", "temperature", "relative_bias", "bias", "offset", "expression"
    }  # fmt: skip


def test_offsets_fit_their_dimensions_and_reach_beyond_the_keys(draw) -> None:
    specs = draw(strategies.family_named("offset")(dimensions=DIMENSIONS))
    for spec in specs:
        build_mask(spec, DIMENSIONS)
    assert {spec.parts[0].name for spec in specs} == set(PLAIN_MASKS)
    rows = {spec.values["rows"] for spec in specs}
    assert {0, 1, DIMENSIONS.kv, DIMENSIONS.kv + 7} <= rows


CAUSES: dict[str, tuple[Callable[[Spec], bool], Spec]] = {
    "any": (lambda _: True, Spec.of("and", FULL, FULL)),
    "or": (lambda spec: spec.name == "or", Spec.of("or", FULL, FULL)),
    "not": (lambda spec: spec.name == "not", Spec.of("not", FULL)),
    "three parts": (lambda spec: len(spec.parts) > 2, Spec.of("and", FULL, FULL, FULL)),
    "causal in an or": (
        lambda spec: spec.name == "or" and Spec.of("causal") in spec.parts,
        Spec.of("or", FULL, Spec.of("causal")),
    ),
    "an offset": (
        lambda spec: any(part.name == "offset" for part in spec.parts),
        Spec.of("and", FULL, Spec.of("offset", FULL, rows=0)),
    ),
    "a later row of a causal mask": (
        lambda spec: any(
            part.name == "offset" and part.values["rows"] and part.parts[0].name == "causal"
            for part in spec.parts
        ),
        Spec.of("and", FULL, Spec.of("offset", Spec.of("causal"), rows=1)),
    ),
    "two levels": (
        lambda spec: any(part.name in COMPOSED for part in spec.parts),
        Spec.of("and", FULL, Spec.of("and", FULL, FULL)),
    ),
    "a nested not": (
        lambda spec: any(part.name == "not" for part in spec.parts),
        Spec.of("and", FULL, Spec.of("not", FULL)),
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_composition_shrinks_to_its_cause(shrink, cause: str) -> None:
    wanted, expected = CAUSES[cause]
    spec = shrink(strategies.compositions(dimensions=DIMENSIONS), wanted)
    assert (spec.name, sorted(map(str, spec.parts))) == (
        expected.name,
        sorted(map(str, expected.parts)),
    )


def test_chain_shrinks_to_the_parts_that_fail(shrink) -> None:
    chains = strategies.score_chains()
    assert shrink(chains) == Spec.of("chain", NONE, NONE)
    capped = shrink(chains, lambda spec: any(part.name == "softcap" for part in spec.parts))
    assert sorted(map(str, capped.parts)) == ["none", "softcap(cap=20.0)"]
    both = shrink(chains, lambda s: s.parts[0].name == "alibi" and s.parts[1].name == "softcap")
    assert both == Spec.of("chain", Spec.of("alibi"), Spec.of("softcap", cap=20.0))
