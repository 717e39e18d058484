"""The plan of one kernel: all questions, stage by stage, and their order."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from msgspec.structs import replace

from attncheck.core.errors import UsageError
from attncheck.gate.bound_stage import baseline_units, bound_units
from attncheck.gate.planning import Planning
from attncheck.gate.property_stage import property_units
from attncheck.gate.stages import (
    SANITIZER_VARIANT,
    contract_units,
    probe_units,
    surrounding_units,
)
from attncheck.inputs.problem import Case
from attncheck.probes import PROBES
from attncheck.records.failures import MAX_STORED, StoredFailure, is_id, load_failure
from attncheck.records.run_reports import STAGES, Stage
from attncheck.verify.question_fit import COMPARE, can_be_asked
from attncheck.workers.units import Unit

REPLAYED = "failed before"  # Variant of a Case that failed in an earlier run.

_UNITS: Mapping[Stage, Callable[[Planning], Iterator[Unit]]] = {
    "contract": contract_units,
    "probes": probe_units,
    "bounds": bound_units,
    "properties": property_units,
    "memory": lambda planning: surrounding_units(planning, "memory"),
    "determinism": lambda planning: surrounding_units(planning, "determinism"),
    "baseline": baseline_units,
}
# Stages of covering arrays. They take seconds to compute, so a unit of its own does that.
_COVERING: tuple[Stage, ...] = ("bounds", "baseline")
# Kinds of units in the order of their priority.
_KINDS = ("describe", "draw", "ask", "shrink")
# Fields of a Problem that seldom or never change the compiled kernel.
_RUNTIME_FIELDS = {"batch", "heads", "kv_heads", "query", "kv", "scale", "distribution", "seed"}


def plan_kernel(planning: Planning) -> list[Unit]:
    """Return the distinct units of a kernel, which depend only on the kernel and the choices."""
    stages = planning.choices.stages
    covering = not set(_COVERING).isdisjoint(stages)
    units = _units_of(planning, [stage for stage in stages if stage not in _COVERING])
    # One unit draws both stages, because they share their cases.
    draw = replace(planning.unit, kind="draw", stage="bounds", alone=False)
    return [*units, draw] if covering else units


def covering_units(planning: Planning) -> list[Unit]:
    """Return the distinct units of the stages ``bounds`` and ``baseline``."""
    return _units_of(planning, [each for each in planning.choices.stages if each in _COVERING])


def _units_of(planning: Planning, stages: Sequence[Stage]) -> list[Unit]:
    units = chain.from_iterable(_UNITS[stage](planning) for stage in stages)
    return list({unit.id: unit for unit in units}.values())


def describe_units(
    kernels: Sequence[str], *, device: str, tier: str, convention: str
) -> list[Unit]:
    """Return the first units of a gate, which describe the kernels."""
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
    """Return a unit's sort key: ``describe`` first, then stage by stage, ``shrink`` last."""
    kind = _KINDS.index(unit.kind)
    # Cases that failed before come first, since they are the most likely ones to fail.
    is_replayed = unit.kind == "ask" and unit.variant == REPLAYED
    return (kind if kind in {0, 3} else 1, not is_replayed, STAGES.index(unit.stage), kind)


def kernel_key(unit: Unit) -> str:
    """Return a key that is equal for questions that most likely run the same compiled kernels.

    It is empty where nothing is compiled, and for compute-sanitizer, whose processes compile anew.
    """
    sanitizes = unit.variant.startswith(SANITIZER_VARIANT)
    if unit.device == "cpu" or unit.kind != "ask" or sanitizes:
        return ""
    fields = {k: v for k, v in unit.case["problem"].items() if k not in _RUNTIME_FIELDS}
    # The arguments of masks and score mods are passed when a kernel is launched.
    names = {part: fields.pop(part)["name"] for part in ("mask", "score") if part in fields}
    return json.dumps([unit.kernel, unit.commit, names, fields], sort_keys=True)


# ------------------------------------------------------------ failures of earlier runs


def replay_units(
    kernels: Sequence[str],
    folder: Path | str,
    *,
    device: str,
    convention: str,
    tier: str,
    stages: Collection[Stage],
    dtypes: Collection[str] = (),
) -> list[Unit]:
    """Return units for the distinct cases that these kernels failed in earlier runs, newest first.

    Files that cannot be read, and Cases of other versions that cannot be asked, are skipped.

    Args:
        folder: Folder of stored failures.
        device: Only failures on this device.
        stages: Only failures that belong to these stages.
        dtypes: Only failures in these dtypes; empty for all.
    """
    units: dict[str, Unit] = {}
    for failure in _kept_failures(Path(folder)):
        stage, case = _stage_of(failure), _askable_case(failure)
        if failure.kernel not in kernels or failure.device != device or stage not in stages:
            continue
        if case is None or (dtypes and case.problem.dtype not in dtypes):
            continue
        unit = Unit(
            kind="ask",
            stage=stage,
            kernel=failure.kernel,
            convention=failure.convention or convention,
            device=device,
            tier=tier,
            variant=REPLAYED,
            test=_test_name(failure.test),
            case=case.to_json(),
        )
        units.setdefault(unit.id, unit)
    return list(units.values())


def _kept_failures(folder: Path) -> Iterator[StoredFailure]:
    def age(path: Path) -> tuple[float, str]:
        try:
            return -path.stat().st_mtime, path.name
        # Another run may have removed the file.
        except OSError:
            return 0.0, path.name

    for path in sorted((p for p in folder.glob("*.json") if is_id(p.stem)), key=age)[:MAX_STORED]:
        try:
            yield load_failure(path)
        except UsageError:
            continue


def _askable_case(failure: StoredFailure) -> Case | None:
    try:
        case = Case.from_json(failure.record.case)
    except UsageError:
        return None
    # Another version with different questions may have stored it.
    return case if can_be_asked(case) else None


def _stage_of(failure: StoredFailure) -> Stage:
    question = str(failure.record.case.get("question"))
    if failure.test:
        return "properties"
    if question in PROBES:
        return "probes"
    # Two stages ask relations, and a stored failure does not name its stage.
    return "bounds" if question == COMPARE else "memory"


def _test_name(nodeid: str) -> str:
    """Return ``test_causal.py::test_x`` for ``properties/test_causal.py::test_x[ideal-bf16]``."""
    path, separator, name = nodeid.partition("::")
    return f"{Path(path).name}{separator}{name.partition('[')[0]}" if separator else ""
