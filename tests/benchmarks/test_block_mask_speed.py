"""The benchmark of tiles that are not visited, interpreted: it runs, counts, and compares bits."""

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

LENGTH = 256  # whose tiles the interpreter makes 64×64


def problem(**changes) -> Problem:
    return Problem(heads=1, query=LENGTH, head_dim=16, dtype="fp32", mask=FULL).replace(**changes)


def test_a_row_for_each_mask():
    options = argparse.Namespace(device="cpu", repeats=1, times=1, alone=True)
    rows = measured(problem(), options)
    assert [row["mask"] for row in rows] == ["causal", "window of 32", "8 documents"]
    assert all(row["same_bits"] for row in rows)
    for row in rows:
        spent = row["ours"]
        assert spent["speed_up"] == spent["dense_ms"] / spent["masked_ms"]
        assert row["share_of_ideal"] == spent["speed_up"] / row["ideal"]
    environment = {"device": "none", "torch": "2", "triton": None}
    table = page({"environment": environment, "shape": "fp32", "rows": rows})
    assert table.count("| yes |") == len(rows)
    rows[1]["same_bits"] = False
    assert "| **no** |" in page({"environment": environment, "shape": "fp32", "rows": rows})


@pytest.mark.parametrize(
    ("mask", "visited"), [("causal", 4 + 3 + 2 + 1), ("window of 32", 4 + 3), ("8 documents", 4)]
)
def test_visited_tiles(mask, visited):
    """However many of them are in one run."""
    assert tiles(problem(mask=masks(LENGTH)[mask]), "cpu") == (16, visited)


def test_bits_that_differ():
    found = Outputs(torch.zeros(2, 3), torch.zeros(2))
    assert same_bits(found, found)
    for name in ("out", "lse"):
        other = getattr(found, name).clone()
        other[0] = 1e-38
        assert not same_bits(dataclasses.replace(found, **{name: other}), found)
