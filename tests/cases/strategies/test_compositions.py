"""Compositions are valid, nested, and shrink to the one that fails."""

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


def test_compositions_are_of_every_kind_and_depth(drawn) -> None:
    found = drawn(strategies.compositions(dimensions=DIMENSIONS))
    for spec in found:
        build_mask(spec, DIMENSIONS)
    assert {spec.name for spec in found} == COMPOSED
    assert {depth(spec) for spec in found} == {1, 2, 3, 4}  # the last one an offset's part
    parts = {part.name for spec in found for part in spec.walk()}
    assert parts == COMPOSED | {"offset", *PLAIN_MASKS}
    assert {len(spec.parts) for spec in found if spec.name != "not"} == {2, 3}


def test_chains_are_of_library_and_written_score_mods(drawn) -> None:
    found = drawn(strategies.score_chains())
    for spec in found:
        build_score(spec, DIMENSIONS)
    assert {len(spec.parts) for spec in found} == {2, 3}
    parts = {part.name for spec in found for part in spec.parts}
    assert parts == {
        "none", "alibi", "softcap", "temperature", "relative_bias", "bias", "offset", "expression"
    }  # fmt: skip


def test_an_offset_fits_the_longer_problem_and_reaches_beyond_the_keys(drawn) -> None:
    found = drawn(strategies.family_named("offset")(dimensions=DIMENSIONS))
    for spec in found:
        build_mask(spec, DIMENSIONS)
    assert {spec.parts[0].name for spec in found} == set(PLAIN_MASKS)
    rows = {spec.values["rows"] for spec in found}
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
    "a not within": (
        lambda spec: any(part.name == "not" for part in spec.parts),
        Spec.of("and", FULL, Spec.of("not", FULL)),
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_composition_shrinks_to_its_cause(smallest, cause: str) -> None:
    wanted, expected = CAUSES[cause]
    found = smallest(strategies.compositions(dimensions=DIMENSIONS), wanted)
    assert (found.name, sorted(map(str, found.parts))) == (
        expected.name,
        sorted(map(str, expected.parts)),
    )


def test_chains_shrink_to_the_part_that_fails(smallest) -> None:
    chains = strategies.score_chains()
    assert smallest(chains) == Spec.of("chain", NONE, NONE)
    capped = smallest(chains, lambda spec: any(part.name == "softcap" for part in spec.parts))
    assert sorted(map(str, capped.parts)) == ["none", "softcap(cap=20.0)"]
    both = smallest(chains, lambda s: s.parts[0].name == "alibi" and s.parts[1].name == "softcap")
    assert both == Spec.of("chain", Spec.of("alibi"), Spec.of("softcap", cap=20.0))
