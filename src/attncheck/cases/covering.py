"""Covering arrays: few problems in which every pair, or triple, of values occurs.

A row that a kernel refuses is moved to the nearest Problem that it takes: it loses values on the
way.
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

from attncheck.cases.variants import FURTHER, VARIANTS, Shape
from attncheck.core.errors import ProblemError
from attncheck.core.formats import DTYPES
from attncheck.core.mod_spec import FULL, NONE, Spec
from attncheck.core.paged_layout import Paging
from attncheck.inputs.problem import USUAL_SCALE, Problem

Exclusion = tuple[tuple[str, ...], "Callable[[Mapping[str, Any]], bool]"]
"""Names of axes, and whether values of theirs cannot be together."""


def covering_rows(
    axes: Mapping[str, Sequence[Hashable]], strength: int, exclusions: Sequence[Exclusion] = ()
) -> list[dict[str, Any]]:
    """Return rows that have every possible choice of values of any ``strength`` axes.

    They follow from the arguments: the same rows every time, on any machine.

    Args:
        axes: The values of each; one without values makes no rows.
        strength: 2 for pairs, 3 for triples; of fewer axes all their combinations.
        exclusions: What cannot be together: no row has it, and nothing is to cover it.
    """
    if not all(axes.values()):
        return []
    items = tuple((name, tuple(values)) for name, values in axes.items())
    rows = _numbered_rows(items, strength, tuple(exclusions))
    return [{name: axes[name][at] for name, at in zip(axes, row, strict=True)} for row in rows]


@functools.lru_cache(maxsize=8)  # several seconds each, and two stages of a gate ask for the same
def _numbered_rows(
    items: tuple[tuple[str, tuple[Hashable, ...]], ...],
    strength: int,
    exclusions: tuple[Exclusion, ...],
) -> list[tuple[int, ...]]:
    """The rows of ``covering_rows``, each value by its number."""
    axes = dict(items)
    # By number: which values they are is not covertable's concern, nor how they are hashed.
    rows = covertable.make(
        {name: list(range(len(values))) for name, values in items},
        strength=min(strength, len(axes)),
        constraints=[_constraint(axes, each) for each in exclusions if set(each[0]) <= set(axes)],
    )
    # Plainest first: the first values of the axes, as a reader would ask them.
    return sorted(tuple(row[name] for name in axes) for row in rows)


def _constraint(axes: Mapping[str, Sequence[Hashable]], exclusion: Exclusion) -> dict[str, Any]:
    names, cannot_be = exclusion

    def allowed(row: Mapping[str, int]) -> bool:
        return not cannot_be({name: axes[name][row[name]] for name in names})

    return {"operator": "fn", "requires": list(names), "evaluate": allowed}


# ------------------------------------------------------------ the axes, and what a value stands for

Fields = dict[str, Any]  # fields of a Problem

EXTENTS = ("", "half", "no key", "one key", "all but one", "all", "beyond")
"""How many keys the number of a mask leaves: a part of them, and its boundary values."""
_BEYOND = 2**20  # a window that hides nothing, of any kernel's lengths

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
    mods = (VARIANTS | FURTHER)[name].mods
    assert mods is not None, "a softmax is no variant of attention"
    return lambda sizes, _extent: mods(sizes)[0]


def _window(sizes: Shape, extent: str, most: int) -> Spec:
    # Of the shorter length: of few rows and many keys a quarter of the keys hides none.
    typical = max(1, min(sizes.query, sizes.kv) // 4)
    return Spec.of("sliding_window", window=_extent(extent, typical, most))


def _padding(sizes: Shape, extent: str) -> Spec:
    # Of each sequence another number; not none, which would leave nothing to bound.
    cut = [max(1, sizes.kv - 3 * turn * sizes.kv // 8) for turn in range(1, sizes.batch + 1)]
    if extent:
        cut[0] = min(_extent(extent, 0, sizes.kv), sizes.kv)
    return Spec.of("padding", lengths=cut)


def _documents(sizes: Shape, extent: str) -> Spec:
    if not extent:
        return _variant("varlen")(sizes, extent)
    # Rows of the first see ``keys`` keys; the last has keys and no rows: their gradients are 0.
    keys = min(_extent(extent, 0, sizes.kv), sizes.kv - sizes.kv // 3)
    rows = sizes.query // 2
    return Spec.of(
        "documents",
        query_lengths=[rows, sizes.query - rows, 0],
        kv_lengths=[keys, sizes.kv - keys - sizes.kv // 3, sizes.kv // 3],
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
    # As flash-attn aligns it: of few rows and many keys most tiles and splits lie outside.
    "window_bottom_right": lambda sizes, extent: Spec.of(
        "offset", _window(sizes, extent, sizes.kv), rows=max(0, sizes.kv - sizes.query)
    ),
}
"""The mask of (sizes, extent), by the names that variants have."""
_OF_EXTENTS = ("varlen", "window_bottom_right", "sliding_window", "padding", "prefix_lm")

SCORES: dict[str, Callable[[Shape], Spec]] = {
    "none": lambda _: NONE,
    "alibi": lambda _: Spec.of("alibi"),
    "softcap": lambda _: Spec.of("softcap", cap=20.0),
    "relative_bias": lambda s: Spec.of("relative_bias", distance=s.kv // 4, seed=0),
    # So small that a hidden key's score, if it were bent, would weigh as much as any.
    "small softcap": lambda _: Spec.of("softcap", cap=0.5),
    "large softcap": lambda _: Spec.of("softcap", cap=1.0e4),
    "alibi by sequence": lambda _: Spec.of("alibi_by_sequence"),
    "bias": lambda _: Spec.of("bias", seed=0, per_batch=1, per_head=1),
}

SCALES = {"": 1.0, "negative": -1.0, "huge": 300.0, "zero": 0.0, "tiny": 2.0**-30}
"""Factors of 1/√head_dim."""

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
"""What else a call has: nothing, a sink, keys in pages, the smallest that engines use first."""

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
"""Query and key lengths: whole tiles, none, one short of and one beyond them, unequal both ways."""

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
"""Batch, heads, kv heads; with 6/2, h // group and h % kv_heads differ; 3, 5, 6 and 7 rows of a
group fill no tile."""

DIMS: dict[str, tuple[int, int]] = {
    text: (int(text.partition("/")[0]), int(text.rpartition("/")[2]))
    for text in ("64", "128", "80", "40/17", "96/128", "1", "256", "33/31", "8/24", "72")
}
"""Of q and k, and of v: powers of two, what lies between and beside them, what fits no vector."""

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
"""Values that leave nothing to see of the others: asked in rows of their own."""

TOGETHER: tuple[Fields, ...] = (
    # All far below −10⁴: a finite number in place of −∞ is above them.
    {"scale": "huge", "distribution": "negative_logits"},
    # exp(0 − LSE) of a key that is not there is infinite, and 0 times it NaN.
    {"backward": "backward", "distribution": "negative_logits"},
)
"""Values that show beside one another what none shows beside plain ones: in rows of their own."""


def _paged(row: Mapping[str, Any]) -> bool:
    return "paging" in STORED[row["stored"]]


_WIDE = {"large_logits", "one_hot", "sink"}  # distributions

EXCLUSIONS: tuple[Exclusion, ...] = (
    (("stored", "backward"), lambda row: _paged(row) and bool(row["backward"])),
    (("dtype", "backward"), lambda row: DTYPES[row["dtype"]].scaled and bool(row["backward"])),
    (("mask", "shape"), lambda row: row["mask"] == "sliding_window" and row["shape"] == "one row"),
    (
        ("mask", "shape"),
        lambda row: row["mask"] == "window_bottom_right" and row["shape"] in {"tall", "one key"},
    ),
    (("mask", "extent"), lambda row: bool(row["extent"]) and row["mask"] not in _OF_EXTENTS),
    # A kernel may divide a sink by the scale: of none there is no bound.
    (("scale", "stored"), lambda row: row["scale"] == "zero" and "sink" in row["stored"]),
    # Or take the maximum before it multiplies: right while exp of the scores' spread is finite.
    (
        ("scale", "distribution"),
        lambda row: row["scale"] == "negative" and row["distribution"] in _WIDE,
    ),
)
"""No such Problems: gradients with pages, or in fp8; a window of one row, which is causal. And what
a right kernel may give anything for."""


def _is_excluded(row: Mapping[str, Any]) -> bool:
    return any(cannot_be(row) for _, cannot_be in EXCLUSIONS)


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
"""Every axis with its values, the plainest first: what the bounds of a gate and the crossed
questions of a check are made of."""


def row_problem(row: Mapping[str, Any], shapes: str, seed: int) -> Problem:
    """Return the Problem of one value of each axis.

    Args:
        row: A value for each of ``AXES``; an axis that is left out has its first.
        shapes: A name of ``SHAPES``.
    """
    row = PLAIN_ROW | {"shape": next(iter(SHAPES[shapes]))} | dict(row)
    # Sizes of a kernel that takes none of ours are values that have no name.
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
    # The usual one to its last bit: a kernel may take no other.
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
    """Return what reports call a row: ``causal alibi sink backward``."""
    words = [row["mask"], row["extent"], row["score"], row["scale"], row["stored"]]
    words.append(row["backward"])
    return " ".join(word for word in words if word and word not in {"none", "plain"})


def alone_rows(axes: Mapping[str, Sequence[Any]]) -> Iterator[Row]:
    """Yield a row for each value of ``ALONE``, where there is one: with shared heads, backward.

    An extent is one of each mask that has it. Then a row for each of ``TOGETHER``.
    """
    common = {name: values[0] for name, values in axes.items()}
    common["backward"] = axes["backward"][-1]
    common |= {"heads": "sequences GQA"} if "sequences GQA" in axes["heads"] else {}
    masks = [mask for mask in _OF_EXTENTS if mask in axes["mask"]]
    for axis, names in ALONE.items():
        for name in names:
            if name not in axes[axis]:
                continue
            for mask in masks if axis == "extent" else axes["mask"][:1]:
                row = common | {axis: name, "mask": mask}
                # What it cannot be asked with its gradients is asked without.
                row |= {"backward": axes["backward"][0]} if _is_excluded(row) else {}
                if not _is_excluded(row):
                    yield row
    for values in TOGETHER:
        # Whatever distributions there is time for elsewhere.
        if all(values[name] in axes[name] for name in values if name != "distribution"):
            yield common | values


Row = dict[str, Any]


# ------------------------------------------------------------ every three, of few compilations

VARIED = ("shape", "heads", "distribution")
"""Axes along which a kernel that is compiled is asked again; of lengths those of one kind."""


def lengths_kind(lengths: tuple[int, int]) -> tuple[int, ...]:
    """Return for what of lengths Triton compiles anew: is each 1, is it a multiple of 16."""
    return tuple(1 if length == 1 else 16 * (length % 16 == 0) for length in lengths)


def compiled_rows(
    axes: Mapping[str, Sequence[Any]],
    shapes: str,
    least: int,
    exclusions: Sequence[Exclusion] = (),
) -> tuple[list[Row], list[Row]]:
    """Return rows that have every possible choice of values of any three axes.

    As ``covering_rows`` of strength 3, for kernels that are compiled: what they are compiled for is
    covered in as few rows as that takes, and each of these is asked several times, with other
    lengths of one kind, heads and distributions.

    Args:
        axes: As of ``covering_rows``, those of ``VARIED`` among them.
        shapes: A name of ``SHAPES``, where the lengths are.
        least: Rows that there are at least, however few values the axes have.
        exclusions: As of ``covering_rows``.

    Returns:
        The rows that are asked first, one of each compilation, and those that ask them again. In
        this order two processes seldom compile the same.
    """
    if not all(axes.values()):
        return [], []
    items = tuple((name, tuple(values)) for name, values in axes.items())
    rows, compilations = _compiled_rows(items, shapes, least, tuple(exclusions))
    return rows[:compilations], rows[compilations:]


@functools.lru_cache(maxsize=8)  # as ``_numbered_rows``
def _compiled_rows(
    items: tuple[tuple[str, tuple[Any, ...]], ...],
    shapes: str,
    least: int,
    exclusions: tuple[Exclusion, ...],
) -> tuple[list[Row], int]:
    """The rows of ``compiled_rows``, and how many of them are the first."""
    axes, kinds = dict(items), dict[tuple[int, ...], list[str]]()
    for name in axes["shape"]:
        kinds.setdefault(lengths_kind(SHAPES[shapes][name]), []).append(name)
    alike = {names[0]: names for names in kinds.values()}  # the first stands for its kind
    compiled = {name: axes[name] for name in axes if name not in VARIED}
    once = covering_rows(compiled | {"shape": tuple(alike)}, 3, exclusions)
    threes = _Threes(axes, alike, exclusions)
    for row in once:
        threes.add(threes.varied(row)[0])
    more = True
    while more:
        more = False
        for row in once:
            whole, gain = threes.varied(row)
            more |= gain > 0
            if gain or len(threes.rows) < least:
                threes.add(whole)
        more |= len(threes.rows) < least
    # A choice of one axis after the other may miss some.
    for row in once:
        for whole in threes.every(row):
            if threes.gain(whole):
                threes.add(whole)
    return threes.rows, len(once)


class _Threes:
    """Rows, and which values of three axes, one of ``VARIED``, are together in them."""

    def __init__(
        self,
        axes: Mapping[str, Sequence[Any]],
        alike: Mapping[str, Sequence[str]],
        exclusions: Sequence[Exclusion],
    ) -> None:
        self._axes, self._alike, self._exclusions = axes, alike, exclusions
        self._seen: set[frozenset[tuple[str, Any]]] = set()
        self._uses: Counter[tuple[str, Any]] = Counter()
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        """Add a whole row."""
        self._seen.update(map(frozenset, itertools.combinations(row.items(), 3)))
        self._uses.update(row.items())
        self.rows.append({name: row[name] for name in self._axes})

    def gain(self, row: Row) -> int:
        """Return how many threes a whole row has that no other has."""
        before = {name: value for name, value in row.items() if name not in VARIED}
        gain = 0
        for name in VARIED:
            gain += self._new(before, (name, row[name]))
            before[name] = row[name]
        return gain

    def varied(self, row: Row) -> tuple[Row, int]:
        """Return ``row`` with the values that make most new threes, the least used of several."""
        whole, gain = {name: value for name, value in row.items() if name not in VARIED}, 0
        for name in VARIED:
            merits = {
                value: (self._new(whole, (name, value)), -self._uses[name, value])
                for value in self._values(row, name)
                if self._able(whole | {name: value})
            }
            whole[name] = max(merits, key=merits.__getitem__)
            gain += merits[whole[name]][0]
        return whole, gain

    def every(self, row: Row) -> Iterator[Row]:
        """Yield ``row`` with all values; where there cannot be one, the nearest row that has it."""
        named = {name for names, _ in self._exclusions for name in names if name not in VARIED}
        changed = [name for name in self._axes if name in named]
        others = [{}, *({name: value} for name in changed for value in self._axes[name])]
        for values in itertools.product(*(self._values(row, name) for name in VARIED)):
            whole = row | dict(zip(VARIED, values, strict=True))
            able = (whole | other for other in others if self._able(whole | other))
            yield from itertools.islice(able, 1)

    def _values(self, row: Row, name: str) -> Sequence[Any]:
        return self._alike[row["shape"]] if name == "shape" else self._axes[name]

    def _able(self, row: Row) -> bool:
        return not any(set(names) <= row.keys() and never(row) for names, never in self._exclusions)

    def _new(self, row: Row, item: tuple[str, Any]) -> int:
        pairs = itertools.combinations(row.items(), 2)
        return sum(frozenset((*pair, item)) not in self._seen for pair in pairs)


# ------------------------------------------------------------ few rows, for a check


_MASKS_ALONE = 2
# ``scale or default`` is what most functions say, torch's own on a CPU multiplies −∞ by the scale,
# a head of 256 takes as long as four others, and of one column, or where one key has all the
# weight or each the same, little else shows: a gate asks for them, a check for some one by one.
_UNUSUAL = {
    "scale": {"negative", "zero"},
    "dims": {"1", "256"},
    "distribution": {*DISTRIBUTIONS} - {"normal", "outliers"},
}


class FewRows:
    """Rows of a kernel, each with as many pairs as it can have that no row before it has.

    No array is complete in so few: which pairs come first is what counts.

    Args:
        takes: Whether the kernel takes a Problem.
        plain: The plainest row that it takes, which all others are changes of.
        shapes: A name of ``SHAPES``.
    """

    def __init__(self, takes: Callable[[Problem], bool], plain: Row, shapes: str) -> None:
        self._plain, self._taken = plain, _taken_rows(takes, shapes)
        self._seen: set[frozenset[tuple[str, Any]]] = set()  # pairs
        self._uses: Counter[tuple[str, Any]] = Counter()

    def takes(self, row: Row) -> bool:
        """Return whether there is such a Problem, and the kernel takes it."""
        return self._taken(self._plain | row)

    def axes(self) -> dict[str, dict[Any, Row]]:
        """Return the values of each axis that it takes, each with what it takes it beside.

        That is the plainest of all others; or a causal mask, at equal lengths: slopes are of it
        alone.
        """
        causal = [{"mask": mask} for mask in ("causal", "causal_bottom_right")]
        beside: list[Row] = [{}, *causal, *(each | {"shape": "even"} for each in causal)]
        axes: dict[str, dict[Any, Row]] = {}
        for name, values in AXES.items():
            others = [{"mask": mask} for mask in axes["mask"]] if name == "extent" else beside
            axes[name] = {self._plain[name]: {}}
            for value in values if name != "dtype" else ():
                able = (each for each in others if self.takes(each | {name: value}))
                choice = (
                    None
                    if value in axes[name] or value in _UNUSUAL.get(name, ())
                    else next(able, None)
                )
                if choice is not None:
                    axes[name][value] = choice
        return axes

    def alone(self) -> Iterator[Row]:
        """Yield ``alone_rows``, of two masks at most."""
        axes = {name: [*values] for name, values in self.axes().items()}
        count: dict[tuple[Any, ...], int] = {}
        for row in alone_rows(axes):
            value = tuple(row[name] for name in ALONE)
            able = (each for each in (row, row | {"backward": ""}) if self.takes(each))
            chosen = next(able, None)
            if chosen is not None and count.setdefault(value, 0) < _MASKS_ALONE:
                count[value] += 1
                yield chosen

    def rows(self, count: int) -> Iterator[Row]:
        """Yield ``count`` rows: as many of a kernel of few layouts, in other distributions."""
        axes = self.axes()
        # Gradients are asked for with the forward, wherever there are any.
        if len(axes["backward"]) > 1:
            del axes["backward"][""]
        for name, alone in ALONE.items():
            axes[name] = {value: row for value, row in axes[name].items() if value not in alone}
        for _ in range(count):
            # From the value that was asked least; of several from one that has a condition.
            every = [(name, value) for name, values in axes.items() for value in values]
            name, value = min(every, key=lambda one: (self._uses[one], not axes[one[0]][one[1]]))
            row = axes[name][value] | {name: value}
            # Which of the others there can be depends on the mask and the lengths.
            for other in sorted(axes, key=lambda each: each not in {"mask", "shape"}):
                if other not in row:
                    row[other] = self._best(row, other, [*axes[other]])
            self._seen.update(frozenset(pair) for pair in _pairs_of(row))
            self._uses.update(row.items())
            yield self._plain | row

    def _best(self, row: Row, name: str, values: list[Any]) -> Any:
        """Return the value that makes most new pairs with ``row``, the least used of several."""

        def merit(value: Any) -> tuple[int, int]:
            new = sum(frozenset((item, (name, value))) not in self._seen for item in row.items())
            return new, -self._uses[name, value]

        able = (v for v in sorted(values, key=merit, reverse=True) if self.takes(row | {name: v}))
        return next(able, self._plain[name])


def plain_row(problem: Problem, shapes: str) -> Row:
    """Return the plainest row of a kernel that takes ``problem``, whatever its sizes are."""
    sizes: dict[str, tuple[Mapping[str, Any], tuple[int, ...]]] = {
        "shape": (SHAPES[shapes], (problem.query, problem.kv)),
        "heads": (HEADS, (problem.batch, problem.heads, problem.kv_heads)),
        "dims": (DIMS, (problem.head_dim, problem.value_dim)),
    }
    row = {name: _name_of(named, size) or size for name, (named, size) in sizes.items()}
    return PLAIN_ROW | row | {"dtype": problem.dtype}


def row_values(row: Mapping[str, Any], problem: Problem, shapes: str) -> Row:
    """Return what ``problem``, moved from ``row``, has of each axis; None for no value of it."""
    shape = _name_of(SHAPES[shapes], (problem.query, problem.kv))
    window = problem.mask.values.get("window") if not row["extent"] else None
    usual = problem.scale / problem.replace(scale=USUAL_SCALE).scale
    has = {"sink": problem.sink, "sink_logits": problem.sink_logits, "paging": problem.paging}
    stored = {name: value for name, value in has.items() if value}
    return {
        # A window that hides nothing causal is no window.
        "mask": None if isinstance(window, int) and problem.query <= window else row["mask"],
        # At other lengths the same number is no boundary.
        "extent": row["extent"] if shape == row["shape"] or not row["extent"] else None,
        # Not as ``row_problem`` has it: a score mod that it dropped would count as had.
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
    """Yield a row for each pair that ``had`` lacks and some Problem near the plainest has.

    Args:
        axes: The values of each; the first are the plainest.
        had: Values of the Problems that are asked already.
        shapes: A name of ``axes.SHAPES``.
        supports: Whether the kernel takes a Problem.
    """
    if not all(axes.values()):
        return
    seen: set[tuple[tuple[str, Any], ...]] = set()
    for row in had:
        seen.update(_pairs_of(row))
    taken = _taken_rows(supports, shapes)
    for pair in _all_pairs(axes):
        if pair in seen:
            continue
        seen.add(pair)
        candidates = list(_candidates(axes, had, dict(pair)))
        # Those first that make up for most; where as many, the plainest.
        candidates.sort(key=lambda row: sum(each in seen for each in _pairs_of(row)))
        addition = next(filter(taken, candidates), None)
        if addition is not None:
            seen.update(_pairs_of(addition))
            yield addition


def _candidates(axes: Mapping[str, Sequence[Any]], had: Sequence[Row], pair: Row) -> Iterator[Row]:
    """Yield rows with ``pair``: the plainest, those one value away, and those asked."""
    plain = {name: values[0] for name, values in axes.items()} | pair
    yield plain
    for name, values in axes.items():
        if name not in pair:
            yield from (plain | {name: value} for value in values[1:])
    for row in had:
        if all(row[name] in axes[name] for name in axes):
            yield {name: row[name] for name in axes} | pair


def _all_pairs(
    axes: Mapping[str, Sequence[Any]],
) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    for one, other in itertools.combinations(axes, 2):
        for value, other_value in itertools.product(axes[one], axes[other]):
            yield (one, value), (other, other_value)


def _pairs_of(row: Row) -> Iterator[tuple[tuple[str, Any], ...]]:
    return itertools.combinations(row.items(), 2)


def _taken_rows(takes: Callable[[Problem], bool], shapes: str) -> Callable[[Row], bool]:
    """Return whether there is the Problem of a row, and a kernel takes it: asked once of each."""

    @functools.cache  # each question to a kernel costs time
    def taken(items: tuple[tuple[str, Any], ...]) -> bool:
        row = dict(items)
        try:
            return not _is_excluded(row) and takes(row_problem(row, shapes, 0))
        except ProblemError:
            return False

    return lambda row: taken(tuple(row.items()))


def _name_of(values: Mapping[str, Any], value: Any) -> str | None:
    return next((name for name, each in values.items() if each == value), None)
