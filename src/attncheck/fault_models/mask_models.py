"""Fault models of masks: an edge one key off, a part ignored, the wrong corner, sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch

from attncheck.fault_models.fault_model import Prediction, masked, model
from attncheck.mods import masks
from attncheck.mods.library import FULL, build_mask
from attncheck.mods.masks import MASKS
from attncheck.mods.scores import SCORES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from attncheck.fault_models.exact_attention import ExactAttention
    from attncheck.inputs.problem import Problem
    from attncheck.mods.spec import Dimensions, Entry, MaskMod, ScoreMod, Spec

__all__ = ["mask_with", "mask_without_part", "score_with"]


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
    from attncheck.mods.spec import build_entry

    return build_entry(entries, spec, dims, "cpu")


_LENGTHS = ("query_lengths", "kv_lengths")


@model(
    "empty-documents-not-counted",
    "documents without rows, or keys, are not counted: rows behind one see another document's keys",
    group="mask",
    applies=masked("documents"),
)
def _not_counted(given: ExactAttention) -> Iterator[Prediction]:
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
            yield Prediction(outputs=given.attend(seen=seen), parameters={"of": whose})


@model(
    "padding-as-prefix",
    "padding is taken for a part of the prefix: all rows see it",
    group="mask",
    applies=lambda problem: masked("padding")(problem) and masked("prefix_lm")(problem),
)
def _prefix(given: ExactAttention) -> Iterator[Prediction]:
    problem = given.problem
    for spec in problem.mask.walk():
        if spec.name == "padding":
            there = given.visible(build_mask(spec, problem.dimensions))
            yield Prediction(outputs=given.attend(seen=given.seen | ~there))


_CAUSAL = ("causal", "causal_bottom_right", "sliding_window", "prefix_lm")


def _edge(spec: Spec, dims: Dimensions, later: int) -> MaskMod | None:
    """A mask with a causal edge, that edge ``later`` keys to the right."""
    values: Any = spec.values
    if spec.name == "causal":
        return lambda _b, _h, i, j: i + later >= j
    if spec.name == "causal_bottom_right":
        return masks.causal_bottom_right(dims.kv - dims.query + later)
    if spec.name == "sliding_window":
        return lambda _b, _h, i, j: (i - j < values["window"]) & (i + later >= j)
    if spec.name == "prefix_lm":
        return lambda _b, _h, i, j: (j < values["prefix"]) | (i + later >= j)
    return None


def _with(
    given: ExactAttention, change: Callable[[Spec, Dimensions], MaskMod | None]
) -> Iterator[Prediction]:
    mask = mask_with(given.problem, change)
    if mask is not None:
        yield Prediction(outputs=given.attend(seen=given.visible(mask)))


def mask_without_part(problem: Problem, name: str, instead: MaskMod = masks.full) -> MaskMod | None:
    """The mask with ``instead`` in place of its parts called ``name``; None where it has none."""
    return mask_with(problem, lambda spec, _: instead if spec.name == name else None)


def _rows_later(given: ExactAttention, rows: int) -> Iterator[Prediction]:
    """The whole mask as a later row has it."""
    seen = given.visible(given.mask, i=rows)
    yield Prediction(outputs=given.attend(seen=seen), parameters={"rows": rows})


@model(
    "mask-one-key-wider",
    "the causal mask is one key too wide: row i sees key i + 1",
    group="mask",
    applies=masked(*_CAUSAL),
)
def _wider(given: ExactAttention) -> Iterator[Prediction]:
    yield from _with(given, lambda spec, dims: _edge(spec, dims, 1))
    yield from _rows_later(given, 1)


@model(
    "mask-one-key-narrower",
    "the causal mask is one key too narrow: row i does not see key i",
    group="mask",
    applies=masked(*_CAUSAL),
)
def _narrower(given: ExactAttention) -> Iterator[Prediction]:
    yield from _with(given, lambda spec, dims: _edge(spec, dims, -1))
    yield from _rows_later(given, -1)


def _rectangular(problem: Problem) -> bool:
    return problem.query != problem.kv


@model(
    "mask-top-left",
    "the causal mask starts at the top left corner: row i sees keys up to i, where it should see "
    "kv − query more",
    group="mask",
    applies=lambda p: _rectangular(p) and masked("causal_bottom_right")(p),
)
def _top_left(given: ExactAttention) -> Iterator[Prediction]:
    yield from _with(
        given, lambda spec, _: masks.causal if spec.name == "causal_bottom_right" else None
    )
    yield from _rows_later(given, given.problem.query - given.problem.kv)


@model(
    "mask-bottom-right",
    "the causal mask ends at the bottom right corner: row i sees kv − query keys more than up to i",
    group="mask",
    applies=lambda p: _rectangular(p) and masked("causal", "sliding_window", "prefix_lm")(p),
)
def _bottom_right(given: ExactAttention) -> Iterator[Prediction]:
    later = given.problem.kv - given.problem.query
    yield from _with(given, lambda spec, dims: _edge(spec, dims, later))
    yield from _rows_later(given, later)


def _window(given: ExactAttention, more: int) -> Iterator[Prediction]:
    yield from _with(
        given,
        lambda spec, _: (
            masks.sliding_window(_number(spec, "window") + more)
            if spec.name == "sliding_window"
            else None
        ),
    )


def _number(spec: Spec, name: str) -> int:
    values: Any = spec.values
    return int(values[name])


@model(
    "window-one-wider",
    "the sliding window is one key too wide on its left",
    group="mask",
    applies=masked("sliding_window"),
)
def _window_wider(given: ExactAttention) -> Iterator[Prediction]:
    yield from _window(given, 1)


@model(
    "window-one-narrower",
    "the sliding window is one key too narrow on its left",
    group="mask",
    applies=masked("sliding_window"),
)
def _window_narrower(given: ExactAttention) -> Iterator[Prediction]:
    yield from _window(given, -1)


@model(
    "window-ignored",
    "the sliding window is ignored: only what is causal of it is left",
    group="mask",
    applies=masked("sliding_window"),
)
def _no_window(given: ExactAttention) -> Iterator[Prediction]:
    mask = mask_without_part(given.problem, "sliding_window", masks.causal)
    if mask is not None:
        yield Prediction(outputs=given.attend(seen=given.visible(mask)))


@model(
    "document-ignored",
    "documents are ignored: rows see keys of other documents",
    group="mask",
    applies=masked("document", "documents"),
)
def _no_documents(given: ExactAttention) -> Iterator[Prediction]:
    yield from _with(
        given, lambda spec, _: masks.full if spec.name in {"document", "documents"} else None
    )


@model(
    "padding-ignored",
    "the lengths of the sequences are ignored: rows see padding",
    group="mask",
    applies=masked("padding"),
)
def _no_padding(given: ExactAttention) -> Iterator[Prediction]:
    yield from _with(given, lambda spec, _: masks.full if spec.name == "padding" else None)


@model(
    "padding-one-wider",
    "a sequence is taken for one key longer than it is",
    group="mask",
    applies=masked("padding"),
)
def _padding_wider(given: ExactAttention) -> Iterator[Prediction]:
    yield from _padded(given, 1)


@model(
    "padding-one-narrower",
    "a sequence is taken for one key shorter than it is",
    group="mask",
    applies=masked("padding"),
)
def _padding_narrower(given: ExactAttention) -> Iterator[Prediction]:
    yield from _padded(given, -1)


def _padded(given: ExactAttention, more: int) -> Iterator[Prediction]:
    def longer(spec: Spec, _dims: Dimensions) -> MaskMod | None:
        if spec.name != "padding":
            return None
        lengths: Any = spec.values["lengths"]
        return masks.padding(torch.tensor(lengths) + more)

    yield from _with(given, longer)


def _prefix_of_masks(given: ExactAttention, more: int) -> Iterator[Prediction]:
    yield from _with(
        given,
        lambda spec, _: (
            masks.prefix_lm(_number(spec, "prefix") + more) if spec.name == "prefix_lm" else None
        ),
    )


@model(
    "prefix-one-wider",
    "the prefix is one key too long",
    group="mask",
    applies=masked("prefix_lm"),
)
def _prefix_wider(given: ExactAttention) -> Iterator[Prediction]:
    yield from _prefix_of_masks(given, 1)


@model(
    "prefix-one-narrower",
    "the prefix is one key too short",
    group="mask",
    applies=masked("prefix_lm"),
)
def _prefix_narrower(given: ExactAttention) -> Iterator[Prediction]:
    yield from _prefix_of_masks(given, -1)


@model(
    "prefix-ignored",
    "the prefix is ignored: the mask is causal alone",
    group="mask",
    applies=masked("prefix_lm"),
)
def _no_prefix(given: ExactAttention) -> Iterator[Prediction]:
    mask = mask_without_part(given.problem, "prefix_lm", masks.causal)
    if mask is not None:
        yield Prediction(outputs=given.attend(seen=given.visible(mask)))


@model(
    "query-offset-missing",
    "the mask and the score mod are asked about the row within the chunk, not within the sequence",
    group="mask",
    applies=lambda p: (
        masked("offset", "causal_bottom_right")(p)
        or any(part.name == "offset" for part in p.score.walk())
    ),
)
def _no_offset(given: ExactAttention) -> Iterator[Prediction]:
    problem = given.problem
    for spec in problem.mask.walk():
        if spec.name in {"offset", "causal_bottom_right"}:
            rows = _number(spec, "rows") if spec.name == "offset" else problem.kv - problem.query
            seen = given.visible(given.mask, i=-rows)
            both = given.modified(given.x, i=-rows) if problem.score.name == "offset" else given.s
            yield Prediction(outputs=given.attend(seen=seen))
            yield Prediction(outputs=given.attend(seen=seen, s=both))
    if problem.score.name == "offset":
        rows = _number(problem.score, "rows")
        yield Prediction(outputs=given.attend(s=given.modified(given.x, i=-rows)))


@model(
    "one-part-ignored",
    "one part of the mask is ignored",
    group="mask",
    applies=masked("and", "or"),
    order=1,
)
def _part(given: ExactAttention) -> Iterator[Prediction]:
    from attncheck.mods.library import build_mask

    spec = given.problem.mask
    if spec.name not in {"and", "or"}:
        return
    for number, gone in enumerate(spec.parts):
        parts = spec.parts[:number] + spec.parts[number + 1 :]
        left = FULL if not parts else parts[0] if len(parts) == 1 else spec.of(spec.name, *parts)
        seen = given.visible(build_mask(left, given.problem.dimensions))
        yield Prediction(outputs=given.attend(seen=seen), parameters={"ignored": str(gone)})


@model(
    "mask-ignored",
    "the mask is ignored: every row sees every key",
    group="mask",
    applies=masked(),
)
def _ignored(given: ExactAttention) -> Iterator[Prediction]:
    yield Prediction(outputs=given.attend(seen=torch.ones(given.shape, dtype=torch.bool)))


@model(
    "causal-always",
    "a causal mask is applied that nobody asked for",
    group="mask",
)
def _causal_always(given: ExactAttention) -> Iterator[Prediction]:
    for later in dict.fromkeys((0, given.problem.kv - given.problem.query)):
        seen = given.seen & (given.i + later >= given.j)
        yield Prediction(outputs=given.attend(seen=seen), parameters={"offset": later})
