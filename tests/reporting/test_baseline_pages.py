"""Changes on a page: the worst first, each with its reason, and foreign text inert."""

from __future__ import annotations

import io
from typing import Any

import pytest

from attncheck.core.errors import UnknownName, UsageError
from attncheck.records.json_reports import load_report
from attncheck.records.run_reports import BaselineComparison, Change
from attncheck.reporting.rendering import FORMATS, render, show
from attncheck.reporting.score_documents import tally


def change(standing: Any, **changes: Any) -> Change:
    given = {"kernel": "mine.py::fwd", "case_id": "abcdefghij", "reason": "", **changes}
    return Change(standing=standing, **given)


REPORT = BaselineComparison(
    command="attncheck baseline diff gate.json",
    baseline="attncheck-baseline.json",
    problems={"abcdefghij": "bf16 causal B1 H2 Q128 K128 D64"},
    changes=(
        change("worse", before=1e-3, after=1.5e-3, reason="out's error is 1.5 × what it was"),
        change("better", before=2e-3, after=1e-3),
        change("gone", before=2e-3),
        change("new", after=0.0),
        change("within rounding", before=1e-3, after=1.01e-3, reason="out 1.01 ×"),
        *(change("identical", before=0.0, after=0.0) for _ in range(3)),
    ),
)


def test_the_counts_stand_first_and_what_is_identical_is_only_counted() -> None:
    text = render(REPORT, "table")
    counts = "1 worse, 1 better, 1 gone, 1 new, 1 within rounding, 3 identical"
    assert f"compared with attncheck-baseline.json: {counts}" in text
    assert text.index("\nworse") < text.index("\nbetter") < text.index("\nwithin rounding")
    assert "\nidentical\n" not in text
    assert "└ out's error is 1.5 × what it was" in text
    assert "bf16 causal B1 H2 Q128 K128 D64" in text
    assert "1.50e-03" in text
    assert "1.50×" in text


def test_json_is_read_back_and_nothing_else_is() -> None:
    assert load_report(render(REPORT, "json"), BaselineComparison) == REPORT
    for text in ("", "[]", '{"schema": 2}', render(REPORT, "json").replace('"worse"', '"bad"')):
        with pytest.raises(UsageError):
            load_report(text, BaselineComparison)


def test_markdown_is_a_table_of_each_standing() -> None:
    text = render(REPORT, "md")
    assert text.startswith("# Compared with the baseline\n")
    assert "## worse" in text
    assert "| remark |" in text


def test_many_of_what_asks_for_nothing_are_cut_with_a_count() -> None:
    many = BaselineComparison(command="x", baseline="y", changes=(change("new", after=1e-3),) * 60)
    text = render(many, "table")
    assert "new (the first 50 of 60)" in text
    assert text.count("mine.py::fwd") == 50
    worse = BaselineComparison(command="x", baseline="y", changes=(change("worse"),) * 60)
    assert render(worse, "table").count("mine.py::fwd") == 60


@pytest.mark.parametrize("fmt", ["table", "md"])
def test_foreign_text_is_inert(fmt: str) -> None:
    evil = "</script>\x1b[31m|=cmd()\u202e\nnext"
    changes = (change("worse", kernel=evil, reason=evil),)
    text = render(BaselineComparison(command=evil, baseline=evil, changes=changes), fmt)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "cmd()\nnext" not in text
    if fmt == "md":
        assert "</script>" not in text.replace("`</script>", "")


def test_nothing_to_compare() -> None:
    assert tally(()) == "nothing to compare"
    for fmt in set(FORMATS) - {"csv"}:  # which has tables alone
        assert render(BaselineComparison(command="x", baseline="y", changes=()), fmt)


def test_another_format() -> None:
    with pytest.raises(UnknownName):
        render(REPORT, "xml")


def test_a_terminal_gets_the_same_lines() -> None:
    stream = io.StringIO()
    show(REPORT, "table", stream)
    assert "1 worse" in stream.getvalue()
