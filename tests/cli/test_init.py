"""``attncheck init`` writes a table that gives a kernel a name for every verb."""

import tomllib

import pytest

from attncheck.core.errors import UsageError

KERNELS = """
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
def project(project):
    (project / "pyproject.toml").write_text(PROJECT)
    return project


@pytest.fixture
def attncheck(project, run_verb):
    return run_verb


def test_init_adds_a_table_that_names_the_kernel(attncheck, project):
    init = ("init", "mine.py::kernel", "--name", "sixty-four")
    code, out = attncheck(*init)
    assert code == 0
    text = (project / "pyproject.toml").read_text()
    assert text.startswith(PROJECT)
    table = tomllib.loads(text)["tool"]["attncheck"]["kernels"]["sixty-four"]
    assert table["entry"] == "mine.py::kernel"
    assert out.splitlines()[-2:] == [
        "  attncheck check sixty-four",
        "  pytest --pyargs attncheck.properties --kernel sixty-four",
    ]
    plain = ("check", "sixty-four", "--question", "plain")
    code, out = attncheck(*plain)
    assert code == 0
    assert "PASS sixty-four: 1 question" in out
    code, out = attncheck(*plain, "--dtype", "fp16")
    assert code == 5
    assert "dtype fp16 is not declared: its table has bf16" in " ".join(out.split())
    _, out = attncheck("list", "--device", "cpu")
    assert "sixty-four  mine.py::kernel (sdpa convention)" in out
    with pytest.raises(UsageError, match="'sixty-four' already: --force replaces it"):
        attncheck(*init)
    assert (project / "pyproject.toml").read_text() == text


def test_dry_run_writes_nothing(attncheck, project):
    code, out = attncheck("init", "mine.py::kernel", "--dry-run", "--file", "new.toml")
    assert code == 0
    assert out.startswith("[kernels.kernel]\n")
    assert out.endswith("would be written to new.toml\n")
    assert [one.name for one in project.glob("*.toml")] == ["pyproject.toml"]
    assert (project / "pyproject.toml").read_text() == PROJECT


def test_force_keeps_what_the_author_declared(attncheck, project, monkeypatch):
    (project / "attncheck.toml").write_text(
        "[kernels.mine]\nentry = 'mine.py::kernel'\nsources = ['mine.py']\nhead_dims = [32]\n"
        "[kernels.mine.arithmetic]\np_in_sum = true\n"
        "[[kernels.mine.override]]\nwhen = { dtype = 'fp16' }\ngqa = true\n"
    )
    (project / "below").mkdir()
    monkeypatch.chdir(project / "below")
    code, _ = attncheck("init", "mine", "--force")
    assert code == 0
    table = tomllib.loads((project / "attncheck.toml").read_text())["kernels"]["mine"]
    assert table["head_dims"] == [64]
    assert (table["entry"], table["sources"]) == ("mine.py::kernel", ["mine.py"])
    assert table["arithmetic"] == {"sums_rounded_weights": True}
    assert table["override"] == [{"when": {"dtype": "fp16"}, "gqa": True}]


def test_kernel_that_supports_nothing_is_not_written(attncheck, project):
    code, _ = attncheck("init", "mine.py::refuses")
    assert code == 5
    assert (project / "pyproject.toml").read_text() == PROJECT


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("mine.py::kernel", "--name", "flex"), "attncheck has a kernel called 'flex'"),
        (("mine.py::kernel", "--name", "a:b"), "cannot be called so"),
        (("mine.py::kernel", "--file", "."), "is a folder"),
        (("mine.py::kernel", "--file", "mine.py"), "is no TOML"),
        (("mine.py::gone",), "has no 'gone'"),
    ],
)
def test_bad_input_writes_nothing(attncheck, project, words, message):
    with pytest.raises(UsageError, match=message):
        attncheck("init", *words)
    assert (project / "pyproject.toml").read_text() == PROJECT
    assert (project / "mine.py").read_text() == KERNELS


def test_init_in_a_new_process(project, run_fresh):
    """The tests of the documents run the verb only in a process that has torch already."""
    words = ("init", "--dry-run", "mine.py::kernel", "--device", "cpu", "-q")
    run = run_fresh(*words, cwd=project)
    assert (run.returncode, run.stderr) == (0, "")
    assert "kernel" in run.stdout
