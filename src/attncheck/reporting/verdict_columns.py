"""A Judgement as columns of the CSV: every number of it under a name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncheck.core.judgement import BlindSpot, Judgement, Place, Precision, Worst
from attncheck.core.outputs import GRADIENTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    import msgspec

__all__ = ["verdict_names", "verdict_values"]

# status is the Record's, and its reason is the column of both.
_ELSEWHERE = ("status", "reason")
_PARTS: dict[str, type[msgspec.Struct]] = {
    "worst": Worst,
    "precision": Precision,
    "blind_spot": BlindSpot,
}


def verdict_names() -> list[str]:
    """Headings: a field's own name, those of its parts behind the name of the part."""
    return [name for name, _ in _columns(None)]


def verdict_values(found: Judgement | None) -> list[Any]:
    """The values under ``verdict_names``; None where there is none."""
    return [value for _, value in _columns(found)]


def _columns(found: Judgement | None) -> Iterator[tuple[str, Any]]:
    for name in Judgement.__struct_fields__:
        value = getattr(found, name, None)
        if name in _PARTS:
            yield from _part(name, _PARTS[name], value)
        elif name == "gradients_over_bound":
            given = value if isinstance(value, dict) else {}
            yield from ((f"{gradient}_over_bound", given.get(gradient)) for gradient in GRADIENTS)
        elif name not in _ELSEWHERE:
            yield name, value


def _part(prefix: str, kind: type[msgspec.Struct], value: Any) -> Iterator[tuple[str, Any]]:
    for name in kind.__struct_fields__:
        inner = getattr(value, name, None)
        if name == "at":
            for axis in Place.__struct_fields__:
                yield f"{prefix}_at_{axis}", getattr(inner, axis, None)
        else:
            yield f"{prefix}_{name}", inner
