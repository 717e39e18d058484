"""Tables at each width, and colours on a terminal or plain text in a pipe."""

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
def test_narrow_table_matches_snapshot(width, sample, matches_snapshot):
    matches_snapshot(f"sample-{width}.txt", as_table(sample, width=width))


@pytest.mark.parametrize("width", [80, 90, 100, 120, 200])
def test_table_fits_its_width(width, sample):
    assert max(map(cell_len, as_table(sample, width=width).splitlines())) <= width


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture
def terminal_environment(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return monkeypatch


def output(report, stream):
    show(report, "table", stream)
    return stream.getvalue()


def test_terminal_page_matches_snapshot(terminal_environment, sample, matches_snapshot):
    terminal_environment.setenv("COLUMNS", "100")
    terminal_environment.setenv("COLORTERM", "")
    page = output(sample, Terminal())
    assert "\x1b[31m" in page
    matches_snapshot("sample-colour.txt", page)


def test_colours_do_not_change_text(terminal_environment, sample):
    terminal_environment.setenv("COLUMNS", "100")
    page = re.sub(r"\x1b\[[0-9;]*m", "", output(sample, Terminal()))
    assert page == as_table(sample, width=100)


def test_no_color_disables_colours(terminal_environment, sample):
    terminal_environment.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", output(sample, Terminal()))


def test_file_gets_plain_text(terminal_environment, sample):
    stream = io.StringIO()
    assert output(sample, stream) == render(sample, "table")


def test_force_color_enables_colours(terminal_environment, sample):
    terminal_environment.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in output(sample, io.StringIO())


def test_ascii_stream_gets_question_marks(terminal_environment, sample):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    show(sample, "table", stream)
    stream.flush()
    assert b"1.00?" in raw.getvalue()


@pytest.mark.parametrize("width", [80, 200])
def test_streamed_rows_match_the_whole_table(sample, width):
    """The words are the same except for repeated headings, and the lines fit the width."""
    rows = RowsAsMeasured(replace(sample, records=()))
    lines = []
    for record in sample.records:
        if shown := rows.row(record):
            section, new = shown
            lines += [line.plain for line in row_lines(section, width, first=new)]
        else:
            assert record.status == "unsupported"
    below = document_lines(rows.closing(sample), width, before=rows.tables.values())
    streamed = [*lines, *(line.plain for line in below)]
    page = as_table(sample, width).splitlines()
    words = {" ".join(line.split()) for line in streamed}
    missing = [line for line in page if " ".join(line.split()) not in words]
    # Command and machine come first only in the page; visible faults name their section only below.
    heads = page[: page.index("")]
    note = re.compile(r"^would have shown.*(\n  .*)*", re.MULTILINE)
    seen = "\n".join(match[0] for match in note.finditer("\n".join(page))).splitlines()
    assert [line for line in missing if line not in heads + seen] == []
    headings = [line for line in lines if line.split()[:1] == ["kernel"]]
    assert len(headings) < len(sample.records)
    assert max(map(cell_len, streamed)) <= width
