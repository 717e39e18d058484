import io
import os

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

def decides(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx if q_idx > 3 else q_idx < kv_idx

other = 7
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
        done = run(*words, "--json")
        assert done.exception is None
        return load_report(done.stdout, BlockReport).records

    return read


def counted(record):
    return record.total, record.empty, record.partial, record.full


def by_definition(seen, block_query, block_kv):
    """How many tiles of a mask, ``(..., query, kv)``, are empty, partial and full."""
    counts = [0, 0, 0]
    for one in seen.flatten(0, -3):
        for i in range(0, seen.shape[-2], block_query):
            for j in range(0, seen.shape[-1], block_kv):
                tile = one[i : i + block_query, j : j + block_kv]
                whole = int(tile.sum()) == block_query * block_kv
                counts[2 if whole else 1 if tile.any() else 0] += 1
    return (sum(counts), *counts)


def test_tiles_of_each_size_are_counted(records):
    sizes = ("--block", "16x24", "--block", "64X64", "--block", "16x24")
    small, large = records("causal", "--query", "100", "--kv", "130", *sizes)
    seen = torch.ones(1, 100, 130).tril() > 0
    assert counted(small) == by_definition(seen, 16, 24)
    assert counted(large) == by_definition(seen, 64, 64)
    assert (large.block_query, large.block_kv) == (64, 64)
    assert small.sparsity == small.empty / small.total
    assert small.speedup == small.total / (small.partial + small.full)


def test_by_default_tiles_are_torchs_and_keys_as_many_as_rows(records):
    (record,) = records("full", "--query", "256")
    assert (record.block_query, record.block_kv) == (128, 128)
    assert counted(record) == (4, 0, 0, 4)
    assert record.map == ()


def test_sequences_and_heads_count_whether_the_mask_reads_them_or_not(records):
    given = '{"name": "padding", "lengths": [96, 40]}'
    (record,) = records(given, "--batch", "2", "--heads", "3", "--query", "96", "--block", "32x32")
    seen = torch.arange(96) < torch.tensor([96, 40]).view(2, 1, 1, 1)
    assert counted(record) == by_definition(seen.expand(2, 3, 96, 96), 32, 32)


def test_a_mask_of_ones_own(records):
    arguments = ("mine.py::limited", "--heads", "4", "--query", "128", "--block", "32x32")
    (record,) = records(*arguments)
    limits = torch.tensor([64, 10, 100, 0]).view(4, 1, 1)
    rows, keys = torch.arange(128).view(-1, 1), torch.arange(128)
    assert counted(record) == by_definition((keys < limits) & (keys % 64 <= rows), 32, 32)


def test_the_map_is_of_the_first_sequence_and_head(run, records):
    arguments = ("mine.py::limited", "--heads", "4", "--query", "128", "--block", "32x32")
    (record,) = records(*arguments, "--map")
    assert record.map == ("1000", "2100", "2200", "2200")
    lines = run(*arguments, "--map").stdout.splitlines()
    assert "32×32, b 0, h 0: · empty, ▒ partial, █ full" in lines
    at = lines.index("  ▒···")
    assert lines[at : at + 4] == ["  ▒···", "  █▒··", "  ██··", "  ██··"]


@pytest.mark.parametrize(("columns", "shown"), [(22, 20), (64, 62), (66, 64)])
def test_a_map_is_cut_to_the_terminal_and_says_so(run, monkeypatch, columns, shown):
    monkeypatch.setenv("COLUMNS", str(columns))
    out = run("causal", "--query", "128", "--block", "2x2", "--map").stdout
    assert max(map(len, (line for line in out.splitlines() if line[2:3] in "·▒█"))) == shown + 2
    assert (f"{shown} of 64 key blocks are shown" in " ".join(out.split())) == (shown < 64)


def test_a_mask_that_hides_everything_has_no_speed_up(run, records):
    given = '{"name": "sliding_window", "window": 0}'
    (record,) = records(given, "--query", "300")
    assert (counted(record), record.sparsity, record.speedup) == ((9, 9, 0, 0), 1.0, None)
    (line,) = (
        line for line in run(given, "--query", "300").stdout.splitlines() if "128×128" in line
    )
    assert line.split() == ["128×128", "9", "9", "0", "0", "100.0%", "—"]


def test_a_page_shows_what_its_report_says_and_nothing_else():
    """A report that no mask gives: whatever is shown was in it."""
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


def test_masks_as_they_are_typed():
    assert mask_of("causal") == Spec.of("causal")
    both = '{"name": "and", "of": [{"name": "causal"}, {"name": "prefix_lm", "prefix": 3}]}'
    parts = Spec.of("causal"), Spec.of("prefix_lm", prefix=3)
    assert mask_of(both) == Spec.of("and", *parts)
    assert mask_of("mine.py::limited").name == "mine.py::limited"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("casual",), "mask 'casual' is not known: did you mean 'causal'? Choose from and, causal"),
        (("prefix_lm",), 'needs numbers or parts: write it as JSON, {"name": "prefix_lm", …}'),
        (("and",), "needs numbers or parts"),
        (('{"name": "and"',), "is no JSON: Expecting"),
        (('{"name": "and"}',), "and has 0 parts: it takes at least one part."),
        (('{"name": "casual"}',), "mask 'casual' is not known"),
        (('{"window": 3}',), "a mod is an object with a name"),
        (('{"name": "padding", "lengths": [3]}', "--batch", "2"), "one for each of the batch=2"),
        (("mine.py::gone",), "mine.py has no 'gone'"),
        (("mine.py::decides",), "cannot be traced"),
        (("mine.py::other",), "it must be a callable"),
        (("mine.py::limited", "--heads", "5"), "allowed is −4 … 3"),
        (("gone.py::mask",), "there is no file gone.py"),
        (("mine.py",), "is not FILE.py::NAME"),
        (("causal", "--block", "128"), "block '128' is not ROWSxKEYS, such as 128x64."),
        (("causal", "--block", "0x64"), "is not ROWSxKEYS"),
        (("causal", "--block", "64x64x64"), "is not ROWSxKEYS"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(run, arguments, says):
    error = run(*arguments).exception
    assert error is not None
    assert says in str(error)
    assert "\n" not in str(error)


def test_errors_end_in_exit_code_2_and_a_report_in_0(in_folder, fresh, attncheck):
    where = {"CUDA_VISIBLE_DEVICES": "", "PYTHONIOENCODING": "utf-8"}
    words = (f"{in_folder}/mine.py::limited", "--heads", "4", "--query", "64")
    done = fresh("blocks", *words, cwd=in_folder, **where)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("attncheck blocks mine.py::limited --heads 4 --query 64\n")
    for words in (("sliding_window",), ("causal", "--query", "0")):
        done = attncheck("blocks", *words, cwd=in_folder, env=os.environ | where)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_an_interrupt_between_two_sizes_ends_it():
    def interrupted():
        raise KeyboardInterrupt

    dimensions = Dimensions(batch=1, heads=1, query=8, kv=8)
    with pytest.raises(KeyboardInterrupt):
        survey_blocks(
            Spec.of("causal"), dimensions, [(4, 4)], mapped=False, command="", done=interrupted
        )
