"""Foreign text: shown as text, on a line of its row, in no width but its own."""

import csv
import io
import re
import time

import msgspec
import pytest
from markdown_it import MarkdownIt
from rich.cells import cell_len

from attncheck.core.sanitize_text import for_markdown, one_line
from attncheck.reporting.measurement_document import measurement_document
from attncheck.reporting.rendering import render
from attncheck.reporting.terminal import PLAIN_WIDTH, plain_text


def as_table(report, width=PLAIN_WIDTH):
    return plain_text(measurement_document(report), width)


HOSTILE = [
    "<script>alert(1)</script>",
    "=cmd()|' /C calc'!A0",
    "+1+1",
    "@SUM(A1)",
    "\t=1+1",
    "a|b\\|c",
    "`tick` **bold** _under_ ~~gone~~ [x](http://evil.example) ![i](x)",
    "\x1b[31mred\x1b[0m\x1b]8;;http://evil.example\x07link\x1b]8;;\x07",
    "\x1b]0;title never ends",
    "two\nlines\r\nand\u2028more\x85still",
    "\u202eflip\u202c \u2066iso\u2069 \u200bzero\ufeff",
    "bell\x07 nul\x00 c1\x9b31m back\b",
    "lone \ud800 surrogate",
    "&lt;b&gt; &amp; &#124;",
    "www.evil.example mailto:a@b.example https://evil.example",
    "[bold]rich[/bold] :smile:",
    "# heading",
    "- item",
    "1. item",
    "===",
    "$x$",
    "全角文字 が広い",
]

FORBIDDEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


def hostile_report(make, text):
    return make.report(
        make.record(text, variant=text, heads=text),
        make.refused(text + "u", "unsupported", text),
        make.refused(text + "e", "error", text, asked={"distribution": text}),
        command=text,
        kernels={text: text},
        absent={text: text},
        environments={"here": make.environment(device=text, interpreter=(text,))},
    )


def markdown_html(text):
    return MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(text)


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_keeps_to_the_width(width, text, make):
    page = as_table(hostile_report(make, text * 40), width=width)
    assert max(map(cell_len, page.splitlines())) <= width


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("fmt", ["table", "md", "csv"])
def test_no_control_character_reaches_a_page(fmt, text, make):
    page = render(hostile_report(make, text), fmt)
    assert not FORBIDDEN.search(page)
    page.encode()


@pytest.mark.parametrize("text", HOSTILE)
def test_json_of_hostile_text_is_ascii_safe_json(text, make):
    page = render(hostile_report(make, text), "json")
    msgspec.json.decode(page.encode())
    assert not re.search("[\x00-\x09\x0b-\x1f]", page)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_takes_no_line_of_its_own(text, make):
    tame = as_table(hostile_report(make, "tame"), width=1000).count("\n")
    assert as_table(hostile_report(make, text), width=1000).count("\n") == tame
    assert render(hostile_report(make, text), "csv").count("\n") == 4


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_shows_hostile_text_as_text(text, make):
    html = markdown_html(render(hostile_report(make, text), "md"))
    tame = markdown_html(render(hostile_report(make, "tame"), "md"))
    # The same tags in the same order, but for what a code span or a plain word is set in.
    tags = [t for t in re.findall(r"<[^>]*>", html) if "code" not in t]
    assert tags == [t for t in re.findall(r"<[^>]*>", tame) if "code" not in t]


def test_markdown_says_the_text_itself(make):
    html = markdown_html(render(hostile_report(make, "a|b <i> `x` \\| *y* &amp; _z_"), "md"))
    assert "<td>a|b &lt;i&gt; `x` \\| *y* &amp;amp; _z_</td>" in html


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_in_csv_is_a_formula(text, make):
    page = render(hostile_report(make, text), "csv")
    for row in csv.reader(io.StringIO(page)):
        for cell in row:
            assert not cell.startswith(("=", "+", "@", "\t", "\r"))
            if cell.startswith("-"):
                float(cell)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x9b31mred", "red"),
        ("\x1b]8;;http://evil.example\x07link\x1b]8;;\x1b\\ here", "link here"),
        ("\x1b]0;never ends", "0;never ends"),
        ("\x1bcreset \x1b(B", "reset"),
        ("  two\n\n lines\t", "two lines"),
        ("cut\x1b[", "cut"),
    ],
)
def test_escape_sequences_leave_nothing(text, line):
    assert one_line(text) == line


@pytest.mark.parametrize("mark", ["\x1b]", "\x90", "\x1b[0;", "a\x1b", "\n ", "<", "_", ":"])
def test_long_foreign_text_takes_no_square_of_its_length(mark):
    start = time.perf_counter()
    for_markdown(mark * 100_000)
    assert time.perf_counter() - start < 2.0


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("<b> & |", "&lt;b&gt; &amp; &#124;"),
        ("flash2_forward _x_", "flash2_forward \\_x\\_"),
        ("see https://x.example, www.x.example", "see https&#58;//x.example, www&#46;x.example"),
        ("a@b \\|", "a&#64;b &#92;&#124;"),
        ("12. x", "12\\. x"),
        ("-1", "\\-1"),
    ],
)
def test_markdown_escapes(text, escaped):
    assert for_markdown(text) == escaped
