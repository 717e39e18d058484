"""The benchmark of the oracle's speed: FLOPs, the calls that it times, memory, and its report."""

import json

import oracle
import pytest
import torch
from oracle_calls import Cell, forward_alone, peak_bytes, sdpa, streamed

from attncheck.oracles.streaming_forward import Blocks

CELL = Cell(8, "causal", 40, 1, 2, backward=True)
SMALL = [Blocks(rows=64, query=16, query_most=32, kv=k, cell=16) for k in (16, 32)]


def test_forward_has_two_products_and_backward_five():
    """A product has 2·head_dim FLOPs for a visible pair; a causal mask has n(n + 1)/2 pairs."""
    forward = Cell(8, "causal", 40, 1, 2)
    assert forward.flops == 4 * 8 * (40 * 41 // 2) * 2
    assert CELL.flops == 3.5 * forward.flops
    assert Cell(8, "full", 40, 1, 2).product == 2 * 8 * 40 * 40 * 2


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_timed_calls_compute_the_same_gradients(mask):
    cell = Cell(8, mask, 40, 1, 2, backward=True)
    inputs = cell.inputs("cpu")
    outputs = streamed(inputs)()
    for gradient, expected in zip(
        (outputs.dq, outputs.dk, outputs.dv), sdpa(cell, inputs)(), strict=True
    ):
        torch.testing.assert_close(gradient, expected)
    assert not forward_alone(inputs)().gradients()
    for blocks in SMALL:
        torch.testing.assert_close(streamed(inputs, blocks)().dq, outputs.dq)


def test_peak_memory_counts_tensors_that_are_alive_at_once():
    def call():
        first = torch.zeros(1000, dtype=torch.float64)
        second = first + 1
        del first
        return second * 2

    assert peak_bytes(call, "cpu") == 2 * 8000


@pytest.fixture
def small_matmul(monkeypatch):
    """Time a small product of matrices as the reference."""
    small = torch.eye(64, dtype=torch.float64)
    monkeypatch.setattr(oracle, "matmul", lambda device: (lambda: small @ small, 2.0 * 64**3))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("sweep", [False, True])
@pytest.mark.usefixtures("small_matmul")
def test_benchmark_prints_a_table_and_writes_rows(tmp_path, monkeypatch, capsys, backward, sweep):
    path = tmp_path / "rows.json"
    words = ["oracle.py", "--length", "40", "--head-dim", "8", "--heads", "2", "--repeats", "1"]
    words += ["--json", str(path), *["--backward"] * backward, *["--sweep"] * sweep]
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.setattr(oracle, "candidates", lambda device: SMALL)
    oracle.main()
    assert capsys.readouterr().out
    row, _ = json.loads(path.read_text())["rows"]
    if sweep:
        assert len(row["ratios"]) == 2
    else:
        assert ("both_ratio" in row) == backward == ("forward_milliseconds" in row)
        assert row["sdpa_ratio"] > 0


@pytest.mark.usefixtures("small_matmul")
def test_no_further_row_is_begun_after_the_time_limit(tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    words = ["oracle.py", "--length", "40", "--head-dim", "8", "--repeats", "1", "--seconds", "0"]
    monkeypatch.setattr("sys.argv", [*words, "--json", str(path)])
    oracle.main()
    assert len(json.loads(path.read_text())["rows"]) == 1
