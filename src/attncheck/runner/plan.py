"""Which Problems a run measures: variants × heads × dtypes × shapes × distributions."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from attncheck.distributions import Sizes
from attncheck.errors import ProblemError, UnknownName
from attncheck.mods.library import FULL, NONE
from attncheck.mods.spec import Spec
from attncheck.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["DEFAULT_SHAPES", "VARIANTS", "Cell", "Shape", "Variant", "plan"]

_SIZE, _OTHER = r"(\d{1,9})", r"(?:/([1-9]\d{0,8}))?"
_SHAPE = re.compile(f"{_SIZE}x{_SIZE}{_OTHER}x{_SIZE}{_OTHER}x{_SIZE}{_OTHER}")
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
    """A named mask and score mod, sized to a shape."""

    summary: str
    mods: Callable[[Shape], tuple[Spec, Spec]]


def _document_lengths(length: int) -> list[int]:
    """Uneven documents: a half, a quarter, an eighth, and the rest."""
    halves = [length // 2, length // 4, length // 8]
    return [*halves, length - sum(halves)]


VARIANTS: dict[str, Variant] = {
    "full": Variant(summary="every key", mods=lambda _: (FULL, NONE)),
    "causal": Variant(
        summary="keys up to the row's own index",
        mods=lambda _: (Spec.of("causal"), NONE),
    ),
    "alibi": Variant(
        summary="causal, scores falling with distance",
        mods=lambda _: (Spec.of("causal"), Spec.of("alibi")),
    ),
    "sliding_window": Variant(
        summary="the last quarter of the keys up to the row's own",
        mods=lambda s: (Spec.of("sliding_window", window=max(1, s.kv // 4)), NONE),
    ),
    "prefix_lm": Variant(
        summary="causal, the first quarter of the keys visible to all",
        mods=lambda s: (Spec.of("prefix_lm", prefix=s.kv // 4), NONE),
    ),
    "softcap": Variant(
        summary="every key, scores through 20·tanh(score/20)",
        mods=lambda _: (FULL, Spec.of("softcap", cap=20.0)),
    ),
    "document": Variant(
        summary="four documents of uneven length, each for itself",
        mods=lambda s: (
            Spec.of("document", lengths=_document_lengths(max(s.query, s.kv))),
            NONE,
        ),
    ),
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
) -> list[Cell]:
    """Every combination, in the order in which a report shows them.

    Raises UnknownName or ProblemError for anything that cannot be measured, before anything is.
    """
    cells = []
    for dtype in dtypes:
        for text in shapes:
            for distribution in distributions:
                for variant, shape, kv_heads in _variants(variants, Shape.parse(text)):
                    mask, score = VARIANTS[variant].mods(shape)
                    problem = Problem(
                        **(asdict(shape) | {"kv_heads": kv_heads}),
                        dtype=dtype,
                        mask=mask,
                        score=score,
                        distribution=distribution,
                        seed=seed,
                    )
                    cells.append(Cell(variant=variant, problem=problem))
    for cell in cells:
        _check_memory(cell.problem)
    return list(dict.fromkeys(cells))


def _check_memory(problem: Problem) -> None:
    """Raises ProblemError when the inputs alone, in float64 while drawn, do not fit."""
    columns = problem.query * problem.heads * (problem.head_dim + problem.value_dim)
    columns += problem.kv * problem.kv_heads * (problem.head_dim + problem.value_dim)
    needed = 8 * problem.batch * columns
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise ProblemError(
            f"shape {problem.shape} needs {needed / 2**30:.0f} GiB for inputs and outputs in "
            f"float64; this machine has {there / 2**30:.0f} GiB."
        )


def _variants(names: Sequence[str], shape: Shape) -> Iterator[tuple[str, Shape, int]]:
    for name in names:
        if name not in VARIANTS:
            raise UnknownName("variant", name, VARIANTS)
        for kv_heads in shape.head_counts():
            yield name, shape, kv_heads
