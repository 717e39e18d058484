from __future__ import annotations

import json

import msgspec
import pytest

from attncheck.core.errors import UsageError
from attncheck.core.judgement import Place
from attncheck.records.json_reports import load_report
from attncheck.records.record import Environment
from attncheck.records.survey_reports import Certificate, CertificateReport, ProvenError
from attncheck.reporting.rendering import render

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
    "dtype": "fp32",
    "seed": 3,
}


def proven(**changes):
    fields = {
        "share": 1.25e-10,
        "error": 2.5e-16,
        "allowance": 2e-6,
        "at": Place(batch=0, head=1, query=2, dim=3),
        "a_priori": 0.0625,
        "elements": 192,
    }
    return ProvenError(**(fields | changes))


def record(oracle="truth", distribution="normal", **changes):
    fields = {
        "case_id": distribution,
        "case": {"problem": PROBLEM},
        "variant": "full",
        "distribution": distribution,
        "oracle": oracle,
        "out": proven() if oracle == "truth" else proven(a_priori=None),
        "lse": proven() if oracle == "truth" else proven(a_priori=None),
        "rows": 48,
        "proven_rows": 48,
    }
    return Certificate(**(fields | changes))


NOTHING = {"share": None, "error": None, "allowance": None, "at": None, "a_priori": None}


def report(*records):
    return CertificateReport(
        command="attncheck oracles --certify",
        environment=Environment(
            device="cpu", machine="x86_64", python="3.11.9", torch="2.13", numpy="2", attncheck="1"
        ),
        flint="0.9.0",
        bits=128,
        limit=0.01,
        arithmetics={"fp32": "products of fp32"},
        oracles={"truth": "t", "naive": "n"},
        records=records,
    )


SAMPLE = report(
    record(),
    record("naive"),
    record(distribution="sink"),
    record("naive", "sink", out=proven(**NOTHING | {"elements": 0, "unproven": 192})),
)


def test_the_table_reads_so():
    assert (
        render(SAMPLE, "table")
        == """\
attncheck oracles --certify
cpu · x86_64 · torch 2.13 · triton missing · Python 3.11.9 · attncheck 1 · \
python-flint 0.9.0, balls of 128 bits
allowance of a kernel in fp32: products of fp32

full · fp32 · B1 Q24 K16 D8/4 · heads 2/1 · seed 3 · out
  distribution     error  allowance     share  a priori     naive
  normal        2.50e-16   2.00e-06  1.25e-10  6.25e-02  1.25e-10
  sink          2.50e-16   2.00e-06  1.25e-10  6.25e-02         —
    └ naive: nothing is proven of 192 of 192 numbers

full · fp32 · B1 Q24 K16 D8/4 · heads 2/1 · seed 3 · LSE
  distribution     error  allowance     share  a priori     naive
  normal        2.50e-16   2.00e-06  1.25e-10  6.25e-02  1.25e-10
  sink          2.50e-16   2.00e-06  1.25e-10  6.25e-02  1.25e-10

error: a proof that the truth, what kernels are compared with, is no further from the exact \
result, where it is the
  largest part of the allowance.
share: error ÷ allowance; above 1 % the judge would call a verdict inconclusive. Under the name of \
each other oracle its
  own.
a priori: largest error ÷ what the judge assumes of the truth without a proof; never above 1.
Largest share of the truth: 1.25e-10.
"""
    )


@pytest.mark.parametrize(
    ("changes", "says", "holds"),
    [
        ({"out": proven(share=0.0123)}, "more than 1 % of the allowance: a verdict here is", False),
        ({"out": proven(a_priori=1.5)}, "more than is assumed of it: that bound is in doubt", True),
        ({"lse": proven(unproven=4)}, "truth: nothing is proven of 4 of 196 numbers", False),
        ({"lse": proven(unbounded=8)}, "8 of 200 numbers have no allowance", True),
        ({"proven_rows": 32}, "32 of 48 rows were examined", True),
    ],
)
def test_what_the_numbers_alone_would_hide_is_said(changes, says, holds):
    changed = record(**changes)
    for fmt in ("table", "md"):
        assert says in render(report(changed), fmt)
        assert says not in render(SAMPLE, fmt)
    assert changed.holds(0.01) is holds
    assert changed.within_a_priori is ("a_priori" not in says and "assumed" not in says)


def test_of_other_oracles_only_what_is_not_proven_is_remarked():
    text = render(report(record(), record("naive", out=proven(share=0.5))), "table")
    assert "5.00e-01" in text
    assert "inconclusive\n" not in text.split("error:")[0]


def test_json_comes_back():
    text = render(SAMPLE, "json")
    assert load_report(text, CertificateReport) == SAMPLE
    assert [r.oracle for r in SAMPLE.truths] == ["truth", "truth"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data | {"schema": 9}, "schema is 9, this version reads 1"),
        (lambda data: data | {"more": 1}, "more"),
        (lambda data: data["records"][0].update(case={}) or data, "holds no problem"),
    ],
)
def test_other_json_is_refused(change, says):
    data = change(json.loads(render(SAMPLE, "json")))
    with pytest.raises(UsageError, match=says):
        load_report(json.dumps(data), CertificateReport)


def test_a_case_without_a_certificate_of_the_truth_is_shown_all_the_same():
    only = msgspec.structs.replace(SAMPLE, records=SAMPLE.records[1:2])
    for fmt in ("table", "md"):
        assert "25e-10" in render(only, fmt)  # in Markdown 1\.25e-10
