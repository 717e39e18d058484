"""What to measure where no variant says it: mods of the user's own, and recorded inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.errors import ProblemError, UnknownName
from attncheck.mods.library import FULL, MASKS, NONE, SCORES
from attncheck.mods.own import is_reference, own_mask, own_score
from attncheck.mods.spec import Spec
from attncheck.runner.plan import Cell, Variant, check_measured, check_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["own_variant", "recorded"]


def own_variant(mask: str | None, score: str | None) -> Variant:
    """A variant of a mask and a score mod as typed: ``FILE.py::NAME``, or a name of the library.

    Raises:
        UsageError: for a file, name or callable that cannot be (``mods.own``), or a mod of the
            library that is not known.
        ProblemError: for one of the library that needs numbers, which a command line cannot give.
    """
    specs = (
        _spec(mask, "mask", MASKS, own_mask) if mask is not None else FULL,
        _spec(score, "score mod", SCORES, own_score) if score is not None else NONE,
    )
    name = " ".join(spec.name for spec in specs if spec != NONE)
    return Variant(name=name, summary="as typed", mods=lambda _: specs)


def _spec(
    text: str, kind: str, entries: Mapping[str, object], adopt: Callable[[str], Spec]
) -> Spec:
    if is_reference(text):
        return adopt(text)
    if text not in entries:
        raise UnknownName(kind, text, entries)
    entry = entries[text]
    if getattr(entry, "arguments", None) or getattr(entry, "compose", None):
        raise ProblemError(f"{kind} {text!r} needs numbers or parts: write it as FILE.py::NAME.")
    return Spec.of(text)


def recorded(path: str, dtypes: Sequence[str]) -> list[Cell]:
    """The recorded calls of a safetensors file, in their own dtype or in ``dtypes``.

    Raises UsageError for a file that is not a recording (``recordings.load``).
    """
    from attncheck import recordings

    for dtype in dtypes:
        check_measured(dtype)
    calls = recordings.load(path)
    cells = [
        Cell(variant=recording.call.name, problem=recording.problem(dtype))
        for dtype in dtypes or (None,)
        for recording in calls
    ]
    for cell in cells:
        check_memory(cell.problem)
    return cells
