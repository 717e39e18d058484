"""The table of fixed problems: each small, and each for a fault that some kernel had.

One table serves the quick check, the gate's contract, its questions about memory and determinism,
and compute-sanitizer. A problem's tags list its users; names are unique within a tag, and the
table's order is the order of asking. Fields that are not given have a Problem's defaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attncheck.core.formats import FORMATS
from attncheck.core.mod_spec import Spec
from attncheck.core.paged_layout import Paging

CHECK = "check"
"""Asked by ``attncheck check``, and as the fixture ``problem`` in users' own tests."""
PROBED = "probed"  # CHECK problems whose layouts the probes use too; CHECK is implied
IN_TURN = "in turn"
"""A quick check makes calls in turn on the first that a kernel takes, and on half of its length."""
LONG = "long"  # the contract asks these unchanged in every dtype of 16 and 8 bits
SMALLEST = "smallest"
"""The contract asks the nearest that a kernel takes, in every dtype, forward and backward."""
CONTRACT = "contract"
"""The contract asks these unchanged: the kernel must refuse cleanly or be right."""
FP8 = "fp8"  # like CONTRACT, for kernels that take fp8
MANY_SEQUENCES = "many sequences"  # like CONTRACT, on a GPU, with no need of exact attention
MEMORY = "memory"  # questions about memory and determinism are asked on these, in turn
BACKWARD_CAP = "backward cap"  # also for MEMORY's question whether hidden NaN reach gradients
MANY_KEYS = "many keys"  # also for MEMORY's question about accesses next to an input
SANITIZER = "sanitizer"  # run under compute-sanitizer


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedProblem:
    """A Problem without a dtype, with its name and uses."""

    name: str  # its name in reports
    tags: frozenset[str]  # its users
    fields: dict[str, Any]  # fields of the Problem
    # Sizes for a kernel that does not take these: the nearest would be far larger.
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


def _row(name: str, sizes: str, *tags: str, instead: str = "", **fields: Any) -> NamedProblem:
    """Return a row of the table; ``sizes`` have the form of reports: ``B2 H6/2 Q40 K70 D96``."""
    return NamedProblem(
        name=name,
        tags=frozenset((*tags, CHECK) if PROBED in tags else tags),
        fields=fields | _sizes(sizes),
        instead=_sizes(instead),
    )


def _window(length: int) -> Spec:
    return Spec.of("sliding_window", window=length)


def _padding(lengths: list[int]) -> Spec:
    return Spec.of("padding", lengths=lengths)


def _lengths(part: Spec, lengths: list[int]) -> Spec:
    return Spec.of("bottom_right", part, lengths=lengths)


_CAUSAL = Spec.of("causal")
_BOTTOM_RIGHT = Spec.of("causal_bottom_right")
_DOCUMENTS = Spec.of("documents_bottom_right", _CAUSAL, query_lengths=[25, 15], kv_lengths=[30, 40])

# Most lengths are no multiples of any tile; some are multiples of small tiles only (48 of 16, 96 of
# 32, 320 of 64), to find a kernel that uses another tile's size to decide whether to mask its last
# tile. Heads and tiles are few, for Triton's interpreter. head_dims are 64, and dims for which
# 1/√head_dim is no power of two.
_TABLE: tuple[NamedProblem, ...] = (
    # ------------------------------------------------------------ a quick check: layouts
    _row("plain", "H8 Q64", CHECK),
    _row("ragged", "Q77 K93", PROBED),
    _row("causal", "Q130 D128", PROBED, mask=_CAUSAL),
    _row("causal-even", "Q128", PROBED, mask=_CAUSAL),
    _row("causal-wide", "Q33 K150 D80", PROBED, mask=_CAUSAL),
    # Tiles of keys that no row of the first blocks sees, and a bound that may go below 0.
    _row("causal-tall", "H1 Q300 K150 D96", PROBED, mask=_CAUSAL),
    # Decoding, where a flag is easily dropped: at the top left the row sees one key.
    _row("causal-one-query", "B2 Q1 K70", CHECK, mask=_CAUSAL),
    # More rows than a tile of any built-in kernel, and a diagonal inside a tile of keys.
    _row("causal-blocks", "H1 Q177 K293", CHECK, CONTRACT, mask=_BOTTOM_RIGHT),
    _row("gqa", "B2 H6/2 Q40 K70 D96", PROBED),
    _row("one-query", "B2 Q1 K211", PROBED),
    _row("one-key", "Q5 K1 D80", CHECK),
    _row("window", "Q100", PROBED, mask=_window(17)),
    _row("window-wide", "H2 Q150", CHECK, CONTRACT, mask=_window(101)),
    # Its left side is odd, so that flash_attn functions get as long a right one.
    _row("window-two-sided", "H2 Q100", CHECK, CONTRACT, mask=_window(24)),
    # The mask empties the first tile, and all scores are far below 0.
    _row(
        "window-negative",
        "Q100",
        CHECK,
        CONTRACT,
        mask=_window(17),
        distribution="negative_logits",
    ),
    # Whole tiles of keys that one head sees, and the other does not.
    _row(
        "mask-by-head",
        "H2 Q128 K256",
        CHECK,
        CONTRACT,
        mask=Spec.of("expression", text="(h == 0) | (kv_idx < 128)"),
    ),
    # Row 0 sees the keys 127 to 133: the last key of a tile of any usual size, and a few more.
    _row(
        "window-edge", "H2 Q17 K150", CHECK, CONTRACT, mask=Spec.of("offset", _window(7), rows=133)
    ),
    # Neighbouring keys this far are one number of 16 bits, so that indices cannot be such numbers.
    _row("window-far", "H1 Q16 K4096", CHECK, mask=Spec.of("offset", _window(7), rows=4080)),
    # More blocks of rows than are launched at once, or swizzled together, and some left over.
    _row("many-rows", "H1 Q1200 K16", CHECK, instead="Q576 K576"),
    _row("padding", "B2 Q35 K60 D80", PROBED, mask=_padding([60, 7])),
    _row("empty-rows", "B2 Q20 K30", PROBED, mask=_padding([0, 30])),
    # Sequences of several lengths, none of which is kv: each has a diagonal of its own.
    _row("causal-lengths", "B3 Q9 K90", PROBED, mask=_lengths(_CAUSAL, [52, 70, 31])),
    _row("window-lengths", "B3 Q9 K90", CHECK, mask=_lengths(_window(17), [52, 70, 31])),
    _row("causal-documents", "Q40 K70", CHECK, mask=_DOCUMENTS),
    # ------------------------------------------------------------ a quick check: values
    _row("scale", "Q65 D80", CHECK, scale=0.3),
    _row("large", "Q64 K129 D96", CHECK, distribution="large_logits"),
    _row("negative", "Q40 K96", CHECK, distribution="negative_logits"),
    _row("one-hot", "Q60 K130 D128", CHECK, distribution="one_hot"),
    _row("outliers", "Q65 K129 D128", CHECK, distribution="outliers"),
    _row("uniform", "Q64 K320 D80", CHECK, distribution="uniform"),
    _row("sink", "Q50 K90", CHECK, distribution="sink"),
    _row("long-sum", "H1 Q16 K4096", CHECK, LONG, instead="Q512 K512", distribution="small_terms"),
    # ------------------------------------------------------------ long sums of gradients
    _row("long sum of dQ", "Q16 K2048", LONG, distribution="small_terms", backward=True),
    _row("long sums of dK and dV", "Q2048 K16", LONG, distribution="small_terms", backward=True),
    # ------------------------------------------------------------ a quick check: calls in turn
    # Lengths that no other question of the check has, so that nothing is cached for them yet.
    _row("calls", "H1 Q74 K106", IN_TURN, instead="Q256 K256"),
    # ------------------------------------------------------------ a contract's smallest
    _row("smallest", "Q1 K1", SMALLEST),
    _row("a tile", "Q16 K16", SMALLEST),
    # ------------------------------------------------------------ a contract's unusual ones
    # Problems with one mask stand together, because kernels are compiled for each kind of mask.
    _row("other scale", "Q5 K7", CONTRACT, scale=0.3),
    # Multiples of one tile size only, to find a path without bounds checks for an outdated size.
    _row("whole tiles of 16", "Q48 K48", CONTRACT),
    _row("whole tiles of 32", "Q96 K96", CONTRACT),
    _row("whole tiles of 64", "Q192 K192", CONTRACT),
    _row("three heads to a key head", "H6/2 Q5 K7", CONTRACT),
    _row("rows that see nothing", "Q7 K5", CONTRACT, mask=_BOTTOM_RIGHT),
    _row("more rows than keys", "Q7 K5", CONTRACT, mask=_CAUSAL),
    _row("more keys than rows", "Q5 K7", CONTRACT, mask=_CAUSAL),
    _row("odd head_dim", "Q5 K7 D17", CONTRACT),
    _row("other value_dim", "Q5 K7", CONTRACT, value_dim=32),
    _row("a window beyond a tile", "Q177 K293", CONTRACT, mask=_window(73)),
    # For tiles of up to 256 rows: tiles on a GPU are larger than an interpreter's.
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
        mask=Spec.of("and", Spec.of("prefix_lm", prefix=4), _padding([15])),
    ),
    _row(
        "negative scores backward",
        "Q40 K40",
        CONTRACT,
        distribution="negative_logits",
        backward=True,
    ),
    _row("rows that see nothing backward", "Q7 K5", CONTRACT, mask=_BOTTOM_RIGHT, backward=True),
    _row("a window backward", "Q9 K9", CONTRACT, mask=_window(2), backward=True),
    _row(
        "the gradient of a table",
        "Q140 K70",
        CONTRACT,
        score=Spec.of("relative_bias", distance=4, seed=0),
        backward=True,
        dcaptured=True,
    ),
    # ``long-sum`` has too few tiles of 128 for an error to exceed e5m2's own rounding.
    _row("longer sum", "H1 Q16 K16384", FP8, distribution="small_terms"),
    # The smallest positive scale: times a descale it is 0, and 0 times a score of −∞ is NaN.
    _row("no scale", "Q4 K70", FP8, mask=_CAUSAL, scale=FORMATS["fp32"].subnormal_spacing),
    # More than the 65 535 blocks of a grid's second axis. Exact attention of so many heads takes
    # minutes; rows that see one key need none, since the result is that key's value.
    _row("more sequences than a grid holds", "B65537 Q1 K2", MANY_SEQUENCES, mask=_CAUSAL),
    # ------------------------------------------------------------ memory and determinism
    # Several sequences, tiles and heads for each kind of mask; small, as each runs several times.
    _row("causal GQA", "B2 H2/1 Q77 K93", MEMORY, mask=_CAUSAL),
    _row("padding", "B2 H2 Q35 K70 D128", MEMORY, mask=_padding([70, 7])),
    _row("sliding window", "Q100", MEMORY, mask=_window(17)),
    _row("one row", "B2 H2 Q1 K129", MEMORY),
    _row("document", "Q96", MEMORY, mask=Spec.of("document", lengths=[33, 50, 13])),
    _row("backward", "B2 H2/1 Q40 K70", MEMORY, mask=_CAUSAL, backward=True),
    _row("paged", "B2 H2/1 Q3 K70", MEMORY, mask=_BOTTOM_RIGHT, paging=Paging(size=16, seed=1)),
    # The slope of this score mod at a NaN is NaN, and 0 times it is NaN, not a gradient of 0.
    _row(
        "backward through a softcap",
        "Q9 K9",
        BACKWARD_CAP,
        mask=_CAUSAL,
        score=Spec.of("softcap", cap=5.0),
        backward=True,
    ),
    # Kernels split the keys if keys are many and rows few.
    _row("a row of many keys", "B2 H2 Q1 K2049", MANY_KEYS),
    # ------------------------------------------------------------ compute-sanitizer
    # Lengths that are no multiples of a tile, where kernels read out of bounds. Small, because the
    # tool makes everything tens of times slower, including the import of torch.
    _row("causal", "H2 Q77 K93", SANITIZER, mask=_CAUSAL),
    _row("one row", "Q1 K129", SANITIZER),
    _row("causal backward", "Q40 K70", SANITIZER, mask=_CAUSAL, backward=True),
)

SUMMARIES = {
    "plain": "lengths that fit every tile; eight heads",
    "ragged": "lengths that fit no tile: masking of the last one",
    "causal": "the diagonal",
    "causal-even": "the diagonal, at lengths that fit every tile",
    "causal-wide": "more keys than queries: causal is aligned top-left",
    "causal-tall": "more queries than keys: the last rows see every key",
    "causal-one-query": "one row and a causal flag",
    "causal-blocks": "several tiles of rows, each with a diagonal inside a tile of keys",
    "gqa": "three query heads to a key head, two sequences",
    "one-query": "one row, as in decoding",
    "one-key": "one key: out is its value",
    "window": "a sliding window, as a mask that is written out",
    "window-wide": "a window wider than a tile: it does not begin before the keys do",
    "window-two-sided": "a causal window with a right side, which the causal flag overrides",
    "window-negative": "a window whose first tile some rows do not see, and low scores after it",
    "mask-by-head": "a mask of its own for each head, in whole tiles",
    "window-edge": "a window that begins with the last key of a tile",
    "window-far": "positions that need more than 8 or 11 bits",
    "many-rows": "many blocks of rows, as long prompts have",
    "padding": "another number of keys in each sequence",
    "empty-rows": "rows that see no key: out is exactly 0",
    "causal-lengths": "the diagonal ends at each sequence's own last key",
    "window-lengths": "a window ends at each sequence's own last key",
    "causal-documents": "packed sequences of other numbers of keys: each has its own diagonal",
    "scale": "a scale other than 1/√head_dim",
    "large": "logits beyond fp32's exp",
    "negative": "every logit near −128",
    "one-hot": "one key takes the whole weight",
    "outliers": "one number in a thousand is ten times larger",
    "uniform": "all signs equal: errors add up",
    "sink": "key 0 takes nearly the whole weight",
    "long-sum": "thousands of small terms after a large one: a sum in 16 bits drops them",
}
"""What a failure of each ``CHECK`` problem would show, in one line."""
