"""Verdicts on measurement pages: marks, reasons, arithmetic profiles, and visible fault sizes."""

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


def test_every_status_has_a_look_and_is_counted(make):
    records = [make.judged(status=status) for status in JUDGED]
    unjudged = ("crash", "timeout", "oom", "flaky", "oracle disagrees", "error", "unsupported")
    records += [make.refused("k", s, "no") for s in unjudged]
    assert sorted(STATUS_LOOKS) == sorted(record.status for record in records)
    page = render(make.report(*records, *records[-2:]), "table")
    assert " ".join(page[page.index("13 cells") :].split()) == (
        "13 cells: 1 pass, 1 warn, 1 inconclusive, 1 fail, 1 flaky, 2 errors, 1 crash, 1 timeout, "
        "1 oom, 1 oracle disagrees, 2 unsupported."
    )


@pytest.mark.parametrize("status", ["warn", "inconclusive", "fail"])
@pytest.mark.parametrize("fmt", PAGES)
def test_reason_of_a_verdict_is_a_note(make, status, fmt):
    record = make.judged(status=status, rule="bound", reason="out[0, 0, 1, 2] is off")
    page = render(make.report(record), fmt)
    assert f"{status} ¹" in page
    assert f"¹ {status}: bound: out" in page


def test_missing_reason_is_noted(make):
    page = render(make.report(make.judged(status="fail")), "table")
    assert "¹ fail: no reason given" in page


@pytest.mark.parametrize("fmt", PAGES)
def test_warning_that_repeats_the_reason_is_shown_once(make, fmt):
    record = make.judged(status="fail", reason="first", warnings=("first", "the other"))
    page = render(make.report(record), fmt)
    assert page.count("the other") == 1
    assert page.count("first") == 1


def test_unbounded_rows_are_counted(make):
    record = make.judged(rows=512, rows_unbounded=3, jumps=7)
    page = render(make.report(record), "table")
    assert (
        "└ not judged: 3 of 512 rows have no finite bound (7 scores at a jump of the mod)" in page
    )


def test_other_profile_satisfied_by_lse_is_noted(make):
    page = render(make.report(make.judged(lse_also_within="fp32 sums")), "table")
    assert "└ LSE is also within: fp32 sums" in page


def test_shares_above_1_are_bold(make):
    page = render(make.report(make.judged(out_over_bound=1.0, lse_over_bound=1.5)), "md")
    assert "| 1.0 | **1.5** |" in page


# Profiles.


def test_shared_profile_is_one_line_per_dtype(make):
    records = (make.judged("a"), make.judged("b"), make.record("c", problem={"dtype": "fp16"}))
    page = render(make.report(*records), "table")
    profile = "bf16 products, fp32 sums, P in bf16, bf16 out"
    assert page.count("judged as") == 2
    assert f"judged as bf16: {profile}\n" in page
    assert f"judged as fp16: {profile}\n" in page


def test_differing_profiles_name_their_kernels(make):
    records = (make.judged("a"), make.judged("b"), make.judged("c", arithmetic="13-bit sums"))
    for page in (render(make.report(*records), fmt) for fmt in PAGES):
        assert "bf16 of a, b: bf16 products" in page
        assert "bf16 of c: 13-bit sums" in page


def test_brief_page_counts_many_profiles_of_one_kernel(make):
    records = [make.judged("a", arithmetic=f"bf16 sums; {n} parts") for n in (1, 2, 3)]
    assert [*profiles(records[:2], brief=True)] == [*profiles(records[:2])]
    assert [*profiles(records, brief=True)] == [
        "bf16: bf16 sums; 1 parts; in other questions in 2 other ways (-v lists them)"
    ]
    assert len([*profiles(records)]) == 3


def test_unjudged_report_has_no_profile(make):
    page = render(make.report(make.refused("k", "unsupported", "no")), "table")
    assert "judged as" not in page
    assert "shown" not in page


# Blind spots.


def judged_with_blind_spots(make, *spots, **record):
    return [make.judged(blind_spot=make.blind_spot(**s), record=dict(record)) for s in spots]


def test_visible_faults_span_best_to_worst_problem(make):
    records = judged_with_blind_spots(
        make,
        {"scale": 0.0031, "weight": 0.02, "dropped_keys": 0.25, "accumulator_bits": 11},
        {"scale": 0.0122, "weight": 0.08, "dropped_keys": 1.0, "accumulator_bits": 12},
    )
    assert visible_faults(records) == (
        "would have shown: a scale 0.31–1.2 % off, one key's weight 2–8 % off, "
        "a dropped key (25–100 % of them), sums of 12 bits or fewer (11 in the worst problem), "
        "an output half as large, an output of zeros"
    )
    for fmt in PAGES:
        assert "0.31–1.2 % off" in " ".join(render(make.report(*records), fmt).split())


def test_invisible_faults_are_listed(make):
    blind = {
        "scale": math.inf,
        "weight": math.inf,
        "dropped_keys": 0.0,
        "accumulator_bits": 0,
        "half": False,
        "zeros": False,
    }
    assert visible_faults(judged_with_blind_spots(make, blind)) == (
        "would not have shown: a scale off by any factor, one key's weight off by any factor, "
        "a dropped key, short accumulators, an output half as large, an output of zeros"
    )
    text = visible_faults(judged_with_blind_spots(make, {}, blind))
    assert "a scale 0.31 % off (in 1 of 2)" in text
    assert "sums of 12 bits or fewer (none in the worst problem)" in text
    assert "zeros (in 1 of 2)" in text
    assert "not: short" not in text


def test_softmax_omits_faults_it_cannot_have(make):
    record = make.softmax(
        judgement=make.judgement(blind_spot=make.blind_spot(scale=math.inf, dropped_keys=None))
    )
    assert "scale" not in visible_faults([record])
    assert "dropped" not in visible_faults([record])
    assert "sums" not in visible_faults([record])  # it has no products to add up
    assert missed_faults([record]) == ()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"dropped_keys": 0.0}, "a dropped key"),
        ({"scale": 0.0101}, "a scale 1 % off"),
        ({"half": False}, "an output half as large"),
        ({"zeros": False}, "an output of zeros"),
    ],
)
def test_plan_blind_to_a_fault_class_is_called_insensitive(make, change, fault):
    blind, seeing = judged_with_blind_spots(make, change, {})
    assert missed_faults([blind, blind]) == (fault,)
    assert missed_faults([blind, seeing]) == ()
    for fmt in PAGES:
        page = render(make.report(blind), fmt)
        assert f"insensitive: nothing here would have shown {fault}" in page
        assert "insensitive" not in render(make.report(blind, seeing), fmt)


def test_visible_scale_fault_of_1_percent_is_sensitive(make):
    assert missed_faults(judged_with_blind_spots(make, {"scale": 0.01})) == ()


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
def test_share_text(number, text):
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
