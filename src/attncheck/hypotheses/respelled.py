"""A Problem's mask or score mod with some of its parts replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from attncheck.mods.library import MASKS, SCORES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attncheck.mods.entries import Entry
    from attncheck.mods.signatures import MaskMod, ScoreMod
    from attncheck.mods.spec import Dimensions, Spec
    from attncheck.problem import Problem

__all__ = ["mask_with", "score_with"]

Mod = TypeVar("Mod")


def mask_with(
    problem: Problem, change: Callable[[Spec, Dimensions], MaskMod | None]
) -> MaskMod | None:
    """The mask with what ``change`` gives for a part in its place; None where it gives nothing."""
    return _respelled(MASKS, problem.mask, problem.dimensions, change)


def score_with(
    problem: Problem, change: Callable[[Spec, Dimensions], ScoreMod | None]
) -> ScoreMod | None:
    """The same of the score mod."""
    return _respelled(SCORES, problem.score, problem.dimensions, change)


def _respelled(
    entries: Mapping[str, Entry[Mod]],
    spec: Spec,
    dims: Dimensions,
    change: Callable[[Spec, Dimensions], Mod | None],
) -> Mod | None:
    changed = change(spec, dims)
    entry = entries[spec.name]
    if changed is not None or entry.compose is None:
        return changed
    inside = entry.within(spec.values, dims)
    parts = [_respelled(entries, part, inside, change) for part in spec.parts]
    if all(part is None for part in parts):
        return None
    built = [
        _built(entries, one, inside) if part is None else part
        for one, part in zip(spec.parts, parts, strict=True)
    ]
    return entry.compose(*built, **spec.values)


def _built(entries: Mapping[str, Entry[Mod]], spec: Spec, dims: Dimensions) -> Mod:
    from attncheck.mods.entries import build

    return build(entries, spec, dims, "cpu")
