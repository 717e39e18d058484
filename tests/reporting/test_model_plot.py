"""The plot of a model report: drift by layer, and a ring where the first call failed."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from attncheck.core.errors import UsageError
from attncheck.records.json_reports import load_report
from attncheck.records.model_report import ModelFault, ModelReport
from attncheck.reporting.image_files import image

pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
from attncheck.reporting.model_plot import model_figure

REPORT = load_report(Path(__file__).parents[2] / "reports/h100/model.json", ModelReport)
FAULT = ModelFault(
    layer=2, module="model.layers.2", step=0, backward=False, reason="wrong", id="x", recording="x"
)


def panels(report):
    axes = model_figure(report).axes
    return {ax.get_title(loc="left"): ax for ax in axes}


def rings(ax):
    return [tuple(one.get_offsets()[0]) for one in ax.collections if one.get_gid() == "wrong"]


def test_line_shows_drift_relative_to_correct_kernels():
    axes = panels(REPORT)
    assert list(axes)[:3] == ["llama · prefill", "gemma · prefill", "gpt-oss · prefill"]
    for record in (one for one in REPORT.records if one.drifts):
        lines = axes[f"{record.model} · prefill"].get_lines()
        (line,) = [one for one in lines if one.get_label() == record.kernel]
        ratios = [d.error / d.floor for d in record.drifts if d.phase == "prefill"]
        assert list(line.get_ydata()) == ratios[:-1]  # the last is KL, which is no distance
    assert not axes["bert · decode"].get_lines()


@pytest.mark.parametrize(("step", "panel"), [(0, "gemma · prefill"), (3, "gemma · decode")])
def test_first_failing_call_is_ringed(step, panel):
    records = [
        replace(one, status="fail", fault=replace(FAULT, step=step))
        if (one.model, one.kernel) == ("gemma", "triton-flash2")
        else one
        for one in REPORT.records
    ]
    axes = panels(replace(REPORT, records=tuple(records)))
    ringed = {title: rings(ax) for title, ax in axes.items() if rings(ax)}
    assert list(ringed) == [panel]
    ((layer, _),) = ringed[panel]
    assert layer == FAULT.layer


def test_large_and_nan_drifts_are_drawn_within_the_panel():
    first = REPORT.records[0]
    far = tuple(replace(one, error=100 * one.floor) for one in first.drifts)
    wide = replace(REPORT, records=(replace(first, drifts=far), *REPORT.records[1:]))
    assert all(ax.get_ylim()[1] > 100 for ax in panels(wide).values() if ax.get_lines())
    nan = tuple(replace(one, error=float("nan")) for one in first.drifts)
    assert image(replace(REPORT, records=(replace(first, drifts=nan),)), ".svg")


def test_report_without_records_is_rejected():
    with pytest.raises(UsageError, match="nothing to plot"):
        model_figure(replace(REPORT, records=()))
