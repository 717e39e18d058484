"""The oracle's benchmark: what counts as a FLOP, what is timed, and what is written."""

import json

import oracle
import pytest
import torch
from oracle_calls import Cell, forward_alone, peak_bytes, sdpa, streamed

from attncheck.oracles.streaming_forward import Blocks

CELL = Cell(8, "causal", 40, 1, 2, backward=True)
SMALL = [Blocks(rows=64, query=16, query_most=32, kv=k, cell=16) for k in (16, 32)]


def test_a_backward_is_five_products_and_a_forward_two():
    """Of each 2·head_dim for a visible pair, of which a causal mask has n(n + 1)/2."""
    forward = Cell(8, "causal", 40, 1, 2)
    assert forward.flops == 4 * 8 * (40 * 41 // 2) * 2
    assert CELL.flops == 3.5 * forward.flops
    assert Cell(8, "full", 40, 1, 2).product == 2 * 8 * 40 * 40 * 2


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_what_is_timed_beside_it_computes_the_same(mask):
    cell = Cell(8, mask, 40, 1, 2, backward=True)
    inputs = cell.inputs("cpu")
    gradients = sdpa(cell, inputs)()
    found = streamed(inputs)()
    for mine, its in zip(gradients, (found.dq, found.dk, found.dv), strict=True):
        torch.testing.assert_close(mine, its)
    assert not forward_alone(inputs)().gradients()
    for blocks in SMALL:
        torch.testing.assert_close(streamed(inputs, blocks)().dq, found.dq)


def test_memory_is_what_was_alive_at_once():
    def call():
        first = torch.zeros(1000, dtype=torch.float64)
        second = first + 1
        del first
        return second * 2

    assert peak_bytes(call, "cpu") == 2 * 8000


def _with_a_small_matmul(monkeypatch):
    small = torch.eye(64, dtype=torch.float64)
    monkeypatch.setattr(oracle, "matmul", lambda device: (lambda: small @ small, 2.0 * 64**3))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("sweep", [False, True])
def test_it_runs_and_writes(tmp_path, monkeypatch, capsys, backward, sweep):
    path = tmp_path / "found.json"
    words = ["oracle.py", "--length", "40", "--head-dim", "8", "--heads", "2", "--repeats", "1"]
    words += ["--json", str(path), *["--backward"] * backward, *["--sweep"] * sweep]
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.setattr(oracle, "candidates", lambda device: SMALL)
    _with_a_small_matmul(monkeypatch)
    oracle.main()
    assert capsys.readouterr().out
    found = json.loads(path.read_text())
    assert len(found["rows"]) == 2
    row = found["rows"][0]
    if sweep:
        assert len(row["ratios"]) == 2
    else:
        assert ("both_ratio" in row) == backward == ("forward_milliseconds" in row)
        assert row["sdpa_ratio"] > 0


def test_nothing_is_begun_after_the_time_is_over(tmp_path, monkeypatch):
    path = tmp_path / "found.json"
    words = ["oracle.py", "--length", "40", "--head-dim", "8", "--repeats", "1", "--seconds", "0"]
    monkeypatch.setattr("sys.argv", [*words, "--json", str(path)])
    _with_a_small_matmul(monkeypatch)
    oracle.main()
    assert len(json.loads(path.read_text())["rows"]) == 1
