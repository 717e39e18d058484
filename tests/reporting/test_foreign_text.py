"""Hostile text in every format of measurement and gate reports is shown as text, never executed."""

import csv
import functools
import io
import json
import re
import time
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import msgspec
import pytest
from markdown_it import MarkdownIt
from rich.cells import cell_len
from tests.reporting import gate_reports as gates
from tests.reporting.conftest import Factory
from tests.reporting.pages import as_html, as_table

from attncheck.core.errors import UsageError
from attncheck.core.sanitize_text import for_markdown, one_line
from attncheck.records.json_reports import load_report
from attncheck.records.run_reports import GateReport
from attncheck.reporting.rendering import (
    GATE_FORMATS,
    LARGEST_SUMMARY,
    gate_markdown,
    render,
    write_gate,
)

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
    "</script></style></title><script>alert(1)</script>",
    "\" onload=alert(1) x='",
    "{{ 7 * 7 }}{% raw %}",
    "../../../etc/passwd::x",
    "a|b\\|c `tick` ```` **bold** [x](http://evil.example)",
    "::error file=x::y\n::set-output name=a::b",
    "%0A::error::no",
    "bell\x07 nul\x00 \ufffe\uffff back\b ]]> <!-- -->",
]
TEXTS = [*HOSTILE, "long " + "x" * 100_000]
FORBIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def gate(text):
    refused = gates.record(text, status="unsupported", reason=text)
    raised = gates.record(text, status="error", reason=text, problem={"distribution": text})
    warned = gates.measured(text)
    judgement = msgspec.structs.replace(
        warned.judgement, status="warn", rule="precision", reason=text, arithmetic=text
    )
    warned = msgspec.structs.replace(warned, status="warn", judgement=judgement, variant=text)
    mods = {"mask": {"name": text}, "score": {"name": text}, "dtype": text}
    return gates.report(
        *(gates.answer(one, test=text) for one in (refused, raised, warned)),
        gates.answer(gates.wrong(text, problem=mods), test=text, failure=text),
        gates.answer(gates.record(text, question=text, status="crash", reason=text, case_id=text)),
        command=text,
        shard=text,
        tier=text,
        started=text,
        environments={"here": msgspec.structs.replace(gates.GPU, device=text)},
        kernels={text: text},
        absent={text: text},
        unfinished=2,
        unfinished_because=text,
        harness=(text,),
        baseline=text,
        changes=(gates.Change(kernel=text, case_id=text, standing="worse", reason=text),),
    )


def measurements(text):
    make = Factory()
    return make.report(
        make.record(text, variant=text, heads=text),
        make.judged(
            text,
            status="fail",
            reason=text,
            warnings=(f"2 {text}",),
            arithmetic=text,
            lse_also_within=text,
        ),
        make.refused(text + "u", "unsupported", text),
        make.refused(text + "e", "error", text, problem={"distribution": text}),
        command=text,
        kernels={text: text},
        absent={text: text},
        environments={"here": make.environment(device=text, interpreter=(text,))},
    )


PAGES = [(fmt, measurements) for fmt in ("table", "md", "csv")]
PAGES += [(fmt, gate) for fmt in GATE_FORMATS if fmt != "json"]


class Tags(HTMLParser):
    """Collects a page's tags with attribute names, its addresses and ids, and its text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.addresses, self.text = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, tuple(name for name, _ in attrs)))
        self.addresses += [v for name, v in attrs if name in {"href", "src", "id", "style"}]

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize(("fmt", "report"), PAGES)
def test_no_control_character_reaches_a_page(fmt, report, text):
    page = render(report(text), fmt)
    assert not FORBIDDEN.search(page)
    page.encode()


@functools.cache
def tame_page():
    return Tags(as_html(gate("tame")))


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_html_tags_do_not_depend_on_text(text):
    page, tame = Tags(as_html(gate(text))), tame_page()
    assert page.tags == tame.tags
    assert page.addresses == tame.addresses


def test_html_shows_text_verbatim():
    text = '<b>a</b> & "c"'
    assert text in "".join(Tags(as_html(gate(text))).text)


def test_failure_script_is_escaped_in_html():
    report = gates.report(gates.answer(gates.record(status="error", reason="no"), failure="abcdef"))
    script = "</code></pre><script>alert(1)</script>\n\tkept\x1b[31m\u202e"
    page = as_html(report, {"abcdef": script})
    assert "<script>alert" not in page
    assert "\n\tkept[31m</code>" in page


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_junit_is_valid_xml(text):
    root = ET.fromstring(render(gate(text), "junit"))  # noqa: S314  # our own
    assert (root.get("tests"), root.get("errors")) == ("8", "4")


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_sarif_locations_stay_in_the_repository(text):
    data = json.loads(render(gate(text), "sarif"))
    for result in data["runs"][0]["results"]:
        (location,) = result["locations"]
        assert location["physicalLocation"]["artifactLocation"]["uri"] == "pyproject.toml"


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_github_lines_are_only_our_own_commands(text):
    page, tame = (render(gate(t), "github") for t in (text, "tame"))
    heads = [line.partition(" ")[0] for line in page.splitlines()]
    assert heads == [line.partition(" ")[0] for line in tame.splitlines()]
    for line in page.splitlines():
        assert re.fullmatch(r"::\w+ title=[^:,]*::.*", line)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("report", [measurements, gate])
def test_csv_cells_are_never_formulas(report, text):
    for row in csv.reader(io.StringIO(render(report(text), "csv"))):
        for cell in row:
            assert not cell.startswith(("=", "+", "@", "\t", "\r"))
            if cell.startswith("-"):
                float(cell)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_gate_json_round_trips(text):
    page = render(gate(text), "json")
    again = load_report(page, GateReport)
    assert render(again, "json") == page


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_text_cannot_close_a_summary_code_fence(text):
    def fences(text):
        page = render(gate(text), "md")
        lines = [line for line in page.splitlines() if re.match("`{3,}", line)]
        return len(lines), len([line for line in page.splitlines() if line.startswith("#")])

    assert fences(text) == fences("tame")


def test_oversized_summary_is_cut_and_counts_what_is_left_out():
    reason = "x" * 100_000
    answers = [
        gates.answer(gates.record(f"kernel{i}", status="error", reason=reason)) for i in range(400)
    ]
    report = gates.report(*answers, kernels={}, changes=())
    page = gate_markdown(report)
    assert len(page.encode()) <= LARGEST_SUMMARY
    assert "more kinds of failure" in page


@pytest.mark.parametrize("largest", [2_000, 3_000, 3_500, 4_000])
def test_summary_respects_smaller_limits(largest):
    page = gate_markdown(gates.sample(), largest=largest)
    assert len(page.encode()) <= largest
    assert "gate.json has" in page


@pytest.mark.parametrize("name", ["../evil", "a/b", "", "A", "x" * 41, "a\n", "<script>"])
def test_script_with_malformed_id_writes_nothing(tmp_path, name):
    with pytest.raises(UsageError, match="is no id"):
        write_gate(gates.sample(), tmp_path, {name: "print()"})
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_file_names_do_not_depend_on_text(tmp_path, text):
    paths = write_gate(gate(text), tmp_path / "out", {"abc234defg": text})
    names = {p.relative_to(tmp_path / "out").as_posix() for p in paths}
    assert names == {
        *("gate.json", "report.html", "junit.xml", "results.sarif", "summary.md"),
        "repro/abc234defg.py",
    }
    assert {p for p in tmp_path.rglob("*") if p.is_file()} == set(paths)


# Measurement reports


def markdown_html(text):
    return MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(text)


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_fits_table_width(width, text):
    page = as_table(measurements(text * 40), width=width)
    assert max(map(cell_len, page.splitlines())) <= width


@pytest.mark.parametrize("text", HOSTILE)
def test_json_of_hostile_text_is_ascii_safe_json(text):
    page = render(measurements(text), "json")
    msgspec.json.decode(page.encode())
    assert not re.search("[\x00-\x09\x0b-\x1f]", page)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_adds_no_lines(text):
    tame = as_table(measurements("tame"), width=1000).count("\n")
    assert as_table(measurements(text), width=1000).count("\n") == tame
    assert render(measurements(text), "csv").count("\n") == 5


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_shows_hostile_text_as_text(text):
    html = markdown_html(render(measurements(text), "md"))
    tame = markdown_html(render(measurements("tame"), "md"))
    # The same tags in the same order, but for what a code span or a plain word is set in.
    tags = [t for t in re.findall(r"<[^>]*>", html) if "code" not in t]
    assert tags == [t for t in re.findall(r"<[^>]*>", tame) if "code" not in t]


def test_markdown_shows_text_verbatim():
    html = markdown_html(render(measurements("a|b <i> `x` \\| *y* &amp; _z_"), "md"))
    assert "<td>a|b &lt;i&gt; `x` \\| *y* &amp;amp; _z_</td>" in html


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
def test_escape_sequences_are_removed(text, line):
    assert one_line(text) == line


@pytest.mark.parametrize("mark", ["\x1b]", "\x90", "\x1b[0;", "a\x1b", "\n ", "<", "_", ":"])
def test_markdown_escaping_is_not_quadratic(mark):
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
