"""The HTML page of a gate: self-contained, under a content security policy that blocks the rest."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from itertools import pairwise

import msgspec
import pytest
from tests.reporting import gate_reports as gates
from tests.reporting.pages import as_html

from attncheck.core.errors import UsageError
from attncheck.reporting.gate_charts import charts, heat_map, level, results_table
from attncheck.reporting.gate_document import MOST_ON_PAGE
from attncheck.reporting.rendering import write_gate

MINE = "myfa.py::forward"


@pytest.fixture(scope="module")
def sample():
    return gates.sample()


@pytest.fixture(scope="module")
def page(sample):
    return as_html(sample)


class Balanced(HTMLParser):
    """Collects a page's elements, those left open and those closed in the wrong order."""

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


def test_policy_allows_only_the_pages_own_style_and_script(page):
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["style-src"] == f"'sha256-{hashes(page, 'style')}'"
    assert rules["script-src"] == f"'sha256-{hashes(page, 'script')}'"
    assert "unsafe" not in policy


def test_page_loads_nothing_and_has_no_inline_style_or_handler(page):
    for tag, attributes in Balanced(page).seen:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "form"}
        assert not {name for name in attributes if name in {"style", "src"} or name[:2] == "on"}
        assert attributes.get("href", "#").startswith("#")


def test_elements_are_closed_ids_unique_and_links_resolve(page):
    parsed = Balanced(page)
    assert (parsed.wrong, parsed.open) == ([], [])
    ids = [attributes["id"] for _, attributes in parsed.seen if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = [
        a[name] for _, a in parsed.seen for name in ("data-copies", "aria-labelledby") if name in a
    ]
    targets += [a["href"][1:] for _, a in parsed.seen if "href" in a]
    assert set(targets) <= set(ids)


def test_headings_skip_no_level(page):
    levels = [int(tag[1]) for tag, _ in Balanced(page).seen if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))


def test_drawings_and_table_headings_are_accessible(page):
    drawings = re.findall(
        r'<svg [^>]*role="img">\s*<title>[^<]+</title>\s*<desc>[^<]+</desc>', page
    )
    assert len(drawings) == page.count('role="img"') == 6  # two maps, two drawings a kernel
    for tag, attributes in Balanced(page).seen:
        if tag == "th":
            assert attributes.get("scope") in {"row", "col"}


def test_failure_shows_its_repro_command_and_script(sample):
    text = "print('a script')"
    whole = as_html(sample, {"pyidwkg7fj": text})
    assert "attncheck repro pyidwkg7fj" in whole
    assert "print(&#39;a script&#39;)" in whole


def test_large_script_is_replaced_by_its_file_name(sample):
    page = as_html(sample, {"pyidwkg7fj": "x" * 2**20})
    assert "<code>repro/pyidwkg7fj.py</code>" in page
    assert len(page) < 2**19


def test_failures_beyond_the_page_limit_are_counted():
    answers = [gates.answer(gates.wrong(f"kernel{i}")) for i in range(MOST_ON_PAGE + 7)]
    page = as_html(gates.report(*answers))
    assert page.count('class="card failure"') == MOST_ON_PAGE
    assert "and 7 more kinds of failure" in page


def test_empty_report_is_rendered():
    page = as_html(gates.report(kernels={}, environments={}))
    assert "NOTHING TESTED" in page


# Parts of the page


def test_results_table_has_a_sign_for_each_outcome():
    answers = [
        gates.answer(gates.measured(MINE, dtype="bf16")),
        gates.answer(gates.wrong(MINE, problem={"dtype": "fp16"})),
        gates.answer(gates.record(MINE, problem={"dtype": "fp32"}, status="warn")),
        gates.answer(gates.record(MINE, problem={"dtype": "e4m3"}, status="unsupported")),
        gates.answer(gates.measured(MINE, mask={"name": "full"}, score={"name": "alibi"})),
        gates.answer(gates.wrong("another")),
    ]
    table = results_table(gates.report(*answers), MINE)
    assert [column.heading for column in table.columns][1:] == ["fp32", "fp16", "bf16", "e4m3"]
    assert [[cell.text for cell in row.cells] for row in table.rows] == [
        ["causal", "! 1/1", "✗ 1/1", "✓ 1", "– 1"],
        ["full + alibi", "", "", "✓ 1", ""],
    ]


def test_curves_show_the_largest_share_of_each_length():
    answers = [
        gates.answer(gates.measured(MINE, share=share, kv=kv, seed=seed))
        for kv, seed, share in ((64, 0, 0.1), (64, 1, 0.4), (4096, 0, 0.2))
    ]
    shares, _ = charts(gates.report(*answers), MINE)
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
def test_curves_join_only_points_of_equal_settings(other):
    problems = [{"kv": 64}, {"kv": 128}, {"kv": 256, "seed": 3, "batch": 1}, {"kv": 512} | other]
    answers = [gates.answer(gates.measured(MINE, **problem)) for problem in problems]
    shares, _ = charts(gates.report(*answers), MINE)
    lines = [len(line) for series in shares.series for line in series.lines]
    assert sorted(lines) == [1, 3]
    # A single point is drawn without a line.
    page = as_html(gates.report(*answers))
    assert page.count("<polyline") == 2
    assert page.count(">bf16 causal D64, ") + page.count("512 keys") >= 8


def test_unsupported_questions_are_folded_and_mentioned_once(page):
    assert page.count("<details><summary><h2") == 2
    assert "not supported: 1 question" in page
    assert page.count("it declares 64, 128.") == 1
    assert "does not support 1 question" not in page


def test_every_filter_value_matches_a_failure(page):
    facets = [json.loads(a["data-facets"]) for _, a in Balanced(page).seen if "data-facets" in a]
    present = {name: {v for each in facets for v in each.get(name, ())} for name in facets[0]}
    filters = page[page.index('id="filters"') : page.index("<output>")]
    for name in ("kernel", "dtype", "stage", "status"):
        select = filters[filters.index(f'name="{name}"') :].partition("</select>")[0]
        values = set(re.findall("<option>(.*?)</option>", select))
        assert len(values) > 1
        assert values - {"unsupported"} <= present[name]


def test_filter_is_omitted_when_all_values_are_equal():
    page = as_html(gates.report(gates.answer(gates.wrong()), gates.answer(gates.measured(MINE))))
    assert 'select name="status"' in page
    assert 'select name="kernel"' not in page


@pytest.mark.parametrize("share", [float("inf"), float("nan"), 1e300])
def test_nonfinite_shares_are_drawn_at_the_top(share):
    answers = [
        gates.answer(gates.measured(MINE, share=s, kv=kv)) for s, kv in ((0.5, 8), (share, 9))
    ]
    shares, _ = charts(gates.report(*answers), MINE)
    ((line,),) = (series.lines for series in shares.series)
    assert 0 <= line[1].y < line[0].y < 250
    as_html(gates.report(*answers))


def test_adjacent_tiles_of_one_level_are_merged():
    drawing = heat_map(gates.wrong())
    assert [(tile.level, tile.width) for tile in drawing.tiles[:3]] == [(1, 26), (5, 26), (1, 52)]
    assert drawing.tiles[1].text == "head 0, rows 64–127: 38 × what is allowed"


@pytest.mark.parametrize(("share", "place"), [(0.0, 0), (1.0, 2), (1.1, 3), (1e9, 6)])
def test_level_changes_above_a_share_of_one(share, place):
    assert level(share) == place
    assert level(float("nan")) == 6


@pytest.mark.parametrize("share", [1.0, 1.5, float("nan")])
@pytest.mark.parametrize("tensor", ["out", "dq"])
def test_map_of_correct_outputs_is_not_drawn_for_a_wrong_gradient(share, tensor):
    record = gates.wrong(rule="improbable")
    worst = msgspec.structs.replace(record.judgement.worst, tensor=tensor)
    record = msgspec.structs.replace(
        record,
        judgement=msgspec.structs.replace(record.judgement, worst=worst),
        error_map=msgspec.structs.replace(record.error_map, values=((0.2, share), (0.1, 0.0))),
    )
    assert (heat_map(record) is None) == (tensor == "dq" and share == 1.0)


# Files


def test_unwritable_file_leaves_all_files_untouched(tmp_path):
    (tmp_path / "junit.xml").mkdir()
    (tmp_path / "gate.json").write_text("old")
    with pytest.raises(UsageError, match="cannot be written"):
        write_gate(gates.sample(), tmp_path, {"abcdefghij": "x"})
    assert (tmp_path / "gate.json").read_text() == "old"
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "gate.json"]
