"""The cells of a measurement: combinations of variants, heads, dtypes, shapes and distributions.

A variant is a mask and a score mod by name, sized to a shape (``VARIANTS``); a cell is one Problem
of a plan under its variant's name (``plan_cells``).
"""

from __future__ import annotations

import itertools
import re
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from attncheck.core.errors import (
    ProblemError,
    UnknownName,
    UsageError,
    did_you_mean,
    require_known,
    without_recorded,
)
from attncheck.core.formats import MEASURED_DTYPES, round_to
from attncheck.core.mod_spec import FULL, NONE, Entry, Spec
from attncheck.core.paged_layout import Paging
from attncheck.inputs.distributions import DISTRIBUTIONS, Sizes
from attncheck.inputs.problem import SOFTMAX_DTYPES, Problem, check_size, head_arrangement
from attncheck.mods.masks import MASKS
from attncheck.mods.scores import SCORES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attncheck.inputs.recorded_calls import Recording
    from attncheck.subjects.capabilities.subject import Subject

ALL = "all"  # In place of a name: every variant, including those of ``OPTIONAL_VARIANTS``.

DEFAULT_SHAPES = {"cpu": "1x4x256x64", "cuda": "2x16x4096x128"}
"""On a CPU small, because Triton is interpreted: 65,536 outputs give three digits of RMSE."""

_SIZE, _OTHER = r"(\d{1,9})", r"(?:/([1-9]\d{0,8}))?"
# Not 0, because a Problem takes a head_dim of 0 for its default.
_DIM = r"([1-9]\d{0,8})"
_SHAPE = re.compile(f"{_SIZE}x{_SIZE}{_OTHER}x{_SIZE}{_OTHER}x{_DIM}{_OTHER}")
_SHAPE_FORM = "BATCHxHEADSxLENGTHxDIM, with /KV after HEADS or LENGTH and /VALUE after DIM"

_DECODING_ROWS = 4  # Rows of a decoding step: one token and three speculative ones.


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(Sizes):
    """Sizes of a Problem as typed: ``2x16/4x1024/4096x128/64``.

    ``kv_heads`` is 0 when the text leaves it open: the plan then measures both MHA and GQA.
    """

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Return the Shape that ``text`` spells; raises ProblemError with the form it needs."""
        match = _SHAPE.fullmatch(text.strip().lower())
        if not match:
            raise ProblemError(f"shape {text!r} is not {_SHAPE_FORM}, such as 2x16/4x1024x128.")
        batch, heads, kv_heads, query, kv, dim, value = (int(g or 0) for g in match.groups())
        return cls(
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            query=query,
            kv=kv or query,
            head_dim=dim,
            value_dim=value or dim,
        )

    def head_counts(self) -> tuple[int, ...]:
        """Return the kv_heads to measure: as typed, else those of MHA and of GQA."""
        if self.kv_heads:
            return (self.kv_heads,)
        ratio = next((r for r in (4, 2, 3) if self.heads % r == 0 and self.heads > r), self.heads)
        return tuple(dict.fromkeys((self.heads, self.heads // max(1, ratio))))


@dataclass(frozen=True, slots=True)
class Variant:
    """A named mask and score mod, sized to a shape; or softmax."""

    name: str  # name on the command line and in reports
    summary: str  # description in one line
    # Shape → mask and score mod; None for softmax, of query rows and kv columns.
    mods: Callable[[Shape], tuple[Spec, Spec]] | None
    most_rows: int = 0  # upper limit on query rows, whatever the shape has; 0 for no limit
    sink: bool = False  # whether each head has a sink
    paged: bool = False  # whether keys and values lie in pages
    # Whether a backward also returns gradients of the tensors that the score mod reads.
    captured: bool = False

    def exists(self, dtype: str, distribution: str, *, backward: bool = False) -> bool:
        """Return whether the variant exists as a Problem with these properties.

        Softmax lacks some dtypes and distributions; neither softmax nor pages have a backward.
        """
        if backward and (self.mods is None or self.paged):
            return False
        if self.mods is not None:
            return True
        has_scores = distribution not in DISTRIBUTIONS or DISTRIBUTIONS[distribution].scores
        return dtype in SOFTMAX_DTYPES and bool(has_scores)

    def fields(self, shape: Shape, kv_heads: int) -> dict[str, Any]:
        """Return the fields of a Problem that the variant and the shape decide."""
        if self.mods is None:
            return {"operation": "softmax", "query": shape.query, "kv": shape.kv}
        if self.most_rows:
            shape = replace(shape, query=min(shape.query, self.most_rows))
        mask, score = self.mods(shape)
        # Page sizes of serving engines; keys fill several pages from a length of 32 on.
        paging = Paging(size=64 if shape.kv >= 4 * 64 else 16, seed=1) if self.paged else None
        layout = {"kv_heads": kv_heads, "sink": self.sink, "paging": paging}
        return asdict(shape) | layout | {"mask": mask, "score": score}


def _uneven_lengths(length: int) -> list[int]:
    """Return four uneven documents: a half, a quarter, an eighth, and the rest."""
    halves = [length // 2, length // 4, length // 8]
    return [*halves, length - sum(halves)]


def _uneven_documents(shape: Shape) -> Spec:
    """Return documents: the first has twice as many rows as keys, the second half as many."""
    # A kernel that mixes up rows and keys of a document is wrong only if their numbers differ.
    first, second, *rest = _uneven_lengths(shape.kv)
    return Spec.of(
        "documents",
        query_lengths=_uneven_lengths(shape.query),
        kv_lengths=[second, first, *rest],
    )


def _neighborhood(name: str, shape: Shape) -> Spec:
    """Return a canvas with one cell per position, and windows of a quarter of its sides.

    The canvas's number of rows is the largest power of two that divides the length and is at most
    its square root; a window's side is at least 3.
    """
    length, rows = max(shape.query, shape.kv), 1
    while length % (2 * rows) == 0 and (2 * rows) ** 2 <= length:
        rows *= 2
    canvas = [rows, length // rows]
    kernel = [min(side, max(3, side // 4 | 1)) for side in canvas]
    tiles = {"tile": [min(8, side) for side in canvas]} if name == "neighborhood_tiled" else {}
    return Spec.of(name, canvas=canvas, kernel=kernel, **tiles)


_CAUSAL, _BOTTOM_RIGHT = Spec.of("causal"), Spec.of("causal_bottom_right")

_USUAL = (
    Variant("full", "every key", lambda _: (FULL, NONE)),
    Variant("causal", "keys up to the row's own index", lambda _: (_CAUSAL, NONE)),
    Variant("alibi", "causal, scores falling with distance", lambda _: (_CAUSAL, Spec.of("alibi"))),
    Variant(
        "sliding_window",
        "the last quarter of the keys up to the row's own",
        lambda s: (Spec.of("sliding_window", window=max(1, s.kv // 4)), NONE),
    ),
    Variant(
        "prefix_lm",
        "causal, the first quarter of the keys visible to all",
        lambda s: (Spec.of("prefix_lm", prefix=s.kv // 4), NONE),
    ),
    Variant(
        "softcap",
        "every key, scores through 20·tanh(score/20)",
        lambda _: (FULL, Spec.of("softcap", cap=20.0)),
    ),
    Variant(
        "document",
        "four documents of uneven length, each for itself",
        lambda s: (Spec.of("document", lengths=_uneven_lengths(max(s.query, s.kv))), NONE),
    ),
    Variant("softmax", "no attention: the softmax of query rows of kv scores", None),
)
VARIANTS = {variant.name: variant for variant in _USUAL}
"""Variants that are measured unless others are named."""

_OPTIONAL = (
    Variant(
        "neighborhood",
        "cells of a canvas, each sees those around it; a quarter of its sides",
        lambda s: (_neighborhood("neighborhood", s), NONE),
    ),
    Variant(
        "neighborhood_tiled",
        "the same, cells numbered in tiles of 8 by 8",
        lambda s: (_neighborhood("neighborhood_tiled", s), NONE),
    ),
    Variant(
        "neighborhood_morton",
        "the same, cells numbered along a Z curve",
        lambda s: (_neighborhood("neighborhood_morton", s), NONE),
    ),
    Variant(
        "bias",
        "every key, a drawn number added for each row and key",
        # One table for all batches and heads: at 4,096 keys, one per head of 16 would take a GiB.
        lambda _: (FULL, Spec.of("bias", seed=0, per_batch=0, per_head=0)),
    ),
    Variant(
        "relative_bias",
        "causal, a number added for each head and distance; with --backward its gradient",
        lambda s: (_CAUSAL, Spec.of("relative_bias", distance=s.kv // 4, seed=0)),
        captured=True,
    ),
    Variant(
        "varlen",
        "four documents, with other lengths of rows than of keys",
        lambda s: (_uneven_documents(s), NONE),
    ),
    Variant(
        "sink",
        "causal, each head with a sink beside its keys",
        lambda _: (_CAUSAL, NONE),
        sink=True,
    ),
    Variant(
        "paged",
        "causal, keys and values in pages of 64 (16 where there are few)",
        lambda _: (_CAUSAL, NONE),
        paged=True,
    ),
    Variant(
        "decode",
        f"the last {_DECODING_ROWS} rows of causal over all keys, as in a decoding step",
        lambda _: (_BOTTOM_RIGHT, NONE),
        most_rows=_DECODING_ROWS,
    ),
    Variant(
        "paged_decode",
        "the same with keys and values in pages",
        lambda _: (_BOTTOM_RIGHT, NONE),
        most_rows=_DECODING_ROWS,
        paged=True,
    ),
)
OPTIONAL_VARIANTS = {variant.name: variant for variant in _OPTIONAL}
"""Variants that are measured if they are named, or with ``ALL``."""

SHARP = Variant(
    "sharp",
    "every key, every score times 16: beyond the exponents of fp64",
    # A power of two: the scores are scaled without rounding.
    lambda _: (FULL, Spec.of("temperature", temperature=2.0**-4)),
)
"""Measured on oracles only: the naive softmax overflows on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One Problem of a plan, and the name of its variant."""

    variant: str
    problem: Problem

    def asking(self, *, backward: bool) -> Cell:
        """Return the cell with the gradients of a loss of out, or with the forward only.

        Raises ProblemError if the Problem has no gradients.
        """
        problem = self.problem.replace(backward=backward, dlse=False, dcaptured=False)
        return replace(self, problem=problem)


def plan_cells(
    *,
    dtypes: Sequence[str],
    variants: Sequence[str],
    shapes: Sequence[str],
    distributions: Sequence[str],
    seed: int,
    own: Variant | None = None,
    backward: bool = False,
    device: str = "cpu",
) -> list[Cell]:
    """Return the cell of every combination, in the order in which a report shows them.

    Args:
        dtypes: Names of dtypes that kernels are measured in.
        variants: Names of ``VARIANTS`` and ``OPTIONAL_VARIANTS``, or ``ALL``; by default all of
            ``VARIANTS``. Variants that are not named are left out where they do not exist in a
            dtype or distribution, or lack a backward that is asked for.
        shapes: Texts for ``Shape.parse``.
        own: A variant of the caller's, measured in place of ``VARIANTS``.
        device: Where the exact result is computed.

    Raises:
        UnknownName, ProblemError: for anything that cannot be measured, before measuring starts.
    """
    by_name = {own.name: own} if own else _variants_named(variants)
    # A named variant must exist: if it does not, creating its Problem raises the reason.
    must_exist = own is not None or (bool(variants) and ALL not in variants)
    cells = []
    for dtype, text, distribution in itertools.product(dtypes, shapes, distributions):
        check_measured(dtype)
        shape = Shape.parse(text)
        for name, variant in by_name.items():
            if not (must_exist or variant.exists(dtype, distribution, backward=backward)):
                continue
            for kv_heads in shape.head_counts():
                fields = variant.fields(shape, kv_heads)
                fields |= {"dtype": dtype, "distribution": distribution, "seed": seed}
                fields |= {"backward": backward, "dcaptured": backward and variant.captured}
                cells.append(Cell(variant=name, problem=Problem(**fields)))
    # Check before anything runs, so that a long run does not fail at its largest shape.
    for cell in cells:
        check_size(cell.problem, device)
    # A softmax has no kv heads, so its cell was made once for each number of them.
    return list(dict.fromkeys(cells))


# ------------------------------------------------------------------ cells of the oracles

ORACLE_VARIANTS = ("full", "causal", SHARP.name, "softmax")

CERTIFIED_VARIANTS = ("full", "causal", "alibi", "softcap", SHARP.name, "softmax")
"""Variants that are proven by default; also score mods, whose roundings the oracle shares."""


def oracle_plan(
    *,
    variants: Sequence[str],
    distributions: Sequence[str],
    dtype: str,
    shape: str,
    seed: int,
    default: Sequence[str] = ORACLE_VARIANTS,
) -> list[Cell]:
    """Return each variant on each distribution, in the order in which a report shows them.

    Args:
        variants: Names of ``VARIANTS``, or ``sharp``; none: those of ``default``.
        distributions: Names; none: all, for softmax those that it has.

    Raises UnknownName or ProblemError for an impossible cell, before anything is computed.
    """
    variants_by_name = VARIANTS | {SHARP.name: SHARP}
    cells: list[Cell] = []
    for name in variants or default:
        require_known("variant", [name], variants_by_name)
        names = tuple(distributions or DISTRIBUTIONS)
        existing = tuple(d for d in names if variants_by_name[name].exists(dtype, d))
        # What is named must exist: if it does not, creating its Problem raises the reason.
        must_exist = bool(variants) and (bool(distributions) or not existing)
        cells += plan_cells(
            dtypes=(dtype,),
            variants=(),
            own=variants_by_name[name],
            shapes=(shape,),
            distributions=names if must_exist else existing,
            seed=seed,
        )
    return list(dict.fromkeys(cells))


def _variants_named(names: Sequence[str]) -> dict[str, Variant]:
    by_name = VARIANTS | OPTIONAL_VARIANTS
    require_known("variant", names, [*by_name, ALL])
    if ALL in names:
        return by_name
    return {name: by_name[name] for name in names} if names else VARIANTS


def check_measured(dtype: str) -> None:
    """Raise UnknownName for a dtype that kernels are not measured in."""
    require_known("dtype", [dtype], MEASURED_DTYPES)


# ------------------------------------------------------------ one cell by its name

_CellAndSubject = tuple[Cell, "Subject"]

_MOST_CHOICES = 16  # Whole labels in a message; beyond this number they are cut off.


def choose_cell(name: str, pairs: Sequence[tuple[Cell, list[Subject]]]) -> tuple[Cell, Subject]:
    """Return the cell and kernel named ``name``: ``KERNEL/VARIANT[/HEADS[/DTYPE]]``.

    Args:
        name: Parts at the end may be left out if the rest is unique; a softmax has no HEADS.
        pairs: Cells with the kernels that are measured on them.

    Raises:
        UsageError: if it names none or several; the message lists the choices.
    """
    choices = [(cell, subject) for cell, subjects in pairs for subject in subjects]
    matches = [one for one in choices if f"{'/'.join(_label_parts(one))}/".startswith(f"{name}/")]
    if not matches:
        whole, cut = _nearest_labels(name, choices)
        # A page of whole labels would hide those that are near.
        listed = whole if len(whole) <= _MOST_CHOICES else cut
        raise UnknownName("cell", name, listed, near=did_you_mean(name, cut))
    if len(matches) == 1:
        return matches[0]
    labels = ["/".join(_label_parts(choice)) for choice in matches]
    if len(set(labels)) == len(labels):
        raise UsageError(f"cell {name!r} is one of {', '.join(labels)}: name one of them.")
    problems = ", ".join(str(cell.problem) for cell, _ in matches)
    raise UsageError(
        f"cell {name!r} is one of {len(matches)} problems ({problems}): "
        "ask for one shape, one distribution and one recorded call."
    )


def _label_parts(choice: _CellAndSubject) -> tuple[str, ...]:
    cell, subject = choice
    problem = cell.problem
    parts = (subject.name, cell.variant, head_arrangement(problem), problem.dtype)
    return tuple(part for part in parts if part)


def _nearest_labels(name: str, choices: list[_CellAndSubject]) -> tuple[set[str], set[str]]:
    """Return the labels that begin with the known part of ``name``; and cut off one part after."""
    labels, depth = [_label_parts(one) for one in choices], 1
    while known := [p for p in labels if f"{name}/".startswith(f"{'/'.join(p[:depth])}/")]:
        if depth > max(map(len, known)):
            break
        labels, depth = known, depth + 1
    return {"/".join(parts) for parts in labels}, {"/".join(parts[:depth]) for parts in labels}


# ------------------------------------------------------------ mods and inputs of the user's own


def own_variant(mask: str | None, score: str | None) -> Variant:
    """Return a variant of a mask and a score mod as typed: ``FILE.py::NAME`` or a library mod.

    Raises:
        UsageError: for an unusable file, name or callable (``mods.mod_files``), or an unknown
            library mod.
        ProblemError: for a library mod that needs numbers, which a command line cannot give.
    """
    # Imported here, because tracing a file's mod needs torch and the table of variants does not.
    from attncheck.mods.mod_files import load_mask, load_score

    specs = (
        _own_spec(mask, "mask", MASKS, load_mask) if mask is not None else FULL,
        _own_spec(score, "score mod", SCORES, load_score) if score is not None else NONE,
    )
    name = " ".join(spec.name for spec in specs if spec != NONE)
    return Variant(name=name, summary="as typed", mods=lambda _: specs)


def _own_spec(
    text: str, kind: str, entries: Mapping[str, Entry[Any]], load: Callable[[str], Spec]
) -> Spec:
    if "::" in text or text.endswith(".py"):  # ``load`` raises if one of the two is missing
        return load(text)
    complete = [name for name, entry in entries.items() if not (entry.arguments or entry.compose)]
    if text not in entries:
        raise UnknownName(kind, text, without_recorded(complete))
    if text not in complete:
        raise ProblemError(f"{kind} {text!r} needs numbers or parts: write it as FILE.py::NAME.")
    return Spec.of(text)


def recorded_cells(path: str, dtypes: Sequence[str], device: str = "cpu") -> list[Cell]:
    """Return the recorded calls of a safetensors file, in their own dtype or in each of ``dtypes``.

    Raises:
        UsageError: for a file that is no recording, and for numbers beyond a dtype's range.
    """
    # Imported here, because it needs torch and the table of variants does not.
    from attncheck.inputs import recording_file

    for name in dtypes:
        check_measured(name)
    recordings = recording_file.load(path)
    cells = []
    for dtype in dict.fromkeys(dtypes) or (None,):
        for recording in recordings:
            problem = recording.problem(dtype)
            check_size(problem, device)
            _check_range(recording, problem)
            cells.append(Cell(variant=recording.call.name, problem=problem))
    return cells


def _check_range(recording: Recording, problem: Problem) -> None:
    """Raise UsageError if a number would become infinite in the Problem's dtype."""
    number_format = problem.formats.products  # tf32 is stored as fp32, but kernels read tf32
    if problem.formats.scaled:  # a head's descale maps its largest number to the format's
        return
    for name in ("q", "k", "v"):
        sizes = getattr(recording, name).abs()
        if round_to(sizes.max().double(), number_format).isfinite():  # rounding is monotonic
            continue
        count = int((sizes.double() > number_format.max).sum())
        raise UsageError(
            f"{name} of call {recording.call.name!r} has {count} number{'s' * (count > 1)} beyond "
            f"{number_format.name}'s {number_format.max:g}: choose another dtype, such as its own, "
            f"{recording.call.dtype}."
        )
