"""``attncheck blocks``: counts of empty, partial and full tiles of a mask, and their map."""

import io

import pytest
import torch

from attncheck.cli.blocks import blocks
from attncheck.core.mod_spec import Dimensions, Spec
from attncheck.records.json_reports import load_report
from attncheck.records.survey_reports import BlockRecord, BlockReport
from attncheck.reporting.rendering import render, show
from attncheck.surveys.block_survey import mask_of, survey_blocks

MINE = """
import torch

LIMITS = torch.tensor([64, 10, 100, 0])

def limited(b, h, q_idx, kv_idx):
    return (kv_idx < LIMITS[h]) & (kv_idx % 64 <= q_idx)
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch, library_as_before):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(invoke):
    return lambda *words: invoke(blocks, *words)


@pytest.fixture
def records(run):
    def read(*words):
        result = run(*words, "--json")
        assert result.exception is None
        return load_report(result.stdout, BlockReport).records

    return read


def counts(record):
    return record.total, record.empty, record.partial, record.full


def count_tiles(seen, block_query, block_kv):
    """Total, empty, partial and full tiles of a mask ``(..., query, kv)``, by brute force."""
    numbers = [0, 0, 0]
    for mask in seen.flatten(0, -3):
        for i in range(0, seen.shape[-2], block_query):
            for j in range(0, seen.shape[-1], block_kv):
                tile = mask[i : i + block_query, j : j + block_kv]
                whole = int(tile.sum()) == block_query * block_kv
                numbers[2 if whole else 1 if tile.any() else 0] += 1
    return (sum(numbers), *numbers)


def test_counts_match_brute_force_for_each_tile_size(records):
    sizes = ("--block", "16x24", "--block", "64X64", "--block", "16x24")
    small, large = records("causal", "--query", "100", "--kv", "130", *sizes)
    seen = torch.ones(1, 100, 130).tril() > 0
    assert counts(small) == count_tiles(seen, 16, 24)
    assert counts(large) == count_tiles(seen, 64, 64)
    assert (large.block_query, large.block_kv) == (64, 64)
    assert small.sparsity == small.empty / small.total
    assert small.speedup == small.total / (small.partial + small.full)


def test_defaults_are_tiles_of_128_and_square_masks(records):
    (record,) = records("full", "--query", "256")
    assert (record.block_query, record.block_kv) == (128, 128)
    assert counts(record) == (4, 0, 0, 4)
    assert record.map == ()


def test_every_sequence_and_head_is_counted(records):
    mask = '{"name": "padding", "lengths": [96, 40]}'
    (record,) = records(mask, "--batch", "2", "--heads", "3", "--query", "96", "--block", "32x32")
    seen = torch.arange(96) < torch.tensor([96, 40]).view(2, 1, 1, 1)
    assert counts(record) == count_tiles(seen.expand(2, 3, 96, 96), 32, 32)


def test_counts_of_a_mask_from_a_file(records):
    arguments = ("mine.py::limited", "--heads", "4", "--query", "128", "--block", "32x32")
    (record,) = records(*arguments)
    limits = torch.tensor([64, 10, 100, 0]).view(4, 1, 1)
    rows, keys = torch.arange(128).view(-1, 1), torch.arange(128)
    assert counts(record) == count_tiles((keys < limits) & (keys % 64 <= rows), 32, 32)


def test_map_shows_the_first_sequence_and_head(run, records):
    arguments = ("mine.py::limited", "--heads", "4", "--query", "128", "--block", "32x32")
    (record,) = records(*arguments, "--map")
    assert record.map == ("1000", "2100", "2200", "2200")
    lines = run(*arguments, "--map").stdout.splitlines()
    assert "32×32, b 0, h 0: · empty, ▒ partial, █ full" in lines
    at = lines.index("  ▒···")
    assert lines[at : at + 4] == ["  ▒···", "  █▒··", "  ██··", "  ██··"]


@pytest.mark.parametrize(("columns", "shown"), [(22, 20), (64, 62), (66, 64)])
def test_map_is_cut_to_the_terminal_with_a_note(run, monkeypatch, columns, shown):
    monkeypatch.setenv("COLUMNS", str(columns))
    out = run("causal", "--query", "128", "--block", "2x2", "--map").stdout
    assert max(map(len, (line for line in out.splitlines() if line[2:3] in "·▒█"))) == shown + 2
    assert (f"{shown} of 64 key blocks are shown" in " ".join(out.split())) == (shown < 64)


def test_empty_mask_has_no_speedup(run, records):
    mask = '{"name": "sliding_window", "window": 0}'
    (record,) = records(mask, "--query", "300")
    assert (counts(record), record.sparsity, record.speedup) == ((9, 9, 0, 0), 1.0, None)
    (line,) = (
        line for line in run(mask, "--query", "300").stdout.splitlines() if "128×128" in line
    )
    assert line.split() == ["128×128", "9", "9", "0", "0", "100.0%", "—"]


def test_page_shows_every_number_of_its_report():
    """No mask gives these numbers, so the page can only have taken them from the report."""
    record = BlockRecord(
        block_query=3,
        block_kv=5,
        total=77,
        empty=11,
        partial=22,
        full=44,
        sparsity=0.125,
        speedup=9.5,
        map=("012", "210"),
    )
    report = BlockReport(
        command="attncheck blocks planted",
        attncheck="0",
        mask={},
        name="planted\x1b[31m",
        batch=6,
        heads=7,
        query=8,
        kv=9,
        records=(record,),
    )
    stream = io.StringIO()
    show(report, stream=stream)
    page = stream.getvalue()
    assert "planted · B6 H7 Q8 K9" in page
    assert "\x1b" not in page
    assert "3×5 77 11 22 44 12.5% 9.50×" in " ".join(page.split())
    assert "  ·▒█\n  █▒·\n" in page
    assert load_report(render(report, "json"), BlockReport) == report


def test_mask_of_parses_names_json_and_files():
    assert mask_of("causal") == Spec.of("causal")
    both = '{"name": "and", "of": [{"name": "causal"}, {"name": "prefix_lm", "prefix": 3}]}'
    parts = Spec.of("causal"), Spec.of("prefix_lm", prefix=3)
    assert mask_of(both) == Spec.of("and", *parts)
    assert mask_of("mine.py::limited").name == "mine.py::limited"


def test_blocks_in_a_new_process(in_folder, run_fresh):
    words = (f"{in_folder}/mine.py::limited", "--heads", "4", "--query", "64")
    variables = {"CUDA_VISIBLE_DEVICES": "", "PYTHONIOENCODING": "utf-8"}
    result = run_fresh("blocks", *words, cwd=in_folder, **variables)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("attncheck blocks mine.py::limited --heads 4 --query 64\n")


def test_interrupt_between_two_sizes_propagates():
    def interrupted():
        raise KeyboardInterrupt

    dimensions = Dimensions(batch=1, heads=1, query=8, kv=8)
    with pytest.raises(KeyboardInterrupt):
        survey_blocks(
            Spec.of("causal"), dimensions, [(4, 4)], mapped=False, command="", done=interrupted
        )
