"""Covering arrays: few problems in which every pair, or triple, of values occurs.

A row that a kernel refuses is replaced by the nearest Problem that it takes, which may lack some of
the row's values.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import covertable

from attncheck.cases.variants import OPTIONAL_VARIANTS, VARIANTS, Shape
from attncheck.core.errors import ProblemError
from attncheck.core.formats import DTYPES
from attncheck.core.mod_spec import FULL, NONE, Spec
from attncheck.core.paged_layout import Paging
from attncheck.inputs.problem import USUAL_SCALE, Problem


def covering_rows(axes: Mapping[str, Sequence[Hashable]], strength: int) -> list[dict[str, Any]]:
    """Return rows in which every possible combination of values of any ``strength`` axes occurs.

    The rows depend only on the arguments: they are equal on every machine. ``EXCLUSIONS`` occur in
    no row.

    Args:
        axes: The values of each axis; if an axis has no values, there are no rows.
        strength: 2 for pairs, 3 for triples; fewer axes than that get all their combinations.
    """
    if not all(axes.values()):
        return []
    items = tuple((name, tuple(values)) for name, values in axes.items())
    rows = _numbered_rows(items, strength)
    return [{name: axes[name][at] for name, at in zip(axes, row, strict=True)} for row in rows]


@functools.lru_cache(maxsize=8)  # it takes several seconds, and two stages of a gate share rows
def _numbered_rows(
    items: tuple[tuple[str, tuple[Hashable, ...]], ...], strength: int
) -> list[tuple[int, ...]]:
    """Return the rows of ``covering_rows`` with the number of each value in its axis."""
    axes = dict(items)
    # covertable gets numbers, so that its rows do not depend on the values and their hashes.
    rows = covertable.make(
        {name: list(range(len(values))) for name, values in items},
        strength=min(strength, len(axes)),
        constraints=[_constraint(axes, each) for each in EXCLUSIONS if set(each[0]) <= set(axes)],
    )
    # Rows with the first, plainest values of the axes come first.
    return sorted(tuple(row[name] for name in axes) for row in rows)


def _constraint(axes: Mapping[str, Sequence[Hashable]], exclusion: Exclusion) -> dict[str, Any]:
    names, cannot_be = exclusion

    def allowed(row: Mapping[str, int]) -> bool:
        return not cannot_be({name: axes[name][row[name]] for name in names})

    return {"operator": "fn", "requires": list(names), "evaluate": allowed}


# ------------------------------------------------------------ the axes, and what their values mean

Fields = dict[str, Any]  # fields of a Problem

EXTENTS = ("", "half", "no key", "one key", "all but one", "all", "beyond")
"""How many keys a mask's number shows: a typical part (""), half, and boundary values."""
_BEYOND = 2**20  # Keys; a window of this size hides no key at the lengths in ``SHAPES``.

_CAUSAL, _BOTTOM_RIGHT = Spec.of("causal"), Spec.of("causal_bottom_right")


def _extent(name: str, typical: int, most: int) -> int:
    numbers = {
        "": typical,
        "half": most // 2,
        "no key": 0,
        "one key": 1,
        "all but one": most - 1,
        "all": most,
    }
    return max(0, numbers.get(name, _BEYOND))


def _variant(name: str) -> Callable[[Shape, str], Spec]:
    mods = (VARIANTS | OPTIONAL_VARIANTS)[name].mods
    assert mods is not None, "a softmax is no variant of attention"
    return lambda sizes, _extent: mods(sizes)[0]


def _window(sizes: Shape, extent: str, most: int) -> Spec:
    # A quarter of the shorter length: with few rows, a quarter of many keys would hide no key.
    typical = max(1, min(sizes.query, sizes.kv) // 4)
    return Spec.of("sliding_window", window=_extent(extent, typical, most))


def _padding(sizes: Shape, extent: str) -> Spec:
    # Sequences have different lengths, of at least 1, since without keys there are no bounds.
    cut = [max(1, sizes.kv - 3 * turn * sizes.kv // 8) for turn in range(1, sizes.batch + 1)]
    if extent:
        cut[0] = min(_extent(extent, 0, sizes.kv), sizes.kv)
    return Spec.of("padding", lengths=cut)


def _documents(sizes: Shape, extent: str) -> Spec:
    if not extent:
        return _variant("varlen")(sizes, extent)
    # The first document has ``keys`` keys; the last has keys but no rows: their gradients are 0.
    keys = min(_extent(extent, 0, sizes.kv), sizes.kv - sizes.kv // 3)
    rows = sizes.query // 2
    return Spec.of(
        "documents",
        query_lengths=[rows, sizes.query - rows, 0],
        kv_lengths=[keys, sizes.kv - keys - sizes.kv // 3, sizes.kv // 3],
    )


def _row_mask(sizes: Shape, extent: str) -> Spec:
    """Return a causal mask, or a window for a number of keys."""
    return _window(sizes, extent, sizes.kv) if extent else _CAUSAL


def _bottom_right(sizes: Shape, extent: str) -> Spec:
    # Each row has a key of its own, and no sequence ends at the last one.
    least = min(sizes.query, sizes.kv)
    cut = (sizes.kv - 3 * turn * sizes.kv // 8 for turn in range(1, sizes.batch + 1))
    lengths = [max(least, length) for length in cut]
    return Spec.of("bottom_right", _row_mask(sizes, extent), lengths=lengths)


def _documents_bottom_right(sizes: Shape, extent: str) -> Spec:
    # Both have the keys of a cache besides their rows' own, the second document more of them.
    rows, further = sizes.query // 2, sizes.kv - sizes.query
    keys = rows + further // 4
    return Spec.of(
        "documents_bottom_right",
        _row_mask(sizes, extent),
        query_lengths=[rows, sizes.query - rows],
        kv_lengths=[keys, sizes.kv - keys],
    )


MASKS: dict[str, Callable[[Shape, str], Spec]] = {
    "full": lambda _sizes, _extent: FULL,
    "causal": lambda _sizes, _extent: _CAUSAL,
    "causal_bottom_right": lambda _sizes, _extent: _BOTTOM_RIGHT,
    "sliding_window": lambda sizes, extent: _window(sizes, extent, sizes.query),
    "prefix_lm": lambda sizes, extent: Spec.of(
        "prefix_lm", prefix=_extent(extent, sizes.kv // 4, sizes.kv)
    ),
    "document": _variant("document"),
    "padding": _padding,
    "varlen": _documents,
    "neighborhood": _variant("neighborhood"),
    # Aligned as in flash-attn: with few rows and many keys most tiles and splits lie outside it.
    "window_bottom_right": lambda sizes, extent: Spec.of(
        "offset", _window(sizes, extent, sizes.kv), rows=max(0, sizes.kv - sizes.query)
    ),
    # Each sequence or document is aligned at its own end, not at that of the longest or of all.
    "bottom_right": _bottom_right,
    "documents_bottom_right": _documents_bottom_right,
}
"""Name → function of (sizes, extent) that returns the mask; names are those of variants."""
_MASKS_WITH_EXTENT = (
    *("varlen", "window_bottom_right", "sliding_window", "padding", "prefix_lm"),
    *("bottom_right", "documents_bottom_right"),
)

SCORES: dict[str, Callable[[Shape], Spec]] = {
    "none": lambda _: NONE,
    "alibi": lambda _: Spec.of("alibi"),
    "softcap": lambda _: Spec.of("softcap", cap=20.0),
    "relative_bias": lambda s: Spec.of("relative_bias", distance=s.kv // 4, seed=0),
    # So small that a hidden key's −∞, if the softcap were applied to it, would weigh like others.
    "small softcap": lambda _: Spec.of("softcap", cap=0.5),
    "large softcap": lambda _: Spec.of("softcap", cap=1.0e4),
    "alibi by sequence": lambda _: Spec.of("alibi_by_sequence"),
    "bias": lambda _: Spec.of("bias", seed=0, per_batch=1, per_head=1),
    # Distance from the last rows' own keys, as in decoding: rows are counted from kv - query.
    "alibi bottom_right": lambda s: Spec.of(
        "offset", Spec.of("alibi"), rows=max(0, s.kv - s.query)
    ),
}

SCALES = {"": 1.0, "negative": -1.0, "huge": 300.0, "zero": 0.0, "tiny": 2.0**-30}
"""Name → factor by which the usual scale 1/√head_dim is multiplied."""

STORED: dict[str, Fields] = {
    "plain": {},
    "sink": {"sink": True},
    "paged": {"paging": Paging(size=16, seed=1)},
    "sink equal": {"sink": True, "sink_logits": "equal"},
    "pages of 1": {"paging": Paging(size=1, seed=1)},
    "sink above": {"sink": True, "sink_logits": "above"},
    "sink absent": {"sink": True, "sink_logits": "absent"},
    "sink below": {"sink": True, "sink_logits": "below"},
    "pages of 256": {"paging": Paging(size=256, seed=1)},  # above any tile
}
"""A sink or paged keys, or neither; pages have the smallest size of serving engines first."""

BACKWARD: dict[str, Fields] = {
    "": {},
    "backward": {"backward": True},
    "backward of LSE": {"backward": True, "dlse": True},
}

SHAPES: dict[str, dict[str, tuple[int, int]]] = {
    "tiny": {
        "ragged": (33, 75),
        "wide": (17, 150),
        "tall": (83, 40),
        "even": (64, 64),
        "one row": (1, 129),
        "one key": (5, 1),
    },
    "small": {
        "even": (64, 64),
        "ragged": (77, 93),
        "one row": (1, 129),
        "wide": (33, 127),
        "tall": (99, 40),
        "one key": (5, 1),
    },
    "medium": {
        "even": (256, 256),
        "ragged": (177, 293),
        "one row": (1, 513),
        "wide": (65, 511),
        "tall": (385, 129),
        "one key": (5, 1),
    },
    "large": {
        "even": (2048, 2048),
        "ragged": (1177, 1293),
        "one row": (1, 4097),
        "wide": (129, 4095),
        "tall": (1025, 385),
        "edge": (127, 129),
        "one key": (5, 1),
        "few": (3, 17),
    },
}
"""(query, kv): multiples of a tile, no multiples, one less or more; either one may be longer."""

HEADS: dict[str, tuple[int, int, int]] = {
    "one head": (1, 1, 1),
    "two sequences": (2, 2, 2),
    "GQA": (1, 4, 2),
    "MQA": (1, 3, 1),
    "sequences GQA": (2, 6, 2),
    "group of 7": (1, 7, 1),
    "group of 5": (1, 5, 1),
    "group of 6": (1, 6, 1),
}
"""(batch, heads, kv_heads). With 6/2, h // group and h % kv_heads differ; groups of 3, 5, 6 and 7
rows fill no tile."""

DIMS: dict[str, tuple[int, int]] = {
    text: (int(text.partition("/")[0]), int(text.rpartition("/")[2]))
    for text in ("64", "128", "80", "40/17", "96/128", "1", "256", "33/31", "8/24", "72")
}
"""(head_dim, value_dim): powers of two, dims between and next to them, dims that fit no vector."""

DISTRIBUTIONS = (
    "normal",
    "large_logits",
    "uniform",
    "outliers",
    "one_hot",
    "negative_logits",
    "sink",
    "constant_rows",
)

ALONE: dict[str, tuple[str, ...]] = {
    "extent": ("no key", "one key"),
    "scale": ("huge", "zero", "tiny"),
    "stored": ("sink above",),
}
"""Values that would hide the effect of all other values, so that they get rows of their own."""

TOGETHER: tuple[Fields, ...] = (
    # All scores are far below −10⁴, so that a finite mask value in place of −∞ exceeds them.
    {"scale": "huge", "distribution": "negative_logits"},
    # exp(0 − LSE) of a key beyond the last is infinite, and 0 times it is NaN.
    {"backward": "backward", "distribution": "negative_logits"},
    # Where a softcap makes a hidden key's −∞ a score, that weighs only beside others so small.
    {"mask": "causal", "score": "small softcap", "shape": "even"},
    # Kernels have a path for one row, which needs no causal mask, and forget the window there.
    {"mask": "window_bottom_right", "shape": "one row"},
    # Slopes by sequence differ from those of the first only beside another sequence.
    {"mask": "causal", "score": "alibi by sequence", "shape": "even", "heads": "two sequences"},
    # Heads that share keys have slopes of their own.
    {"mask": "causal", "score": "alibi", "shape": "even"},
    # Several tiles each way, because the loops of a backward have bounds of their own.
    {"mask": "causal", "shape": (150, 150)},
    # A window of each sequence, in decoding, and of each document: from its own last key.
    {"mask": "bottom_right", "extent": "half", "shape": "one row"},
    {"mask": "documents_bottom_right", "extent": "half"},
)
"""Combinations that find faults that no single value of theirs finds: in rows of their own."""


def _is_paged(row: Mapping[str, Any]) -> bool:
    return "paging" in STORED[row["stored"]]


def _has_more_keys(shape: str | tuple[int, int]) -> bool:
    """Return whether a shape has more keys than rows: a name, or a kernel's own sizes."""
    if isinstance(shape, str):
        return shape not in {"tall", "even", "one key"}
    return shape[1] > shape[0]


Exclusion = tuple[tuple[str, ...], "Callable[[Mapping[str, Any]], bool]"]
"""Names of axes, and a predicate that is true for values of these axes that cannot be combined."""

_WIDE_DISTRIBUTIONS = {"large_logits", "one_hot", "sink"}  # those with a large spread of scores

EXCLUSIONS: tuple[Exclusion, ...] = (
    (("stored", "backward"), lambda row: _is_paged(row) and bool(row["backward"])),
    (("dtype", "backward"), lambda row: DTYPES[row["dtype"]].scaled and bool(row["backward"])),
    (("mask", "shape"), lambda row: row["mask"] == "sliding_window" and row["shape"] == "one row"),
    (
        ("mask", "shape"),
        lambda row: row["mask"] == "window_bottom_right" and row["shape"] in {"tall", "one key"},
    ),
    # With no more keys than rows, all sequences would have all keys, and documents as many as rows.
    (
        ("mask", "shape"),
        lambda row: (
            row["mask"] in {"bottom_right", "documents_bottom_right"}
            and not _has_more_keys(row["shape"])
        ),
    ),
    # The first document has no row.
    (
        ("mask", "shape"),
        lambda row: row["mask"] == "documents_bottom_right" and row["shape"] == "one row",
    ),
    (("mask", "extent"), lambda row: bool(row["extent"]) and row["mask"] not in _MASKS_WITH_EXTENT),
    (
        ("score", "shape"),
        lambda row: (
            row["score"] == "alibi bottom_right" and row["shape"] in {"tall", "even", "one key"}
        ),
    ),
    # A kernel may divide a sink by the scale, so a scale of 0 has no error bound.
    (("scale", "stored"), lambda row: row["scale"] == "zero" and "sink" in row["stored"]),
    # A maximum taken before a negative scale is right only if exp of the scores' spread is finite.
    (
        ("scale", "distribution"),
        lambda row: row["scale"] == "negative" and row["distribution"] in _WIDE_DISTRIBUTIONS,
    ),
)
"""Combinations that are no Problem (gradients with pages or in fp8), that equal another (a window
of one row is causal), or for which a right kernel may return anything."""


def is_excluded(row: Mapping[str, Any]) -> bool:
    """Return whether a row, which may lack axes, has one of ``EXCLUSIONS``."""
    return any(cannot_be(row) for names, cannot_be in EXCLUSIONS if row.keys() >= {*names})


AXES: dict[str, tuple[Any, ...]] = {
    "mask": tuple(MASKS),
    "extent": EXTENTS,
    "score": tuple(SCORES),
    "scale": tuple(SCALES),
    "stored": tuple(STORED),
    "backward": tuple(BACKWARD),
    "dtype": tuple(name for name, dtype in DTYPES.items() if dtype.measured),
    "shape": tuple(SHAPES["tiny"]),
    "heads": tuple(HEADS),
    "dims": tuple(DIMS),
    "distribution": DISTRIBUTIONS,
}
"""Axis → its values, plainest first. The bounds of a gate and the crossed questions of a check
combine them."""


def row_problem(row: Mapping[str, Any], shapes: str, seed: int) -> Problem:
    """Return the Problem that has the row's value on each axis.

    Args:
        row: Axis of ``AXES`` → value; axes that are left out have their first value.
        shapes: A name of ``SHAPES``.
    """
    row = PLAIN_ROW | {"shape": next(iter(SHAPES[shapes]))} | dict(row)
    # Kernels that take none of these sizes have rows with their own sizes instead of names.
    query, kv = SHAPES[shapes].get(row["shape"], row["shape"])
    batch, heads, kv_heads = HEADS.get(row["heads"], row["heads"])
    head_dim, value_dim = DIMS.get(row["dims"], row["dims"])
    sizes = Shape(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        query=query,
        kv=kv,
        head_dim=head_dim,
        value_dim=value_dim,
    )
    # Exactly the default scale, to the last bit: some kernels take no other.
    factor = SCALES[row["scale"]]
    scale = USUAL_SCALE if factor == 1.0 else factor / math.sqrt(head_dim)
    return Problem(
        **dataclasses.asdict(sizes),
        mask=MASKS[row["mask"]](sizes, row["extent"]),
        score=SCORES[row["score"]](sizes),
        scale=scale,
        dtype=row["dtype"],
        **STORED[row["stored"]],
        **BACKWARD[row["backward"]],
        distribution=row["distribution"],
        seed=seed,
    )


PLAIN_ROW = {name: values[0] for name, values in AXES.items()}  # the plainest value of each axis


def row_name(row: Mapping[str, Any]) -> str:
    """Return a row's name in reports, such as ``causal alibi sink backward``."""
    words = [row["mask"], row["extent"], row["score"], row["scale"], row["stored"]]
    words.append(row["backward"])
    return " ".join(word for word in words if word and word not in {"none", "plain"})


def alone_rows(axes: Mapping[str, Sequence[Any]]) -> Iterator[Row]:
    """Yield a row with shared heads and a backward for each value of ``ALONE``, if possible.

    An extent gets a row for each mask that has it. A row for each of ``TOGETHER`` follows.
    """
    common = {name: values[0] for name, values in axes.items()}
    common["backward"] = axes["backward"][-1]
    common |= {"heads": "sequences GQA"} if "sequences GQA" in axes["heads"] else {}
    masks = [mask for mask in _MASKS_WITH_EXTENT if mask in axes["mask"]]
    for axis, names in ALONE.items():
        for name in names:
            if name not in axes[axis]:
                continue
            for mask in masks if axis == "extent" else axes["mask"][:1]:
                row = common | {axis: name, "mask": mask}
                # Combinations that exclude a backward are asked without it.
                row |= {"backward": axes["backward"][0]} if is_excluded(row) else {}
                if not is_excluded(row):
                    yield row
    for values in TOGETHER:
        # Sizes are no value of an axis, and a distribution may be left out there to save time.
        chosen = {name: value for name, value in values.items() if not isinstance(value, tuple)}
        if all(value in axes[name] for name, value in chosen.items() if name != "distribution"):
            yield common | values


Row = dict[str, Any]


# ------------------------------------------------------------ every triple, with few compilations

VARIED = ("shape", "heads", "distribution")
"""Axes whose values can change without compiling a kernel anew, if lengths stay of one kind."""


def lengths_kind(lengths: tuple[int, int]) -> tuple[int, ...]:
    """Return the kind of each length, as Triton specializes on: 1; 16 for its multiples; else 0."""
    return tuple(1 if length == 1 else 16 * (length % 16 == 0) for length in lengths)


def compiled_rows(
    axes: Mapping[str, Sequence[Any]], shapes: str, least: int
) -> tuple[list[Row], list[Row]]:
    """Return rows in which every possible combination of values of any three axes occurs.

    Like ``covering_rows`` of strength 3, but for kernels that are compiled: the values that need a
    compilation are covered in as few rows as possible, and each compilation serves several rows,
    with other lengths of one kind, heads and distributions.

    Args:
        axes: As in ``covering_rows``; the axes in ``VARIED`` are among them.
        shapes: The name in ``SHAPES`` of the lengths.
        least: The smallest number of rows, however few values the axes have.

    Returns:
        The first row of each compilation, and the rows that reuse one. In this order two processes
        seldom compile the same kernel at once.

    Raises:
        ProblemError: if all combinations of values are excluded.
    """
    if not all(axes.values()):
        return [], []
    items = tuple((name, tuple(values)) for name, values in axes.items())
    return _compiled_rows(items, shapes, least)


@functools.lru_cache(maxsize=8)
def _compiled_rows(
    items: tuple[tuple[str, tuple[Any, ...]], ...], shapes: str, least: int
) -> tuple[list[Row], list[Row]]:
    """Return the rows of ``compiled_rows``."""
    axes, kinds = dict(items), dict[tuple[int, ...], list[str]]()
    for name in axes["shape"]:
        kinds.setdefault(lengths_kind(SHAPES[shapes][name]), []).append(name)
    names_by_first = {names[0]: names for names in kinds.values()}  # the first represents its kind
    compiled = {name: axes[name] for name in axes if name not in VARIED}
    first_rows = covering_rows(compiled | {"shape": tuple(names_by_first)}, 3)
    if not first_rows:
        raise ProblemError("no values of these axes can be combined: each combination is excluded.")
    triples = _Triples(axes, names_by_first)
    for row in first_rows:
        triples.add(triples.varied(row)[0])
    is_incomplete = True
    while is_incomplete:
        is_incomplete = False
        for row in first_rows:
            full_row, gain = triples.varied(row)
            is_incomplete |= gain > 0
            if gain or len(triples.rows) < least:
                triples.add(full_row)
        is_incomplete |= len(triples.rows) < least
    # Values chosen for one axis after the other may miss triples, so try all values.
    for row in first_rows:
        for full_row in triples.every(row):
            if triples.gain(full_row):
                triples.add(full_row)
    return triples.rows[: len(first_rows)], triples.rows[len(first_rows) :]


class _Combinations:
    """The combinations of values of ``strength`` axes in some rows, and how often each is used."""

    def __init__(self, strength: int) -> None:
        self._strength = strength
        self._seen: set[frozenset[tuple[str, Any]]] = set()
        self.uses: Counter[tuple[str, Any]] = Counter()  # of each value

    def add(self, row: Row) -> None:
        """Add the combinations of a row."""
        self._seen.update(map(frozenset, itertools.combinations(row.items(), self._strength)))
        self.uses.update(row.items())

    def merit(self, row: Row, item: tuple[str, Any]) -> tuple[int, int]:
        """Return how many combinations ``item`` adds to a row, then how seldom it is used."""
        others = itertools.combinations(row.items(), self._strength - 1)
        return sum(frozenset((*each, item)) not in self._seen for each in others), -self.uses[item]


class _Triples(_Combinations):
    """Rows, and the triples of values (of three axes, one of them in ``VARIED``) in them."""

    def __init__(
        self, axes: Mapping[str, Sequence[Any]], alike: Mapping[str, Sequence[str]]
    ) -> None:
        super().__init__(3)
        self._axes, self._alike = axes, alike
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        """Add a row that has a value on every axis."""
        super().add(row)
        self.rows.append({name: row[name] for name in self._axes})

    def gain(self, row: Row) -> int:
        """Return the number of triples of a full row that no row has yet."""
        before = {name: value for name, value in row.items() if name not in VARIED}
        gain = 0
        for name in VARIED:
            gain += self.merit(before, (name, row[name]))[0]
            before[name] = row[name]
        return gain

    def varied(self, row: Row) -> tuple[Row, int]:
        """Return ``row`` with values that add most triples (least used if equal), and how many."""
        full_row, gain = {name: value for name, value in row.items() if name not in VARIED}, 0
        for name in VARIED:
            merits = {
                value: self.merit(full_row, (name, value))
                for value in self._values(row, name)
                if not is_excluded(full_row | {name: value})
            }
            full_row[name] = max(merits, key=merits.__getitem__)
            gain += merits[full_row[name]][0]
        return full_row, gain

    def every(self, row: Row) -> Iterator[Row]:
        """Yield ``row`` with all ``VARIED`` values; if excluded, with another axis changed too."""
        named = {name for names, _ in EXCLUSIONS for name in names if name not in VARIED}
        changed = [name for name in self._axes if name in named]
        others = [{}, *({name: value} for name in changed for value in self._axes[name])]
        for values in itertools.product(*(self._values(row, name) for name in VARIED)):
            full_row = row | dict(zip(VARIED, values, strict=True))
            changes = (full_row | other for other in others)
            yield from itertools.islice(itertools.filterfalse(is_excluded, changes), 1)

    def _values(self, row: Row, name: str) -> Sequence[Any]:
        return self._alike[row["shape"]] if name == "shape" else self._axes[name]


# ------------------------------------------------------------ few rows, for a check


_MASKS_ALONE = 2  # Masks per value of ``ALONE`` in a check.
# Values that a gate covers and a check leaves out, or asks one by one. Scale: most functions read
# ``scale or default``, and torch's on a CPU multiplies −∞ by it. Dims: 256 takes as long as four
# others. A dim of 1, or one key with all the weight, or equal weights hide most other faults.
_UNUSUAL = {
    "scale": {"negative", "zero"},
    "dims": {"1", "256"},
    "distribution": {*DISTRIBUTIONS} - {"normal", "outliers"},
}


class FewRows:
    """A few rows for one kernel, each with as many pairs as possible that no earlier row has.

    So few rows cannot cover all pairs; they start with the most important ones.

    Args:
        takes: Whether the kernel takes a Problem.
        plain: The plainest row that the kernel takes; all other rows are changes of it.
        shapes: A name of ``SHAPES``.
    """

    def __init__(self, takes: Callable[[Problem], bool], plain: Row, shapes: str) -> None:
        self._plain, self._taken = plain, _cached_row_filter(takes, shapes)
        self._pairs = _Combinations(2)

    def takes(self, row: Row) -> bool:
        """Return whether the row is a Problem that the kernel takes."""
        return self._taken(self._plain | row)

    def axes(self) -> dict[str, dict[Any, Row]]:
        """Return axis → value that the kernel takes → changes of other axes that the value needs.

        The changes are none, a causal mask, or one with equal lengths: some kernels take slopes
        only with these. An extent needs a mask that has it.
        """
        causal = [{"mask": mask} for mask in ("causal", "causal_bottom_right")]
        needed: list[Row] = [{}, *causal, *(each | {"shape": "even"} for each in causal)]
        axes: dict[str, dict[Any, Row]] = {}
        for name, values in AXES.items():
            others = [{"mask": mask} for mask in axes["mask"]] if name == "extent" else needed
            axes[name] = {self._plain[name]: {}}
            for value in values if name != "dtype" else ():
                accepted = (each for each in others if self.takes(each | {name: value}))
                choice = (
                    None
                    if value in axes[name] or value in _UNUSUAL.get(name, ())
                    else next(accepted, None)
                )
                if choice is not None:
                    axes[name][value] = choice
        return axes

    def alone(self) -> Iterator[Row]:
        """Yield the ``alone_rows`` that the kernel takes, each value with at most two masks."""
        axes = {name: [*values] for name, values in self.axes().items()}
        count: dict[frozenset[tuple[str, Any]], int] = {}
        for row in alone_rows(axes):
            # Rows that differ in their masks alone ask about the same value.
            question = frozenset(row.items() - {(name, row[name]) for name in ("mask", "backward")})
            accepted = (each for each in (row, row | {"backward": ""}) if self.takes(each))
            chosen = next(accepted, None)
            if chosen is not None and count.setdefault(question, 0) < _MASKS_ALONE:
                count[question] += 1
                yield chosen

    def rows(self, count: int) -> Iterator[Row]:
        """Yield ``count`` rows; a kernel with few layouts gets as many, in more distributions."""
        axes = self.axes()
        # If the kernel has a backward, every row asks for gradients with the forward.
        if len(axes["backward"]) > 1:
            del axes["backward"][""]
        for name, alone in ALONE.items():
            axes[name] = {value: row for value, row in axes[name].items() if value not in alone}
        for _ in range(count):
            # Start with the least used value; among several, one that needs changes of other axes.
            pairs = [(name, value) for name, values in axes.items() for value in values]
            name, value = min(
                pairs, key=lambda one: (self._pairs.uses[one], not axes[one[0]][one[1]])
            )
            row = axes[name][value] | {name: value}
            # Mask and lengths first, because they limit the values of the other axes.
            for other in sorted(axes, key=lambda each: each not in {"mask", "shape"}):
                if other not in row:
                    row[other] = self._best(row, other, [*axes[other]])
            self._pairs.add(row)
            yield self._plain | row

    def _best(self, row: Row, name: str, values: list[Any]) -> Any:
        """Return the value that adds most new pairs to ``row``; among several, the least used."""
        best = sorted(values, key=lambda v: self._pairs.merit(row, (name, v)), reverse=True)
        return next((v for v in best if self.takes(row | {name: v})), self._plain[name])


def plain_row(problem: Problem, shapes: str) -> Row:
    """Return the plainest row with the sizes and dtype of ``problem``, which a kernel takes."""
    sizes: dict[str, tuple[Mapping[str, Any], tuple[int, ...]]] = {
        "shape": (SHAPES[shapes], (problem.query, problem.kv)),
        "heads": (HEADS, (problem.batch, problem.heads, problem.kv_heads)),
        "dims": (DIMS, (problem.head_dim, problem.value_dim)),
    }
    row = {name: _name_of(named, size) or size for name, (named, size) in sizes.items()}
    return PLAIN_ROW | row | {"dtype": problem.dtype}


def row_values(row: Mapping[str, Any], problem: Problem, shapes: str) -> Row:
    """Return axis → the value of ``problem``, which replaces ``row``; None if it has none."""
    shape = _name_of(SHAPES[shapes], (problem.query, problem.kv))
    window = problem.mask.values.get("window") if not row["extent"] else None
    usual = problem.scale / problem.replace(scale=USUAL_SCALE).scale
    has = {"sink": problem.sink, "sink_logits": problem.sink_logits, "paging": problem.paging}
    stored = {name: value for name, value in has.items() if value}
    return {
        # A window as long as the rows hides no more than causal, so the row's mask is lost.
        "mask": None if isinstance(window, int) and problem.query <= window else row["mask"],
        # At other lengths the mask's number is no boundary value.
        "extent": row["extent"] if shape == row["shape"] or not row["extent"] else None,
        # A score mod that was dropped on the way to ``problem`` is lost.
        "score": row["score"] if (problem.score == NONE) == (row["score"] == "none") else None,
        "scale": row["scale"] if abs(usual - SCALES[row["scale"]]) <= 2.0**-20 else "",
        "stored": _name_of(STORED, stored),
        "backward": row["backward"] if problem.backward == bool(row["backward"]) else "",
        "dtype": problem.dtype,
        "shape": shape,
        "heads": _name_of(HEADS, (problem.batch, problem.heads, problem.kv_heads)),
        "dims": _name_of(DIMS, (problem.head_dim, problem.value_dim)),
        "distribution": problem.distribution,
    }


def restore_lost_pairs(
    axes: Mapping[str, Sequence[Any]],
    had: Sequence[Row],
    shapes: str,
    supports: Callable[[Problem], bool],
) -> Iterator[Row]:
    """Yield rows for the pairs that ``had`` lacks, as far as the kernel takes a Problem with them.

    Args:
        axes: The values of each axis, the plainest first.
        had: Values of the Problems that are asked already.
        shapes: A name of ``SHAPES``.
        supports: Whether the kernel takes a Problem.
    """
    if not all(axes.values()):
        return
    seen: set[tuple[tuple[str, Any], ...]] = set()
    for row in had:
        seen.update(_pairs_of(row))
    taken = _cached_row_filter(supports, shapes)
    for one, other in itertools.combinations(axes, 2):
        for value, other_value in itertools.product(axes[one], axes[other]):
            pair = ((one, value), (other, other_value))
            if pair in seen:
                continue
            seen.add(pair)
            candidates = list(_candidates(axes, had, dict(pair)))
            # Rows that add most missing pairs first; among equals, the plainest.
            candidates.sort(key=lambda row: sum(each in seen for each in _pairs_of(row)))
            addition = next(filter(taken, candidates), None)
            if addition is not None:
                seen.update(_pairs_of(addition))
                yield addition


def _candidates(axes: Mapping[str, Sequence[Any]], had: Sequence[Row], pair: Row) -> Iterator[Row]:
    """Yield rows with ``pair``: the plainest, rows one value away from it, and those in ``had``."""
    plain = {name: values[0] for name, values in axes.items()} | pair
    yield plain
    for name, values in axes.items():
        if name not in pair:
            yield from (plain | {name: value} for value in values[1:])
    for row in had:
        if all(row[name] in axes[name] for name in axes):
            yield {name: row[name] for name in axes} | pair


def _pairs_of(row: Row) -> Iterator[tuple[tuple[str, Any], ...]]:
    return itertools.combinations(row.items(), 2)


def _cached_row_filter(takes: Callable[[Problem], bool], shapes: str) -> Callable[[Row], bool]:
    """Return a cached function: whether a row is a Problem that a kernel takes."""

    @functools.cache  # each question to a kernel costs time
    def is_taken(items: tuple[tuple[str, Any], ...]) -> bool:
        row = dict(items)
        try:
            return not is_excluded(row) and takes(row_problem(row, shapes, 0))
        except ProblemError:
            return False

    return lambda row: is_taken(tuple(row.items()))


def _name_of(values: Mapping[str, Any], value: Any) -> str | None:
    return next((name for name, each in values.items() if each == value), None)
