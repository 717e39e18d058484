"""A report of sheets in the format asked for: what its page draws, and nothing of what it says."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Generic, TextIO, TypeVar

import msgspec
from rich.text import Text

from attncheck.core.errors import UnknownName
from attncheck.core.sanitize_text import for_markdown
from attncheck.reporting import screen, struct_json
from attncheck.reporting.sheet import markdown_lines, terminal_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from attncheck.reporting.sheet import Sheet

__all__ = ["FORMATS", "Page", "paged"]

FORMATS = ("table", "json", "md")

R = TypeVar("R", bound=msgspec.Struct)


class Page(Generic[R]):
    """How the reports of one kind look.

    Args:
        table: Report and width → the lines of a terminal.
        markdown: Report → lines of Markdown.
    """

    def __init__(
        self,
        table: Callable[[R, int], Iterator[Text]],
        markdown: Callable[[R], Iterator[str]],
    ) -> None:
        self._table = table
        self._markdown = markdown

    def render(self, report: R, fmt: str) -> str:
        """``report`` in ``fmt``, one of ``FORMATS``, the same on every machine (no colours).

        Raises UnknownName for another format.
        """
        if fmt not in FORMATS:
            raise UnknownName("format", fmt, FORMATS)
        if fmt == "json":
            return struct_json.written(report)
        if fmt == "md":
            return "\n".join(self._markdown(report)) + "\n"
        return screen.plain(lambda width: self._table(report, width))

    def show(self, report: R, fmt: str = "table", stream: TextIO | None = None) -> None:
        """Write ``report`` to ``stream`` (default: standard output); a table takes its colours."""
        stream = stream or sys.stdout
        if fmt == "table":
            text = screen.drawn(lambda width: self._table(report, width), stream)
        else:
            text = self.render(report, fmt)
        screen.put(text, stream)


def paged(
    title: str,
    above: Callable[[R], Iterable[str]],
    sheets: Callable[[R, int | None], Iterable[Sheet]],
    below: Callable[[R], Iterable[str]],
) -> Page[R]:
    """A page of sheets between lines.

    Args:
        title: Of the Markdown.
        above: Report → the command, then facts.
        sheets: Report and the terminal's width → the sheets; None asks for those of Markdown.
        below: Report → how to read it.
    """

    def table(report: R, width: int) -> Iterator[Text]:
        for line in above(report):
            yield from screen.wrapped(line, width, style="dim")
        for sheet in sheets(report, width):
            yield Text("")
            yield from terminal_lines(sheet, width)
        yield Text("")
        for line in below(report):
            yield from screen.wrapped(line, width, style="dim")

    def markdown(report: R) -> Iterator[str]:
        command, *facts = above(report)
        yield from (f"# {title}", "", f"`{command.replace('`', chr(39))}`", "")
        yield from (f"- {for_markdown(fact)}" for fact in facts)
        for sheet in sheets(report, None):
            yield ""
            yield from markdown_lines(sheet)
        yield ""
        yield from (f"- {for_markdown(line)}" for line in below(report))

    return Page(table, markdown)
