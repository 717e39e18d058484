"""The figure of a failed record: error maps by tile and by head."""

import math

import msgspec
import pytest
from msgspec.structs import replace

from attncheck.records.record import Diagnosis, ErrorMap, TileMap
from attncheck.reporting.image_files import image, is_mapped, write_plots

pytest.importorskip("matplotlib", reason="plots need the extra plot")

from attncheck.reporting.image_files import error_figure

KERNEL = "mine.py::attention on cpu"
DIAGONAL = TileMap(rows=64, keys=32, values=((1.0, 0.25, 0.0), (0.004, 0.5, 1.0)))
HEADS = ErrorMap(rows=64, heads=1, values=((0.5, 200.0), (math.inf, math.nan)))


@pytest.fixture
def failed(make):
    """``failed(tiles=…, heads=…)``: a Record of 128 rows, 96 keys and 4 heads."""

    def failed(tiles=DIAGONAL, heads=HEADS):
        diagnosis = Diagnosis(ranked=(), tied=0, tried=45, tiles=tiles)
        return replace(make.record(), status="fail", diagnosis=diagnosis, error_map=heads)

    return failed


def maps(fig):
    """The axes that have cells, in their order."""
    return [ax for ax in fig.axes if any(one.get_gid() == "cells" for one in ax.collections)]


def numbers(ax):
    return [text.get_text() for text in ax.texts]


def words(fig):
    texts = [text.get_text() for text in fig.texts]
    for ax in fig.axes:
        texts += [ax.get_title("left"), ax.get_xlabel(), ax.get_ylabel()]
    return texts


def test_tile_map_and_head_map_are_side_by_side(failed):
    fig = error_figure(failed(), kernel=KERNEL)
    tiles, heads = maps(fig)
    assert numbers(tiles) == ["100", "25", "·", "·", "50", "100"]
    assert numbers(heads) == ["0.5", "200", "∞", "NaN"]
    assert (tiles.get_xlabel(), tiles.get_ylabel()) == ("key", "query row")
    assert (heads.get_xlabel(), heads.get_ylabel()) == ("query row", "query head")


def test_cell_colours_follow_their_numbers(failed):
    tiles, heads = maps(error_figure(failed(), kernel=KERNEL))
    (cells,) = tiles.collections
    assert cells.get_array().ravel().tolist() == pytest.approx([100, 25, 0, 0.4, 50, 100])
    (cells,) = heads.collections
    assert cells.get_array().ravel().tolist() == pytest.approx([math.log10(0.5), 2, 2, 2])


def test_rows_run_downwards_with_ticks_at_tile_edges(failed):
    tiles, heads = maps(error_figure(failed(), kernel=KERNEL))
    assert tiles.get_ylim() == (128, 0)
    assert [label.get_text() for label in tiles.get_xticklabels()] == ["0", "32", "64", "96"]
    assert [label.get_text() for label in tiles.get_yticklabels()] == ["0", "64", "128"]
    assert [label.get_text() for label in heads.get_yticklabels()] == ["0", "1"]


def test_partial_last_tile_is_drawn_narrower(failed):
    (tiles, *_) = maps(error_figure(failed(replace(DIAGONAL, keys=40)), kernel=KERNEL))
    assert tiles.get_xlim() == (0, 96)
    assert [label.get_text() for label in tiles.get_xticklabels()] == ["0", "40", "96"]


def test_map_larger_than_the_problem_is_drawn_in_full(failed):
    """A relation runs problems of other sizes than the one the record names."""
    (tiles, *_) = maps(error_figure(failed(replace(DIAGONAL, keys=7)), kernel=KERNEL))
    assert tiles.get_xlim() == (0, 21)


def test_large_map_has_no_numbers_and_few_ticks(failed):
    many = ErrorMap(rows=2, heads=1, values=(tuple(0.1 for _ in range(64)),) * 4)
    (_, heads) = maps(error_figure(failed(heads=many), kernel=KERNEL))
    assert numbers(heads) == []
    assert len(heads.get_xticklabels()) < 20


def test_figure_names_problem_kernel_cause_and_units(failed):
    texts = words(error_figure(failed(), kernel=KERNEL))
    for text in (
        "bf16 full B1 H4 Q128 K96 D64 normal seed 0",
        KERNEL,
        "likely: unknown: none of 45 fault models fits",
        "by how much weights are off, in % of the worst tile",
        "largest |error| ÷ what is allowed there",
    ):
        assert text in texts


def test_single_map_gets_one_panel(failed):
    assert len(maps(error_figure(failed(heads=msgspec.UNSET), kernel=KERNEL))) == 1
    assert len(maps(error_figure(failed(tiles=msgspec.UNSET), kernel=KERNEL))) == 1


def test_record_without_maps_is_not_plotted(make, failed):
    assert is_mapped(failed())
    assert not is_mapped(make.record())
    assert not is_mapped(failed(msgspec.UNSET, msgspec.UNSET))


def test_hostile_kernel_name_is_one_literal_line(failed):
    assert "$\\frac{" in words(error_figure(failed(), kernel="$\\frac{\n\x1b[31m"))
    assert image(failed(), ".svg", kernel="$\\frac{")


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_images_are_deterministic(failed, suffix, tmp_path):
    write_plots(failed(), [str(tmp_path / f"a{suffix}")], kernel=KERNEL)
    again = image(failed(), suffix, kernel=KERNEL)
    assert (tmp_path / f"a{suffix}").read_bytes() == again
