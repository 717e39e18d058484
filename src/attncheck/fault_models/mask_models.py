"""Fault models of masks: an edge one key off, a part ignored, the wrong corner, sequences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from attncheck.core.mod_spec import FULL, Dimensions, Spec
from attncheck.core.outputs import Outputs
from attncheck.fault_models.fault_model import (
    Form,
    ModelTable,
    Parameters,
    has_mask,
    has_score,
)
from attncheck.fault_models.layout_models import key_counts
from attncheck.fault_models.steps import Builder, Steps, round_to_format, steps_with_masks
from attncheck.fault_models.tile_models import first_key, once_for_each, tile_visibility
from attncheck.mods import masks
from attncheck.mods.library import build_mask, build_score, is_additive
from attncheck.mods.masks import shifted_dimensions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attncheck.fault_models.exact_attention import ExactAttention
    from attncheck.inputs.problem import Problem
    from attncheck.mods.signatures import MaskMod

MODELS = ModelTable("mask")

_model = MODELS.model
# Masks of the library with a causal edge.
_CAUSAL = ("causal", "causal_bottom_right", "sliding_window", "prefix_lm")
_DOCUMENTS = ("document", "documents")

Values = Any  # a Spec's values, by name


def _shift_edge(later: int) -> Steps:
    """Return Steps that move the edge of causal masks ``later`` keys to the right."""
    return steps_with_masks(
        {
            "causal": lambda _v, _d, _: lambda _b, _h, i, j: i + later >= j,
            "causal_bottom_right": lambda _v, d, _: masks.causal_bottom_right(
                d.kv - d.query + later
            ),
            "sliding_window": lambda v, _d, _: (
                lambda _b, _h, i, j: (i - j < v["window"]) & (i + later >= j)
            ),
            "prefix_lm": lambda v, _d, _: lambda _b, _h, i, j: (j < v["prefix"]) | (i + later >= j),
        }
    )


def mask_without(*names: str, instead: MaskMod = masks.full) -> Steps:
    """Return Steps with ``instead`` in place of the mask's named parts."""
    return steps_with_masks(dict.fromkeys(names, lambda _v, _d, _: instead))


def _with_later_rows(call: ExactAttention, rows: int) -> Form:
    """Return outputs with the mask of the row ``rows`` later, and parameters."""
    # A shift by one row is in the sentence, and needs no parameter.
    parameters = {"rows": rows} if abs(rows) > 1 else {}
    return call.attend(seen=call.visible(call.mask, i=rows)), parameters


def _with_empty_last(whose: str) -> Steps:
    """Return Steps that move empty documents to the end, so that the others' numbers shift."""

    def moved(name: str, values: Values, dims: Dimensions, device: str) -> MaskMod:
        lengths = {side: values[side] for side in ("query_lengths", "kv_lengths")}
        lengths[whose] = sorted(values[whose], key=lambda length: length == 0)
        spec = type(FULL).of(name, *values.get("of", ()), **lengths)
        return build_mask(spec, dims, device)

    names = ("documents", "documents_bottom_right")
    return steps_with_masks({name: partial(moved, name) for name in names})


@_model(
    applies=has_mask("documents", "documents_bottom_right"),
    steps=_with_empty_last("query_lengths"),
)
def empty_documents_not_counted(_call: ExactAttention) -> Iterator[Form]:
    """Documents without rows, or keys, are not counted: rows behind one see another document's
    keys.
    """
    # Rows and keys have separate offsets: either may be counted wrong.
    for whose in ("query_lengths", "kv_lengths"):
        yield _with_empty_last(whose), {"of": whose}


def _padding_seen(problem: Problem, device: str) -> MaskMod | None:
    parts = {spec.name: spec for spec in problem.mask.walk()}
    if not {"padding", "prefix_lm"} <= set(parts):
        return None
    mask = problem.mask_mod(device)
    unpadded = build_mask(parts["padding"], problem.dimensions, device)
    return lambda *at: mask(*at) | ~unpadded(*at)


MODELS.add(
    "padding-as-prefix",
    "padding is taken for a part of the prefix: all rows see it",
    applies=lambda problem: has_mask("padding")(problem) and has_mask("prefix_lm")(problem),
    steps=Steps(mask=_padding_seen),
)


@_model(applies=has_mask(*_CAUSAL), steps=_shift_edge(1))
def mask_one_key_wider(call: ExactAttention) -> Iterator[Form]:
    """The causal mask is one key too wide: row i sees key i + 1."""
    # The whole mask may be shifted by a row, with all its parts.
    yield _with_later_rows(call, 1)
    # The loop may end with the tile of the last key that a block's last row sees. The tile is no
    # parameter, because any size fits short problems.
    wider = call.visible(call.mask, i=1)
    for rows, size in call.tiles:
        yield call.attend(seen=wider & tile_visibility(call, rows, size)[0]), {}


@_model(applies=has_mask(*_CAUSAL), steps=_shift_edge(-1))
def mask_one_key_narrower(call: ExactAttention) -> Iterator[Form]:
    """The causal mask is one key too narrow: row i does not see key i."""
    yield _with_later_rows(call, -1)


def _aligned_part(values: Values, dims: Dimensions, device: str) -> MaskMod:
    """Return the causal mask or window that each sequence or document has."""
    return build_mask(values["of"][0], dims, device)


Diagonals = Callable[[tuple[int, ...], Dimensions], list[int]]
"""(lengths of the sequences, dimensions) → the key on the diagonal in row 0 of each sequence."""


def _by_length(
    longer: int = 0,
    *,
    later: Diagonals | None = None,
    edge: Literal["both", "left"] = "both",
    ends: bool = True,
) -> Builder[MaskMod]:
    """Return a builder of ``bottom_right`` masks with another diagonal in each sequence.

    Args:
        longer: Keys that each sequence is taken to have besides its own.
        later: The diagonals; None: those of a right kernel.
        edge: Whether only the left edge of a window lies there.
        ends: Whether keys behind a sequence's last stay hidden.
    """

    def build(values: Values, dims: Dimensions, device: str) -> MaskMod:
        part = _aligned_part(values, dims, device)
        own = [length + longer for length in values["lengths"]]
        right = [length - dims.query for length in own]
        end = torch.tensor(own if ends else [dims.kv] * dims.batch, device=device)
        at = torch.tensor(right if later is None else later(tuple(own), dims), device=device)
        # A window's right edge stays where the causal mask has it.
        causal = torch.tensor(right, device=device) if edge == "left" else None

        def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if causal is None:
                return part(b, h, i + at[b], j) & (j < end[b])
            # Beyond its right edge the window goes on to the row's own key.
            inside = part(b, h, i + at[b], j) | (j > i + at[b])
            return inside & (j <= i + causal[b]) & (j < end[b])

        return mask

    return build


def with_diagonals(
    later: Diagonals, *, edge: Literal["both", "left"] = "both", ends: bool = True
) -> Steps:
    """Return Steps with the masks of ``_by_length``."""
    return steps_with_masks({"bottom_right": _by_length(later=later, edge=edge, ends=ends)})


_OTHER_DIAGONALS: dict[str, Diagonals] = {
    "of all keys": lambda own, dims: [dims.kv - dims.query] * len(own),
    "of the longest": lambda own, dims: [max(own) - dims.query] * len(own),
    "of the shortest": lambda own, dims: [min(own) - dims.query] * len(own),
    "of the first": lambda own, dims: [own[0] - dims.query] * len(own),
    "of the last": lambda own, dims: [own[-1] - dims.query] * len(own),
    "of the next": lambda own, dims: [n - dims.query for n in (*own[1:], own[0])],
}
"""Diagonals that a kernel may take for a sequence's own; the first one is planted."""


def _of_whole_pages(size: int) -> Diagonals:
    return lambda own, dims: [-(-n // size) * size - dims.query for n in own]


@_model(
    applies=lambda p: (
        has_mask("bottom_right")(p) or (p.paging is not None and has_mask(*_CAUSAL)(p))
    ),
    steps=with_diagonals(_OTHER_DIAGONALS["of all keys"]),
)
def sequence_diagonals(call: ExactAttention) -> Iterator[Form]:
    """The causal mask of a sequence does not end at the sequence's own last key, but at that of
    another, or of all.
    """
    problem, others = call.problem, dict(_OTHER_DIAGONALS)
    if problem.paging is not None:
        others["of whole pages"] = _of_whole_pages(problem.paging.size)
        # Where all sequences have all keys, too.
        later = -problem.kv % problem.paging.size
        if not has_mask("bottom_right")(problem):
            seen = call.visible(call.mask, i=later)
            yield call.attend(seen=seen), {"diagonal": "of whole pages"}
            return
    for name, later_keys in others.items():
        yield with_diagonals(later_keys), {"diagonal": name}
        # A kernel may rely on the causal mask to hide what lies behind a sequence's end.
        yield with_diagonals(later_keys, ends=False), {"diagonal": name, "ends": "not masked"}


@_model(
    applies=has_mask("sliding_window"),
    steps=steps_with_masks(
        {"sliding_window": lambda v, _d, _: lambda _b, _h, i, j: (j < v["window"]) & (j <= i)}
    ),
)
def window_of_another_end(call: ExactAttention) -> Iterator[Form]:
    """The left edge of the window is not counted from the row's own key: the first keys are left,
    or the edge lies where another sequence or other rows have it.
    """
    problem = call.problem
    parts = {part.name: part for part in problem.mask.walk()}
    if "bottom_right" in parts:
        others = {**_OTHER_DIAGONALS, "of the rows": lambda own, _dims: [0] * len(own)}
        if problem.paging is not None:
            others["of whole pages"] = _of_whole_pages(problem.paging.size)
        for name, later in others.items():
            yield with_diagonals(later, edge="left"), {"edge": name}
    elif "offset" in parts:
        causal = mask_without("sliding_window", instead=masks.causal).mask
        assert causal is not None
        seen, window = causal(problem, "cpu"), int(parts["sliding_window"].values["window"])
        shown = call.visible(seen or masks.full) & (call.i - call.j < window)
        yield call.attend(seen=shown), {"edge": "of the rows"}


def _numbers_and_places(lengths: list[int], count: int) -> tuple[Tensor, Tensor]:
    """Return the number of each position's document, and its place there, int64 ``(count,)``."""
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[:count]
    places = torch.cat([torch.arange(length) for length in lengths])[:count]
    return numbers, places


def _with_document_diagonal(diagonal: str) -> Steps:
    """Return Steps with one diagonal for all documents: a name of ``_document_diagonals``."""

    def build(values: Values, dims: Dimensions, device: str) -> MaskMod:
        part, later = _aligned_part(values, dims, device), _document_diagonals(values, dims)
        (row_of, row), (key_of, key) = (
            [tensor.to(device) for tensor in _numbers_and_places(values[lengths], count)]
            for lengths, count in (("query_lengths", dims.query), ("kv_lengths", dims.kv))
        )
        return lambda b, h, i, j: (
            (row_of[i] == key_of[j]) & part(b, h, row[i] + later[diagonal], key[j])
        )

    return steps_with_masks({"documents_bottom_right": build})


def _document_diagonals(values: Values, dims: Dimensions) -> dict[str, int]:
    """Return keys that a kernel may take for the one on the diagonal in a document's row 0."""
    rows, keys = values["query_lengths"], values["kv_lengths"]
    return {
        "of the longest": max(keys) - max(rows),
        "of all together": dims.kv - dims.query,
        "of the first": keys[0] - rows[0],
        "of the last": keys[-1] - rows[-1],
        "top left": 0,
    }


@_model(
    applies=lambda p: (
        has_mask("documents_bottom_right")(p)
        or (has_mask("documents")(p) and has_mask("causal_bottom_right")(p))
    ),
    steps=_with_document_diagonal("of the longest"),
)
def document_diagonals(call: ExactAttention) -> Iterator[Form]:
    """The causal mask of a document does not end at the document's own last key."""
    problem = call.problem
    named = {part.name: part for part in problem.mask.walk()}
    spec = named.get("documents_bottom_right") or named["documents"]
    part = build_mask(spec.parts[0], problem.dimensions) if spec.parts else masks.causal
    rows, keys = (spec.values[f"{side}_lengths"] for side in ("query", "kv"))
    (row_of, row), (key_of, key) = (
        _numbers_and_places(rows, problem.query),
        _numbers_and_places(keys, problem.kv),
    )
    later = _document_diagonals(spec.values, problem.dimensions)
    row_of, row = row_of[call.rows], row[call.rows]
    own = row_of[:, None] == key_of
    for diagonal, rows_later in later.items():
        seen = (own & part(call.b, call.h, row[:, None] + rows_later, key)).expand(call.shape)
        for s in _scores_behind_diagonal(call):
            yield call.attend(seen=seen, s=s), {"diagonal": diagonal}


def _scores_behind_diagonal(call: ExactAttention) -> Iterator[Tensor]:
    """Yield the scores, and those that a kernel may compute of keys that a causal mask hides."""
    yield call.s
    # Behind a row's own key flash-attn's ALiBi falls, where the library's rises.
    if has_score("alibi", "alibi_by_sequence")(call.problem) and is_additive(call.problem.score):
        yield call.x - (call.s - call.x).abs()


def _rectangular(problem: Problem) -> bool:
    return problem.query != problem.kv


_OF_EACH = ("bottom_right", "documents_bottom_right")  # aligned in each sequence or document


@_model(
    applies=lambda p: _rectangular(p) and has_mask("causal_bottom_right", *_OF_EACH)(p),
    steps=(
        mask_without("causal_bottom_right", instead=masks.causal),
        with_diagonals(lambda own, _dims: [0] * len(own)),
        _with_document_diagonal("top left"),
    ),
)
def mask_top_left(call: ExactAttention) -> Iterator[Form]:
    """Its causal mask is aligned at the top left, where query 0 sees key 0 alone: expected at the
    bottom right, where the last query sees the last key. If its causal flag means that, causal =
    "top_left" in the configuration declares it.
    """
    if has_mask("causal_bottom_right")(call.problem):
        yield _with_later_rows(call, call.problem.query - call.problem.kv)


@_model(
    applies=lambda p: (
        _rectangular(p)
        and has_mask("causal", "sliding_window", "prefix_lm")(p)
        and not has_mask(*_OF_EACH)(p)
    )
)
def mask_bottom_right(call: ExactAttention) -> Iterator[Form]:
    """Its causal mask is aligned at the bottom right, where the last query sees the last key:
    expected at the top left, where query 0 sees key 0 alone. If its causal flag means that, causal
    = "bottom_right" in the configuration declares it.
    """
    later = call.problem.kv - call.problem.query
    # Also of a part that is bottom right already, and is then shifted twice.
    yield _shift_edge(later)
    yield _with_later_rows(call, later)


MODELS.add(
    "window-between-corners",
    "the left edge of its window is aligned at the bottom right, and its causal edge at the top "
    "left",
    applies=lambda p: _rectangular(p) and has_mask("sliding_window")(p),
    steps=steps_with_masks(
        {
            "sliding_window": lambda v, d, _: (
                lambda _b, _h, i, j: (i + d.kv - d.query - j < v["window"]) & (i >= j)
            )
        }
    ),
)


def _window(more: int) -> Steps:
    return steps_with_masks(
        {"sliding_window": lambda v, _d, _: masks.sliding_window(v["window"] + more)}
    )


def _prefix(more: int) -> Steps:
    return steps_with_masks({"prefix_lm": lambda v, _d, _: masks.prefix_lm(v["prefix"] + more)})


def _padding(more: int) -> Steps:
    def build(values: Values, _dims: Dimensions, device: str) -> MaskMod:
        return masks.padding(torch.tensor(values["lengths"], device=device) + more)

    return steps_with_masks({"padding": build, "bottom_right": _by_length(more)})


def _whole(values: Values, dims: Dimensions, device: str) -> MaskMod:
    """Return the part of a mask of each sequence, aligned at the end of all keys."""
    part, later = _aligned_part(values, dims, device), dims.kv - dims.query
    return lambda b, h, i, j: part(b, h, i + later, j)


@_model(
    applies=has_mask("sliding_window"), steps=mask_without("sliding_window", instead=masks.causal)
)
def window_ignored(call: ExactAttention) -> Iterator[Form]:
    """The sliding window is ignored: only what is causal of it is left."""
    # A loop that begins with the window visits only the window's tiles.
    causal = call.visible(masks.causal)
    for rows, size in call.any_tiles:
        some, _ = tile_visibility(call, rows, size)
        yield call.attend(seen=some & causal), {"tile": size, "rows": rows}


for _names, _sentence, _steps in (
    ("window-one-wider", "the sliding window is one key too wide on its left", _window(1)),
    ("window-one-narrower", "the sliding window is one key too narrow on its left", _window(-1)),
):
    MODELS.add(_names, _sentence, applies=has_mask("sliding_window"), steps=_steps)

MODELS.add(
    "document-ignored",
    "documents are ignored: rows see keys of other documents",
    applies=has_mask(*_DOCUMENTS, "documents_bottom_right"),
    steps=steps_with_masks(
        dict.fromkeys(_DOCUMENTS, lambda _v, _d, _: masks.full) | {"documents_bottom_right": _whole}
    ),
)

for _names, _sentence, _steps in (
    (
        "padding-ignored",
        "the lengths of the sequences are ignored: rows see padding",
        steps_with_masks({"padding": lambda _v, _d, _: masks.full, "bottom_right": _whole}),
    ),
    ("padding-one-wider", "a sequence is taken for one key longer than it is", _padding(1)),
    ("padding-one-narrower", "a sequence is taken for one key shorter than it is", _padding(-1)),
):
    MODELS.add(_names, _sentence, applies=has_mask("padding", "bottom_right"), steps=_steps)

for _names, _sentence, _steps in (
    ("prefix-one-wider", "the prefix is one key too long", _prefix(1)),
    ("prefix-one-narrower", "the prefix is one key too short", _prefix(-1)),
    (
        "prefix-ignored",
        "the prefix is ignored: the mask is causal alone",
        mask_without("prefix_lm", instead=masks.causal),
    ),
):
    MODELS.add(_names, _sentence, applies=has_mask("prefix_lm"), steps=_steps)


def _later_rows(offset: Spec) -> int:
    rows: Any = offset.values["rows"]
    return int(rows)


def _without_offset(problem: Problem, device: str) -> MaskMod | None:
    """Return the mask of a chunk whose rows are counted from 0."""
    if problem.mask.name == "causal_bottom_right":
        return masks.causal
    if problem.mask.name == "offset":
        return problem.replace(mask=problem.mask.parts[0]).mask_mod(device)
    return None


@_model(
    applies=lambda p: (
        has_mask("offset", "causal_bottom_right")(p)
        or any(part.name == "offset" for part in p.score.walk())
    ),
    steps=Steps(mask=_without_offset),
)
def query_offset_missing(call: ExactAttention) -> Iterator[Form]:
    """The mask and the score mod are asked about the row within the chunk, not within the
    sequence.
    """
    problem = call.problem
    # The mask alone may lack its offset, or the score mod, too, if they share an index.
    for spec in problem.mask.walk():
        if spec.name in {"offset", "causal_bottom_right"}:
            rows = _later_rows(spec) if spec.name == "offset" else problem.kv - problem.query
            seen = call.visible(call.mask, i=-rows)
            both = call.modified(call.x, i=-rows) if problem.score.name == "offset" else call.s
            yield call.attend(seen=seen)
            yield call.attend(seen=seen, s=both)
    if problem.score.name == "offset":
        rows = _later_rows(problem.score)
        yield call.attend(s=call.modified(call.x, i=-rows))


@_model(applies=lambda p: has_mask()(p) or has_score()(p), order=1, family="precision")
def positions_rounded(call: ExactAttention) -> Iterator[Form]:
    """The numbers of rows and keys are rounded to too few bits before the mask, or the score mod,
    compares them.
    """
    problem = call.problem
    mask, score, dims = problem.mask, problem.score, problem.dimensions
    part, see, modify, of_mask, of_score = mask, call.mask, call.score, 0, 0
    # Within an offset a row has its number in the whole sequence.
    if mask.name == "offset":
        part, of_mask = mask.parts[0], _later_rows(mask)
        see = build_mask(part, shifted_dimensions(mask.values, dims))
    if score.name == "offset":
        of_score = _later_rows(score)
        modify = build_score(score.parts[0], shifted_dimensions(score.values, dims))

    def at(rounded: Callable[[Tensor], Tensor], rows: int) -> tuple[Tensor, ...]:
        ends = (call.i + rows, problem.query + rows), (call.j, problem.kv)
        # Clamped first, since the largest numbers are infinite in fp16.
        i, j = (rounded(x.double()).clamp(max=end - 1).long() for x, end in ends)
        return call.b, call.h, i, j

    for name in ("bf16", "fp16"):
        rounded = round_to_format(name)
        seen = torch.as_tensor(see(*at(rounded, of_mask))).expand(call.shape)
        s = modify(call.x.clone(), *at(rounded, of_score)).double().expand(call.x.shape)
        yield call.attend(seen=seen), {"format": name, "of": "the mask"}
        yield call.attend(s=s), {"format": name, "of": "the score mod"}
        yield call.attend(seen=seen, s=s), {"format": name, "of": "both"}
        # The first key of a window may be computed from the rounded row, and rounded again.
        if part.name == "sliding_window":
            window: Any = part.values["window"]
            _, _, i, j = at(rounded, of_mask)
            seen = (rounded((i - (window - 1)).double()) <= j) & (j <= i)
            outputs = call.attend(seen=seen.expand(call.shape))
            yield outputs, {"format": name, "of": "the mask"}


@_model(applies=has_mask("and", "or"), order=1)
def one_part_ignored(call: ExactAttention) -> Iterator[Form]:
    """One part of the mask is ignored."""
    spec = call.problem.mask
    if spec.name not in {"and", "or"}:
        return
    # Without its only part the mask hides nothing.
    for number, ignored in enumerate(spec.parts):
        parts = spec.parts[:number] + spec.parts[number + 1 :]
        rest = FULL if not parts else parts[0] if len(parts) == 1 else spec.of(spec.name, *parts)
        seen = call.visible(build_mask(rest, call.problem.dimensions))
        yield call.attend(seen=seen), {"ignored": str(ignored)}


def _of_sequence_0(problem: Problem, device: str) -> MaskMod:
    mask = problem.mask_mod(device)
    return lambda b, h, i, j: mask(b * 0, h, i, j)


@_model(applies=lambda p: has_mask()(p) and p.batch > 1, steps=Steps(mask=_of_sequence_0))
def mask_of_another_sequence(call: ExactAttention) -> Iterator[Form]:
    """The mask is asked about another sequence of the batch."""
    last, group = call.problem.batch - 1, call.problem.group
    # A block of all sequences and heads may be divided by another number of heads.
    block = call.b * call.problem.heads + call.h
    others = {
        "in reverse order": last - call.b,
        "the next": (call.b + 1) % (last + 1),
        "the block ÷ key heads": (block // call.problem.kv_heads).clamp(max=last),
        "the block ÷ group": (block // group).clamp(max=last),
    }
    for name, other in others.items():
        yield call.attend(seen=call.visible(call.mask, b=other)), {"sequence": name}


@_model(applies=lambda p: has_mask()(p) and p.operation == "attention" and p.group > 1)
def mask_of_packed_rows(call: ExactAttention) -> Iterator[Form]:
    """The rows of query heads that share a key head are packed in one order, and counted in another
    by the mask: a row gets that of another.
    """
    group, query = call.problem.group, call.problem.query
    member = call.h % group
    for packed, row in {
        "head by head": (member * query + call.i) // group,
        "row by row": (call.i * group + member) % query,
    }.items():
        yield call.attend(seen=call.visible(call.mask, i=row - call.i)), {"packed": packed}


@_model(applies=has_mask("sliding_window"))
def one_row_sees_all(call: ExactAttention) -> Iterator[Form]:
    """A single row, as in decoding, sees every key: the window is left out with the causal
    mask.
    """
    # Other parts of the mask, such as padding, stay.
    yield mask_without("sliding_window") if call.problem.query == 1 else call.exact, {}


@_model(applies=has_mask("sliding_window"))
def long_window_sees_all(call: ExactAttention) -> Iterator[Form]:
    """A window as long as the keys is left out, and the causal mask with it: rows see what comes
    later.
    """
    windows: list[Any] = [
        spec.values["window"] for spec in call.problem.mask.walk() if spec.name == "sliding_window"
    ]
    if min(windows) < call.problem.kv:
        yield call.exact, {}
        return
    of_rest = mask_without("sliding_window").mask
    mask = of_rest and of_rest(call.problem, "cpu")
    assert mask is not None, "asked of what has a window"
    for s in _scores_behind_diagonal(call):
        yield call.attend(seen=call.visible(mask), s=s)


def _two_sided(values: Values, dims: Dimensions, _device: str) -> MaskMod:
    # Conventions pass a window with an odd number of keys before a row's own as long on its right,
    # and none that hides nothing.
    window = values["window"]
    after = 0 if window % 2 or window >= dims.query else window - 1
    return lambda _b, _h, i, j: (i - j < window) & (j - i <= after)


_TWO_SIDED = steps_with_masks({"sliding_window": _two_sided})


@_model(applies=has_mask("sliding_window"), steps=_TWO_SIDED)
def window_two_sided(call: ExactAttention) -> Iterator[Form]:
    """The window's right side counts, although the causal flag overrides it."""
    mask = _TWO_SIDED.mask and _TWO_SIDED.mask(call.problem, "cpu")
    assert mask is not None, "asked of what has a window"
    for s in _scores_behind_diagonal(call):
        yield call.attend(seen=call.visible(mask), s=s)


@_model(
    applies=has_mask(),
    steps=Steps(mask=lambda problem, _: None if problem.mask == FULL else masks.full),
)
def mask_ignored(call: ExactAttention) -> Iterator[Form]:
    """The mask is ignored: every row sees every key."""
    if call.problem.mask == FULL:
        return
    for s in _scores_behind_diagonal(call):
        yield call.attend(seen=torch.ones_like(call.seen), s=s)
    # The end of the keys may be ignored, too, so that padding of the last tile counts.
    for _, size in call.tiles:
        count = -call.problem.kv % size
        if count:
            yield call.with_extra_keys(call.s.new_zeros(count), call.s), {}


@_model(applies=has_mask())
def mask_reversed(call: ExactAttention) -> Iterator[Form]:
    """The mask is the wrong way round: what is hidden counts, and what is seen does not."""
    shown = call.visible(call.mask)
    edges: dict[str, Tensor] = {}
    if not bool(shown.all()):
        edges["the mask"] = ~shown
    later = first_key(call.problem) or 0
    of_keys = once_for_each(lambda keys: call.attend(seen=keys))
    if has_mask("causal", "causal_bottom_right", "sliding_window")(call.problem):
        edges["the diagonal"] = (call.j >= call.i + later).expand(call.shape)
    for of, seen in edges.items():
        yield call.attend(seen=seen), {"of": of}
        # A causal loop still ends with the block.
        for rows, size in call.any_tiles:
            visited = call.j // size * size < (call.i // rows + 1) * rows + later
            parameters: Parameters = {"of": of, "tile": size, "rows": rows}
            outputs = of_keys(seen & visited)
            yield outputs, parameters
            # A row that sees nothing of the first tile computes ∞ - ∞.
            blind = ~(seen & (call.j < size)).any(-1)
            if outputs.lse is not None and bool(blind.any()):
                nan = torch.where(blind[..., None], torch.nan, outputs.out)
                yield Outputs(nan, torch.where(blind, torch.nan, outputs.lse)), parameters


@_model()
def causal_always(call: ExactAttention) -> Iterator[Form]:
    """A causal mask, or its reverse, is applied that nobody asked for."""
    # Published kernels align either corner.
    corners = [0, call.problem.kv - call.problem.query]
    # Or one key narrower, so that a row does not see its own; causal masks have an edge model.
    if not has_mask(*_CAUSAL)(call.problem):
        corners += [corner - 1 for corner in corners]
    for later in dict.fromkeys(corners):
        yield call.attend(seen=call.seen & (call.i + later >= call.j)), {"offset": later}
    # Or aligned with the end of each sequence, some of which are shorter.
    own = torch.tensor(key_counts(call.problem)).view(-1, 1, 1, 1) - call.problem.query
    yield call.attend(seen=call.seen & (call.i + own >= call.j)), {"offset": "of each sequence"}
    # The reverse of a causal mask leaves nothing of a causal one.
    for later in dict.fromkeys(corners) if not has_mask(*_CAUSAL)(call.problem) else ():
        seen = call.seen & (call.i + later < call.j)
        yield call.attend(seen=seen), {"offset": later, "which": "its reverse"}
