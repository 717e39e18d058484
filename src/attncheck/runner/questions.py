"""What to measure where no variant says it: mods of the user's own, and recorded inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncheck.core.errors import ProblemError, UnknownName, UsageError, without_recorded
from attncheck.core.formats import round_to
from attncheck.mods.library import FULL, NONE
from attncheck.mods.masks import MASKS
from attncheck.mods.mod_files import load_mask, load_score
from attncheck.mods.scores import SCORES
from attncheck.mods.spec import Entry, Spec
from attncheck.runner.plan import Cell, check_measured, check_memory
from attncheck.runner.variants import Variant

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attncheck.inputs.problem import Problem
    from attncheck.inputs.recorded_calls import Recording

__all__ = ["own_variant", "recorded"]


def own_variant(mask: str | None, score: str | None) -> Variant:
    """A variant of a mask and a score mod as typed: ``FILE.py::NAME``, or a name of the library.

    Raises:
        UsageError: for a file, name or callable that cannot be (``mods.own``), or a mod of the
            library that is not known.
        ProblemError: for one of the library that needs numbers, which a command line cannot give.
    """
    specs = (
        _spec(mask, "mask", MASKS, load_mask) if mask is not None else FULL,
        _spec(score, "score mod", SCORES, load_score) if score is not None else NONE,
    )
    name = " ".join(spec.name for spec in specs if spec != NONE)
    return Variant(name=name, summary="as typed", mods=lambda _: specs)


def _spec(
    text: str, kind: str, entries: Mapping[str, Entry[Any]], adopt: Callable[[str], Spec]
) -> Spec:
    if "::" in text or text.endswith(".py"):  # or its beginning: ``adopt`` says what is missing
        return adopt(text)
    complete = [name for name, entry in entries.items() if not (entry.arguments or entry.compose)]
    if text not in entries:
        raise UnknownName(kind, text, without_recorded(complete))
    if text not in complete:
        raise ProblemError(f"{kind} {text!r} needs numbers or parts: write it as FILE.py::NAME.")
    return Spec.of(text)


def recorded(path: str, dtypes: Sequence[str]) -> list[Cell]:
    """The recorded calls of a safetensors file, in their own dtype or in each of ``dtypes``.

    Raises UsageError for a file that is not a recording (``recording_file.load``), and for numbers
    that a dtype does not hold.
    """
    from attncheck.inputs import recording_file

    for name in dtypes:
        check_measured(name)
    calls = recording_file.load(path)
    cells = []
    for dtype in dict.fromkeys(dtypes) or (None,):
        for recording in calls:
            problem = recording.problem(dtype)
            check_memory(problem)
            _check_range(recording, problem)
            cells.append(Cell(variant=recording.call.name, problem=problem))
    return cells


def _check_range(recording: Recording, problem: Problem) -> None:
    """Raises UsageError where a number would become infinite in the Problem's dtype.

    In fp8 none does: a head's descale, an fp32 number, brings its largest to the format's.
    """
    fmt = problem.formats.products  # in tf32 kernels read what is stored in fp32
    if problem.formats.scaled:
        return
    for name in ("q", "k", "v"):
        sizes = getattr(recording, name).abs()
        if round_to(sizes.max().double(), fmt).isfinite():  # rounding is monotonic
            continue
        count = int((sizes.double() > fmt.max).sum())
        raise UsageError(
            f"{name} of call {recording.call.name!r} has {count} number{'s' * (count > 1)} beyond "
            f"{fmt.name}'s {fmt.max:g}: choose another dtype, such as its own, "
            f"{recording.call.dtype}."
        )
