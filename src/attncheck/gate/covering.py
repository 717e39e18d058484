"""Covering arrays: as few rows as have every pair, or triple, of the axes' values together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import covertable  # type: ignore[import-untyped]  # it ships no types

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

__all__ = ["Exclusion", "covering"]

Exclusion = tuple[tuple[str, ...], "Callable[[Mapping[str, Any]], bool]"]
"""Names of axes, and whether values of theirs cannot be together."""


def covering(
    axes: Mapping[str, Sequence[Hashable]], strength: int, exclusions: Sequence[Exclusion] = ()
) -> list[dict[str, Any]]:
    """Rows that together have every possible choice of values of any ``strength`` axes.

    They follow from the arguments: the same rows every time, on any machine.

    Args:
        axes: The values of each; one without values makes no rows.
        strength: 2 for pairs, 3 for triples; of fewer axes all their combinations.
        exclusions: What cannot be together: no row has it, and nothing is to cover it.
    """
    if not all(axes.values()):
        return []
    # By number: which values they are is not covertable's concern, nor how they are hashed.
    numbers = {name: list(range(len(values))) for name, values in axes.items()}
    rows = covertable.make(
        numbers,
        strength=min(strength, len(axes)),
        constraints=[_constraint(axes, each) for each in exclusions if set(each[0]) <= set(axes)],
    )
    found = [{name: row[name] for name in axes} for row in rows]
    # Plainest first: the first values of the axes, as a reader would ask them.
    found.sort(key=lambda row: tuple(row.values()))
    return [{name: axes[name][number] for name, number in row.items()} for row in found]


def _constraint(axes: Mapping[str, Sequence[Hashable]], exclusion: Exclusion) -> dict[str, Any]:
    names, cannot_be = exclusion

    def allowed(row: Mapping[str, int]) -> bool:
        return not cannot_be({name: axes[name][row[name]] for name in names})

    return {"operator": "fn", "requires": list(names), "evaluate": allowed}
