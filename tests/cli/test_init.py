"""``attncheck init``: from a function to a name that every verb knows."""

import tomllib

import pytest

from attncheck.core.errors import UsageError

MINE = """
import torch
from torch.nn.functional import scaled_dot_product_attention
def kernel(q, k, v):
    if q.shape[-1] != 64 or v.shape[-1] != 64 or q.dtype != torch.bfloat16 or q.shape[2] % 64:
        raise ValueError("takes bf16, head_dim 64 and lengths of 64 alone")
    return scaled_dot_product_attention(q, k, v)
def refuses(q, k, v):
    raise ValueError("only on Tuesdays")
"""
PROJECT = "# Kept, to the byte.\n[project]\nname    = 'mine'\n"


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def attncheck(mine, by_verb):
    return by_verb


def test_the_table_is_added_and_the_kernel_has_a_name(attncheck, mine):
    named = ("init", "mine.py::kernel", "--name", "sixty-four")
    code, shown = attncheck(*named)
    assert code == 0
    text = (mine / "pyproject.toml").read_text()
    assert text.startswith(PROJECT)
    table = tomllib.loads(text)["tool"]["attncheck"]["kernels"]["sixty-four"]
    assert table["entry"] == "mine.py::kernel"
    assert shown.splitlines()[-2:] == [
        "  attncheck check sixty-four",
        "  pytest --pyargs attncheck.properties --kernel sixty-four",
    ]
    plain = ("check", "sixty-four", "--question", "plain")
    code, shown = attncheck(*plain)
    assert code == 0
    assert "PASS sixty-four: 1 question" in shown
    code, shown = attncheck(*plain, "--dtype", "fp16")
    assert code == 5
    assert "dtype fp16 is not declared: its table has bf16" in " ".join(shown.split())
    _, shown = attncheck("list", "--device", "cpu")
    assert "sixty-four  mine.py::kernel (sdpa convention)" in shown
    with pytest.raises(UsageError, match="'sixty-four' already: --force replaces it"):
        attncheck(*named)
    assert (mine / "pyproject.toml").read_text() == text


def test_a_dry_run_writes_nothing(attncheck, mine):
    code, shown = attncheck("init", "mine.py::kernel", "--dry-run", "--file", "new.toml")
    assert code == 0
    assert shown.startswith("[kernels.kernel]\n")
    assert shown.endswith("would be written to new.toml\n")
    assert [one.name for one in mine.glob("*.toml")] == ["pyproject.toml"]
    assert (mine / "pyproject.toml").read_text() == PROJECT


def test_what_its_author_has_said_survives_a_new_probe(attncheck, mine, monkeypatch):
    (mine / "attncheck.toml").write_text(
        "[kernels.mine]\nentry = 'mine.py::kernel'\nsources = ['mine.py']\nhead_dims = [32]\n"
        "[kernels.mine.arithmetic]\np_in_sum = true\n"
        "[[kernels.mine.override]]\nwhen = { dtype = 'fp16' }\ngqa = true\n"
    )
    (mine / "below").mkdir()
    monkeypatch.chdir(mine / "below")
    code, _ = attncheck("init", "mine", "--force")
    assert code == 0
    table = tomllib.loads((mine / "attncheck.toml").read_text())["kernels"]["mine"]
    assert table["head_dims"] == [64]
    assert (table["entry"], table["sources"]) == ("mine.py::kernel", ["mine.py"])
    assert table["arithmetic"] == {"sums_rounded_weights": True}
    assert table["override"] == [{"when": {"dtype": "fp16"}, "gqa": True}]


def test_a_kernel_that_takes_nothing_is_not_written(attncheck, mine):
    code, _ = attncheck("init", "mine.py::refuses")
    assert code == 5
    assert (mine / "pyproject.toml").read_text() == PROJECT


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("mine.py::kernel", "--name", "flex"), "attncheck has a kernel called 'flex'"),
        (("mine.py::kernel", "--name", "a:b"), "cannot be called so"),
        (("mine.py::kernel", "--file", "."), "is a folder"),
        (("mine.py::kernel", "--file", "mine.py"), "is no TOML"),
        (("mine.py::gone",), "has no 'gone'"),
    ],
)
def test_nothing_is_written_where_it_cannot_be(attncheck, mine, words, said):
    with pytest.raises(UsageError, match=said):
        attncheck("init", *words)
    assert (mine / "pyproject.toml").read_text() == PROJECT
    assert (mine / "mine.py").read_text() == MINE


def test_a_process_that_has_imported_nothing(mine, fresh):
    """Documents show the verb, and a probe, but in a process that has torch already."""
    words = ("init", "--dry-run", "mine.py::kernel", "--device", "cpu", "-q")
    run = fresh(*words, cwd=mine)
    assert (run.returncode, run.stderr) == (0, "")
    assert "kernel" in run.stdout
