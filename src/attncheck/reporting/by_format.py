"""A report of sheets in the format asked for: what its page draws, and nothing of what it says."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Generic, TextIO, TypeVar

import msgspec

from attncheck.errors import UnknownName
from attncheck.reporting import screen, struct_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.text import Text

__all__ = ["FORMATS", "Page"]

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
