"""The benchmark of skipped tiles: its rows, its counts of tiles, and its comparison of bits."""

import argparse
import dataclasses

import pytest
import torch
from block_mask_speed import masks, measured, page, same_bits, tiles

from attncheck.core.mod_spec import FULL
from attncheck.core.outputs import Outputs
from attncheck.inputs.problem import Problem
from attncheck.verify.environment import prepare

if not torch.cuda.is_available():
    prepare("cpu")

LENGTH = 256  # in the interpreter its tiles are 64×64


def problem(**changes) -> Problem:
    return Problem(heads=1, query=LENGTH, head_dim=16, dtype="fp32", mask=FULL).replace(**changes)


def test_rows_and_page_have_each_mask_with_speed_up_and_equal_bits():
    options = argparse.Namespace(device="cpu", repeats=1, times=1, alone=True)
    rows = measured(problem(), options)
    assert [row["mask"] for row in rows] == ["causal", "window of 32", "8 documents"]
    assert all(row["same_bits"] for row in rows)
    for row in rows:
        ours = row["ours"]
        assert ours["speed_up"] == ours["dense_ms"] / ours["masked_ms"]
        assert row["share_of_ideal"] == ours["speed_up"] / row["ideal"]
    environment = {"device": "none", "torch": "2", "triton": None}
    table = page({"environment": environment, "shape": "fp32", "rows": rows})
    assert table.count("| yes |") == len(rows)
    rows[1]["same_bits"] = False
    assert "| **no** |" in page({"environment": environment, "shape": "fp32", "rows": rows})


@pytest.mark.parametrize(
    ("mask", "visited"), [("causal", 4 + 3 + 2 + 1), ("window of 32", 4 + 3), ("8 documents", 4)]
)
def test_visited_tiles_are_counted_one_by_one(mask, visited):
    """The kernel's table has runs of tiles, of any length."""
    assert tiles(problem(mask=masks(LENGTH)[mask]), "cpu") == (16, visited)


@pytest.mark.parametrize("name", ["out", "lse"])
def test_a_tiny_difference_in_out_or_lse_is_not_the_same_bits(name):
    outputs = Outputs(torch.zeros(2, 3), torch.zeros(2))
    assert same_bits(outputs, outputs)
    changed = getattr(outputs, name).clone()
    changed[0] = 1e-38
    assert not same_bits(dataclasses.replace(outputs, **{name: changed}), outputs)
