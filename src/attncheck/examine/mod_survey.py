"""Every mod of a file in every world: one ModReport."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from attncheck.errors import AttncheckError, ProblemError, UsageError
from attncheck.examine.environment import environment
from attncheck.examine.executor import InProcess
from attncheck.examine.mod_worlds import worlds
from attncheck.mod_record import Answer, ModRecord, ModReport
from attncheck.mods.in_file import defined_at, kind_of_mod, mods_in
from attncheck.mods.index_ranges import check_index_ranges
from attncheck.mods.spec import Dimensions, Spec
from attncheck.mods.trace import trace_mask, trace_score
from attncheck.problem import Problem
from attncheck.source_files import attribute, import_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attncheck.examine.mod_worlds import ModWorlds, World
    from attncheck.subjects.contract import Subject

__all__ = [
    "MOST_PLACES",
    "concerns_mods",
    "dimensions_of",
    "mods_of_file",
    "refusals",
    "survey",
    "takes_any_mod",
]

MOST_PLACES = 2**20
"""Index tuples of one comparison: every one is evaluated on mpmath numbers."""

_SIZE = r"([1-9]\d{0,8})"
_SHAPE = re.compile(f"{_SIZE}x{_SIZE}x{_SIZE}(?:/{_SIZE})?")


def dimensions_of(shape: str) -> Dimensions:
    """The index ranges ``BxHxL``, or ``BxHxQUERY/KV``; raises ProblemError for anything else."""
    match = _SHAPE.fullmatch(shape.strip().lower())
    if not match:
        raise ProblemError(
            f"shape {shape!r} is not BATCHxHEADSxLENGTH, with /KV after LENGTH, such as 2x2x40/48."
        )
    batch, heads, query, kv = (int(size) for size in match.groups(match[3]))
    if batch * heads * query * kv > MOST_PLACES:
        places = batch * heads * query * kv
        raise ProblemError(
            f"shape {shape!r} has {places} places (b, h, q_idx, kv_idx): at most {MOST_PLACES} are "
            "compared."
        )
    return Dimensions(batch=batch, heads=heads, query=query, kv=kv)


def mods_of_file(reference: str, device: str) -> dict[str, Callable[..., Any]]:
    """The mods of ``FILE.py``, or the one of ``FILE.py::NAME``, their tensors on ``device``.

    Raises:
        UsageError: for a file that cannot be imported or holds no mod, or a name that is none.
    """
    file, separator, name = reference.partition("::")
    what = f"mods of {reference!r}"
    if not file or (separator and not name):
        missing = "name after '::'" if file else "file"
        raise UsageError(f"{what}: there is no {missing}: give FILE.py or FILE.py::NAME.")
    with torch.device(device):
        module = import_file(Path(file), what)
    takes = "(b, h, q_idx, kv_idx) or (score, b, h, q_idx, kv_idx)"
    if not name:
        found = mods_in(module)
        if not found:
            raise UsageError(f"{what}: there are none: a mod is a public name that takes {takes}.")
        return found
    mod = attribute(module, Path(file), name, what)
    if kind_of_mod(mod) is None:
        raise UsageError(f"{what}: {name!r} is no mod: it does not take {takes}.")
    return {name: mod}


def refusals(
    mods: Mapping[str, Callable[..., Any]], file: str, dimensions: Dimensions, device: str
) -> list[str]:
    """Why each mod that cannot be compared cannot, in a line that names it and its place.

    Args:
        mods: By name.
        file: Their file's own name.
        dimensions: The index ranges: none may lead outside a captured tensor.
        device: Where the tensors are that they capture.
    """
    reasons = []
    for name, mod in mods.items():
        kind = kind_of_mod(mod)
        trace = trace_mask if kind == "mask" else trace_score
        try:
            check_index_ranges(trace(mod, device), dimensions, f"{kind} {name!r}")
        except AttncheckError as error:
            line = defined_at(mod)
            place = f"{file}:{line}" if line else file
            reasons.append(f"{place}: {name}: {error}")
    return reasons


def concerns_mods(subject: Subject) -> bool:
    """Whether mods are a question for a kernel at all: they are none for a softmax."""
    return InProcess().concerns(subject, Problem(query=16, head_dim=16, dtype="fp32"))


def takes_any_mod(subject: Subject, device: str) -> bool:
    """Whether a kernel takes any mask and score mod, in fp32: asked where no kernel is named."""
    problem = Problem(
        query=16,
        head_dim=16,
        dtype="fp32",
        mask=Spec.of("expression", text="(q_idx + kv_idx) % 2 == 0"),
        score=Spec.of("softcap", cap=1.0),
    )
    executor = InProcess()
    return executor.concerns(subject, problem) and not executor.refusal(subject, problem, device)


def survey(
    mods: Mapping[str, Callable[..., Any]],
    subjects: Sequence[Subject],
    *,
    file: str,
    dimensions: Dimensions,
    device: str,
    command: str,
    done: Callable[[str], None] = lambda _: None,
) -> ModReport:
    """Compare each mod's callable with mpmath and with what each kernel makes of it.

    Args:
        mods: By name; those that ``refusals`` names first belong to a usage error.
        subjects: The kernels.
        file: The mods' file's own name.
        dimensions: The index ranges.
        device: ``cpu`` or ``cuda``.
        command: The command line, for the report.
        done: Called with the name of each mod as it is done.
    """
    records = []
    for name, mod in mods.items():
        (found,) = worlds({name: mod}, subjects, device=device, dimensions=dimensions)
        records.append(_record(found, defined_at(mod)))
        done(name)
    sizes = (dimensions.batch, dimensions.heads, dimensions.query, dimensions.kv)
    return ModReport(
        command=command,
        environment=environment(device),
        mpmath=metadata.version("mpmath"),
        file=file,
        shape=" ".join(f"{axis}{size}" for axis, size in zip("BHQK", sizes, strict=True)),
        worlds={"mpmath": "160 bits"} | {s.name: s.summary for s in subjects},
        records=tuple(records),
    )


def _record(found: ModWorlds, line: int | None) -> ModRecord:
    if found.reason:
        raise UsageError(found.reason)
    kind = cast("Any", found.kind)
    answers = {world.name: _answer(world) for world in found.worlds}
    return ModRecord(
        name=found.name, kind=kind, line=line, expression=found.expression, answers=answers
    )


def _answer(world: World) -> Answer:
    detail = world.reason
    if world.difference is not None:
        detail = f"{world.differing} of {world.compared} places, first {world.difference}"
    return Answer(status=world.status, detail=detail)
