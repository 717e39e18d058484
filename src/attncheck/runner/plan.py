"""Which Problems a run measures: variants × heads × dtypes × shapes × distributions."""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from attncheck.distributions import DISTRIBUTIONS, Sizes
from attncheck.errors import ProblemError, UnknownName
from attncheck.formats import DTYPES
from attncheck.mods.library import FULL, NONE
from attncheck.mods.spec import Spec
from attncheck.problem import SOFTMAX_DTYPES, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "DEFAULT_SHAPES",
    "VARIANTS",
    "Cell",
    "Shape",
    "Variant",
    "check_measured",
    "check_memory",
    "plan",
]

_SIZE, _OTHER = r"(\d{1,9})", r"(?:/([1-9]\d{0,8}))?"
# A head_dim of 0 would be a Problem's default, which nobody asked for.
_DIM = r"([1-9]\d{0,8})"
_SHAPE = re.compile(f"{_SIZE}x{_SIZE}{_OTHER}x{_SIZE}{_OTHER}x{_DIM}{_OTHER}")
SHAPE_FORM = "BATCHxHEADSxLENGTHxDIM, with /KV after HEADS or LENGTH and /VALUE after DIM"


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
    """

    name: str
    summary: str
    mods: Callable[[Shape], tuple[Spec, Spec]] | None

    def exists(self, dtype: str, distribution: str) -> bool:
        """Whether there is such a Problem: softmax has neither every dtype nor distribution."""
        if self.mods is not None:
            return True
        known = distribution not in DISTRIBUTIONS or DISTRIBUTIONS[distribution].scores
        return dtype in SOFTMAX_DTYPES and bool(known)

    def fields(self, shape: Shape, kv_heads: int) -> dict[str, Any]:
        """What of a Problem the variant and the shape say."""
        if self.mods is None:
            return {"operation": "softmax", "query": shape.query, "kv": shape.kv}
        mask, score = self.mods(shape)
        return asdict(shape) | {"kv_heads": kv_heads, "mask": mask, "score": score}


def _document_lengths(length: int) -> list[int]:
    """Uneven documents: a half, a quarter, an eighth, and the rest."""
    halves = [length // 2, length // 4, length // 8]
    return [*halves, length - sum(halves)]


VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
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
            mods=lambda s: (
                Spec.of("document", lengths=_document_lengths(max(s.query, s.kv))),
                NONE,
            ),
        ),
        Variant(
            name="softmax",
            summary="no attention: the softmax of query rows of kv scores",
            mods=None,
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One Problem of a plan under its variant's name."""

    variant: str
    problem: Problem


def plan(
    *,
    dtypes: Sequence[str],
    variants: Sequence[str],
    shapes: Sequence[str],
    distributions: Sequence[str],
    seed: int,
    own: Variant | None = None,
) -> list[Cell]:
    """Every combination, in the order in which a report shows them.

    Args:
        dtypes: Names of dtypes that kernels are measured in.
        variants: Names of ``VARIANTS``; none: all that exist in the dtype and distribution.
        shapes: As typed, ``Shape.parse``.
        distributions: Names.
        seed: Which draw.
        own: A variant that no name stands for; measured in place of ``VARIANTS``.

    Raises UnknownName or ProblemError for anything that cannot be measured, before anything is.
    """
    named = {own.name: own} if own else {name: _variant(name) for name in variants or VARIANTS}
    cells = []
    for dtype, text, distribution in itertools.product(dtypes, shapes, distributions):
        check_measured(dtype)
        shape = Shape.parse(text)
        for name, variant in named.items():
            if not (variants or own or variant.exists(dtype, distribution)):
                continue
            for kv_heads in shape.head_counts():
                fields = variant.fields(shape, kv_heads)
                fields |= {"dtype": dtype, "distribution": distribution, "seed": seed}
                cells.append(Cell(variant=name, problem=Problem(**fields)))
    for cell in cells:
        check_memory(cell.problem)
    return list(dict.fromkeys(cells))


def _variant(name: str) -> Variant:
    if name not in VARIANTS:
        raise UnknownName("variant", name, VARIANTS)
    return VARIANTS[name]


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
    needed = 8 * problem.batch * columns
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise ProblemError(
            f"shape {problem.shape} needs {needed / 2**30:.0f} GiB for inputs and outputs in "
            f"float64; this machine has {there / 2**30:.0f} GiB."
        )
