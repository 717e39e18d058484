"""Keys where kernels go wrong: the first and the last, edges of masks, tiles and pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.mods.spec import Spec
    from attncheck.problem import Problem

__all__ = ["boundaries"]

_TILES = (64, 128, 32, 16, 256)
"""Widths of tiles and pages, the commonest first."""


def boundaries(problem: Problem) -> list[int]:
    """All keys, those at boundaries first.

    In this order: the first and the last key; the key before and the key at each edge that the
    mask's name and numbers tell (end of the prefix, of a document, of padding, a window's width,
    the diagonals of the first and the last row); those of tiles; the rest, spread evenly.
    """
    kv = problem.kv
    edges = [0, kv, *_of_mask(problem.mask, problem)]
    edges += [side for width in _TILES for side in _ends(width, kv)]
    edges += [multiple for width in _TILES for multiple in range(width, kv, width)]
    near = [key for edge in edges for key in (edge - 1, edge) if 0 <= key < kv]
    return list(dict.fromkeys(near + _spread(kv)))


def _ends(width: int, kv: int) -> tuple[int, int]:
    """The end of the first tile and the start of the last one."""
    return width, (kv - 1) // width * width


def _of_mask(mask: Spec, problem: Problem) -> Iterator[int]:
    for part in mask.walk():
        numbers = part.values
        if part.name in {"document", "padding"}:
            lengths = cast("tuple[int, ...]", numbers["lengths"])
            ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
            yield from ends if part.name == "document" else lengths
        elif part.name == "prefix_lm":
            yield cast("int", numbers["prefix"])
        elif part.name == "sliding_window":
            window = cast("int", numbers["window"])
            yield from (window, problem.query - window)
        if part.name in {"causal", "sliding_window", "prefix_lm"}:
            yield from (1, problem.query)
        elif part.name == "causal_bottom_right":
            yield problem.kv - problem.query + 1


def _spread(kv: int) -> list[int]:
    """All keys, by halves: the middle, the quarters, the eighths, and so on."""
    bits = (kv - 1).bit_length()
    by_halves = (int(f"{n:0{bits}b}"[::-1], 2) if bits else 0 for n in range(1 << bits))
    return [key for key in by_halves if key < kv]
