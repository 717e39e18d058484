"""Tables by width, and what a terminal or a pipe gets."""

import io
import re

import pytest
from msgspec.structs import replace
from rich.cells import cell_len
from tests.reporting.pages import as_table

from attncheck.reporting.measurement_document import RowsAsMeasured
from attncheck.reporting.rendering import render, show
from attncheck.reporting.terminal import document_lines, row_lines


@pytest.mark.parametrize("width", [80, 100])
def test_narrow_table_looks_as_it_did(width, sample, matches_snapshot):
    matches_snapshot(f"sample-{width}.txt", as_table(sample, width=width))


@pytest.mark.parametrize("width", [80, 90, 100, 120, 200])
def test_table_keeps_to_its_width(width, sample):
    assert max(map(cell_len, as_table(sample, width=width).splitlines())) <= width


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture
def screen(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return monkeypatch


def shown(report, stream):
    show(report, "table", stream)
    return stream.getvalue()


def test_terminal_gets_its_colours_and_width(screen, sample, matches_snapshot):
    screen.setenv("COLUMNS", "100")
    screen.setenv("COLORTERM", "")
    page = shown(sample, Terminal())
    assert "\x1b[31m" in page
    matches_snapshot("sample-colour.txt", page)


def test_colours_change_no_letter(screen, sample):
    screen.setenv("COLUMNS", "100")
    page = re.sub(r"\x1b\[[0-9;]*m", "", shown(sample, Terminal()))
    assert page == as_table(sample, width=100)


def test_no_color_is_heeded(screen, sample):
    screen.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", shown(sample, Terminal()))


def test_a_file_gets_plain_text(screen, sample):
    stream = io.StringIO()
    assert shown(sample, stream) == render(sample, "table")


def test_force_color_is_heeded(screen, sample):
    screen.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in shown(sample, io.StringIO())


def test_stream_without_the_signs_gets_question_marks(screen, sample):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    show(sample, "table", stream)
    stream.flush()
    assert b"1.00?" in raw.getvalue()


@pytest.mark.parametrize("width", [80, 200])
def test_rows_one_by_one_say_what_the_whole_table_says(sample, width):
    """Word for word, but for headings that come again; and columns stand in line."""
    rows = RowsAsMeasured(replace(sample, records=()))
    lines = []
    for record in sample.records:
        section, new = rows.row(record)
        lines += [line.plain for line in row_lines(section, width, first=new)]
    below = document_lines(rows.closing(sample), width, before=rows.tables.values())
    shown = [*lines, *(line.plain for line in below)]
    page = as_table(sample, width).splitlines()
    words = {" ".join(line.split()) for line in shown}
    missing = [line for line in page if " ".join(line.split()) not in words]
    # The command and the machine are shown first; what would be seen names its section below.
    heads = page[: page.index("")]
    seen = [line for line in missing if "would have shown" in line or line.startswith("  of ")]
    assert [line for line in missing if line not in heads + seen] == []
    headings = [line for line in lines if line.split()[:1] == ["kernel"]]
    assert len(headings) < len(sample.records)
    assert max(map(cell_len, shown)) <= width
