"""``print`` and a notebook show judgements, records and reports in readable lines."""

import html
from types import SimpleNamespace

import msgspec

import attncheck
from attncheck.core.judgement import Judgement


def test_judgement_is_one_escaped_line():
    wrong = Judgement(status="fail", rule="bound", reason="out[0] = 1,\n but should be <b>2</b>")
    assert str(wrong) == "fail: bound: out[0] = 1, but should be <b>2</b>"
    shown = wrong._repr_html_()
    assert "<b>" not in shown
    assert html.unescape(shown) == f"<code>{wrong}</code>"
    right = Judgement(status="pass", out_over_bound=0.31, lse_over_bound=0.0042)
    assert str(right) == "pass: out 0.31 × the bound and LSE 0.0042 × the bound"


def test_record_is_one_line(make):
    """A notebook shows these as the result of ``attncheck.check``."""
    right = make.record("mine", judgement=Judgement(status="pass", out_over_bound=0.31))
    assert str(right) == f"mine {right.variant}: pass: out 0.31 × the bound"
    refused = msgspec.structs.replace(right, judgement=None, status="error", reason="a\nb")
    assert str(refused) == f"mine {right.variant}: error: a b"
    printed = []
    right._repr_pretty_(SimpleNamespace(text=printed.append), False)
    assert printed == [str(right)]


def test_report_is_one_escaped_line_per_record(make):
    report = make.report(make.record("<script>alert(1)</script>"), make.record("mine"))
    shown = report._repr_html_()
    assert "<script>" not in shown
    assert html.unescape(shown) == f"<pre>{report}</pre>"
    assert str(report).splitlines() == [str(record) for record in report.records]


def test_package_dir_lists_only_public_names():
    assert dir(attncheck) == sorted(attncheck.__all__)
