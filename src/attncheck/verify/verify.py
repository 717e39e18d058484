"""The loop: each subject on each case gives a Record; all of them a Report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.inputs.problem import Case
from attncheck.records.record import Record, Report
from attncheck.verify.environment import environment, fingerprint, prepare
from attncheck.verify.evidence import Evidence
from attncheck.verify.executor import InProcess
from attncheck.verify.run_case import compare

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attncheck.capabilities.subject import Subject
    from attncheck.runner.plan import Cell

__all__ = ["absences", "concerned", "measure", "pairs"]


def absences(subjects: Sequence[Subject], device: str) -> dict[str, str]:
    """Subjects that can run nothing on ``device``, by name, each with the reason."""
    executor = InProcess()
    return {s.name: why for s in subjects if (why := executor.absence(s, device))}


def concerned(cells: Sequence[Cell], subjects: Sequence[Subject]) -> list[Subject]:
    """Those of ``subjects`` for which at least one cell is a question."""
    executor = InProcess()
    return [s for s in subjects if any(executor.concerns(s, c.problem) for c in cells)]


def pairs(
    cells: Sequence[Cell], subjects: Sequence[Subject], device: str
) -> list[tuple[Cell, list[Subject]]]:
    """Each cell with the subjects that it concerns, of those that can run something here."""
    absent = absences(subjects, device)
    present = [subject for subject in subjects if subject.name not in absent]
    return [(cell, concerned([cell], present)) for cell in cells]


def measure(
    cells: Sequence[Cell],
    subjects: Sequence[Subject],
    *,
    device: str,
    command: str,
    done: Callable[[Record], None] = lambda _: None,
) -> Report:
    """Compare every subject with the exact result on every cell that concerns it.

    Args:
        cells: What to compute.
        subjects: The kernels. Those that can run nothing on ``device`` are named once in the
            Report, not in every cell; those that no cell concerns, not at all.
        device: ``cpu`` or ``cuda``.
        command: The command line, for the Report.
        done: Called with each Record as it is made.
    """
    prepare(device)
    executor, subjects = InProcess(), concerned(cells, subjects)
    env = environment(device)
    key = fingerprint(env)
    records = []
    for cell, asked in pairs(cells, subjects, device):
        evidence = Evidence(Case(problem=cell.problem), device)
        for subject in asked:
            record = compare(
                subject, evidence, variant=cell.variant, environment=key, executor=executor
            )
            records.append(record)
            done(record)
    return Report(
        command=command,
        environments={key: env},
        kernels={s.name: s.summary for s in subjects},
        absent=absences(subjects, device),
        records=tuple(records),
    )
