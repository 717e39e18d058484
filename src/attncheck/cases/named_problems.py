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
PROBED = "probed"  # of those, the ones whose layout the probes are asked on
IN_TURN = "in turn"
"""A quick check asks for calls in turn on the first that a kernel takes, and on half of it."""
LONG = "long"  # the contract asks these as they stand in every dtype of 16 and 8 bits
SMALLEST = "smallest"
"""The contract asks the nearest that a kernel takes, in every dtype, forward and backward."""
CONTRACT = "contract"
"""The contract asks as it stands: the kernel refuses cleanly, or answers rightly."""
FP8 = "fp8"  # the same, of kernels that take fp8
MANY_SEQUENCES = "many sequences"  # the same, on a GPU, by a question that needs no exact attention
MEMORY = "memory"  # questions about memory and determinism are asked on these, in turn
BACKWARD_CAP = "backward cap"  # beside those, for what hidden keys of NaN do to gradients
MANY_KEYS = "many keys"  # beside those, for what lies next to an input
SANITIZER = "sanitizer"  # run under compute-sanitizer


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedProblem:
    """A Problem but for its dtype."""

    name: str  # what reports call it
    tags: frozenset[str]  # who asks it
    summary: str  # what it would show, in a line; empty where the name says it
    fields: dict[str, Any]  # of the Problem
    # Sizes for a kernel that does not take its own: the nearest would be far larger.
    instead: dict[str, Any]


def tagged(tag: str) -> dict[str, NamedProblem]:
    """Return the problems with this tag by name, in the order in which they are asked."""
    return {each.name: each for each in _TABLE if tag in each.tags}


_SIZES = {"B": "batch", "H": "heads kv_heads", "Q": "query", "K": "kv", "D": "head_dim"}


def _sizes(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split():
        sizes |= dict(zip(_SIZES[part[0]].split(), map(int, part[1:].split("/")), strict=False))
    return sizes


def _row(
    name: str, sizes: str, *tags: str, summary: str = "", instead: str = "", **fields: Any
) -> NamedProblem:
    """Return a row of the table, its ``sizes`` as reports write them: ``B2 H6/2 Q40 K70 D96``."""
    return NamedProblem(
        name=name,
        tags=frozenset(tags),
        summary=summary,
        fields=fields | _sizes(sizes),
        instead=_sizes(instead),
    )


_CAUSAL = Spec.of("causal")
_BOTTOM_RIGHT = Spec.of("causal_bottom_right")

# Most lengths are no multiples of any tile; some are of small tiles alone (48 of 16, 96 of 32, 320
# of 64), for a kernel that asks by the length of another tile whether to mask its last. Few heads
# and tiles, for Triton's interpreter. The head_dims are those of which 1/√head_dim is no power of
# two, and 64.
_TABLE: tuple[NamedProblem, ...] = (
    # ------------------------------------------------------------ a quick check: layouts
    _row("plain", "H8 Q64", CHECK, summary="lengths that fit every tile; eight heads"),
    _row(
        "ragged",
        "Q77 K93",
        CHECK,
        PROBED,
        summary="lengths that fit no tile: masking of the last one",
    ),
    _row("causal", "Q130 D128", CHECK, PROBED, summary="the diagonal", mask=_CAUSAL),
    _row(
        "causal-even",
        "Q128",
        CHECK,
        PROBED,
        summary="the diagonal, at lengths that fit every tile",
        mask=_CAUSAL,
    ),
    _row(
        "causal-wide",
        "Q33 K150 D80",
        CHECK,
        PROBED,
        summary="more keys than queries: causal is aligned top-left",
        mask=_CAUSAL,
    ),
    _row(
        "causal-tall",
        "Q99 K48 D96",
        CHECK,
        PROBED,
        summary="more queries than keys: the last rows see every key",
        mask=_CAUSAL,
    ),
    _row(
        "gqa",
        "B2 H6/2 Q40 K70 D96",
        CHECK,
        PROBED,
        summary="three query heads to a key head, two sequences",
    ),
    _row("one-query", "B2 Q1 K211", CHECK, PROBED, summary="one row, as in decoding"),
    _row("one-key", "Q5 K1 D80", CHECK, summary="one key: out is its value"),
    _row(
        "window",
        "Q100",
        CHECK,
        PROBED,
        summary="a sliding window, as a mask that is written out",
        mask=Spec.of("sliding_window", window=17),
    ),
    _row(
        "window-wide",
        "H2 Q150",
        CHECK,
        CONTRACT,
        summary="a window wider than a tile: it does not begin before the keys do",
        mask=Spec.of("sliding_window", window=100),
    ),
    # Row 0 sees the keys 127 to 133: of any usual tile one, and some of the next.
    _row(
        "window-edge",
        "H2 Q17 K150",
        CHECK,
        CONTRACT,
        summary="a window that begins with the last key of a tile",
        mask=Spec.of("offset", Spec.of("sliding_window", window=7), rows=133),
    ),
    _row(
        "padding",
        "B2 Q35 K60 D80",
        CHECK,
        PROBED,
        summary="another number of keys in each sequence",
        mask=Spec.of("padding", lengths=[60, 7]),
    ),
    _row(
        "empty-rows",
        "B2 Q20 K30",
        CHECK,
        PROBED,
        summary="rows that see no key: out is exactly 0",
        mask=Spec.of("padding", lengths=[0, 30]),
    ),
    # ------------------------------------------------------------ a quick check: values
    _row("scale", "Q65 D80", CHECK, summary="a scale other than 1/√head_dim", scale=0.3),
    _row(
        "large",
        "Q64 K129 D96",
        CHECK,
        summary="logits beyond fp32's exp",
        distribution="large_logits",
    ),
    _row(
        "negative",
        "Q40 K96",
        CHECK,
        summary="every logit near −128",
        distribution="negative_logits",
    ),
    _row(
        "one-hot",
        "Q60 K130 D128",
        CHECK,
        summary="one key takes the whole weight",
        distribution="one_hot",
    ),
    _row(
        "outliers",
        "Q65 K129 D128",
        CHECK,
        summary="one number in a thousand is ten times larger",
        distribution="outliers",
    ),
    _row(
        "uniform",
        "Q64 K320 D80",
        CHECK,
        summary="all signs equal: errors add up",
        distribution="uniform",
    ),
    _row(
        "sink", "Q50 K90", CHECK, summary="key 0 takes nearly the whole weight", distribution="sink"
    ),
    _row(
        "long-sum",
        "H1 Q16 K4096",
        CHECK,
        LONG,
        summary="thousands of small terms after a large one: a sum in 16 bits drops them",
        instead="Q512 K512",
        distribution="small_terms",
    ),
    # ------------------------------------------------------------ long sums of gradients
    _row("long sum of dQ", "Q16 K2048", LONG, distribution="small_terms", backward=True),
    _row("long sums of dK and dV", "Q2048 K16", LONG, distribution="small_terms", backward=True),
    # ------------------------------------------------------------ a quick check: calls in turn
    # Lengths that no other question of it has: what is kept by shape is new.
    _row("calls", "H1 Q74 K106", IN_TURN, instead="Q256 K256"),
    # ------------------------------------------------------------ a contract's smallest
    _row("smallest", "Q1 K1", SMALLEST),
    _row("a tile", "Q16 K16", SMALLEST),
    # ------------------------------------------------------------ a contract's unusual ones
    # Those of one mask stand together: for each kind kernels are compiled.
    _row("other scale", "Q5 K7", CONTRACT, scale=0.3),
    # Of one size and no larger: a path without bounds, chosen for the tiles that there once were.
    _row("whole tiles of 16", "Q48 K48", CONTRACT),
    _row("whole tiles of 32", "Q96 K96", CONTRACT),
    _row("whole tiles of 64", "Q192 K192", CONTRACT),
    _row("three heads to a key head", "H6/2 Q5 K7", CONTRACT),
    _row("rows that see nothing", "Q7 K5", CONTRACT, mask=_BOTTOM_RIGHT),
    # More than a tile of rows of every kernel of ours, and a diagonal within a tile of keys.
    _row("a diagonal beyond a tile", "Q177 K293", CONTRACT, mask=_BOTTOM_RIGHT),
    _row("more rows than keys", "Q7 K5", CONTRACT, mask=_CAUSAL),
    _row("more keys than rows", "Q5 K7", CONTRACT, mask=_CAUSAL),
    # A first tile that the mask empties, before scores that are all far below 0.
    _row(
        "a window over negative scores",
        "Q100 K100",
        CONTRACT,
        mask=Spec.of("sliding_window", window=17),
        distribution="negative_logits",
    ),
    _row("odd head_dim", "Q5 K7 D17", CONTRACT),
    _row("other value_dim", "Q5 K7", CONTRACT, value_dim=32),
    _row(
        "a window beyond a tile", "Q177 K293", CONTRACT, mask=Spec.of("sliding_window", window=73)
    ),
    # Of up to 256 rows: those of a GPU are larger than an interpreter's.
    _row(
        "a prefix beyond the diagonal's tiles",
        "Q20 K330",
        CONTRACT,
        mask=Spec.of("prefix_lm", prefix=300),
    ),
    _row(
        "a prefix beside padding",
        "Q9 K20",
        CONTRACT,
        mask=Spec.of("and", Spec.of("prefix_lm", prefix=4), Spec.of("padding", lengths=[15])),
    ),
    _row(
        "negative scores backward",
        "Q40 K40",
        CONTRACT,
        distribution="negative_logits",
        backward=True,
    ),
    _row("rows that see nothing backward", "Q7 K5", CONTRACT, mask=_BOTTOM_RIGHT, backward=True),
    _row(
        "a window backward",
        "Q9 K9",
        CONTRACT,
        mask=Spec.of("sliding_window", window=2),
        backward=True,
    ),
    _row(
        "the gradient of a table",
        "Q140 K70",
        CONTRACT,
        score=Spec.of("relative_bias", distance=4, seed=0),
        backward=True,
        dcaptured=True,
    ),
    # Of tiles of 128 those that a long sum has are too few to show beside e5m2's own rounding.
    _row("longer sum", "H1 Q16 K16384", FP8, distribution="small_terms"),
    # The smallest scale there is: times a descale it is 0, and 0 times a score of −∞ is NaN.
    _row("no scale", "Q4 K70", FP8, mask=_CAUSAL, scale=FORMATS["fp32"].subnormal_spacing),
    # More than the 65 535 places of a grid's second axis. Of so many heads exact attention takes
    # minutes, and a row of one key none: it is that key's value.
    _row("more sequences than a grid holds", "B65537 Q1 K2", MANY_SEQUENCES, mask=_CAUSAL),
    # ------------------------------------------------------------ memory and determinism
    # Several sequences, tiles and heads of each kind of hiding; small: each runs several times.
    _row("causal GQA", "B2 H2/1 Q77 K93", MEMORY, mask=_CAUSAL),
    _row("padding", "B2 H2 Q35 K70 D128", MEMORY, mask=Spec.of("padding", lengths=[70, 7])),
    _row("sliding window", "Q100", MEMORY, mask=Spec.of("sliding_window", window=17)),
    _row("one row", "B2 H2 Q1 K129", MEMORY),
    _row("document", "Q96", MEMORY, mask=Spec.of("document", lengths=[33, 50, 13])),
    _row("backward", "B2 H2/1 Q40 K70", MEMORY, mask=_CAUSAL, backward=True),
    _row("paged", "B2 H2/1 Q3 K70", MEMORY, mask=_BOTTOM_RIGHT, paging=Paging(size=16, seed=1)),
    # The slope of this score mod at a NaN is NaN: 0 times it is no gradient.
    _row(
        "backward through a softcap",
        "Q9 K9",
        BACKWARD_CAP,
        mask=_CAUSAL,
        score=Spec.of("softcap", cap=5.0),
        backward=True,
    ),
    # Keys are cut into parts where they are many and rows few.
    _row("a row of many keys", "B2 H2 Q1 K2049", MANY_KEYS),
    # ------------------------------------------------------------ compute-sanitizer
    # No multiples of a tile, since what reads too far does so there. Small: a tool takes tens of
    # times as long, and torch is imported under it.
    _row("causal", "H2 Q77 K93", SANITIZER, mask=_CAUSAL),
    _row("one row", "Q1 K129", SANITIZER),
    _row("causal backward", "Q40 K70", SANITIZER, mask=_CAUSAL, backward=True),
)
