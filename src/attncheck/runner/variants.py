"""What a run measures by name: masks, score mods and layouts, each sized to a shape."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from attncheck.core.errors import ProblemError
from attncheck.core.paged_layout import Paging
from attncheck.inputs.distributions import DISTRIBUTIONS, Sizes
from attncheck.inputs.problem import SOFTMAX_DTYPES
from attncheck.mods.library import FULL, NONE
from attncheck.mods.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ALL", "DEFAULT_SHAPES", "FURTHER", "VARIANTS", "Shape", "Variant"]

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
