"""Everything that one kernel is asked, stage by stage, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from attncheck.core.errors import UsageError
from attncheck.gate.bound_stage import baseline_units, bound_units
from attncheck.gate.planning import Planning
from attncheck.gate.property_stage import property_units
from attncheck.gate.stages import contract_units, probe_units, surrounding_units
from attncheck.inputs.problem import Case, check_parameters
from attncheck.records.failures import MOST_KEPT, KeptFailure, is_id, load_failure
from attncheck.records.run_reports import STAGES, Stage
from attncheck.verify.question_fit import COMPARE, allowed_parameters, is_probe, unfit_reason
from attncheck.workers.units import Unit

REPLAYED = "failed before"  # variant of a Case that failed in an earlier run

_UNITS: Mapping[Stage, Callable[[Planning], Iterator[Unit]]] = {
    "contract": contract_units,
    "probes": probe_units,
    "bounds": bound_units,
    "properties": property_units,
    "memory": lambda planning: surrounding_units(planning, "memory"),
    "determinism": lambda planning: surrounding_units(planning, "determinism"),
    "baseline": baseline_units,
}
# What is done first: nothing can be asked before a kernel is described.
_KINDS = ("describe", "draw", "ask", "shrink")


def plan_kernel(planning: Planning) -> list[Unit]:
    """Return the work, each unit once; it follows from the kernel, the choices and nothing else."""
    units = chain.from_iterable(_UNITS[stage](planning) for stage in planning.choices.stages)
    return list({unit.id: unit for unit in units}.values())


def describe_units(
    kernels: Sequence[str], *, device: str, tier: str, convention: str
) -> list[Unit]:
    """Return the first work of a gate: what each kernel is."""
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
    """Order units: what a kernel is, then stage by stage, smaller failures last."""
    kind = _KINDS.index(unit.kind)
    # A case that failed before most likely fails again, and its author waits for that answer.
    again = unit.kind == "ask" and unit.variant == REPLAYED
    return (kind if kind in {0, 3} else 1, not again, STAGES.index(unit.stage), kind)


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
    """Return the cases that these kernels failed before, each once; newest first.

    A file that cannot be read, or that holds a Case that another version asked and this one cannot,
    is no reason to stop.

    Args:
        folder: Where ``attncheck repro`` finds failures.
        device: Only those that failed there.
        stages: Only those that belong to these.
        dtypes: Only these; empty for all.
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


def _kept_failures(folder: Path) -> Iterator[KeptFailure]:
    def age(path: Path) -> tuple[float, str]:
        try:
            return -path.stat().st_mtime, path.name
        # Another run may have removed the file meanwhile.
        except OSError:
            return 0.0, path.name

    for path in sorted((p for p in folder.glob("*.json") if is_id(p.stem)), key=age)[:MOST_KEPT]:
        try:
            yield load_failure(path)
        except UsageError:
            continue


def _askable_case(failure: KeptFailure) -> Case | None:
    try:
        case = Case.from_json(failure.record.case)
        # Another version may have kept it, which asked other questions.
        question, problem = case.question, case.problem
        if unfit_reason(question, problem) is not None:
            return None
        check_parameters(question, case.parameters, allowed_parameters(question, problem))
    except UsageError:
        return None
    return case


def _stage_of(failure: KeptFailure) -> Stage:
    question = str(failure.record.case.get("question"))
    if failure.test:
        return "properties"
    if is_probe(question):
        return "probes"
    # Two stages ask relations; a kept failure does not say which of them it was.
    return "bounds" if question == COMPARE else "memory"


def _test_name(nodeid: str) -> str:
    """Return ``test_causal.py::test_x`` of ``properties/test_causal.py::test_x[ideal-bf16]``."""
    path, separator, name = nodeid.partition("::")
    return f"{Path(path).name}{separator}{name.partition('[')[0]}" if separator else ""
