"""What a page shows of a Judgement: its cells, its footnote, its remarks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.reporting import figures
from attncheck.reporting.cells import Cell, Look

if TYPE_CHECKING:
    from attncheck.core.judgement import Judgement
    from attncheck.records.record import Record, Status

__all__ = ["JUDGED", "STATUSES", "footnote", "share_cell", "verdict_cells", "verdict_remarks"]

STATUSES: dict[Status, Look] = {
    "pass": "good",
    "warn": "notable",
    "inconclusive": "notable",
    "fail": "bad",
    "flaky": "notable",
    "error": "bad",
    "crash": "bad",
    "timeout": "bad",
    "oom": "bad",
    "oracle disagrees": "notable",
    "unsupported": "dim",
}
"""Every status in the order in which they are counted, and how it looks."""

JUDGED: frozenset[Status] = frozenset({"pass", "warn", "inconclusive", "fail"})
"""Those that mean that there are numbers."""


def verdict_cells(record: Record, note: int) -> dict[str, Cell]:
    """``verdict``, ``share`` and ``lse_share`` of a judged record; ``note`` is its footnote's."""
    mark = f" {figures.superscript(note)}" if note else ""
    found = record.judgement
    return {
        "verdict": Cell(f"{record.status}{mark}", STATUSES[record.status]),
        "share": share_cell(found.out_over_bound if found else None),
        "lse_share": share_cell(found.lse_over_bound if found else None),
    }


def share_cell(share: float | None) -> Cell:
    """An error as a part of its bound; bad beyond it."""
    if share is None:
        return Cell(figures.NOTHING, "dim")
    return Cell(figures.share(share), "plain" if share <= 1 else "bad")


def footnote(record: Record) -> str:
    """Why the record has its status, in one line; empty where a pass needs no reason."""
    found = record.judgement
    if record.status not in JUDGED or found is None:
        return "" if record.status in JUDGED else record.reason or "no reason given"
    said = ": ".join(part for part in (found.rule, found.reason) if part)
    return said if said or record.status == "pass" else "no reason given"


def verdict_remarks(found: Judgement | None) -> tuple[Cell, ...]:
    """Warnings beside the verdict, rows that were not judged, and another profile that fits."""
    if found is None:
        return ()
    remarks = [Cell(warning, "notable") for warning in found.warnings if warning != found.reason]
    if found.rows_unbounded:
        jumps = f" ({found.jumps} scores at a jump of the mod)" if found.jumps else ""
        text = (
            f"not judged: {found.rows_unbounded} of {found.rows} rows have no finite bound{jumps}"
        )
        remarks.append(Cell(text, "notable"))
    if found.lse_also_within:
        remarks.append(Cell(f"LSE is also within: {found.lse_also_within}", "dim"))
    return tuple(remarks)
