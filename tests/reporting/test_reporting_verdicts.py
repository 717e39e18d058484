"""Verdicts on the pages: marks, reasons, profiles, and how small a fault would have shown."""

import math

import pytest
from tests.reporting.pages import csv_rows

from attncheck.core.judgement import BlindSpot, Judgement, Precision, Worst, share_text
from attncheck.core.tensor_names import GRADIENTS
from attncheck.reporting.measurement_document import profiles
from attncheck.reporting.number_text import percent
from attncheck.reporting.record_text import JUDGED, STATUS_LOOKS, missed_faults, visible_faults
from attncheck.reporting.rendering import render

PAGES = ("table", "md")


def test_every_status_has_a_look_and_a_count(make):
    records = [make.judged(status=status) for status in JUDGED]
    lost = ("crash", "timeout", "oom", "flaky", "oracle disagrees", "error", "unsupported")
    records += [make.refused("k", s, "no") for s in lost]
    assert sorted(STATUS_LOOKS) == sorted(record.status for record in records)
    page = render(make.report(*records, *records[-2:]), "table")
    assert " ".join(page[page.index("13 cells") :].split()) == (
        "13 cells: 1 pass, 1 warn, 1 inconclusive, 1 fail, 1 flaky, 2 errors, 1 crash, 1 timeout, "
        "1 oom, 1 oracle disagrees, 2 unsupported."
    )


@pytest.mark.parametrize("status", ["warn", "inconclusive", "fail"])
@pytest.mark.parametrize("fmt", PAGES)
def test_why_it_is_no_pass_stands_below(make, status, fmt):
    record = make.judged(status=status, rule="bound", reason="out[0, 0, 1, 2] is off")
    page = render(make.report(record), fmt)
    assert f"{status} ¹" in page
    assert f"¹ {status}: bound: out" in page


def test_a_verdict_without_a_reason_says_so(make):
    page = render(make.report(make.judged(status="fail")), "table")
    assert "¹ fail: no reason given" in page


@pytest.mark.parametrize("fmt", PAGES)
def test_a_warning_beside_the_reason_is_a_remark_and_the_reason_is_none(make, fmt):
    record = make.judged(status="fail", reason="first", warnings=("first", "the other"))
    page = render(make.report(record), fmt)
    assert page.count("the other") == 1
    assert page.count("first") == 1


def test_rows_that_nothing_was_asked_of_are_told(make):
    record = make.judged(rows=512, rows_unbounded=3, jumps=7)
    page = render(make.report(record), "table")
    assert (
        "└ not judged: 3 of 512 rows have no finite bound (7 scores at a jump of the mod)" in page
    )


def test_another_profile_that_lse_satisfies_is_told(make):
    page = render(make.report(make.judged(lse_also_within="fp32 sums")), "table")
    assert "└ LSE is also within: fp32 sums" in page


def test_a_share_above_1_is_bad_and_1_is_not(make):
    page = render(make.report(make.judged(out_over_bound=1.0, lse_over_bound=1.5)), "md")
    assert "| 1.0 | **1.5** |" in page


# Profiles.


def test_one_profile_of_a_dtype_is_one_line(make):
    records = (make.judged("a"), make.judged("b"), make.record("c", asked={"dtype": "fp16"}))
    page = render(make.report(*records), "table")
    profile = "bf16 products, fp32 sums, P in bf16, bf16 out"
    assert page.count("judged as") == 2
    assert f"judged as bf16: {profile}\n" in page
    assert f"judged as fp16: {profile}\n" in page


def test_two_profiles_of_a_dtype_name_their_kernels(make):
    records = (make.judged("a"), make.judged("b"), make.judged("c", arithmetic="13-bit sums"))
    for page in (render(make.report(*records), fmt) for fmt in PAGES):
        assert "bf16 of a, b: bf16 products" in page
        assert "bf16 of c: 13-bit sums" in page


def test_many_profiles_of_one_kernel_are_counted_on_a_brief_page(make):
    records = [make.judged("a", arithmetic=f"bf16 sums; {n} parts") for n in (1, 2, 3)]
    assert [*profiles(records[:2], brief=True)] == [*profiles(records[:2])]
    assert [*profiles(records, brief=True)] == [
        "bf16: bf16 sums; 1 parts; in other questions in 2 other ways (-v lists them)"
    ]
    assert len([*profiles(records)]) == 3


def test_without_a_judgement_there_is_no_profile(make):
    page = render(make.report(make.refused("k", "unsupported", "no")), "table")
    assert "judged as" not in page
    assert "shown" not in page


# Blind spots.


def spotted(make, *spots, **record):
    return [make.judged(blind_spot=make.blind_spot(**s), record=dict(record)) for s in spots]


def test_what_would_have_shown_spans_the_best_and_the_worst_problem(make):
    records = spotted(
        make,
        {"scale": 0.0031, "weight": 0.02, "dropped_keys": 0.25, "accumulator_bits": 11},
        {"scale": 0.0122, "weight": 0.08, "dropped_keys": 1.0, "accumulator_bits": 12},
    )
    assert visible_faults(records) == (
        "would have shown: the scale off by 0.31–1.2 %, one key's weight off by 2–8 %, "
        "25–100 % of single dropped keys, sums of 11–12 bits, half the output, zeros"
    )
    for fmt in PAGES:
        assert "0.31–1.2 %" in " ".join(render(make.report(*records), fmt).split())


def test_what_would_not_have_shown_is_said(make):
    blind = {
        "scale": math.inf,
        "weight": math.inf,
        "dropped_keys": 0.0,
        "accumulator_bits": 0,
        "half": False,
        "zeros": False,
    }
    assert visible_faults(spotted(make, blind)) == (
        "would not have shown: the scale of any size, one key's weight of any size, "
        "a dropped key, short accumulators, half the output, zeros"
    )
    said = visible_faults(spotted(make, {}, blind))
    assert "the scale off by 0.31 % (in 1 of 2)" in said
    assert "zeros (in 1 of 2)" in said
    assert "not: short" not in said


def test_a_softmax_has_no_scale_no_products_and_one_key_cannot_be_dropped(make):
    record = make.softmax(
        judgement=make.judgement(blind_spot=make.blind_spot(scale=math.inf, dropped_keys=None))
    )
    assert "scale" not in visible_faults([record])
    assert "dropped" not in visible_faults([record])
    assert "sums" not in visible_faults([record])  # it has no products to add up
    assert missed_faults([record]) == ()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dropped_keys": 0.0}, "a dropped key"),
        ({"scale": 0.0101}, "a scale 1 % off"),
        ({"half": False}, "half the output"),
        ({"zeros": False}, "an output of zeros"),
    ],
)
def test_a_plan_that_is_blind_to_a_class_of_fault_is_insensitive(make, change, named):
    blind, seeing = spotted(make, change, {})
    assert missed_faults([blind, blind]) == (named,)
    assert missed_faults([blind, seeing]) == ()
    for fmt in PAGES:
        page = render(make.report(blind), fmt)
        assert f"insensitive: nothing here would have shown {named}" in page
        assert "insensitive" not in render(make.report(blind, seeing), fmt)


def test_a_scale_off_by_1_percent_that_just_shows_is_enough(make):
    assert missed_faults(spotted(make, {"scale": 0.01})) == ()


# The CSV.


def test_csv_has_every_number_of_the_judgement(make):
    (row,) = csv_rows(render(make.report(make.judged(reason="why", rows_unbounded=3)), "csv"))
    parts = {"worst": Worst, "precision": Precision, "blind_spot": BlindSpot}
    names = set(Judgement.__struct_fields__) - {"status", "reason", "gradients_over_bound"}
    names = (names | {f"{gradient}_over_bound" for gradient in GRADIENTS}) - set(parts)
    for prefix, kind in parts.items():
        names |= {f"{prefix}_{field}" for field in kind.__struct_fields__ if field != "at"}
    assert names <= set(row)
    assert (row["status"], row["reason"], row["rows_unbounded"]) == ("pass", "why", "3")
    assert (row["worst_at_query"], row["worst_got"], row["out_over_bound"]) == (
        "127",
        "0.25",
        "0.25",
    )
    assert row["worst_budget"] == '{"output rounding":0.0234375,"weights":0.0078125}'
    assert (row["blind_spot_scale"], row["precision_z"]) == ("0.0031", "1.02")


# Figures.


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0"),
        (0.314, "0.31"),
        (0.00421, "0.0042"),
        (1.0, "1.0"),
        (1.0004, "1.0004"),
        (0.99996, "0.99996"),
        (1 + 2.0**-52, "1.0000000000000002"),
        (26.9, "27"),
        (159.3, "159"),
        (1240.0, "1.2e+03"),
        (3.0e36, "3.0e+36"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_share(number, text):
    assert share_text(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0"),
        (0.0031, "0.31"),
        (0.25, "25"),
        (0.9987, ">99"),
        (1.0, "100"),
        (3.0, "300"),
        (10.0, ">999"),
        (2.9e37, ">999"),
        (math.inf, "inf"),
    ],
)
def test_percent(number, text):
    assert percent(number) == text
