"""The page of a gate: whole in itself, by a policy that lets nothing else in."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from itertools import pairwise

import msgspec
import pytest
from tests.reporting import gate_reports as made

from attncheck.core.errors import UsageError
from attncheck.reporting.gate_charts import charts, heat_map, level, results_table
from attncheck.reporting.gate_document import MOST_ON_PAGE, gate_page
from attncheck.reporting.html import html_text
from attncheck.reporting.rendering import write_gate


def as_html(report, scripts=None):
    return html_text(gate_page(report, scripts or {}))


MINE = "myfa.py::forward"


@pytest.fixture(scope="module")
def sample():
    return made.sample()


@pytest.fixture(scope="module")
def page(sample):
    return as_html(sample)


class Balanced(HTMLParser):
    """Elements that are open, and those that are wrongly closed."""

    def __init__(self, page):
        super().__init__()
        self.open, self.wrong, self.seen = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def hashes(page, tag):
    (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_the_policy_names_the_style_and_the_script_of_the_page(page):
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["style-src"] == f"'sha256-{hashes(page, 'style')}'"
    assert rules["script-src"] == f"'sha256-{hashes(page, 'script')}'"
    assert "unsafe" not in policy


def test_nothing_is_loaded_and_no_style_or_handler_is_inline(page):
    for tag, attributes in Balanced(page).seen:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "form"}
        assert not {name for name in attributes if name in {"style", "src"} or name[:2] == "on"}
        assert attributes.get("href", "#").startswith("#")


def test_elements_are_closed_and_ids_are_had_once(page):
    found = Balanced(page)
    assert (found.wrong, found.open) == ([], [])
    ids = [attributes["id"] for _, attributes in found.seen if "id" in attributes]
    assert len(ids) == len(set(ids))
    wanted = [
        a[name] for _, a in found.seen for name in ("data-copies", "aria-labelledby") if name in a
    ]
    wanted += [a["href"][1:] for _, a in found.seen if "href" in a]
    assert set(wanted) <= set(ids)


def test_headings_leave_no_level_out(page):
    levels = [int(tag[1]) for tag, _ in Balanced(page).seen if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))


def test_drawings_and_headings_of_tables_say_what_they_are(page):
    drawings = re.findall(
        r'<svg [^>]*role="img">\s*<title>[^<]+</title>\s*<desc>[^<]+</desc>', page
    )
    assert len(drawings) == page.count('role="img"') == 6  # two maps, two drawings a kernel
    for tag, attributes in Balanced(page).seen:
        if tag == "th":
            assert attributes.get("scope") in {"row", "col"}


def test_a_failure_is_shown_with_its_command_and_script(sample):
    text = "print('a script')"
    whole = as_html(sample, {"pyidwkg7fj": text})
    assert "attncheck repro pyidwkg7fj" in whole
    assert "print(&#39;a script&#39;)" in whole


def test_a_script_too_large_for_the_page_is_named(sample):
    page = as_html(sample, {"pyidwkg7fj": "x" * 2**20})
    assert "<code>repro/pyidwkg7fj.py</code>" in page
    assert len(page) < 2**19


def test_more_failures_than_the_page_shows_are_counted():
    answers = [made.answer(made.wrong(f"kernel{i}")) for i in range(MOST_ON_PAGE + 7)]
    page = as_html(made.report(*answers))
    assert page.count('class="card failure"') == MOST_ON_PAGE
    assert "and 7 more kinds of failure" in page


def test_a_report_of_nothing_is_a_page():
    page = as_html(made.report(kernels={}, environments={}))
    assert "NOTHING TESTED" in page


# The parts.


def test_the_matrix_has_a_sign_for_each_outcome():
    answers = [
        made.answer(made.measured(MINE, dtype="bf16")),
        made.answer(made.wrong(MINE, asked={"dtype": "fp16"})),
        made.answer(made.record(MINE, asked={"dtype": "fp32"}, status="warn")),
        made.answer(made.record(MINE, asked={"dtype": "e4m3"}, status="unsupported")),
        made.answer(made.measured(MINE, mask={"name": "full"}, score={"name": "alibi"})),
        made.answer(made.wrong("another")),
    ]
    table = results_table(made.report(*answers), MINE)
    assert [column.heading for column in table.columns][1:] == ["fp32", "fp16", "bf16", "e4m3"]
    assert [[cell.text for cell in row.cells] for row in table.rows] == [
        ["causal", "! 1/1", "✗ 1/1", "✓ 1", "– 1"],
        ["full + alibi", "", "", "✓ 1", ""],
    ]


def test_curves_take_the_largest_of_each_length():
    answers = [
        made.answer(made.measured(MINE, share=share, kv=kv, seed=seed))
        for kv, seed, share in ((64, 0, 0.1), (64, 1, 0.4), (4096, 0, 0.2))
    ]
    shares, _ = charts(made.report(*answers), MINE)
    ((line,),) = (series.lines for series in shares.series)
    assert [point.text for point in line] == [
        "bf16 causal D64, 64 keys: 0.40",
        "bf16 causal D64, 4,096 keys: 0.20",
    ]
    assert line[0].y < line[1].y  # larger is higher


@pytest.mark.parametrize(
    "other",
    [
        {"mask": {"name": "full"}},
        {"score": {"name": "alibi"}},
        {"head_dim": 128},
        {"value_dim": 32},
        {"distribution": "outliers"},
        {"backward": True},
        {"sink": True},
        {"dtype": "fp16"},
    ],
)
def test_a_line_joins_only_what_belongs_together(other):
    asked = [{"kv": 64}, {"kv": 128}, {"kv": 256, "seed": 3, "batch": 1}, {"kv": 512} | other]
    answers = [made.answer(made.measured(MINE, **each)) for each in asked]
    shares, _ = charts(made.report(*answers), MINE)
    lines = [len(line) for series in shares.series for line in series.lines]
    assert sorted(lines) == [1, 3]
    # A point alone is drawn, and joined with nothing.
    page = as_html(made.report(*answers))
    assert page.count("<polyline") == 2
    assert page.count(">bf16 causal D64, ") + page.count("512 keys") >= 8


def test_what_is_not_taken_is_folded_and_said_once(page):
    assert page.count("<details><summary><h2") == 2
    assert "not supported: 1 question" in page
    assert page.count("it declares 64, 128.") == 1
    assert "does not support 1 question" not in page


def test_every_value_to_choose_is_that_of_something(page):
    said = [json.loads(a["data-facets"]) for _, a in Balanced(page).seen if "data-facets" in a]
    shown = {name: {v for each in said for v in each.get(name, ())} for name in said[0]}
    filters = page[page.index('id="filters"') : page.index("<output>")]
    for name in ("kernel", "dtype", "stage", "status"):
        select = filters[filters.index(f'name="{name}"') :].partition("</select>")[0]
        values = set(re.findall("<option>(.*?)</option>", select))
        assert len(values) > 1
        assert values - {"unsupported"} <= shown[name]


def test_by_what_is_the_same_throughout_nobody_can_choose():
    page = as_html(made.report(made.answer(made.wrong()), made.answer(made.measured(MINE))))
    assert 'select name="status"' in page
    assert 'select name="kernel"' not in page


@pytest.mark.parametrize("share", [float("inf"), float("nan"), 1e300])
def test_what_is_not_finite_is_drawn_at_the_top(share):
    answers = [made.answer(made.measured(MINE, share=s, kv=kv)) for s, kv in ((0.5, 8), (share, 9))]
    shares, _ = charts(made.report(*answers), MINE)
    ((line,),) = (series.lines for series in shares.series)
    assert 0 <= line[1].y < line[0].y < 250
    as_html(made.report(*answers))


def test_neighbours_of_one_level_are_drawn_as_one():
    drawn = heat_map(made.wrong())
    assert [(tile.level, tile.width) for tile in drawn.tiles[:3]] == [(1, 26), (5, 26), (1, 52)]
    assert drawn.tiles[1].text == "head 0, rows 64–127: 38 × what is allowed"


@pytest.mark.parametrize(("share", "place"), [(0.0, 0), (1.0, 2), (1.1, 3), (1e9, 6)])
def test_levels_have_one_as_a_border(share, place):
    assert level(share) == place
    assert level(float("nan")) == 6


@pytest.mark.parametrize("share", [1.0, 1.5, float("nan")])
@pytest.mark.parametrize("tensor", ["out", "dq"])
def test_a_map_of_right_outs_is_not_drawn_for_a_wrong_gradient(share, tensor):
    record = made.wrong(rule="improbable")
    worst = msgspec.structs.replace(record.judgement.worst, tensor=tensor)
    record = msgspec.structs.replace(
        record,
        judgement=msgspec.structs.replace(record.judgement, worst=worst),
        error_map=msgspec.structs.replace(record.error_map, values=((0.2, share), (0.1, 0.0))),
    )
    assert (heat_map(record) is None) == (tensor == "dq" and share == 1.0)


# Files


def test_nothing_is_written_where_something_cannot_be(tmp_path):
    (tmp_path / "junit.xml").mkdir()
    (tmp_path / "gate.json").write_text("old")
    with pytest.raises(UsageError, match="cannot be written"):
        write_gate(made.sample(), tmp_path, {"abcdefghij": "x"})
    assert (tmp_path / "gate.json").read_text() == "old"
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "gate.json"]
