"""``attncheck rmse --explain CELL``: one kernel on one problem, term by term."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.cli.standard_output import standard_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.capabilities.subject import Subject
    from attncheck.cases.variants import Cell
    from attncheck.records.record import Report

__all__ = ["explain"]


def explain(name: str, cells: Sequence[Cell], subjects: Sequence[Subject], device: str) -> Report:
    """Measure the one cell called ``name``, and show what its verdict is made of.

    Raises UsageError where ``name`` names none of ``cells``, or several.
    """
    from attncheck.cases.variants import choose_cell
    from attncheck.inputs.problem import Case
    from attncheck.reporting.check_document import explanation
    from attncheck.reporting.rendering import show
    from attncheck.verify.verify import case_subjects, verify

    concerned = case_subjects([cell.problem for cell in cells], subjects, device)
    cell, subject = choose_cell(name, list(zip(cells, concerned, strict=True)))
    asked = [(cell.variant, Case(problem=cell.problem))]
    report = verify(subject, asked, device=device, applicable_only=True, timed=True)
    (record,) = report.records
    with standard_output():
        show(record, document=explanation)
    return report
