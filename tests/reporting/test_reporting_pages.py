"""Measurement reports as pages: notes, sections, environments, and the format of numbers."""

import math
import re

import pytest
from tests.reporting.pages import csv_rows

from attncheck.core.errors import UsageError
from attncheck.core.judgement import Place
from attncheck.reporting import number_text
from attncheck.reporting.rendering import FORMATS, render


@pytest.mark.parametrize("fmt", FORMATS)
def test_sample_matches_snapshot(fmt, sample, matches_snapshot):
    suffix = {"table": "txt"}.get(fmt, fmt)
    matches_snapshot(f"sample.{suffix}", render(sample, fmt))


@pytest.mark.parametrize("fmt", FORMATS)
def test_empty_report_renders(fmt, make):
    page = render(make.report(), fmt)
    assert page.endswith("\n")
    if fmt in {"table", "md"}:
        assert "0 cells.\n" in page


def test_csv_numbers_are_in_full(make):
    out = make.out(rmse=0.1 + 0.2, bias=-1 / 3, max_error=math.inf, floor_rmse=0.0)
    (row,) = csv_rows(render(make.report(make.record(out=out)), "csv"))
    assert float(row["out_rmse"]) == 0.1 + 0.2
    assert row["out_bias"] == repr(-1 / 3)
    assert row["out_max_error"] == "inf"
    assert row["out_over_floor"] == ""
    assert float(row["out_over_ideal"]) == out.rmse / out.ideal_rmse
    assert (row["out_at_query"], row["torch"], row["dtype"]) == ("127", "2.13.0+cpu", "bf16")


def test_shared_reason_is_shown_once(make):
    report = make.report(*(make.refused(k, "unsupported", "no mask") for k in "abc"))
    for page in (render(report, "table"), render(report, "md")):
        assert page.count("no mask") == 1
        assert "a, b, c do not support full: no mask" in page
        assert "err/bound" not in page  # without numbers there is nothing to explain


def test_error_and_unsupported_have_separate_notes(make):
    report = make.report(make.refused("a", "unsupported", "x"), make.refused("b", "error", "x"))
    page = render(report, "table")
    assert "a does not support full: x" in page
    assert "¹ error: x" in page


def test_page_without_rows_has_no_empty_section(make):
    report = make.report(make.refused("a", "unsupported", "no mask"))
    for page in (render(report, "table"), render(report, "md")):
        assert "a does not support full: no mask" in page
        assert "\n\n\n" not in page


def test_line_of_unsupported_cells_names_heads_and_counts_other_shapes(make):
    refused = make.refused("a", "unsupported", "no GQA", heads="GQA")
    page = render(make.report(refused, make.record("a", heads="MHA")), "table")
    assert "a does not support full with GQA 4: no GQA" in page
    page = render(make.report(refused, make.record("a", heads="GQA")), "table")
    assert "a does not support full in 1 of 2 cells: no GQA" in page


def test_long_reason_is_cut_on_pages_only(make):
    report = make.report(make.refused("a", "error", "y" * 3000))
    assert "1009 more characters in the JSON" in render(report, "md")
    assert "y" * 3000 in render(report, "json")
    assert "y" * 3000 in render(report, "csv")


def test_nonfinite_elements_and_wrong_dead_rows_are_counted(make):
    out = make.out(rmse=math.nan, max_error=math.inf, nonfinite=7, dead_rows=5, dead_rows_wrong=3)
    page = render(make.report(make.record(out=out)), "table")
    assert "NaN or infinite: 7 of 32768 elements of out" in page
    assert "rows that see no key: out is not 0 in 3 of 5" in page
    assert re.search(r"flash2_forward +pass +0\.25 +0\.042 +nan +nan +nan +2\.40e-03 +inf ", page)


def test_record_without_comparisons_says_so(make):
    out = make.out(rmse=math.nan, elements=0, max_at=None)
    lse = make.lse(rmse=0.0, max_error=0.0, max_at=None)
    judgement = make.judgement(out_over_bound=None, lse_over_bound=None, worst=None)
    page = render(make.report(make.record(out=out, lse=lse, judgement=judgement)), "table")
    assert "nothing to compare: no row sees a key" in page
    assert "nan" not in page
    assert re.search(r"^  flash2_forward +pass +(— +){9}123 ms†$", page, re.MULTILINE)


def test_kernels_keep_the_order_of_the_command(make):
    report = make.report(
        *(make.record(k) for k in ("z", "b", "a")), kernels={"a": "", "b": "", "z": ""}
    )
    names = re.findall(r"^  ([abz]) ", render(report, "table"), re.MULTILINE)
    assert names == ["a", "b", "z"]


def test_sections_separate_dtype_shape_distribution_and_seed(make):
    changes = [{}, {"dtype": "fp16"}, {"kv": 64}, {"distribution": "uniform"}, {"seed": 1}]
    report = make.report(*(make.record(problem=c) for c in changes), make.record("again"))
    page = render(report, "md")
    assert page.count("## ") == 5
    assert "## bf16 · B1 Q128 K64 D64 · normal · seed 0" in page


def test_compiled_kernel_time_has_no_interpreter_mark(make):
    gpu = make.environment(
        device="NVIDIA H200", capability="9.0", interpreter=(), cuda="13.0", triton="3.6.0"
    )
    page = render(make.report(make.record(interpreted=False), environments={"here": gpu}), "table")
    assert "†" not in page
    assert "interpreted" not in page
    assert "NVIDIA H200 (9.0) · x86_64 · torch 2.13.0+cpu · triton 3.6.0 · CUDA 13.0" in page


def test_interpreter_repairs_are_named_only_for_interpreted_environments(make):
    environments = {"here": make.environment(), "there": make.environment()}
    records = (make.record(interpreted=False), make.record(environment="there"))
    page = render(make.report(*records, environments=environments), "table")
    assert "B: kernels interpreted on the CPU, repaired" in page
    assert "A: kernels" not in page


def test_two_environments_get_letters(make):
    environments = {"here": make.environment(), "there": make.environment(device="GPU")}
    report = make.report(make.record(), make.record(environment="there"), environments=environments)
    page = render(report, "table")
    assert "B: GPU · x86_64" in page
    assert re.search(r" B$", page, re.MULTILINE)


def test_record_without_a_problem_is_rejected(make):
    report = make.report(make.record(case={}))
    with pytest.raises(UsageError, match="'abcdefghij' holds no problem"):
        render(report, "table")


@pytest.mark.parametrize(
    ("error", "reference", "text"),
    [
        (1.0, 1.0, "1.00×"),
        (0.98, 1.0, "0.980×"),
        (123.4, 1.0, "123×"),
        (0.0, 0.0, "exact"),
        (1.0, 0.0, "—"),
        (1.0, math.nan, "—"),
        (0.0, math.nan, "—"),
        (math.nan, 1.0, "nan"),
        (math.inf, 1.0, "inf"),
        (math.nan, 0.0, "—"),
        (0.0, 1.0, "0.00×"),
        (4e5, 1.0, "4.00e+05×"),
        (1e300, 1e-300, "inf"),
    ],
)
def test_ratio(error, reference, text):
    assert number_text.ratio(error, reference) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "—"),
        (math.nan, "—"),
        (0.0, "0.00 ns"),
        (81.34e-6, "81.3 µs"),
        (999.9e-6, "1.00 ms"),
        (0.0123, "12.3 ms"),
        (2.5, "2.50 s "),
        (4321.0, "4321 s "),
    ],
)
def test_duration(seconds, text):
    assert number_text.duration(seconds) == text


def test_scientific_and_place():
    assert number_text.scientific(0.0015312) == "1.53e-03"
    assert number_text.scientific(1e-6, signed=True) == "+1.00e-06"
    assert [number_text.scientific(x) for x in (-0.0, math.nan, -math.inf)] == ["0", "nan", "-inf"]
    assert number_text.place(Place(batch=0, head=1, query=2, dim=3)) == "0,1,2,3"
    assert number_text.place(Place(batch=0, head=1, query=2), "lse") == "0,1,2"
    assert number_text.place(None) == "—"
