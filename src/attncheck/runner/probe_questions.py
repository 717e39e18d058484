"""What ``attncheck probe`` tries: one change of a small Problem at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attncheck.core.formats import DTYPES
from attncheck.inputs.problem import Problem
from attncheck.mods.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "HEAD_DIMS",
    "LENGTHS",
    "Trial",
    "bases",
    "empty_rows",
    "lengths",
    "rectangular",
    "trials",
]

LENGTHS = (64, 128)
"""Tried for the Problem that all others are changes of; both are multiples of usual tiles."""

HEAD_DIMS: tuple[int | tuple[int, int], ...] = (
    *(16, 17, 32, 40, 64, 65, 80, 96, 128, 192, 256),
    *((64, 32), (64, 96), (192, 128)),
)
"""Usual ones, two that no tile divides, and pairs of which v has its own."""

_FULL, _CAUSAL = Spec.of("full"), Spec.of("causal")
_BASE_DTYPES = ("bf16", "fp16", "fp32", "e4m3")
_BASE_DIMS = (64, 128, 32)
_WINDOW, _PREFIX = 17, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One thing to try.

    Attributes:
        aspect: The field of the table that it is for.
        what: What is tried of it: ``bf16``, ``192/128``.
        changes: Of the Problem that is known to be taken.
    """

    aspect: str
    what: str
    changes: dict[str, Any] = field(default_factory=dict)

    def of(self, base: Problem) -> Problem:
        """The Problem to ask."""
        return base.replace(**self.changes)


def bases() -> Iterator[Problem]:
    """Problems of which the first that the kernel takes is changed from then on."""
    for mask in (_FULL, _CAUSAL):
        for length in LENGTHS:
            for head_dim in _BASE_DIMS:
                for dtype in _BASE_DTYPES:
                    yield Problem(query=length, heads=2, head_dim=head_dim, dtype=dtype, mask=mask)


def trials(base: Problem, device: str) -> list[Trial]:
    """Everything that is tried of a kernel that takes ``base``, in the order of the table."""
    return [
        *_dtypes(device),
        *(_head_dim(dims) for dims in HEAD_DIMS),
        *_masks(base.query),
        *_scores(),
        Trial(aspect="gqa", what="4 heads on 2", changes={"heads": 4, "kv_heads": 2}),
        Trial(aspect="gqa", what="3 heads on 1", changes={"heads": 3, "kv_heads": 1}),
        Trial(aspect="batch", what="3 sequences", changes={"batch": 3}),
        Trial(aspect="scale", what="0.3", changes={"scale": 0.3}),
    ]


def rectangular(base: Problem) -> Iterator[Trial]:
    """Lengths that differ."""
    n = base.query
    for name, query, kv in (
        ("query < kv", n, 2 * n),
        ("query > kv", 2 * n, n),
        ("one query", 1, n),
    ):
        yield Trial(aspect="rectangular", what=name, changes={"query": query, "kv": kv})


def causal(base: Problem) -> tuple[Trial, Trial]:
    """The causal mask where lengths differ: aligned top-left, and bottom-right."""
    first, second = (
        Trial(
            aspect="causal",
            what=f"{mask}, query < kv",
            changes={"kv": 2 * base.query, "mask": Spec.of(mask)},
        )
        for mask in ("causal", "causal_bottom_right")
    )
    return first, second


def empty_rows(base: Problem) -> Iterator[Trial]:
    """Problems with rows that see no key, some of which the kernel may be able to be asked."""
    n = base.query
    masks: dict[str, dict[str, Any]] = {
        "padding": {"batch": 2, "mask": Spec.of("padding", lengths=[0, n])},
        "causal_bottom_right": {"query": 2 * n, "kv": n, "mask": Spec.of("causal_bottom_right")},
        "sliding_window": {"mask": Spec.of("sliding_window", window=0)},
    }
    for name, changes in masks.items():
        yield Trial(aspect="empty_row", what=name, changes=changes)


def _dtypes(device: str) -> Iterator[Trial]:
    for dtype in DTYPES.values():
        if dtype.measured and (dtype.name != "tf32" or device != "cpu"):
            yield Trial(aspect="dtypes", what=dtype.name, changes={"dtype": dtype.name})


def _head_dim(dims: int | tuple[int, int]) -> Trial:
    head_dim, value_dim = dims if isinstance(dims, tuple) else (dims, dims)
    what = str(dims) if isinstance(dims, int) else f"{head_dim}/{value_dim}"
    # 0: the default of the new head_dim, not the scale of the old one.
    changes = {"head_dim": head_dim, "value_dim": value_dim, "scale": 0.0}
    return Trial(aspect="head_dims", what=what, changes=changes)


def _masks(length: int) -> Iterator[Trial]:
    first = length // 3
    window = Spec.of("sliding_window", window=_WINDOW)
    documents = Spec.of("document", lengths=[first, 1, length - first - 1])
    specs = {
        "full": _FULL,
        "causal": _CAUSAL,
        "sliding_window": window,
        "prefix_lm": Spec.of("prefix_lm", prefix=_PREFIX),
        "document": documents,
        "composition": Spec.of("and", documents, Spec.of("or", window, _CAUSAL)),
        "expression": Spec.of("expression", text="(q_idx + kv_idx) % 3 != 0"),
    }
    for name, spec in specs.items():
        yield Trial(aspect="masks", what=name, changes={"mask": spec})
    # Where the lengths are equal it is the causal mask.
    wide = {"kv": 2 * length, "mask": Spec.of("causal_bottom_right")}
    yield Trial(aspect="masks", what="causal_bottom_right", changes=wide)
    padding = {"batch": 2, "mask": Spec.of("padding", lengths=[length, first])}
    yield Trial(aspect="masks", what="padding", changes=padding)


def _scores() -> Iterator[Trial]:
    softcap = Spec.of("softcap", cap=20.0)
    specs = {
        "none": Spec.of("none"),
        "alibi": Spec.of("alibi"),
        "softcap": softcap,
        "relative_bias": Spec.of("relative_bias", distance=8, seed=0),
        "temperature": Spec.of("temperature", temperature=2.0),
        "composition": Spec.of("chain", softcap, Spec.of("alibi")),
        "expression": Spec.of("expression", text="score * 0.5"),
    }
    for name, spec in specs.items():
        yield Trial(aspect="scores", what=name, changes={"score": spec})


def lengths(length: int) -> Iterator[Trial]:
    """Lengths that queries and keys share; 1 and 77 are multiples of no tile."""
    for other in (1, 77, *(n for n in (16, 32, 64, 128) if n != length)):
        yield Trial(aspect="lengths", what=str(other), changes={"query": other, "kv": other})
