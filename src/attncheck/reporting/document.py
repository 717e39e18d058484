"""The document model: what a page says, whatever it is written as.

Every kind of report becomes a ``Document`` by one function, and every format is written from one:
``terminal``, ``markdown``, ``html`` and ``csv_text`` know nothing of attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

Look = Literal["plain", "dim", "good", "notable", "bad"]

FacetValues: TypeAlias = Mapping[str, tuple[str, ...]]  # values by facet: ``{"dtype": ("bf16",)}``

STYLES: dict[Look, str] = {
    "plain": "",
    "dim": "dim",
    "good": "green",
    "notable": "yellow",
    "bad": "red",
}
"""rich's words for each look, on a terminal."""

# Here, since who makes the points and who draws the axes must agree on them.
LEFT, RIGHT, TOP, BOTTOM = 46.0, 352.0, 12.0, 208.0
"""Place of a ``Chart``'s axes, in the drawing's own units."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A piece of text in a table; may be foreign, as every text of a document may."""

    text: str
    look: Look = "plain"
    # A sign or a colour alone says nothing to a screen reader.
    spoken: str = ""  # the same in words, for those who hear the page; empty where the text says it
    code: bool = False  # whether it is a name that somebody types


@dataclass(frozen=True, slots=True)
class Note:
    """A line of prose; ``whole`` where it is to be copied, and is never wrapped."""

    text: str
    # Prose is quieter than the numbers that it explains.
    look: Look = "dim"
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    heading: str
    words: bool = False  # whether it holds words, which begin in line; numbers end in line
    # Where a terminal is narrow, columns of 1 go first, then those of 2, and so on; those of 0
    # stay.
    # Numbers that cannot be read in part are left out whole; words can be cut.
    spare: int = 0
    cut: bool = False  # whether its texts may be cut where the page is narrow
    # Whether its texts go on below where the page is narrow: of a last column of words.
    wrap: bool = False
    # One long foreign name must not push every number off the terminal.
    most: int = 10_000  # columns of a terminal that its texts take at most
    least: int = 0  # those that it takes at least, so that rows shown one by one stand in line


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table."""

    cells: tuple[Cell, ...]  # one for each column; fewer where there is no more to say
    remarks: tuple[Note, ...] = ()  # what the cells alone would hide
    # What neighbouring rows share, one text for each of the table's ``groups``.
    group: tuple[str, ...] = ()
    # Names and values by which a page can be narrowed to it.
    facets: FacetValues = field(default_factory=dict)


DASH = Cell("—", "dim")  # where there is nothing to show


def count_cell(number: int, look: Look = "plain") -> Cell:
    """Return the cell of a count; of none a dash."""
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
    """Return a row: a text is a plain cell, None a dash; remarks stand out, empty ones are none."""
    shown = (DASH if c is None else Cell(c) if isinstance(c, str) else c for c in cells)
    notes = (Note(remark, "notable") for remark in remarks if remark)
    return Row(tuple(shown), tuple(notes), group, facets or {})


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under headings."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    # Headings of what rows share: columns on a page, a line above rows on a terminal.
    groups: tuple[str, ...] = ()
    # How many columns, from the left, say what a row is: where a terminal is too narrow for the
    # others, they are shown in several tables, which all begin with these. 0 for none.
    # Without them nobody could tell which row of the second table is which.
    keys: int = 0


@dataclass(frozen=True, slots=True)
class Facts:
    """Labels with a text each; a text without a label goes on with the one above."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """Lines of signs that stand as they are."""

    title: str
    lines: tuple[str, ...]  # of one length; cut where the terminal ends
    cut_note: str = ""  # what to say then; ``{shown}`` and ``{all}`` are columns


@dataclass(frozen=True, slots=True)
class Tile:
    """Neighbouring cells of one level in a heat map, in its own units."""

    x: float
    y: float
    width: float
    height: float
    level: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """A drawing of where errors are: heads down, rows to the right."""

    # width, height: of all tiles.
    width: float
    height: float
    tiles: tuple[Tile, ...]  # in reading order
    levels: tuple[str, ...]  # names of the levels, for a legend
    description: str  # for those who do not see it
    caption: str  # what is drawn


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a series: where it is drawn, and what it says."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one colour and mark, which ``place`` chooses; those of one line are joined."""

    name: str
    place: int
    lines: tuple[tuple[Point, ...], ...]


@dataclass(frozen=True, slots=True)
class Axis:
    """A logarithmic axis: where each of its labels is."""

    ticks: tuple[tuple[float, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Curves on two logarithmic axes."""

    title: str
    description: str  # the same for those who do not see it, with the largest value
    # x, y: axes.
    x: Axis
    y: Axis
    x_name: str  # what the x axis counts
    limit: tuple[float, str]  # where a line is drawn across, and what it means
    series: tuple[Series, ...]  # one a colour


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A failure in full."""

    kernel: str
    heading: str  # what is wrong, in a line
    meaning: str = ""  # what that means, for readers who see it for the first time
    facts: tuple[tuple[str, str], ...] = ()
    map: HeatMap | None = None  # where the errors are; None where that says nothing
    command: str = ""  # what shows it again
    script: str = ""  # text of a script that asks the same; empty where there is none to show
    # Too large a script is left out of the page, and then only this names it.
    script_file: str = ""  # where that lies
    others: str = ""  # ids of what fails alike
    other_count: int = 0  # how many of those there are
    facets: FacetValues = field(default_factory=dict)  # as of a Row


Block: TypeAlias = Note | Facts | Table | Picture | Card | Chart


@dataclass(frozen=True, slots=True)
class Section:
    """Blocks under a title."""

    title: str
    blocks: tuple[Block, ...]
    name: str = ""  # stands in a page's list of sections
    folded: bool = False  # whether a page of HTML shows the title alone until somebody opens it
    facets: FacetValues = field(default_factory=dict)  # as of a Row


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict: a word such as ``FAIL``, and the rest of the sentence."""

    word: str
    text: str
    look: Look


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A page."""

    title: str  # of a page that is read elsewhere
    # Comes last on a terminal and first on a page; None where there is none.
    verdict: Verdict | None = None
    verdict_first: bool = False  # whether it comes first on a terminal too
    # Names, numbers and looks that a page begins with.
    counters: tuple[tuple[str, int, Look], ...] = ()
    command: str = ""
    facts: tuple[str, ...] = ()  # where and when, a line each
    # Facets that a page of HTML can be narrowed by, each with its values.
    filters: FacetValues = field(default_factory=dict)
    sections: tuple[Section, ...] = ()
    notes: tuple[Note, ...] = ()  # how to read it, and the arithmetic that was assumed
    closing: tuple[Note, ...] = ()  # what it comes to, the last lines


class LiveRows(Protocol):
    """A page whose rows come one by one: it is shown as it grows."""

    head: Document  # what it begins with
    tables: dict[Any, Table]  # one of those shown for each set of columns

    def row(self, one: Any) -> tuple[Section, bool]:
        """Return a section of what is new, and whether its title and headings are too."""

    def closing(self, report: Any) -> Document:
        """Return what stands below the rows of ``report``, which have all been shown."""
