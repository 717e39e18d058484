"""Gradients on measurement pages: extra columns, and no mention of them without gradients."""

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
    """The column headings of the table's first section."""
    line = next(line for line in page.splitlines() if line.startswith("  kernel "))
    return re.split(r" {2,}", line.strip())


@pytest.fixture
def backward(make):
    """Two sections, with and without gradients; has a fault, a refusal and a long kernel name."""
    shares = {"dq": 0.61, "dk": 4.8e2, "dv": 0.33}
    records = [
        make.backward("ideal"),
        make.backward("triton-flash2", gradients={"dk": make.gradient(rmse=2.2e-02)}),
        make.backward(
            "a_kernel_with_a_name_that_is_long",
            status="inconclusive",
            judgement=make.judgement(
                status="inconclusive", reason="why", gradients_over_bound=shares
            ),
        ),
        make.refused("flex", "unsupported", "no backward on a CPU", problem={"backward": True}),
        make.record("ideal"),
    ]
    return make.report(*records, kernels=dict.fromkeys(("ideal", "triton-flash2"), ""))


@pytest.mark.parametrize("fmt", ["txt", "md", "csv"])
def test_page_matches_snapshot(backward, fmt, matches_snapshot):
    matches_snapshot(f"backward.{fmt}", render(backward, {"txt": "table"}.get(fmt, fmt)))


def test_narrow_table_matches_snapshot(backward, matches_snapshot):
    matches_snapshot("backward-80.txt", as_table(backward, width=80))


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("width", [80, 90, 100, 120, 140, 160, WIDE])
def test_table_fits_its_width(make, backward, width, sink):
    report = make.report(*backward.records, make.backward(sink=sink))
    assert max(map(cell_len, as_table(report, width=width).splitlines())) <= width


def test_every_gradient_has_share_rmse_and_ratio_columns(make):
    report = make.report(make.backward(gradients={"dk": make.gradient(rmse=2.2e-02)}))
    page = as_table(report, width=300)
    assert "Left out" not in page
    assert headings(page)[2:7] == ["err/bound", "LSE/bound", "dQ/bound", "dK/bound", "dV/bound"]
    columns = [f"d{x} {what}" for x in "QKV" for what in ("RMSE", "×ideal")]
    assert headings(page)[-7:] == [*columns, "time"]
    row = next(line for line in page.splitlines() if line.startswith("  flash2_forward")).split()
    assert row[2:7] == ["0.25", "0.042", "0.61", "0.42", "0.33"]
    assert row[-8:-2] == ["2.12e-03", "1.06×", "2.20e-02", "11.0×", "2.12e-03", "1.06×"]


def test_sink_columns_appear_only_with_a_sink(make):
    assert "dsink" not in as_table(make.report(make.backward()), width=300)
    page = as_table(make.report(make.backward(sink=True)), width=300)
    assert {"dsink/bound", "dsink RMSE", "dsink ×ideal"} <= set(headings(page))


def test_gradient_legend_appears_only_with_gradients(make):
    assert max(map(len, _OF_GRADIENTS)) <= 80
    for fmt in ("table", "md"):
        assert all(line in render(make.report(make.backward()), fmt) for line in _OF_GRADIENTS)
        assert "gradient" not in render(make.report(make.record()), fmt)


def test_nonfinite_elements_are_counted_per_gradient(make):
    broken = make.gradient(rmse=math.inf, max_error=math.inf, bias=math.nan, nonfinite=7)
    page = as_table(make.report(make.backward(gradients={"dv": broken})), width=WIDE)
    assert "└ NaN or infinite: 7 of 32768 elements of dv\n" in page
    assert re.search(r" inf +inf ", page)


def test_gradient_without_elements_is_shown_as_dashes(make):
    empty = make.gradient(rmse=0.0, max_error=0.0, max_at=None, elements=0)
    report = make.report(make.backward(gradients={"dk": empty}))
    row = next(line for line in as_table(report, width=300).splitlines() if "  flash2" in line)
    assert row.split()[-6:-4] == ["—", "—"]


def test_csv_has_every_number_of_a_gradient(make):
    errors = make.gradient(rmse=0.1 + 0.2, bias=-1 / 3)
    (row,) = csv_rows(render(make.report(make.backward(gradients={"dk": errors})), "csv"))
    assert float(row["dk_rmse"]) == 0.1 + 0.2
    assert row["dk_bias"] == repr(-1 / 3)
    assert float(row["dk_over_floor"]) == errors.rmse / errors.floor_rmse
    assert float(row["dk_over_ideal"]) == errors.rmse / errors.ideal_rmse
    assert (row["dk_at_query"], row["dk_elements"], row["dk_over_bound"]) == ("95", "32768", "0.42")
    assert {row[name] for name in row if name.startswith("dsink_")} == {""}
    assert None not in row
    assert None not in row.values()


def test_json_round_trips(make, backward):
    broken = make.gradient(rmse=math.inf, max_error=math.inf, nonfinite=7)
    report = make.report(*backward.records, make.backward(sink=True, gradients={"dv": broken}))
    text = render(report, "json")
    assert load_report(text, Report) == report
    assert render(load_report(text, Report), "json") == text
    assert json.loads(text)["records"][-1]["gradients"]["dv"]["rmse"] == "inf"


def test_reports_join_unless_a_record_repeats(make):
    forward, backward = make.report(make.record()), make.report(make.backward())
    assert len(join_reports([forward, backward]).records) == 2
    with pytest.raises(UsageError, match="is in two of the reports"):
        join_reports([backward, forward, backward])


def test_plot_rejects_reports_with_gradients(make):
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
def test_check_table_shows_failures_without_a_share(make, tensor, rule, got, cells):
    worst = msgspec.structs.replace(make.worst(), tensor=tensor, got=got)
    judgement = make.judgement(
        status="fail", rule=rule, worst=worst, gradients_over_bound={"dk": 0.5, "dv": 0.3}
    )
    record = make.backward("mine", status="fail", judgement=judgement)
    (table,) = check_section([record]).blocks
    assert [cell.text for cell in table.rows[0].cells[2:5]] == cells
