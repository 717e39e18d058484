"""A stream that somebody reads: its width, its colours, and the signs that it can say."""

from __future__ import annotations

import os
import textwrap
from typing import TYPE_CHECKING, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from attncheck.core.sanitize_text import one_line
from attncheck.reporting.map_text import PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["PLAIN_WIDTH", "drawn", "plain", "put", "wrapped"]

PLAIN_WIDTH = 120
"""Columns where there is no terminal to ask."""


def put(text: str, stream: TextIO) -> None:
    """Write ``text``; a stream that cannot say a sign gets another one, or a question mark."""
    encoding = stream.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(PLAIN)
    stream.write(text.encode(encoding, errors="replace").decode(encoding))


def drawn(lines: Callable[[int], Iterable[Text]], stream: TextIO) -> str:
    """``lines(width)`` with the width and the colours of ``stream``.

    NO_COLOR, FORCE_COLOR and COLUMNS are heeded.
    """
    asked = stream.isatty() or "COLUMNS" in os.environ
    console = Console(file=stream, width=None if asked else PLAIN_WIDTH)
    with console.capture() as capture:
        text = Text("\n").join(lines(console.width))
        console.print(text, soft_wrap=True, highlight=False, markup=False, emoji=False)
    return capture.get()


def plain(lines: Callable[[int], Iterable[Text]]) -> str:
    """``lines(PLAIN_WIDTH)``, the same on every machine, without colours."""
    return "".join(f"{line.plain}\n" for line in lines(PLAIN_WIDTH))


def wrapped(text: str, width: int, *, style: str = "", indent: str = "") -> list[Text]:
    """``text`` in lines of ``width`` columns after ``indent``, all but the first further in."""
    line = one_line(text)
    # textwrap counts characters, and an East Asian one may take two columns.
    size = width if cell_len(line) == len(line) else width // 2
    further = indent + "  "
    lines = textwrap.wrap(line, max(size, 20), initial_indent=indent, subsequent_indent=further)
    return [Text(part, style=style) for part in lines]
