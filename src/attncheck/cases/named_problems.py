"""The table of fixed problems: each small, each for a fault that kernels had.

One table serves the quick check, the gate's contract, its questions of memory and determinism,
and compute-sanitizer. A problem's tags say who asks it; within a tag its name is its own, and the
table's order is the order of asking. What is not said here is a Problem's default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attncheck.core.formats import FORMATS
from attncheck.core.mod_spec import Spec
from attncheck.core.paged_layout import Paging

CHECK = "check"
"""Asked by ``attncheck check``, and as the fixture ``problem`` of somebody's own tests."""
PROBED = "probed"
"""Of those, the ones whose layout the probes are asked on."""
SMALLEST = "smallest"
"""The contract asks the nearest that a kernel takes, in every dtype, forward and backward."""
CONTRACT = "contract"
"""The contract asks as it stands: the kernel refuses cleanly, or answers rightly."""
FP8 = "fp8"
"""The same, of kernels that take fp8."""
MANY_SEQUENCES = "many sequences"
"""The same, on a GPU, by a question that needs no exact attention."""
MEMORY = "memory"
"""Questions about memory and determinism are asked on these, in turn."""
BACKWARD_CAP = "backward cap"
"""Beside those, for what hidden keys of NaN do to gradients."""
MANY_KEYS = "many keys"
"""Beside those, for what lies next to an input."""
SANITIZER = "sanitizer"
"""Run under compute-sanitizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedProblem:
    """A Problem but for its dtype.

    Attributes:
        name: What reports call it.
        summary: What it would show, in a line; empty where the name says it.
        tags: Who asks it.
        fields: Of the Problem.
    """

    name: str
    tags: frozenset[str]
    summary: str
    fields: dict[str, Any]


def tagged(tag: str) -> dict[str, NamedProblem]:
    """Return the problems with this tag by name, in the order in which they are asked."""
    return {each.name: each for each in _TABLE if tag in each.tags}


def _row(name: str, *tags: str, summary: str = "", **fields: Any) -> NamedProblem:
    return NamedProblem(name=name, tags=frozenset(tags), summary=summary, fields=fields)


_CAUSAL = Spec.of("causal")
_BOTTOM_RIGHT = Spec.of("causal_bottom_right")

# Most lengths are no multiples of any tile; some are of small tiles alone (48 of 16, 96 of 32, 320
# of 64), for a kernel that asks by the length of another tile whether to mask its last. Few heads
# and tiles, for Triton's interpreter. The head_dims are those of which 1/√head_dim is no power of
# two, and 64.
_TABLE: tuple[NamedProblem, ...] = (
    # ------------------------------------------------------------ a quick check: layouts
    _row("plain", CHECK, summary="lengths that fit every tile; eight heads", query=64, heads=8),
    _row(
        "ragged",
        CHECK,
        PROBED,
        summary="lengths that fit no tile: masking of the last one",
        query=77,
        kv=93,
    ),
    _row("causal", CHECK, PROBED, summary="the diagonal", query=130, head_dim=128, mask=_CAUSAL),
    _row(
        "causal-even",
        CHECK,
        PROBED,
        summary="the diagonal, at lengths that fit every tile",
        query=128,
        mask=_CAUSAL,
    ),
    _row(
        "causal-wide",
        CHECK,
        PROBED,
        summary="more keys than queries: causal is aligned top-left",
        query=33,
        kv=150,
        head_dim=80,
        mask=_CAUSAL,
    ),
    _row(
        "causal-tall",
        CHECK,
        PROBED,
        summary="more queries than keys: the last rows see every key",
        query=99,
        kv=48,
        head_dim=96,
        mask=_CAUSAL,
    ),
    _row(
        "gqa",
        CHECK,
        PROBED,
        summary="three query heads to a key head, two sequences",
        batch=2,
        heads=6,
        kv_heads=2,
        query=40,
        kv=70,
        head_dim=96,
    ),
    _row("one-query", CHECK, PROBED, summary="one row, as in decoding", batch=2, query=1, kv=211),
    _row("one-key", CHECK, summary="one key: out is its value", query=5, kv=1, head_dim=80),
    _row(
        "window",
        CHECK,
        PROBED,
        summary="a sliding window, as a mask that is written out",
        query=100,
        mask=Spec.of("sliding_window", window=17),
    ),
    _row(
        "padding",
        CHECK,
        PROBED,
        summary="another number of keys in each sequence",
        batch=2,
        query=35,
        kv=60,
        head_dim=80,
        mask=Spec.of("padding", lengths=[60, 7]),
    ),
    _row(
        "empty-rows",
        CHECK,
        PROBED,
        summary="rows that see no key: out is exactly 0",
        batch=2,
        query=20,
        kv=30,
        mask=Spec.of("padding", lengths=[0, 30]),
    ),
    # ------------------------------------------------------------ a quick check: values
    _row(
        "scale", CHECK, summary="a scale other than 1/√head_dim", query=65, head_dim=80, scale=0.3
    ),
    _row(
        "large",
        CHECK,
        summary="logits beyond fp32's exp",
        query=64,
        kv=129,
        head_dim=96,
        distribution="large_logits",
    ),
    _row(
        "negative",
        CHECK,
        summary="every logit near −128",
        query=40,
        kv=96,
        distribution="negative_logits",
    ),
    _row(
        "one-hot",
        CHECK,
        summary="one key takes the whole weight",
        query=60,
        kv=130,
        head_dim=128,
        distribution="one_hot",
    ),
    _row(
        "outliers",
        CHECK,
        summary="one number in a thousand is ten times larger",
        query=65,
        kv=129,
        head_dim=128,
        distribution="outliers",
    ),
    _row(
        "uniform",
        CHECK,
        summary="all signs equal: errors add up",
        query=64,
        kv=320,
        head_dim=80,
        distribution="uniform",
    ),
    _row(
        "sink",
        CHECK,
        summary="key 0 takes nearly the whole weight",
        query=50,
        kv=90,
        distribution="sink",
    ),
    # ------------------------------------------------------------ a contract's smallest
    _row("smallest", SMALLEST, query=1, kv=1),
    _row("a tile", SMALLEST, query=16, kv=16),
    # ------------------------------------------------------------ a contract's unusual ones
    # Those of one mask stand together: for each kind kernels are compiled.
    _row("other scale", CONTRACT, query=5, kv=7, scale=0.3),
    # Of one size and no larger: a path without bounds, chosen for the tiles that there once were.
    _row("whole tiles of 16", CONTRACT, query=48, kv=48),
    _row("whole tiles of 32", CONTRACT, query=96, kv=96),
    _row("whole tiles of 64", CONTRACT, query=192, kv=192),
    _row("three heads to a key head", CONTRACT, query=5, kv=7, heads=6, kv_heads=2),
    _row("rows that see nothing", CONTRACT, query=7, kv=5, mask=_BOTTOM_RIGHT),
    # More than a tile of rows of every kernel of ours, and a diagonal within a tile of keys.
    _row("a diagonal beyond a tile", CONTRACT, query=177, kv=293, mask=_BOTTOM_RIGHT),
    _row("more rows than keys", CONTRACT, query=7, kv=5, mask=_CAUSAL),
    _row("more keys than rows", CONTRACT, query=5, kv=7, mask=_CAUSAL),
    # A first tile that the mask empties, before scores that are all far below 0.
    _row(
        "a window over negative scores",
        CONTRACT,
        query=100,
        kv=100,
        mask=Spec.of("sliding_window", window=17),
        distribution="negative_logits",
    ),
    _row("odd head_dim", CONTRACT, query=5, kv=7, head_dim=17),
    _row("other value_dim", CONTRACT, query=5, kv=7, value_dim=32),
    _row(
        "a window beyond a tile",
        CONTRACT,
        query=177,
        kv=293,
        mask=Spec.of("sliding_window", window=73),
    ),
    # Of up to 256 rows: those of a GPU are larger than an interpreter's.
    _row(
        "a prefix beyond the diagonal's tiles",
        CONTRACT,
        query=20,
        kv=330,
        mask=Spec.of("prefix_lm", prefix=300),
    ),
    _row(
        "a prefix beside padding",
        CONTRACT,
        query=9,
        kv=20,
        mask=Spec.of("and", Spec.of("prefix_lm", prefix=4), Spec.of("padding", lengths=[15])),
    ),
    _row(
        "negative scores backward",
        CONTRACT,
        query=40,
        kv=40,
        distribution="negative_logits",
        backward=True,
    ),
    _row(
        "rows that see nothing backward",
        CONTRACT,
        query=7,
        kv=5,
        mask=_BOTTOM_RIGHT,
        backward=True,
    ),
    _row(
        "a window backward",
        CONTRACT,
        query=9,
        kv=9,
        mask=Spec.of("sliding_window", window=2),
        backward=True,
    ),
    _row(
        "the gradient of a table",
        CONTRACT,
        query=140,
        kv=70,
        score=Spec.of("relative_bias", distance=4, seed=0),
        backward=True,
        dcaptured=True,
    ),
    # The smallest scale there is: times a descale it is 0, and 0 times a score of −∞ is NaN.
    _row(
        "no scale",
        FP8,
        query=4,
        kv=70,
        mask=_CAUSAL,
        scale=FORMATS["fp32"].subnormal_spacing,
    ),
    # More than the 65 535 places of a grid's second axis. Of so many heads exact attention takes
    # minutes, and a row of one key none: it is that key's value.
    _row(
        "more sequences than a grid holds",
        MANY_SEQUENCES,
        batch=65_537,
        query=1,
        kv=2,
        mask=_CAUSAL,
    ),
    # ------------------------------------------------------------ memory and determinism
    # Several sequences, tiles and heads of each kind of hiding; small: each runs several times.
    _row(
        "causal GQA",
        MEMORY,
        batch=2,
        heads=2,
        kv_heads=1,
        query=77,
        kv=93,
        mask=_CAUSAL,
    ),
    _row(
        "padding",
        MEMORY,
        batch=2,
        heads=2,
        query=35,
        kv=70,
        head_dim=128,
        mask=Spec.of("padding", lengths=[70, 7]),
    ),
    _row("sliding window", MEMORY, query=100, mask=Spec.of("sliding_window", window=17)),
    _row("one row", MEMORY, batch=2, heads=2, query=1, kv=129),
    _row("document", MEMORY, query=96, mask=Spec.of("document", lengths=[33, 50, 13])),
    _row(
        "backward",
        MEMORY,
        batch=2,
        heads=2,
        kv_heads=1,
        query=40,
        kv=70,
        mask=_CAUSAL,
        backward=True,
    ),
    _row(
        "paged",
        MEMORY,
        batch=2,
        heads=2,
        kv_heads=1,
        query=3,
        kv=70,
        mask=_BOTTOM_RIGHT,
        paging=Paging(size=16, seed=1),
    ),
    # The slope of this score mod at a NaN is NaN: 0 times it is no gradient.
    _row(
        "backward through a softcap",
        BACKWARD_CAP,
        query=9,
        kv=9,
        mask=_CAUSAL,
        score=Spec.of("softcap", cap=5.0),
        backward=True,
    ),
    # Keys are cut into parts where they are many and rows few.
    _row("a row of many keys", MANY_KEYS, batch=2, heads=2, query=1, kv=2049),
    # ------------------------------------------------------------ compute-sanitizer
    # No multiples of a tile, since what reads too far does so there. Small: a tool takes tens of
    # times as long, and torch is imported under it.
    _row("causal", SANITIZER, query=77, kv=93, heads=2, mask=_CAUSAL),
    _row("one row", SANITIZER, query=1, kv=129),
    _row("causal backward", SANITIZER, query=40, kv=70, mask=_CAUSAL, backward=True),
)
