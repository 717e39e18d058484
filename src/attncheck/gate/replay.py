"""Failures of earlier runs, asked again before anything else."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from attncheck.core.errors import UsageError
from attncheck.gate.plan import REPLAYED
from attncheck.inputs.problem import Case
from attncheck.inputs.question_parameters import check_parameters
from attncheck.probes import PROBES
from attncheck.records.failures import MOST_KEPT, is_id, load_failure
from attncheck.verify.question_fit import COMPARE, allowed_parameters, unfit_reason
from attncheck.workers.units import Unit

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from attncheck.records.failures import KeptFailure
    from attncheck.records.run_reports import Stage

__all__ = ["replays"]


def replays(
    kernels: Sequence[str],
    folder: Path | str,
    *,
    device: str,
    convention: str,
    tier: str,
    stages: Collection[Stage],
    dtypes: Collection[str] = (),
) -> list[Unit]:
    """The Cases that these kernels failed, as ``folder`` keeps them, each once; newest first.

    A file that cannot be read, or that holds a Case that another version asked and this one cannot,
    is no reason to stop.

    Args:
        kernels: As asked for.
        folder: Of ``reporting.failures.keep``.
        device: Only those that failed there.
        convention: Of the kernels.
        tier: Of the units.
        stages: Only those that belong to these.
        dtypes: Only these; empty for all.
    """
    found: dict[str, Unit] = {}
    for failed in _failures(Path(folder)):
        if failed.kernel not in kernels or failed.device != device:
            continue
        stage = _stage(failed)
        case = _case(failed)
        if case is None or stage not in stages or (dtypes and case.problem.dtype not in dtypes):
            continue
        unit = Unit(
            kind="ask",
            stage=stage,
            kernel=failed.kernel,
            convention=failed.convention or convention,
            device=device,
            tier=tier,
            variant=REPLAYED,
            test=_test(failed.test),
            case=case.to_json(),
        )
        found.setdefault(unit.id, unit)
    return list(found.values())


def _failures(folder: Path) -> Iterator[KeptFailure]:
    def age(path: Path) -> tuple[float, str]:
        try:
            return -path.stat().st_mtime, path.name
        except OSError:
            return 0.0, path.name

    for path in sorted((p for p in folder.glob("*.json") if is_id(p.stem)), key=age)[:MOST_KEPT]:
        try:
            yield load_failure(path)
        except UsageError:
            continue


def _case(failed: KeptFailure) -> Case | None:
    """None where it can be asked no more."""
    try:
        case = Case.from_json(failed.record.case)
        question, problem = case.question, case.problem
        if unfit_reason(question, problem) is not None:
            return None
        check_parameters(question, case.parameters, allowed_parameters(question, problem))
    except UsageError:
        return None
    return case


def _stage(failed: KeptFailure) -> Stage:
    question = str(failed.record.case.get("question"))
    if failed.test:
        return "properties"
    if question in PROBES:
        return "probes"
    return "bounds" if question == COMPARE else "memory"


def _test(nodeid: str) -> str:
    """``test_causal.py::test_x`` of ``properties/test_causal.py::test_x[triton-flash2-bf16]``."""
    path, separator, name = nodeid.partition("::")
    return f"{Path(path).name}{separator}{name.partition('[')[0]}" if separator else ""
