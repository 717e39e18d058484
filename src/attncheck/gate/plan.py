"""Everything that one kernel is asked, stage by stage, in the order in which it is asked."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from attncheck.gate.bounds import bounds, measurements
from attncheck.gate.contract import contract
from attncheck.gate.probing import probing
from attncheck.gate.searched import searches
from attncheck.gate.surroundings import surroundings
from attncheck.records.run_reports import STAGES
from attncheck.workers.units import Unit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attncheck.gate.planning import Planning
    from attncheck.records.run_reports import Stage

__all__ = ["REPLAYED", "describing", "plan", "priority"]

_KINDS = ("describe", "draw", "ask", "shrink")

REPLAYED = "failed before"
"""Variant of a Case that failed in an earlier run."""


def plan(planning: Planning) -> list[Unit]:
    """The work, each piece once; it follows from the kernel, the choices and nothing else."""
    found = chain.from_iterable(_of(planning, stage) for stage in planning.choices.stages)
    return list({unit.id: unit for unit in found}.values())


def describing(kernels: Sequence[str], *, device: str, tier: str, convention: str) -> list[Unit]:
    """The first work of a gate: what each kernel is."""
    return [
        Unit(
            kind="describe",
            stage="contract",
            kernel=kernel,
            convention=convention,
            device=device,
            tier=tier,
        )
        for kernel in kernels
    ]


def priority(unit: Unit) -> tuple[int, ...]:
    """What is done first: what a kernel is, then stage by stage; a smaller failure last."""
    kind = _KINDS.index(unit.kind)
    again = unit.kind == "ask" and unit.variant == REPLAYED
    return (kind if kind in {0, 3} else 1, not again, STAGES.index(unit.stage), kind)


def _of(planning: Planning, stage: Stage) -> Iterator[Unit]:
    match stage:
        case "contract":
            yield from contract(planning)
        case "probes":
            yield from probing(planning)
        case "bounds":
            yield from bounds(planning)
        case "properties":
            yield from searches(planning)
        case "memory" | "determinism":
            yield from surroundings(planning, stage)
        case "baseline":
            yield from measurements(planning)
