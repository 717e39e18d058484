"""The reports of ``attncheck faults``: files, and a table on standard output."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from attncheck.cli.standard_output import standard_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.cli.interrupts import Interrupts

__all__ = ["show"]


def show(
    interrupts: Interrupts, report: Any, outputs: Sequence[tuple[str, str]], pages: Any
) -> None:
    """Writes each file in its format, then shows the table.

    Args:
        interrupts: Of the verb.
        report: What ``pages`` renders.
        outputs: Files and their formats.
        pages: A module of ``reporting`` with ``render`` and ``show``.
    """
    from attncheck.reporting.files import write_texts

    for file, fmt in outputs:
        path = Path(file)
        with interrupts.writing(str(path.parent)):
            write_texts({path.name: pages.render(report, fmt)}, path.parent, instead="file")
    with standard_output():
        pages.show(report)
