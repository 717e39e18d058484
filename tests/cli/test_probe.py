"""``attncheck probe`` and ``attncheck init`` as they are typed, of a kernel that refuses a lot."""

import json
import tomllib

import pytest
from tests.messages import one_line

from attncheck.cli.probe import name_of
from attncheck.core.errors import UsageError

# Quick: it takes one dtype, one head_dim, and neither masks nor score mods.
MINE = """
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
def two(q, k): ...
def exits(q, k, v):
    raise SystemExit(3)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def attncheck(mine, by_verb):
    return by_verb


def test_the_table_is_shown_and_nothing_is_written(attncheck, mine):
    code, shown = attncheck("probe", "mine.py::kernel", "--device", "cpu")
    assert code == 0
    said = " ".join(shown.split())
    assert "refuses 80: ValueError: takes fp32, head_dim 64 and lengths of 64 alone" in said
    table = shown[shown.index("[tool.") :]
    found = tomllib.loads(table)["tool"]["attncheck"]["kernels"]["kernel"]
    assert found["entry"] == "mine.py::kernel"
    assert (found["dtypes"], found["head_dims"]) == (["fp32"], [64])
    assert (found["masks"], found["length_multiple"]) == (["full"], 64)
    assert list(mine.glob("*.toml")) == []


def test_json_alone_on_standard_output(attncheck):
    _, shown = attncheck("probe", "mine.py::kernel", "--convention", "sdpa", "--json")
    found = json.loads(shown)
    assert (found["kernel"], found["convention"]) == ("kernel", "sdpa")
    assert {one["verdict"] for one in found["tried"]} == {"takes", "refuses"}
    assert found["table"].startswith("[tool.attncheck.kernels.kernel]\n")


@pytest.mark.parametrize("kernel", ["refuses", "raises", "exits"])
def test_a_kernel_that_takes_nothing(attncheck, kernel):
    code, shown = attncheck("probe", f"mine.py::{kernel}")
    assert code == 5
    assert "The kernel takes nothing that was tried." in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("mine.py::two",), r"takes \(q, k\): a kernel's first three"),
        (("nosuch",), "kernel 'nosuch' is not known: choose from"),
        (("mine.py::kernel", "--convention", "ours"), "convention 'ours' is not known"),
        (("sdpa-cudnn",), "cannot run on cpu: needs a CUDA GPU"),
    ],
)
def test_bad_input_is_a_usage_error(attncheck, arguments, said):
    with one_line(UsageError, match=said):
        attncheck("probe", *arguments, "--device", "cpu")


def test_bad_input_is_one_line(mine, fresh):
    run = fresh("probe", "mine.py::gone", cwd=mine)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.splitlines()[-1] == (
        "attncheck: kernel 'mine.py::gone': mine.py has no 'gone'."
    )


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("mine.py::kernel", "kernel"),
        ("package.module:Class.method", "Class-method"),
        ("ideal", "my-ideal"),
        ("mine", "mine"),
    ],
)
def test_a_table_is_called_as_the_function_is(spec, name):
    assert name_of(spec) == name
