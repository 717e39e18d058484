from __future__ import annotations

import io
import json

import msgspec
import pytest

from attncheck.core.errors import UnknownName, UsageError
from attncheck.core.judgement import Place
from attncheck.records.json_reports import load_report
from attncheck.records.record import Environment
from attncheck.records.survey_reports import Agreement, Distance, OracleRecord, OracleReport, Rows
from attncheck.reporting.rendering import render, show

AT = Place(batch=0, head=1, query=2, dim=3)
PROBLEM = {
    "mask": {"name": "full"},
    "score": {"name": "none"},
    "scale": 0.5,
    "distribution": "normal",
    "batch": 1,
    "heads": 2,
    "kv_heads": 1,
    "query": 24,
    "kv": 16,
    "head_dim": 8,
    "value_dim": 4,
    "dtype": "bf16",
    "seed": 3,
}


def record(oracle="safe", distribution="normal", variant="full", **changes):
    softmax = variant == "softmax"
    fields = {
        "case_id": f"{variant} {distribution}",
        "case": {"problem": PROBLEM | ({"operation": "softmax"} if softmax else {})},
        "variant": variant,
        "distribution": distribution,
        "oracle": oracle,
        "out": Distance(units=1.2345, at=AT, compared=192),
        "lse": Distance(units=0.0, at=Place(batch=0, head=0, query=0), compared=48),
        "rows": Rows(total=48),
    }
    return OracleRecord(**(fields | changes))


def naive(distribution="large_logits", **rows):
    count = sum(rows.values())
    return record(
        "naive",
        distribution,
        out=Distance(units=7.0, at=AT, compared=192 - 4 * count, nonfinite=4 * count),
        lse=Distance(units=3.0, at=AT, compared=48 - count, nonfinite=count),
        rows=Rows(total=48, nonfinite=count, **rows),
    )


def report(*records, log10=-51.3, **apart):
    cases = {r.case_id: r for r in records}
    return OracleReport(
        command="attncheck oracles --digits 50",
        environment=Environment(
            device="cpu", machine="x86_64", python="3.11.9", torch="2.13", numpy="2", attncheck="1"
        ),
        mpmath="1.3.0",
        backend="python",
        digits=50,
        must_agree=40,
        reference="safe",
        may_overflow=("naive",),
        oracles={"naive": "n", "safe": "s"},
        records=records,
        agreements=tuple(
            Agreement(
                case_id=case_id,
                variant=r.variant,
                distribution=r.distribution,
                oracles=("naive", "online"),
                log10=log10,
                **apart,
            )
            for case_id, r in cases.items()
        ),
    )


SAMPLE = report(
    record("naive"),
    record(),
    naive(overflowed=37),
    record(distribution="large_logits"),
    record("naive", variant="softmax"),
    record(variant="softmax"),
)


def test_the_table_reads_so():
    assert (
        render(SAMPLE, "table")
        == """\
attncheck oracles --digits 50
cpu · x86_64 · torch 2.13 · triton missing · Python 3.11.9 · attncheck 1 · mpmath 1.3.0 on \
Python's integers

full · bf16 · B1 Q24 K16 D8/4 · heads 2/1 · seed 3 · out in units of 2^-53 Σ p|v|
  distribution     naive  safe  50 digits
  normal            1.23  1.23      1e-51
  large_logits  overflow  1.23      1e-51
    └ naive overflows in 37 of 48 rows; at most 7.00 units elsewhere

full · bf16 · B1 Q24 K16 D8/4 · heads 2/1 · seed 3 · LSE in units of 2^-53 max(1, |LSE|)
  distribution     naive  safe
  normal               0     0
  large_logits  overflow     0

softmax · bf16 · B1 H2 R24 C16 · seed 3 · out in units of 2^-53 p
  distribution     naive  safe  50 digits
  normal            1.23  1.23      1e-51

softmax · bf16 · B1 H2 R24 C16 · seed 3 · LSE in units of 2^-53 max(1, |LSE|)
  distribution     naive  safe
  normal               0     0

Largest error of each fp64 oracle against the safe one in 50 digits; 0: the very same numbers.
2^-53 is half the distance from 1 to the next fp64 number: one rounding is at most 1.
50 digits: how far the recurrences themselves are apart when all are run in that many digits.
overflow, 0/0: NaN or infinite where the exact result is finite, as it must be without the row's \
maximum subtracted.
"""
    )


@pytest.mark.parametrize(
    ("rows", "cell", "remark"),
    [
        ({"overflowed": 48}, "overflow", "naive overflows in 48 of 48 rows"),
        ({"vanished": 5}, "0/0", "naive is 0/0 in 5 of 48 rows"),
        (
            {"overflowed": 1, "vanished": 2},
            "overflow",
            "naive overflows in 1 of 48 rows, is 0/0 in 2 of 48 rows",
        ),
    ],
)
def test_what_is_not_finite_is_said(rows, cell, remark):
    for fmt in ("table", "md"):
        text = render(report(naive(**rows), record(distribution="large_logits")), fmt)
        assert cell in text
        assert remark in text
        assert "nan" not in text.lower().replace("nan or infinite", "")


def test_nan_of_no_known_cause_and_wrong_dead_rows_are_said():
    broken = record("online", rows=Rows(total=40, nonfinite=2, dead_wrong=8))
    broken = msgspec.structs.replace(
        broken, out=Distance(units=None, at=None, compared=0, nonfinite=160)
    )
    text = render(report(broken), "table")
    assert "not finite" in text
    assert "online is not finite in 2 of 40 rows, is wrong in 8 rows that see no key\n" in text


def test_all_equal_at_many_digits_is_a_zero():
    text = render(report(record(), log10=None), "table")
    assert text.splitlines()[5].split() == ["normal", "1.23", "0"]


@pytest.mark.parametrize(
    ("apart", "cell", "remark"),
    [
        (
            {"log10": -39.9, "furthest": "online"},
            "1e-39",
            "in 50 digits online and safe agree to fewer than 40",
        ),
        (
            {"log10": -51.3, "infinite": 3, "furthest": "online"},
            "infinite",
            "in 50 digits 3 numbers are infinitely far from safe's: online's among them",
        ),
        (
            {"log10": None, "infinite": 1, "furthest": "naive"},
            "infinite",
            "in 50 digits 1 number is infinitely far from safe's: naive's",
        ),
    ],
)
def test_recurrences_that_disagree_are_named(apart, cell, remark):
    found = report(record(), **apart)
    lines = render(found, "table").splitlines()
    assert lines[5].split() == ["normal", "1.23", cell]
    assert lines[6].strip() == f"└ {remark}"
    assert remark in render(found, "md")
    assert load_report(render(found, "json"), OracleReport) == found


@pytest.mark.parametrize(
    ("units", "shown"),
    [(0.0, "0"), (1e-30, "<0.01"), (0.5, "0.50"), (135.0, "135.00"), (2.0**54, "1.80e+16")],
)
def test_units_have_two_decimals(units, shown):
    distance = Distance(units=units, at=AT, compared=192)
    text = render(report(record(out=distance)), "table")
    assert text.splitlines()[5].split() == ["normal", shown, "1e-51"]


def test_json_comes_back():
    text = render(SAMPLE, "json")
    assert load_report(text, OracleReport) == SAMPLE
    assert json.loads(text)["records"][2]["rows"]["overflowed"] == 37


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data | {"schema": 9}, "schema is 9, this version reads 1"),
        (lambda data: data | {"schema": True}, "schema is True"),
        (lambda data: data | {"more": 1}, "more"),
        (lambda data: {"schema": 1}, "missing required field"),
        (lambda data: [data], "schema is None"),
        (lambda data: data["records"][0].update(case={}) or data, "holds no problem"),
    ],
)
def test_other_json_is_refused(change, says):
    data = change(json.loads(render(SAMPLE, "json")))
    with pytest.raises(UsageError, match=says):
        load_report(json.dumps(data), OracleReport)
    with pytest.raises(UsageError, match="is no OracleReport"):
        load_report("{", OracleReport)


def test_markdown_has_a_table_for_each_section():
    text = render(SAMPLE, "md")
    assert text.count("## ") == 4
    assert text.count("\n| --- |") == 4
    assert "| large\\_logits | **overflow**" in text.replace("large_logits", "large\\_logits")


def test_another_format_is_refused():
    with pytest.raises(UnknownName, match="choose from csv, html, json, md, table"):
        render(SAMPLE, "pdf")


def test_a_stream_gets_the_same_table_and_no_colours(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    stream = io.StringIO()
    show(SAMPLE, stream=stream)
    assert stream.getvalue() == render(SAMPLE, "table")
