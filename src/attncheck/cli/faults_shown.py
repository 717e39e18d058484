"""The reports of ``attncheck faults``: files, and a table on standard output."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from attncheck.cli.standard_output import standard_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    import msgspec

    from attncheck.cli.interrupts import Interrupts

__all__ = ["show"]


def show(
    interrupts: Interrupts, report: msgspec.Struct, outputs: Sequence[tuple[str, str]]
) -> None:
    """Writes each file in its format, then shows the table.

    Args:
        interrupts: Of the verb.
        report: What was found.
        outputs: Files and their formats.
    """
    from attncheck.core.files import write_texts
    from attncheck.reporting import rendering

    for file, fmt in outputs:
        path = Path(file)
        with interrupts.writing(str(path.parent)):
            write_texts({path.name: rendering.render(report, fmt)}, path.parent, instead="file")
    with standard_output():
        rendering.show(report)
