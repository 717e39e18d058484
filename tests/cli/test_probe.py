"""``attncheck probe`` prints a table of what a kernel supports."""

import json
import tomllib

import pytest

from attncheck.cli.probe import name_of

# Quick to probe: it supports one dtype, one head_dim, and neither masks nor score mods.
KERNELS = """
import torch
from torch.nn.functional import scaled_dot_product_attention
print("imported")
def kernel(q, k, v):
    if q.shape[-1] != 64 or v.shape[-1] != 64 or q.dtype != torch.float32 or q.shape[2] % 64:
        raise ValueError("takes fp32, head_dim 64 and lengths of 64 alone")
    return scaled_dot_product_attention(q, k, v)
def refuses(q, k, v):
    raise ValueError("only on Tuesdays")
def raises(q, k, v):
    raise RuntimeError("no\\nway")
def exits(q, k, v):
    raise SystemExit(3)
"""


@pytest.fixture
def attncheck(project, run_verb):
    return run_verb


def test_probe_prints_the_table_and_writes_nothing(attncheck, project):
    code, out = attncheck("probe", "mine.py::kernel", "--device", "cpu")
    assert code == 0
    reason = "refuses 80: ValueError: takes fp32, head_dim 64 and lengths of 64 alone"
    assert reason in " ".join(out.split())
    toml = tomllib.loads(out[out.index("[tool.") :])
    table = toml["tool"]["attncheck"]["kernels"]["kernel"]
    assert table["entry"] == "mine.py::kernel"
    assert (table["dtypes"], table["head_dims"]) == (["fp32"], [64])
    assert (table["masks"], table["length_multiple"]) == (["full"], 64)
    assert list(project.glob("*.toml")) == []


def test_json_is_alone_on_stdout(attncheck):
    _, out = attncheck("probe", "mine.py::kernel", "--convention", "sdpa", "--json")
    report = json.loads(out)
    assert (report["kernel"], report["convention"]) == ("kernel", "sdpa")
    assert {trial["verdict"] for trial in report["tried"]} == {"takes", "refuses"}
    assert report["table"].startswith("[tool.attncheck.kernels.kernel]\n")


@pytest.mark.parametrize("kernel", ["refuses", "raises", "exits"])
def test_kernel_that_supports_nothing_exits_5(attncheck, kernel):
    code, out = attncheck("probe", f"mine.py::{kernel}")
    assert code == 5
    assert "The kernel takes nothing that was tried." in out


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("mine.py::kernel", "kernel"),
        ("package.module:Class.method", "Class-method"),
        ("ideal", "my-ideal"),
        ("mine", "mine"),
    ],
)
def test_table_is_named_after_the_function(spec, name):
    assert name_of(spec) == name
