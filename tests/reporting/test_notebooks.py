"""What a notebook and ``print`` show of a verdict."""

import html

import attncheck
from attncheck.core.judgement import Judgement


def test_a_judgement_is_one_readable_line():
    wrong = Judgement(status="fail", rule="bound", reason="out[0] = 1,\n but should be <b>2</b>")
    assert str(wrong) == "fail: bound: out[0] = 1, but should be <b>2</b>"
    shown = wrong._repr_html_()
    assert "<b>" not in shown
    assert html.unescape(shown) == f"<code>{wrong}</code>"
    right = Judgement(status="pass", out_over_bound=0.31, lse_over_bound=0.0042)
    assert str(right) == "pass: out 0.31 × the bound and LSE 0.0042 × the bound"


def test_a_report_is_a_page_that_does_nothing(make):
    report = make.report(make.record("<script>alert(1)</script>"))
    shown = report._repr_html_()
    assert shown.startswith('<iframe sandbox srcdoc="')
    page = shown.removeprefix('<iframe sandbox srcdoc="').rpartition('" style')[0]
    assert not {'"', "<"} & set(page)
    assert "<script>alert" not in html.unescape(page)
    assert "&lt;script&gt;alert" in html.unescape(page)


def test_the_package_lists_its_names():
    assert {*attncheck.__all__} <= {*dir(attncheck)}
