"""``--sanitizer``: a few small problems of a kernel under NVIDIA's compute-sanitizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from attncheck.inputs.problem import Case, Problem
from attncheck.mods.spec import Spec
from attncheck.records.run_reports import Answer
from attncheck.verify import sanitizer
from attncheck.workers.units import Done

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.gate.planning import Planning
    from attncheck.records.run_reports import Stage
    from attncheck.workers.units import Unit

__all__ = ["VARIANT", "sanitized", "sanitizing"]

VARIANT = "compute-sanitizer"
"""With a tool's name after it, the variant of its units."""

_STAGE: Stage = "memory"
_TOOLS = ("memcheck", "racecheck", "synccheck")
_ON_A_CPU = "compute-sanitizer sees nothing of a CPU"
# No multiples of a tile, since what reads too far does so there. Small: a tool takes tens of times
# as long, and torch is imported under it.
_PROBLEMS: tuple[dict[str, Any], ...] = (
    {"query": 77, "kv": 93, "heads": 2, "mask": Spec.of("causal")},
    {"query": 1, "kv": 129},
    {"query": 40, "kv": 70, "mask": Spec.of("causal"), "backward": True},
)


def sanitizing(planning: Planning) -> Iterator[Unit]:
    """A unit for each tool, each with all problems: most of its time its process takes to begin.

    Where there is none, nothing is asked: one answer says so, and fails nothing.
    """
    if not planning.choices.sanitizer:
        return
    found = _cases(planning)
    if not found:
        return
    why = _ON_A_CPU if planning.device == "cpu" else ""
    why = why or ("" if sanitizer.sanitizer() else sanitizer.ABSENT)
    if why:
        planning.drop(_STAGE, found[0], VARIANT, why)
        return
    for tool in _TOOLS:
        yield planning.ask(_STAGE, found[0], f"{VARIANT} {tool}")


def sanitized(unit: Unit, planning: Planning) -> Done:
    """What the tool of ``unit`` says of the kernel: an answer for each problem."""
    tool = unit.variant.removeprefix(VARIANT).strip()
    records = sanitizer.sanitized(
        unit.kernel,
        _cases(planning),
        tool,
        convention=unit.convention,
        device=unit.device,
    )
    named = {
        "kernel": planning.subject.name,
        "variant": unit.variant,
        "environment": planning.environment,
    }
    answers = tuple(
        Answer(unit=unit.id, stage=unit.stage, record=replace(record, **named))
        for record in records
    )
    return Done(unit=unit.id, answers=answers)


def _cases(planning: Planning) -> list[Case]:
    """The problems, as the kernel takes them, each once."""
    if not planning.dtypes:
        return []
    problems = (Problem(dtype=_dtype(planning), **fields) for fields in _PROBLEMS)
    found = (planning.nearest(each) for problem in problems for each in planning.concerned(problem))
    return [Case(problem=each) for each in dict.fromkeys(found) if each is not None]


def _dtype(planning: Planning) -> str:
    """One with gradients, where there is one."""
    return next((d for d in planning.dtypes if d in {"bf16", "fp16"}), planning.dtypes[0])
