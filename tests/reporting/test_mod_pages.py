from __future__ import annotations

import io
import json

import msgspec
import pytest

from attncheck.core.errors import UnknownName, UsageError
from attncheck.records.json_reports import load_report
from attncheck.records.record import Environment
from attncheck.records.survey_reports import ModAnswer, ModRecord, ModReport
from attncheck.reporting.rendering import render, show

EQUAL = ModAnswer(status="equal")


def record(name="causal", kind="mask", expression="q_idx >= kv_idx", **answers):
    answers = {"mpmath": EQUAL, "flex": EQUAL} | answers
    return ModRecord(name=name, kind=kind, line=3, expression=expression, answers=answers)


def report(*records):
    return ModReport(
        command="attncheck mods mine.py",
        environment=Environment(
            device="cpu", machine="x86_64", python="3.11", torch="2.13", numpy="2", attncheck="1"
        ),
        mpmath="1.3.0",
        file="mine.py",
        shape="B1 H2 Q8 K8 D4",
        backends={"mpmath": "m", "flex": "f"},
        records=records,
    )


WRONG = record(
    "odd", flex=ModAnswer(status="different", detail="at b=0 h=1: True, but should be False")
)
ABSENT = ModAnswer(status="unsupported", detail="torch.compile is broken here")
LONG = record("long", "score mod", " + ".join(["score"] * 40), flex=ABSENT)


def test_the_table_reads_so():
    assert (
        render(report(record(), WRONG, LONG), "table")
        == """\
attncheck mods mine.py
cpu · x86_64 · torch 2.13 · triton missing · Python 3.11 · attncheck 1 · mpmath 1.3.0

mine.py · B1 H2 Q8 K8 D4
  mod     kind       expression                                                                \
mpmath  flex
  causal  mask       q_idx >= kv_idx                                                           \
equal   equal
  odd     mask       q_idx >= kv_idx                                                           \
equal   different
    └ flex: at b=0 h=1: True, but should be False
  long    score mod  score + score + score + score + score + score + score + score + score +…  \
equal   —

— flex of long: torch.compile is broken here
equal: as the callable says, at every place. Whole expressions: --format json.
3 mods: 4 equal, 1 different, 1 unsupported.
"""
    )


def test_a_narrow_terminal_cuts_expressions_alone(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    stream = io.StringIO()
    show(report(record(), WRONG, LONG), stream=stream)
    head, *rows = stream.getvalue().splitlines()[5:10]
    assert head.split() == ["mod", "kind", "expression", "mpmath", "flex"]
    assert max(map(len, [head, *rows])) <= 70
    assert rows[-1].endswith("score…  equal   —")
    monkeypatch.setenv("COLUMNS", "20")
    show(report(record(), LONG), stream=stream)
    assert "  long    score mod  score + score…  equal\n" in stream.getvalue()


@pytest.mark.parametrize("width", [80, 100, 120, 200])
@pytest.mark.parametrize("others", [(), ("sdpa-math", "mine", "triton-flash3", "triton-flash4")])
@pytest.mark.parametrize("name", ["odd", "a_mod_with_quite_a_long_name_of_its_own"])
def test_no_line_is_wider_than_the_terminal_and_every_kernel_has_its_column(
    monkeypatch, width, others, name
):
    names = ["ideal", "triton-flash1", "triton-flash2", "flex", *others]
    answers = dict.fromkeys(names, EQUAL)
    wrong = ModAnswer(status="different", detail="here")
    absent = ModAnswer(status="unsupported", detail="no LSE " * 30)
    long = record("long", "score mod", LONG.expression, **answers | {names[0]: absent})
    rows = [record(**answers), record(name, **answers | {names[-1]: wrong}), long]
    whole = msgspec.structs.replace(
        report(*rows),
        command="attncheck mods mine.py" + " --kernel triton-flash" * 9,
        backends={"mpmath": "m"} | dict.fromkeys(names, "k"),
    )
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    show(whole, stream=stream)
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    headings = [line.split() for line in lines if line.startswith("  mod  ")]
    assert [h for line in headings for h in line[3:]] == ["mpmath", *names]
    assert len(headings) == 1 or others or width == 80 or name != "odd"
    assert sum("└" in line for line in lines) == 1


def test_an_absence_for_all_mods_is_said_once():
    text = render(report(record(flex=ABSENT), record("other", flex=ABSENT)), "table")
    assert "— flex: torch.compile is broken here\n" in text


def test_json_comes_back_whole():
    whole = report(record(), WRONG, LONG)
    text = render(whole, "json")
    assert load_report(text, ModReport) == whole
    assert json.loads(text)["records"][2]["expression"] == LONG.expression


def test_foreign_text_is_harmless():
    foreign = "x | y \x1b[31m\n<b> \ud800"
    wrong = ModAnswer(status="error", detail=foreign)
    bad = report(record("m", expression=foreign, flex=wrong))
    assert json.loads(render(bad, "json"))["records"][0]["expression"].endswith("\\ud800")
    for fmt in ("table", "md"):
        text = render(bad, fmt)
        assert "\x1b" not in text
        assert "\ud800" not in text
    assert "<b>" not in render(bad, "md")


def test_another_schema_and_another_format_are_refused():
    other = msgspec.structs.replace(report(record()), schema=1)
    with pytest.raises(UsageError, match="schema is 1, this version reads 2"):
        load_report(render(other, "json"), ModReport)
    with pytest.raises(UnknownName, match="choose from csv, html, json, md, table"):
        render(other, "pdf")
