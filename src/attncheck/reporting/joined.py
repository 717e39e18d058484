"""Several reports as one: a run that was shared out over processes or machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.core.errors import UsageError
from attncheck.records.record import Report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.records.record import Record

__all__ = ["joined"]


def joined(reports: Sequence[Report]) -> Report:
    """The records of all, in the order given; the command lines one after the other.

    A kernel is absent where it is in every report that asked for it.

    Raises:
        UsageError: where two reports measured the same kernel on the same Case and machine.
    """
    if len(reports) == 1:
        return reports[0]
    records = tuple(record for report in reports for record in report.records)
    seen: set[tuple[str, str, str]] = set()
    for record in records:
        if _place(record) in seen:
            raise UsageError(
                f"{record.kernel} on {record.variant} {record.heads} is in two of the reports: "
                "give each part of a run once."
            )
        seen.add(_place(record))
    kernels = {name: text for report in reports for name, text in report.kernels.items()}
    present = {name for report in reports for name in set(report.kernels) - set(report.absent)}
    return Report(
        command="; ".join(dict.fromkeys(report.command for report in reports)),
        environments={key: env for report in reports for key, env in report.environments.items()},
        kernels=kernels,
        absent={
            name: why
            for report in reports
            for name, why in report.absent.items()
            if name not in present
        },
        records=records,
    )


def _place(record: Record) -> tuple[str, str, str]:
    return record.kernel, record.environment, f"{record.variant} {record.case}"
