"""Faults of sequences in one tensor: documents without rows or keys, padding beside a prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncheck.hypotheses.model import Variant, masked, model
from attncheck.hypotheses.respelled import mask_with
from attncheck.mods.library import build_mask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.hypotheses.given import Given
    from attncheck.mods.signatures import MaskMod
    from attncheck.mods.spec import Dimensions, Spec

_LENGTHS = ("query_lengths", "kv_lengths")


@model(
    "empty-documents-not-counted",
    "documents without rows, or keys, are not counted: rows behind one see another document's keys",
    group="mask",
    applies=masked("documents"),
)
def _not_counted(given: Given) -> Iterator[Variant]:
    for whose in _LENGTHS:

        def counted(spec: Spec, dims: Dimensions, whose: str = whose) -> MaskMod | None:
            if spec.name != "documents":
                return None
            values: Any = spec.values
            # The empty ones last: each of the others has a smaller number.
            moved = sorted(values[whose], key=lambda length: length == 0)
            return build_mask(spec.of(spec.name, **{**values, whose: moved}), dims)

        mask = mask_with(given.problem, counted)
        if mask is not None:
            seen = given.visible(mask)
            yield Variant(outputs=given.attend(seen=seen), parameters={"of": whose})


@model(
    "padding-as-prefix",
    "padding is taken for a part of the prefix: all rows see it",
    group="mask",
    applies=lambda problem: masked("padding")(problem) and masked("prefix_lm")(problem),
)
def _prefix(given: Given) -> Iterator[Variant]:
    problem = given.problem
    for spec in problem.mask.walk():
        if spec.name == "padding":
            there = given.visible(build_mask(spec, problem.dimensions))
            yield Variant(outputs=given.attend(seen=given.seen | ~there))
