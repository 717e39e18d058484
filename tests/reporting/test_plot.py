"""The plot of an RMSE report: marks, labels, scales, and the files it is written to."""

import math
import sys
from collections import Counter
from itertools import pairwise

import pytest
from tests.messages import one_line

from attncheck.core.errors import UsageError
from attncheck.reporting.image_files import check_plots, image, write_plots
from attncheck.reporting.rmse_plot import plot_of

pytest.importorskip("matplotlib", reason="plots need the extra plot")

from attncheck.reporting.rmse_plot import figure

PNG = b"\x89PNG\r\n\x1a\n"


def mark_counts(report):
    """How many marks of each kind the figure has."""
    counts = Counter()
    for ax in figure(report).axes:
        for collection in ax.collections:
            if collection.get_gid() in {"marks", "raised", "failed"}:
                counts[collection.get_gid()] += len(collection.get_offsets())
    return counts


def words(report):
    """Every text of the figure."""
    fig = figure(report)
    texts = [text.get_text() for text in fig.texts]
    for ax in fig.axes:
        texts += [ax.get_title("left"), ax.get_ylabel(), *(t.get_text() for t in ax.texts)]
        texts += [tick.get_text() for tick in ax.get_xticklabels()]
    return texts + [text.get_text() for legend in fig.legends for text in legend.get_texts()]


def test_every_measured_cell_has_one_mark(sample):
    statuses = Counter(record.status for record in sample.records)
    assert statuses["unsupported"]
    assert mark_counts(sample) == {
        "marks": sum(statuses[s] for s in ("pass", "warn", "fail")),
        "raised": statuses["error"],
        "failed": statuses["fail"],
    }


def test_each_dtype_and_seed_has_a_panel(make):
    records = [
        make.record(problem={"dtype": dtype, "seed": seed})
        for dtype in ("bf16", "fp16", "e4m3")
        for seed in (0, 1)
    ]
    report = make.report(*records)
    assert list(plot_of(report).panels) == [
        f"{dtype} · B1 Q128 K96 D64 · normal · seed {seed}"
        for dtype in ("bf16", "fp16", "e4m3")
        for seed in (0, 1)
    ]
    fig = figure(report)
    assert len(fig.axes) == 6
    assert fig.get_figheight() > 9  # panels stay readable: the page grows


def test_marks_are_side_by_side_in_report_order(make):
    kernels = dict.fromkeys(("third", "first", "second"), "")
    records = [make.record(name) for name in sorted(kernels)]
    plot = plot_of(make.report(*records, kernels=kernels))
    (marks,) = plot.panels.values()
    order = sorted(marks, key=lambda mark: mark.middle)
    assert [mark.kernel for mark in order] == list(kernels) == list(plot.kernels)
    for left, right in pairwise(order):
        assert left.reach[1] == pytest.approx(right.reach[0])


def test_softmax_has_its_own_scale(make):
    small = make.out(rmse=1e-9, floor_rmse=1e-9, ideal_rmse=1e-9)
    report = make.report(make.record(), make.softmax(out=small))
    attention, softmax = figure(report).axes
    assert attention.get_ylim()[0] > softmax.get_ylim()[1] > 1e-9 > softmax.get_ylim()[0]
    assert "rows" in words(report)


def test_label_shows_what_differs_from_the_title(make):
    report = make.report(
        make.record(variant="causal"),
        make.record(variant="decode", problem={"query": 4}),
        make.record(variant="decode", heads="GQA", problem={"query": 4, "kv_heads": 2}),
    )
    (column,) = plot_of(report).columns
    assert [label for label, *_ in column.variants] == ["causal", "decode (Q4)"]
    assert [slot.heads for slot in column.slots] == ["MHA", "MHA", "GQA"]


def test_variant_label_is_cut_to_28_characters(make):
    (column,) = plot_of(make.report(make.record(variant="v" * 28))).columns
    assert column.slots[0].label == "v" * 28
    (column,) = plot_of(make.report(make.record(variant="v" * 29))).columns
    assert column.slots[0].label == "v" * 27 + "…"


def test_marks_follow_values_and_others_are_at_the_edge(make):
    records = [
        make.record("right", out=make.out(rmse=2e-3)),
        make.record("exact", out=make.out(rmse=0.0)),
        make.judged("broken", status="fail", record={"out": make.out(rmse=math.nan)}),
        make.refused("raised", "error", "RuntimeError: no"),
    ]
    (ax,) = figure(make.report(*records)).axes
    lowest, highest = ax.get_ylim()
    heights = [
        float(y)
        for collection in ax.collections
        if collection.get_gid() in {"marks", "raised"}
        for _, y in collection.get_offsets()
    ]
    assert heights == [2e-3, lowest, highest, lowest]


def test_floor_has_a_line_per_slot_and_ideal_a_line_per_mark(make):
    report = make.report(make.record("a"), make.record("b"), make.record("c", variant="causal"))
    (ax,) = figure(report).axes
    lines = {
        c.get_gid(): c.get_segments() for c in ax.collections if c.get_gid() in ("floor", "ideal")
    }
    assert [len(lines[name]) for name in ("floor", "ideal")] == [2, 3]
    assert {float(y) for segment in lines["floor"] for _, y in segment} == {1.5006e-03}
    assert {float(y) for segment in lines["ideal"] for _, y in segment} == {1.5294e-03}


def test_figure_explains_units_and_signs(sample):
    texts = " ".join(words(sample))
    for word in ("RMSE of out", "fp64", "units of V", "bf16 · B1", "sdpa_math", "rounding floor"):
        assert word in texts
    for word in ("ideal kernel", "verdict: fail", "warn", "raised", "2 cells without a mark"):
        assert word in texts


def test_kernels_differ_without_colours(make):
    names = [f"kernel {i}" for i in range(20)]
    fig = figure(make.report(*(make.record(name) for name in names)))
    (legend,) = fig.legends
    looks = [(line.get_marker(), line.get_color()) for line in legend.get_lines()][: len(names)]
    assert len(set(looks)) == len(names)
    for first, second in pairwise(looks):
        assert first[0] != second[0]


def test_hostile_names_are_shown_literally_on_one_line(make):
    names = ["_hidden", "$x^2$", "a\x1b[31m\nb", "n" * 60, ""]
    report = make.report(*(make.record(name) for name in names), command="$\\frac{")
    texts = words(report)
    for name in ("_hidden", "$x^2$", "a b", "n" * 23 + "…", "?"):
        assert name in texts
    assert image(report, ".svg")  # invalid TeX must not raise


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_images_are_deterministic(sample, suffix):
    assert image(sample, suffix) == image(sample, suffix)


def test_files_are_images_of_their_suffix(sample, tmp_path):
    paths = [tmp_path / "new" / "a.png", tmp_path / "b.SVG"]
    write_plots(sample, [str(path) for path in paths])
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a.png", "b.SVG", "new"]
    assert paths[0].read_bytes().startswith(PNG)
    text = paths[1].read_text()
    assert text.startswith("<?xml")
    assert text.rstrip().endswith("</svg>")
    assert "<dc:date>" not in text


def test_user_matplotlib_settings_do_not_change_the_image(sample):
    import matplotlib as mpl

    before = image(sample, ".svg")
    with mpl.rc_context({"font.size": 30, "axes.facecolor": "black"}):
        assert image(sample, ".svg") == before
        assert mpl.rcParams["font.size"] == 30


@pytest.mark.parametrize("name", ["plot.pdf", "plot", ".png", "plot.png.gz"])
def test_unknown_suffix_is_rejected(name, sample, tmp_path):
    with pytest.raises(UsageError, match=r"does not end in \.png or \.svg"):
        write_plots(sample, [str(tmp_path / "good.png"), str(tmp_path / name)])
    assert list(tmp_path.iterdir()) == []


def test_report_without_measurements_is_rejected(make, tmp_path):
    refused = make.refused("k", "unsupported", "no")
    for records in ((), (refused,), (make.refused("k", "error", "no"),)):
        with pytest.raises(UsageError, match="no cell that was measured"):
            write_plots(make.report(*records), [str(tmp_path / "a.png")])
    assert list(tmp_path.iterdir()) == []


def test_check_plots_rejects_unwritable_paths(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "taken.png").mkdir()
    for path in (tmp_path / "file" / "a.png", tmp_path / "taken.png"):
        with pytest.raises(UsageError, match=r"plots cannot be written to .*another --plot"):
            check_plots([str(path)])


def test_missing_matplotlib_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with one_line(
        UsageError,
        whole="a plot needs matplotlib, which is not installed: pip install 'attncheck[plot]'.",
    ):
        check_plots(["a.png"])
    check_plots([])  # no plot needs no matplotlib
