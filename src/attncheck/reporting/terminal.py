"""Documents on a terminal or as plain text: width, colours, and characters of the encoding."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from attncheck.core.grouping import group_by
from attncheck.core.sanitize_text import one_line, shortened
from attncheck.reporting.document import (
    LABEL,
    STYLES,
    Block,
    Card,
    Cell,
    Chart,
    Column,
    Document,
    Facts,
    Note,
    Picture,
    Section,
    Table,
    Verdict,
    card_text,
)

PLAIN_WIDTH = 120  # columns of output that does not go to a terminal

_GAP = _INDENT = "  "
_LEAST_WRAPPED = 16  # columns that a wrapped text has at least
_LEAST_CUT = 14  # columns to which a text may be cut
_ASCII_SHADES = str.maketrans({"·": ".", "░": "-", "▒": "+", "▓": "#", "█": "@"})


def print_lines(lines: Callable[[int], Iterable[Text]], stream: TextIO) -> None:
    """Write ``lines(width)`` to ``stream``, in the width and colours of that stream.

    NO_COLOR, FORCE_COLOR and COLUMNS are heeded.
    """
    columns = os.environ.get("COLUMNS", "")
    # rich assumes 80 columns in a pipe, but logs have room for more; in 0 columns it shows nothing.
    sized = columns.isdecimal() and columns.strip("0") if columns else stream.isatty()
    console = Console(file=stream, width=None if sized else PLAIN_WIDTH)
    with console.capture() as capture:
        # The lines are final: rich must not wrap or highlight, or take [brackets] for markup.
        text = Text("\n").join(lines(console.width))
        console.print(text, soft_wrap=True, highlight=False, markup=False, emoji=False)
    print_text(capture.get(), stream)


def print_text(text: str, stream: TextIO) -> None:
    """Write ``text``; characters that ``stream`` cannot encode become similar ones or ``?``."""
    encoding = stream.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_ASCII_SHADES)
    stream.write(text.encode(encoding, errors="replace").decode(encoding))
    stream.flush()


def plain_text(document: Document, width: int = PLAIN_WIDTH) -> str:
    """Return ``document`` as text without colours, the same on every machine."""
    return "".join(f"{line.plain}\n" for line in document_lines(document, width))


def document_lines(
    document: Document, width: int, *, before: Iterable[Table] = ()
) -> Iterator[Text]:
    """Yield the lines of ``document``, at most ``width`` wide except for texts to be copied.

    Columns left out of tables that were shown ``before`` are listed with those left out here.
    """
    yield from head_lines(document, width)
    sections = [
        replace(section, blocks=tuple(part for b in section.blocks for part in _parts(b, width)))
        for section in document.sections
    ]
    blocks = [block for section in sections for block in section.blocks]
    layouts = _layouts([block for block in blocks if isinstance(block, Table)], width)
    needs_blank_line = bool(document.verdict_first or document.command or document.facts)
    for section in sections:
        if needs_blank_line:
            yield Text("")
        needs_blank_line = True
        yield from _wrap(section.title, width, style="bold cyan")
        for i, block in enumerate(section.blocks):
            if i and isinstance(block, Card | Picture):
                yield Text("")
            layout = layouts[block.columns, block.groups] if isinstance(block, Table) else None
            yield from _block_lines(block, width, layout=layout)
    # Tables do not show that columns are left out, so the closing lines list them.
    every = [*layouts.values(), *(_Layout([table], width) for table in before)]
    left_out = [name for layout in every for name in layout.left_out]
    yield from closing_lines(document, width, left_out=dict.fromkeys(left_out))


def head_lines(document: Document, width: int) -> Iterator[Text]:
    """Yield the command and the facts at the head of a page, below a verdict that comes first."""
    if document.verdict and document.verdict_first:
        yield from _verdict_lines(document.verdict, width)
    yield from _wrap(shortened(document.command), width, style="bold")
    for fact in document.facts:
        yield from _wrap(shortened(fact), width, style="dim")


def row_lines(section: Section, width: int, *, first: bool) -> Iterator[Text]:
    """Yield the rows of a section's tables, after its title and headings if they are ``first``."""
    if first:
        yield Text("")
        yield from _wrap(section.title, width, style="bold cyan")
    for block in section.blocks:
        yield from _block_lines(block, width, headings=first)


def closing_lines(
    document: Document, width: int, *, left_out: Iterable[str] = ()
) -> Iterator[Text]:
    """Yield the notes, the columns that were left out, and the verdict if it comes last."""
    if document.notes or document.closing:
        yield Text("")
    for text in document.notes:
        yield from _wrap(shortened(text), width, style=STYLES["dim"])
    if columns := ", ".join(left_out):
        yield from _wrap(f"Left out at {width} columns: {columns}.", width, style="dim")
    for note in document.closing:
        yield from _note_lines(note, width)
    if document.verdict and not document.verdict_first:
        yield Text("")
        yield from _verdict_lines(document.verdict, width)


def _verdict_lines(verdict: Verdict, width: int) -> list[Text]:
    style = f"bold {STYLES[verdict.look]}".strip()
    return _wrap(f"{verdict.word}  {verdict.text}", width, style=style)


def _block_lines(
    block: Block, width: int, *, layout: _Layout | None = None, headings: bool = True
) -> Iterator[Text]:
    """Yield the lines of a block; a chart has none, since text cannot show it.

    Args:
        layout: The layout of a table that shares its columns' widths with others.
        headings: Whether a table begins with its headings.
    """
    match block:
        case Note():
            yield from _note_lines(block, width)
        case Facts():
            yield from _fact_lines(block.pairs, width)
        case Table():
            layout = layout or _Layout([block], width)
            yield from _table_lines(block, layout, width, headings=headings)
        case Picture():
            yield from _picture_lines(block, width)
        case Card():  # facts are never wrapped, since a map of characters may be among them
            yield from _wrap(block.heading, width, style=f"bold {STYLES['bad']}")
            yield from map(Text, card_text(block))
        case Chart():
            return


def _note_lines(note: Note, width: int) -> list[Text]:
    if note.whole:
        return [Text(one_line(note.text), style=STYLES[note.look])]
    return _wrap(shortened(note.text), width, style=STYLES[note.look])


def _fact_lines(pairs: Iterable[tuple[str, str]], width: int) -> Iterator[Text]:
    """Yield a line for each fact, labels on the left; long texts wrap in their own column."""
    pairs = list(pairs)
    label = max([LABEL, *(len(name) + 1 for name, _ in pairs)])
    for name, text in pairs:
        first = f"{_INDENT}{one_line(name):<{label}}"
        yield from _hanging_lines(first, one_line(text), width)


def _picture_lines(picture: Picture, width: int) -> Iterator[Text]:
    room = max(1, width - len(_INDENT))
    yield Text(_cut(one_line(picture.title), width), style="bold")
    yield from (Text(_INDENT + line[:room]) for line in picture.lines)
    # Lines are cut, not wrapped, since their characters must stay below each other.
    longest = max(map(len, picture.lines), default=0)
    if picture.cut_note and longest > room:
        note = picture.cut_note.format(shown=room, all=longest)
        yield from _wrap(note, width, style="yellow", indent=_INDENT)


class _Layout:
    """The columns that fit on a terminal, and their widths, shared by tables of equal columns.

    Attributes:
        columns: All columns of the tables.
        shown: Indices of the columns that fit.
        left_out: Headings of the other columns.
    """

    def __init__(self, tables: Sequence[Table], width: int) -> None:
        self.columns = tables[0].columns
        self._widths = [_natural_width(i, c, tables) for i, c in enumerate(self.columns)]
        self.shown = list(range(len(self.columns)))
        self.left_out: list[str] = []
        # Leave out columns with a ``spare`` rank, one rank at a time; only then cut words.
        for rank in sorted({c.spare for c in self.columns if c.spare}):
            if self.total > width:
                dropped = [i for i in self.shown if self.columns[i].spare == rank]
                self.left_out += [self.columns[i].heading for i in dropped]
                self.shown = [i for i in self.shown if i not in dropped]
        for i in sorted(self.shown, key=lambda i: -self._widths[i]):
            if self.columns[i].cut and self.total > width:
                least = min(self._widths[i], _LEAST_CUT)
                self._widths[i] = max(least, self._widths[i] - (self.total - width))

    @property
    def total(self) -> int:
        widths = sum(self._widths[i] for i in self.shown)
        return len(_INDENT) + widths + len(_GAP) * (len(self.shown) - 1)

    def lines(self, cells: Sequence[Cell], width: int) -> Iterator[Text]:
        """Yield the lines of a row; a last column with ``wrap`` may take several."""
        if len(cells) < len(self.columns) or not self.columns[-1].wrap:
            yield self.line(cells)
            return
        *others, last = cells
        line = self.line([*others, Cell("")], strip=False)
        line.right_crop(self._widths[-1])
        for text in _hanging_lines(line.plain, one_line(last.text), width):
            rest = Text(text.plain[len(line.plain) :], style=STYLES[last.look])
            yield Text.assemble(line, rest)
            line = Text(" " * len(line.plain))

    def line(self, cells: Sequence[Cell], *, strip: bool = True) -> Text:
        """Return a row in one line."""
        line = Text(_INDENT)
        for n, i in enumerate(place for place in self.shown if place < len(cells)):
            cell, width = cells[i], self._widths[i]
            # A status in place of a row's numbers may be wider than its column.
            last = len(cells) < len(self.columns) and i == len(cells) - 1
            text = _flatten(cell.text) if last else _cut(_flatten(cell.text), width)
            padding = " " * (width - cell_len(text))
            line.append(_GAP if n else "")
            words = self.columns[i].words
            line.append(text + padding if words else padding + text, style=STYLES[cell.look])
        if strip:
            line.rstrip()
        return line


def _natural_width(i: int, column: Column, tables: Sequence[Table]) -> int:
    # A status in place of a row's numbers ("unsupported") makes no column wider.
    rows = (row for table in tables for row in table.rows if len(row.cells) == len(table.columns))
    texts = [column.heading, " " * _LEAST_WRAPPED * column.wrap]
    if not column.wrap:
        texts += [_flatten(row.cells[i].text) for row in rows]
    return max(min(max(map(cell_len, texts)), column.most), column.least)


def _parts(block: Block, width: int) -> list[Block]:
    """Return ``block``; a too wide table becomes several with the same first columns."""
    if not isinstance(block, Table) or not block.keys or _Layout([block], width).total <= width:
        return [block]
    # Greedy: columns in order, with a new table whenever the next column does not fit.
    keys, places = list(range(block.keys)), range(block.keys, len(block.columns))
    chosen: list[list[int]] = [keys]
    for i in places:
        wider = _with_columns(block, [*chosen[-1], i])
        if len(chosen[-1]) > block.keys and _Layout([wider], width).total > width:
            chosen.append(keys)
        chosen[-1] = [*chosen[-1], i]
    parts = [_with_columns(block, some) for some in chosen]
    return [
        *(replace(p, rows=tuple(replace(r, remarks=()) for r in p.rows)) for p in parts[:-1]),
        parts[-1],
    ]


def _with_columns(table: Table, places: list[int]) -> Table:
    """Return ``table`` with the columns of these indices only."""
    rows = tuple(replace(row, cells=tuple(row.cells[i] for i in places)) for row in table.rows)
    return replace(table, columns=tuple(table.columns[i] for i in places), rows=rows, keys=0)


def _layouts(tables: Sequence[Table], width: int) -> dict[tuple[object, ...], _Layout]:
    """Return one layout for all tables with the same columns, so that these are aligned."""
    alike = group_by(tables, lambda table: (table.columns, table.groups))
    return {key: _Layout(several, width) for key, several in alike.items()}


def _table_lines(table: Table, layout: _Layout, width: int, *, headings: bool) -> Iterator[Text]:
    """Yield headings, then rows, each remark below its row and each new group above its rows."""
    if headings:
        yield layout.line([Cell(column.heading, "dim") for column in table.columns])
    group: tuple[str, ...] = ()
    for row in table.rows:
        if row.group != group:
            group = row.group
            title = " · ".join(part for part in map(one_line, group) if part)
            yield Text(_cut(title, width), style="bold")
        yield from layout.lines(row.cells, width)
        for remark in row.remarks:
            style = STYLES[remark.look]
            yield from _wrap(f"└ {shortened(remark.text)}", width, style=style, indent="    ")


def _hanging_lines(first: str, text: str, width: int) -> list[Text]:
    """Return lines of ``first`` and then ``text``, wrapped in the column where ``text`` begins."""
    lines = textwrap.wrap(
        text, max(width - len(first), _LEAST_WRAPPED), break_on_hyphens=False
    ) or [""]
    indent = " " * len(first)
    return [Text((indent if i else first) + line) for i, line in enumerate(lines)]


def _wrap(text: str, width: int, *, style: str = "", indent: str = "") -> list[Text]:
    """Return ``text`` wrapped to ``width`` columns, indented, further from the second on."""
    line = one_line(text)
    # textwrap counts characters, but an East Asian one may take two columns.
    size = width if cell_len(line) == len(line) else width // 2
    further = indent + "  "
    lines = textwrap.wrap(line, max(size, 20), initial_indent=indent, subsequent_indent=further)
    return [Text(part, style=style) for part in lines]


def _flatten(text: str) -> str:
    """Return ``text`` in one line, keeping the trailing spaces that align units."""
    return one_line(text) + " " * (len(text) - len(text.rstrip(" ")))


def _cut(text: str, width: int) -> str:
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"
