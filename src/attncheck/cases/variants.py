"""The cells of a measurement: variants, heads, dtypes, shapes and distributions."""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from attncheck.core.errors import ProblemError, UnknownName, UsageError, without_recorded
from attncheck.core.formats import DTYPES, round_to
from attncheck.core.paged_layout import Paging
from attncheck.inputs.distributions import DISTRIBUTIONS, Sizes
from attncheck.inputs.problem import SOFTMAX_DTYPES, Problem
from attncheck.mods.library import FULL, NONE
from attncheck.mods.masks import MASKS
from attncheck.mods.mod_files import load_mask, load_score
from attncheck.mods.scores import SCORES
from attncheck.mods.spec import Entry, Spec
from attncheck.verify.run_case import head_arrangement

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attncheck.capabilities.subject import Subject
    from attncheck.inputs.recorded_calls import Recording

__all__ = [
    "ALL",
    "DEFAULT_SHAPES",
    "FURTHER",
    "VARIANTS",
    "Cell",
    "Shape",
    "Variant",
    "check_measured",
    "check_memory",
    "choose_cell",
    "own_variant",
    "plan_cells",
    "recorded_cells",
]


ALL = "all"
"""In place of a name: every variant there is, those of ``FURTHER`` too."""

_SIZE, _OTHER = r"(\d{1,9})", r"(?:/([1-9]\d{0,8}))?"
# A head_dim of 0 would be a Problem's default, which nobody asked for.
_DIM = r"([1-9]\d{0,8})"
_SHAPE = re.compile(f"{_SIZE}x{_SIZE}{_OTHER}x{_SIZE}{_OTHER}x{_DIM}{_OTHER}")
SHAPE_FORM = "BATCHxHEADSxLENGTHxDIM, with /KV after HEADS or LENGTH and /VALUE after DIM"

_FEW = 4  # rows of a decoding step: a token and three more that are guessed


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(Sizes):
    """Sizes of a Problem as typed: ``2x16/4x1024/4096x128/64``.

    ``kv_heads`` is 0 when the text leaves it open: the plan then measures both MHA and GQA.
    """

    @classmethod
    def parse(cls, text: str) -> Shape:
        """The Shape that ``text`` says; raises ProblemError with the form it should have."""
        match = _SHAPE.fullmatch(text.strip().lower())
        if not match:
            raise ProblemError(f"shape {text!r} is not {SHAPE_FORM}, such as 2x16/4x1024x128.")
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
        """kv_heads to measure: what was typed, else one per query head and one per group."""
        if self.kv_heads:
            return (self.kv_heads,)
        ratio = next((r for r in (4, 2, 3) if self.heads % r == 0 and self.heads > r), self.heads)
        return tuple(dict.fromkeys((self.heads, self.heads // max(1, ratio))))


DEFAULT_SHAPES = {"cpu": "1x4x256x64", "cuda": "2x16x4096x128"}
"""65,536 outputs are enough for three digits of RMSE, and an interpreter's patience is short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A named mask and score mod, sized to a shape; or softmax.

    Attributes:
        name: What it is called on the command line and in reports.
        summary: What it asks for, in a line.
        mods: Shape → mask and score mod; None for softmax, of query rows and kv columns.
        most_rows: Query rows at most, whatever the shape says; 0 for as many as it says.
        sink: Whether each head has a sink.
        paged: Whether keys and values lie in pages.
        captured: Whether a backward is asked for the gradients of what the score mod reads, too.
    """

    name: str
    summary: str
    mods: Callable[[Shape], tuple[Spec, Spec]] | None
    most_rows: int = 0
    sink: bool = False
    paged: bool = False
    captured: bool = False

    def exists(self, dtype: str, distribution: str, *, backward: bool = False) -> bool:
        """Whether there is such a Problem.

        Softmax has neither every dtype nor distribution; it has no backward, nor have pages.
        """
        if backward and (self.mods is None or self.paged):
            return False
        if self.mods is not None:
            return True
        known = distribution not in DISTRIBUTIONS or DISTRIBUTIONS[distribution].scores
        return dtype in SOFTMAX_DTYPES and bool(known)

    def fields(self, shape: Shape, kv_heads: int) -> dict[str, Any]:
        """What of a Problem the variant and the shape say."""
        if self.mods is None:
            return {"operation": "softmax", "query": shape.query, "kv": shape.kv}
        if self.most_rows:
            shape = replace(shape, query=min(shape.query, self.most_rows))
        mask, score = self.mods(shape)
        paging = _paging(shape.kv) if self.paged else None
        layout = {"kv_heads": kv_heads, "sink": self.sink, "paging": paging}
        return asdict(shape) | layout | {"mask": mask, "score": score}


def _paging(kv: int) -> Paging:
    """Pages as serving engines have them, and several of them from a length of 32 on."""
    return Paging(size=64 if kv >= 4 * 64 else 16, seed=1)


def _uneven(length: int) -> list[int]:
    """Uneven documents: a half, a quarter, an eighth, and the rest."""
    halves = [length // 2, length // 4, length // 8]
    return [*halves, length - sum(halves)]


def _uneven_pairs(shape: Shape) -> Spec:
    """The first document has twice as many rows as keys, the second half as many."""
    first, second, *rest = _uneven(shape.kv)
    return Spec.of(
        "documents", query_lengths=_uneven(shape.query), kv_lengths=[second, first, *rest]
    )


def _neighborhood(name: str, shape: Shape) -> Spec:
    """A canvas of a cell for each position, and windows of a quarter of its sides, 3 at least.

    Its rows are the largest power of two that divides the length and is at most its root.
    """
    length, rows = max(shape.query, shape.kv), 1
    while length % (2 * rows) == 0 and (2 * rows) ** 2 <= length:
        rows *= 2
    canvas = [rows, length // rows]
    kernel = [min(side, max(3, side // 4 | 1)) for side in canvas]
    tiles = {"tile": [min(8, side) for side in canvas]} if name == "neighborhood_tiled" else {}
    return Spec.of(name, canvas=canvas, kernel=kernel, **tiles)


def _named(*variants: Variant) -> dict[str, Variant]:
    return {variant.name: variant for variant in variants}


VARIANTS: dict[str, Variant] = _named(
    Variant(name="full", summary="every key", mods=lambda _: (FULL, NONE)),
    Variant(
        name="causal",
        summary="keys up to the row's own index",
        mods=lambda _: (Spec.of("causal"), NONE),
    ),
    Variant(
        name="alibi",
        summary="causal, scores falling with distance",
        mods=lambda _: (Spec.of("causal"), Spec.of("alibi")),
    ),
    Variant(
        name="sliding_window",
        summary="the last quarter of the keys up to the row's own",
        mods=lambda s: (Spec.of("sliding_window", window=max(1, s.kv // 4)), NONE),
    ),
    Variant(
        name="prefix_lm",
        summary="causal, the first quarter of the keys visible to all",
        mods=lambda s: (Spec.of("prefix_lm", prefix=s.kv // 4), NONE),
    ),
    Variant(
        name="softcap",
        summary="every key, scores through 20·tanh(score/20)",
        mods=lambda _: (FULL, Spec.of("softcap", cap=20.0)),
    ),
    Variant(
        name="document",
        summary="four documents of uneven length, each for itself",
        mods=lambda s: (Spec.of("document", lengths=_uneven(max(s.query, s.kv))), NONE),
    ),
    Variant(
        name="softmax",
        summary="no attention: the softmax of query rows of kv scores",
        mods=None,
    ),
)
"""Measured unless others are named."""

FURTHER: dict[str, Variant] = _named(
    Variant(
        name="neighborhood",
        summary="cells of a canvas, each sees those around it; a quarter of its sides",
        mods=lambda s: (_neighborhood("neighborhood", s), NONE),
    ),
    Variant(
        name="neighborhood_tiled",
        summary="the same, cells numbered in tiles of 8 by 8",
        mods=lambda s: (_neighborhood("neighborhood_tiled", s), NONE),
    ),
    Variant(
        name="neighborhood_morton",
        summary="the same, cells numbered along a Z curve",
        mods=lambda s: (_neighborhood("neighborhood_morton", s), NONE),
    ),
    Variant(
        name="bias",
        summary="every key, a drawn number added for each row and key",
        # One for all batches and heads: at 4,096 keys of 16 heads another each would be a GiB.
        mods=lambda _: (FULL, Spec.of("bias", seed=0, per_batch=0, per_head=0)),
    ),
    Variant(
        name="relative_bias",
        summary="causal, a number added for each head and distance; with --backward its gradient",
        mods=lambda s: (Spec.of("causal"), Spec.of("relative_bias", distance=s.kv // 4, seed=0)),
        captured=True,
    ),
    Variant(
        name="varlen",
        summary="four documents, with other lengths of rows than of keys",
        mods=lambda s: (_uneven_pairs(s), NONE),
    ),
    Variant(
        name="sink",
        summary="causal, each head with a sink beside its keys",
        mods=lambda _: (Spec.of("causal"), NONE),
        sink=True,
    ),
    Variant(
        name="paged",
        summary="causal, keys and values in pages of 64 (16 where there are few)",
        mods=lambda _: (Spec.of("causal"), NONE),
        paged=True,
    ),
    Variant(
        name="decode",
        summary=f"the last {_FEW} rows of causal over all keys, as in a decoding step",
        mods=lambda _: (Spec.of("causal_bottom_right"), NONE),
        most_rows=_FEW,
    ),
    Variant(
        name="paged_decode",
        summary="the same with keys and values in pages",
        mods=lambda _: (Spec.of("causal_bottom_right"), NONE),
        most_rows=_FEW,
        paged=True,
    ),
)
"""Measured where they are named, or with ``ALL``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One Problem of a plan under its variant's name."""

    variant: str
    problem: Problem

    def asking(self, *, backward: bool) -> Cell:
        """The same with gradients of out's loss, or of the forward alone.

        Raises ProblemError where there are no gradients.
        """
        return replace(
            self, problem=self.problem.replace(backward=backward, dlse=False, dcaptured=False)
        )


def plan_cells(
    *,
    dtypes: Sequence[str],
    variants: Sequence[str],
    shapes: Sequence[str],
    distributions: Sequence[str],
    seed: int,
    own: Variant | None = None,
    backward: bool = False,
) -> list[Cell]:
    """Every combination, in the order in which a report shows them.

    Args:
        dtypes: Names of dtypes that kernels are measured in.
        variants: Names of ``VARIANTS`` and ``FURTHER``, or ``ALL``; none: those of ``VARIANTS``.
            Without a name, what does not exist in a dtype or distribution, or has no backward where
            one is asked for, is left out.
        shapes: As typed, ``Shape.parse``.
        distributions: Names.
        seed: Which draw.
        own: A variant that no name stands for; measured in place of ``VARIANTS``.
        backward: Whether gradients are asked for too.

    Raises UnknownName or ProblemError for anything that cannot be measured, before anything is.
    """
    named = {own.name: own} if own else _asked_for(variants)
    must = own is not None or (bool(variants) and ALL not in variants)
    cells = []
    for dtype, text, distribution in itertools.product(dtypes, shapes, distributions):
        check_measured(dtype)
        shape = Shape.parse(text)
        for name, variant in named.items():
            if not (must or variant.exists(dtype, distribution, backward=backward)):
                continue
            for kv_heads in shape.head_counts():
                fields = variant.fields(shape, kv_heads)
                fields |= {"dtype": dtype, "distribution": distribution, "seed": seed}
                fields |= {"backward": backward, "dcaptured": backward and variant.captured}
                cells.append(Cell(variant=name, problem=Problem(**fields)))
    for cell in cells:
        check_memory(cell.problem)
    return list(dict.fromkeys(cells))


def _asked_for(names: Sequence[str]) -> dict[str, Variant]:
    known = VARIANTS | FURTHER
    for name in names:
        if name not in known and name != ALL:
            raise UnknownName("variant", name, [*known, ALL])
    if ALL in names:
        return known
    return {name: known[name] for name in names} if names else VARIANTS


def check_measured(dtype: str) -> None:
    """Raises UnknownName for a dtype that kernels are not measured in."""
    measured = [name for name, d in DTYPES.items() if d.measured]
    if dtype not in measured:
        raise UnknownName("dtype", dtype, measured)


def check_memory(problem: Problem) -> None:
    """Raises ProblemError when the inputs alone, in float64 while drawn, do not fit."""
    dims = problem.head_dim + problem.value_dim
    columns = dims * (problem.query * problem.heads + problem.kv * problem.kv_heads)
    if problem.operation == "softmax":
        columns = 2 * problem.heads * problem.query * problem.kv
    # A backward has a gradient for each of them.
    needed = 8 * problem.batch * columns * (2 if problem.backward else 1)
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise ProblemError(
            f"shape {problem.shape} needs {needed / 2**30:.0f} GiB for inputs and outputs in "
            f"float64; this machine has {there / 2**30:.0f} GiB."
        )


_Asked = tuple["Cell", "Subject"]


def choose_cell(name: str, pairs: Sequence[tuple[Cell, list[Subject]]]) -> tuple[Cell, Subject]:
    """The one that is called ``name``: ``KERNEL/VARIANT[/HEADS[/DTYPE]]``.

    Args:
        name: What distinguishes it may be left out at the end; a softmax has no HEADS.
        pairs: Cells with the kernels that they concern, of ``measure.pairs``.

    Raises:
        UsageError: where it names none, or several; what there is is listed.
    """
    asked = [(cell, subject) for cell, subjects in pairs for subject in subjects]
    matches = [one for one in asked if f"{_label(one)}/".startswith(f"{name}/")]
    if not matches:
        raise UnknownName("cell", name, _nearest(name, asked))
    if len(matches) > 1:
        raise UsageError(_ambiguous(name, matches))
    return matches[0]


def _parts(asked: _Asked) -> tuple[str, ...]:
    cell, subject = asked
    problem = cell.problem
    parts = (subject.name, cell.variant, head_arrangement(problem), problem.dtype)
    return tuple(part for part in parts if part)


def _label(asked: _Asked) -> str:
    return "/".join(_parts(asked))


def _nearest(name: str, asked: list[_Asked]) -> list[str]:
    """Names that are as long as what of ``name`` is known, and one part more."""
    known = [_parts(one) for one in asked]
    depth = 1
    while True:
        there = {parts: "/".join(parts[:depth]) for parts in known}
        right = [parts for parts in known if f"{name}/".startswith(f"{there[parts]}/")]
        if not right or depth > max(map(len, right)):
            return sorted(set(there.values()))
        known, depth = right, depth + 1


def _ambiguous(name: str, matches: list[_Asked]) -> str:
    labels = [_label(one) for one in matches]
    if len(set(labels)) == len(labels):
        return f"cell {name!r} is one of {', '.join(labels)}: name one of them."
    problems = ", ".join(str(cell.problem) for cell, _ in matches)
    return (
        f"cell {name!r} is one of {len(matches)} problems ({problems}): "
        "ask for one shape, one distribution and one recorded call."
    )


def own_variant(mask: str | None, score: str | None) -> Variant:
    """A variant of a mask and a score mod as typed: ``FILE.py::NAME``, or a name of the library.

    Raises:
        UsageError: for a file, name or callable that cannot be (``mods.own``), or a mod of the
            library that is not known.
        ProblemError: for one of the library that needs numbers, which a command line cannot give.
    """
    specs = (
        _spec(mask, "mask", MASKS, load_mask) if mask is not None else FULL,
        _spec(score, "score mod", SCORES, load_score) if score is not None else NONE,
    )
    name = " ".join(spec.name for spec in specs if spec != NONE)
    return Variant(name=name, summary="as typed", mods=lambda _: specs)


def _spec(
    text: str, kind: str, entries: Mapping[str, Entry[Any]], adopt: Callable[[str], Spec]
) -> Spec:
    if "::" in text or text.endswith(".py"):  # or its beginning: ``adopt`` says what is missing
        return adopt(text)
    complete = [name for name, entry in entries.items() if not (entry.arguments or entry.compose)]
    if text not in entries:
        raise UnknownName(kind, text, without_recorded(complete))
    if text not in complete:
        raise ProblemError(f"{kind} {text!r} needs numbers or parts: write it as FILE.py::NAME.")
    return Spec.of(text)


def recorded_cells(path: str, dtypes: Sequence[str]) -> list[Cell]:
    """The recorded calls of a safetensors file, in their own dtype or in each of ``dtypes``.

    Raises UsageError for a file that is not a recording (``recording_file.load``), and for numbers
    that a dtype does not hold.
    """
    from attncheck.inputs import recording_file

    for name in dtypes:
        check_measured(name)
    calls = recording_file.load(path)
    cells = []
    for dtype in dict.fromkeys(dtypes) or (None,):
        for recording in calls:
            problem = recording.problem(dtype)
            check_memory(problem)
            _check_range(recording, problem)
            cells.append(Cell(variant=recording.call.name, problem=problem))
    return cells


def _check_range(recording: Recording, problem: Problem) -> None:
    """Raises UsageError where a number would become infinite in the Problem's dtype.

    In fp8 none does: a head's descale, an fp32 number, brings its largest to the format's.
    """
    fmt = problem.formats.products  # in tf32 kernels read what is stored in fp32
    if problem.formats.scaled:
        return
    for name in ("q", "k", "v"):
        sizes = getattr(recording, name).abs()
        if round_to(sizes.max().double(), fmt).isfinite():  # rounding is monotonic
            continue
        count = int((sizes.double() > fmt.max).sum())
        raise UsageError(
            f"{name} of call {recording.call.name!r} has {count} number{'s' * (count > 1)} beyond "
            f"{fmt.name}'s {fmt.max:g}: choose another dtype, such as its own, "
            f"{recording.call.dtype}."
        )
