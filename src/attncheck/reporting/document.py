"""The document model: the contents of a page, independent of its format.

One function for each kind of report makes a ``Document``, from which every format is written:
``terminal``, ``markdown``, ``html`` and ``csv_text`` know nothing of attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from attncheck.core.sanitize_text import one_line

Look = Literal["plain", "dim", "good", "notable", "bad"]

FacetValues: TypeAlias = Mapping[str, tuple[str, ...]]  # values by facet: ``{"dtype": ("bf16",)}``

STYLES: dict[Look, str] = {
    "plain": "",
    "dim": "dim",
    "good": "green",
    "notable": "yellow",
    "bad": "red",
}
"""rich's style for each look, on a terminal."""

LABEL = 11
"""Columns of the labels of facts, in text."""

# Defined here, since the code that places points and the code that draws axes must agree on them.
LEFT, RIGHT, TOP, BOTTOM = 46.0, 352.0, 12.0, 208.0
"""Ends of a ``Chart``'s axes, in the drawing's own units."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A piece of text in a table; as every text of a document, it may be untrusted."""

    text: str
    look: Look = "plain"
    # A screen reader does not read out a symbol or a colour.
    spoken: str = ""  # the text in words, for screen readers; empty where the text suffices
    code: bool = False  # whether the text is an identifier, shown in a code font


@dataclass(frozen=True, slots=True)
class Note:
    """A line of prose; if ``whole``, it is meant to be copied and never wrapped."""

    text: str
    # Prose is dimmer than the numbers that it explains.
    look: Look = "dim"
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    heading: str
    words: bool = False  # whether it holds words, aligned left; numbers are aligned right
    # On a narrow terminal columns of rank 1 are left out first, then those of 2, and so on; those
    # of 0 stay. Columns of numbers are left out whole, since a cut number is useless.
    spare: int = 0
    cut: bool = False  # whether its texts may be cut on a narrow page
    # Whether its texts wrap on a narrow page; only for a last column of words.
    wrap: bool = False
    # Largest width in characters, so that one long name does not push numbers off the terminal.
    most: int = 10_000
    least: int = 0  # least width in characters, so that rows shown one by one are aligned


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table."""

    cells: tuple[Cell, ...]  # one for each column; fewer if the others would be empty
    remarks: tuple[Note, ...] = ()  # lines below the row
    # Texts that neighbouring rows share, one for each of the table's ``groups``.
    group: tuple[str, ...] = ()
    # Values of the page's filters that select this row.
    facets: FacetValues = field(default_factory=dict)


DASH = Cell("—", "dim")  # an empty cell


def count_cell(number: int, look: Look = "plain") -> Cell:
    """Return the cell of a count; a dash for 0."""
    return Cell(f"{number:,}", look) if number else DASH


def columns(
    words: Sequence[str], numbers: Iterable[str] = (), *, cut: int = 0
) -> tuple[Column, ...]:
    """Return columns of words, of which the first ``cut`` may be cut, then columns of numbers."""
    left = (Column(name, words=True, cut=i < cut) for i, name in enumerate(words))
    return (*left, *map(Column, numbers))


def row(
    *cells: Cell | str | None,
    remarks: Iterable[str] = (),
    group: tuple[str, ...] = (),
    facets: FacetValues | None = None,
) -> Row:
    """Return a row: texts become plain cells, None a dash; empty remarks are dropped."""
    shown = (DASH if c is None else Cell(c) if isinstance(c, str) else c for c in cells)
    notes = (Note(remark, "notable") for remark in remarks if remark)
    return Row(tuple(shown), tuple(notes), group, facets or {})


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under headings."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    # Headings of the rows' ``group`` texts: columns on a page, a line above rows on a terminal.
    groups: tuple[str, ...] = ()
    # Number of columns, from the left, that identify a row. If a terminal is too narrow for the
    # others, these are split into several tables, which all begin with the identifying columns.
    # 0 never splits.
    keys: int = 0


@dataclass(frozen=True, slots=True)
class Facts:
    """Labels with a text each; a text without a label continues the one above."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """Lines of characters that are never wrapped."""

    title: str
    lines: tuple[str, ...]  # lines of equal length; cut at the width of the terminal
    cut_note: str = ""  # note below cut lines; ``{shown}`` and ``{all}`` are columns


@dataclass(frozen=True, slots=True)
class Tile:
    """Neighbouring cells of one level in a heat map, as a rectangle in the drawing's units."""

    x: float
    y: float
    width: float
    height: float
    level: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """A drawing of the places of errors: heads down, rows to the right."""

    # width, height: size of all tiles together.
    width: float
    height: float
    tiles: tuple[Tile, ...]  # in reading order
    levels: tuple[str, ...]  # names of the levels, for a legend
    description: str  # text for screen readers
    caption: str  # text below the drawing


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a series: its place in the drawing, and its text."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one colour and marker, which ``place`` chooses; points of a line are joined."""

    name: str
    place: int
    lines: tuple[tuple[Point, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Curves on two logarithmic axes."""

    title: str
    description: str  # text for screen readers, with the largest value
    # x_ticks, y_ticks: place and text of each label of an axis.
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    x_name: str  # the quantity on the x axis
    limit: tuple[float, str]  # y of a line drawn across the chart, and its label
    series: tuple[Series, ...]  # one for each colour


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A failure in full: its heading, facts, map, script and similar failures."""

    kernel: str
    heading: str  # description of the failure, in a line
    meaning: str = ""  # explanation of the heading, for first-time readers
    facts: tuple[tuple[str, str], ...] = ()
    map: HeatMap | None = None  # places of the errors; None if a map would show nothing
    command: str = ""  # command that reproduces it
    script: str = ""  # text of a script that reproduces it; empty if there is none
    # A script that is too large for the page is named only by this path.
    script_file: str = ""  # path of the script
    others: str = ""  # ids of failures with the same cause
    other_count: int = 0  # number of those failures
    facets: FacetValues = field(default_factory=dict)  # see Row


def card_text(card: Card) -> list[str]:
    """Return the facts of a failure, a line each, and the command that reproduces it."""
    lines = [f"  {name:<{LABEL}}{one_line(text)}" for name, text in card.facts]
    return [*lines, f"Reproduce: {one_line(card.command)}"] if card.command else lines


Block: TypeAlias = Note | Facts | Table | Picture | Card | Chart


@dataclass(frozen=True, slots=True)
class Section:
    """Blocks under a title."""

    title: str
    blocks: tuple[Block, ...]
    name: str = ""  # its entry in a page's list of sections
    folded: bool = False  # whether a page of HTML shows only the title until it is opened
    facets: FacetValues = field(default_factory=dict)  # see Row


def table_section(title: str, headings: Iterable[Column], rows: Iterable[Row]) -> Section:
    """Return a section of one table."""
    return Section(title, (Table(tuple(headings), tuple(rows)),))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict: a word such as ``FAIL``, and the rest of the sentence."""

    word: str
    text: str
    look: Look


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The contents of a page."""

    title: str
    # Shown last on a terminal, unless ``verdict_first``, and first on a page.
    verdict: Verdict | None = None
    verdict_first: bool = False  # whether the verdict comes first on a terminal too
    # Names, numbers and looks of the counters at the head of a page.
    counters: tuple[tuple[str, int, Look], ...] = ()
    command: str = ""
    facts: tuple[str, ...] = ()  # environments and dates, a line each
    # Facets by which a page of HTML can be filtered, each with its values.
    filters: FacetValues = field(default_factory=dict)
    sections: tuple[Section, ...] = ()
    notes: tuple[str, ...] = ()  # how to read the page, and the arithmetic that was assumed
    closing: tuple[Note, ...] = ()  # the last lines, with the conclusion


class LiveRows(Protocol):
    """A page whose rows come one by one and are shown as they come."""

    head: Document  # the head of the page
    tables: dict[Any, Table]  # for each set of columns one of the tables shown so far

    def row(self, one: Any) -> tuple[Section, bool] | None:
        """Return a section of one new row, and whether its title and headings are new too.

        None if nothing is shown of it before the end of the page.
        """

    def closing(self, report: Any) -> Document:
        """Return the end of the page, below all rows of ``report``."""
