"""``attncheck rmse --explain CELL``: one kernel on one problem, term by term."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.cli.standard_output import standard_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.capabilities.subject import Subject
    from attncheck.records.record import Report
    from attncheck.runner.plan import Cell

__all__ = ["explain"]


def explain(name: str, cells: Sequence[Cell], subjects: Sequence[Subject], device: str) -> Report:
    """Measure the one cell called ``name``, and show what its verdict is made of.

    Raises UsageError where ``name`` names none of ``cells``, or several.
    """
    from attncheck.reporting.check_document import explanation
    from attncheck.reporting.rendering import show
    from attncheck.runner.choose import chosen
    from attncheck.verify.verify import measure, pairs

    cell, subject = chosen(name, pairs(cells, subjects, device))
    report = measure([cell], [subject], device=device, command="")
    (record,) = report.records
    with standard_output():
        show(record, document=explanation)
    return report
