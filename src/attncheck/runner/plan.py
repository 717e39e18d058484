"""Which Problems a run measures: variants × heads × dtypes × shapes × distributions."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attncheck.core.errors import ProblemError, UnknownName
from attncheck.core.formats import DTYPES
from attncheck.inputs.problem import Problem
from attncheck.runner.variants import ALL, FURTHER, VARIANTS, Shape, Variant

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Cell", "check_measured", "check_memory", "plan"]


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


def plan(
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
