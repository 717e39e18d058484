"""Gradients on the pages: columns beside out and LSE, and nothing of them where there are none."""

import json
import math
import re

import msgspec
import pytest
from rich.cells import cell_len
from tests.reporting.pages import as_table, csv_rows

from attncheck.core.errors import UsageError
from attncheck.records.json_reports import load_report
from attncheck.records.record import Report, join_reports
from attncheck.reporting.check_document import check_section
from attncheck.reporting.measurement_document import _OF_GRADIENTS
from attncheck.reporting.rendering import render
from attncheck.reporting.rmse_plot import plot_of

WIDE = 200


def headings(page):
    """Those of the first section of a table."""
    line = next(line for line in page.splitlines() if line.startswith("  kernel "))
    return re.split(r" {2,}", line.strip())


@pytest.fixture
def backward(make):
    """Two sections, of gradients and of a forward alone; a fault, a refusal and a long name."""
    fault = {"dq": 0.61, "dk": 4.8e2, "dv": 0.33}
    records = [
        make.backward("ideal"),
        make.backward("triton-flash2", gradients={"dk": make.gradient(rmse=2.2e-02)}),
        make.backward(
            "a_kernel_with_a_name_that_is_long",
            status="inconclusive",
            judgement=make.judgement(
                status="inconclusive", reason="why", gradients_over_bound=fault
            ),
        ),
        make.refused("flex", "unsupported", "no backward on a CPU", asked={"backward": True}),
        make.record("ideal"),
    ]
    return make.report(*records, kernels=dict.fromkeys(("ideal", "triton-flash2"), ""))


@pytest.mark.parametrize("fmt", ["txt", "md", "csv"])
def test_a_report_of_gradients_looks_as_it_did(backward, fmt, matches_snapshot):
    matches_snapshot(f"backward.{fmt}", render(backward, {"txt": "table"}.get(fmt, fmt)))


def test_a_narrow_table_of_gradients_looks_as_it_did(backward, matches_snapshot):
    matches_snapshot("backward-80.txt", as_table(backward, width=80))


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("width", [80, 90, 100, 120, 140, 160, WIDE])
def test_the_table_keeps_to_its_width(make, backward, width, sink):
    report = make.report(*backward.records, make.backward(sink=sink))
    assert max(map(cell_len, as_table(report, width=width).splitlines())) <= width


def test_every_gradient_has_its_share_its_rmse_and_its_ratio(make):
    report = make.report(make.backward(gradients={"dk": make.gradient(rmse=2.2e-02)}))
    page = as_table(report, width=300)
    assert "Left out" not in page
    assert headings(page)[2:7] == ["err/bound", "LSE/bound", "dQ/bound", "dK/bound", "dV/bound"]
    of_each = [f"d{x} {what}" for x in "QKV" for what in ("RMSE", "×ideal")]
    assert headings(page)[-7:] == [*of_each, "time"]
    row = next(line for line in page.splitlines() if line.startswith("  flash2_forward")).split()
    assert row[2:7] == ["0.25", "0.042", "0.61", "0.42", "0.33"]
    assert row[-8:-2] == ["2.12e-03", "1.06×", "2.20e-02", "11.0×", "2.12e-03", "1.06×"]


def test_a_sink_has_columns_where_there_is_one(make):
    plain, sunk = make.report(make.backward()), make.report(make.backward(sink=True))
    assert "dsink" not in as_table(plain, width=300)
    page = as_table(sunk, width=300)
    assert {"dsink/bound", "dsink RMSE", "dsink ×ideal"} <= set(headings(page))


def test_how_to_read_gradients_is_said_where_there_are_some(make):
    assert max(map(len, _OF_GRADIENTS)) <= 80
    for fmt in ("table", "md"):
        assert all(line in render(make.report(make.backward()), fmt) for line in _OF_GRADIENTS)
        assert "gradient" not in render(make.report(make.record()), fmt)


def test_elements_that_are_not_finite_are_counted_by_gradient(make):
    broken = make.gradient(rmse=math.inf, max_error=math.inf, bias=math.nan, nonfinite=7)
    page = as_table(make.report(make.backward(gradients={"dv": broken})), width=WIDE)
    assert "└ NaN or infinite: 7 of 32768 elements of dv\n" in page
    assert re.search(r" inf +inf ", page)


def test_gradients_of_which_no_element_counts_are_dashes(make):
    nothing = make.gradient(rmse=0.0, max_error=0.0, max_at=None, elements=0)
    report = make.report(make.backward(gradients={"dk": nothing}))
    row = next(line for line in as_table(report, width=300).splitlines() if "  flash2" in line)
    assert row.split()[-6:-4] == ["—", "—"]


def test_the_csv_has_every_number_of_a_gradient(make):
    found = make.gradient(rmse=0.1 + 0.2, bias=-1 / 3)
    (row,) = csv_rows(render(make.report(make.backward(gradients={"dk": found})), "csv"))
    assert float(row["dk_rmse"]) == 0.1 + 0.2
    assert row["dk_bias"] == repr(-1 / 3)
    assert float(row["dk_over_floor"]) == found.rmse / found.floor_rmse
    assert float(row["dk_over_ideal"]) == found.rmse / found.ideal_rmse
    assert (row["dk_at_query"], row["dk_elements"], row["dk_over_bound"]) == ("95", "32768", "0.42")
    assert {row[name] for name in row if name.startswith("dsink_")} == {""}
    assert None not in row
    assert None not in row.values()


def test_the_json_reads_back_what_was_written(make, backward):
    broken = make.gradient(rmse=math.inf, max_error=math.inf, nonfinite=7)
    report = make.report(*backward.records, make.backward(sink=True, gradients={"dv": broken}))
    text = render(report, "json")
    assert load_report(text, Report) == report
    assert render(load_report(text, Report), "json") == text
    assert json.loads(text)["records"][-1]["gradients"]["dv"]["rmse"] == "inf"


def test_a_forward_and_a_backward_are_join_reports(make):
    forward, backward = make.report(make.record()), make.report(make.backward())
    assert len(join_reports([forward, backward]).records) == 2
    with pytest.raises(UsageError, match="is in two of the reports"):
        join_reports([backward, forward, backward])


def test_a_plot_shows_no_gradients_and_says_so(make):
    with pytest.raises(UsageError, match=r"^the report has gradients, which a plot does not show"):
        plot_of(make.report(make.record(), make.backward("other")))


@pytest.mark.parametrize(
    ("tensor", "rule", "got", "cells"),
    [
        ("dv", "finite", math.nan, ["0.25", "0.042", "nan"]),
        ("out", "empty rows", math.nan, ["nan", "0.042", "0.50"]),
        ("lse", "empty rows", 0.5, ["0.25", "inf", "0.50"]),
        ("dk", "bound", 0.5, ["0.25", "0.042", "0.50"]),
    ],
)
def test_a_check_shows_what_fails_without_a_share(make, tensor, rule, got, cells):
    worst = msgspec.structs.replace(make.worst(), tensor=tensor, got=got)
    judgement = make.judgement(
        status="fail", rule=rule, worst=worst, gradients_over_bound={"dk": 0.5, "dv": 0.3}
    )
    record = make.backward("mine", status="fail", judgement=judgement)
    (table,) = check_section([record]).blocks
    assert [cell.text for cell in table.rows[0].cells[2:5]] == cells
