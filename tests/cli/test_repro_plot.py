"""``attncheck repro --plot`` draws where the errors of a failure are."""

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="plots need the extra plot")

WRONG = f"{Path(__file__).parents[1] / 'cases' / 'planted_kernels.py'}::sees_the_next_key"
PROBLEM = {"query": 3, "kv": 5, "head_dim": 8, "mask": {"name": "causal"}}


@pytest.fixture
def repro(tmp_path, attncheck):
    """``repro(word, …)``: run a problem file in an otherwise empty folder."""
    (tmp_path / "input.json").write_text(json.dumps(PROBLEM))

    def run(*words, kernel=WRONG):
        arguments = ("repro", "input.json", "--kernel", kernel, "--device", "cpu", *words)
        return attncheck(*arguments, cwd=tmp_path)

    return run


def test_error_is_drawn_to_every_plot_path(repro, tmp_path):
    result = repro("--plot", "error.png", "--plot", "new/error.svg")
    assert result.returncode == 1, result.stderr
    assert result.stdout.startswith("FAIL bound compare: out[")
    assert (tmp_path / "error.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    text = (tmp_path / "new" / "error.svg").read_text()
    assert text.startswith("<?xml")
    assert "sees_the_next_key on cpu" in text


def test_passing_kernel_is_not_plotted(repro, tmp_path):
    result = repro("--plot", "error.png", kernel="ideal")
    assert result.returncode == 0
    assert result.stderr == (
        "attncheck: nothing is known of where an error is: no plot is drawn.\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["input.json"]


@pytest.mark.parametrize(
    ("before", "name", "message"),
    [
        ("", "error.pdf", "plot 'error.pdf' does not end in .png or .svg: "),
        ("", "input.json/a.png", "plots cannot be written to 'input.json': Not a directory"),
        (
            "sys.modules['matplotlib'] = None",
            "error.png",
            "a plot needs matplotlib, which is not installed: pip install 'attncheck[plot]'.",
        ),
    ],
    ids=["suffix", "no folder", "no matplotlib"],
)
def test_impossible_plot_is_a_one_line_error(run_fresh, tmp_path, before, name, message):
    (tmp_path / "input.json").write_text("{}")
    result = run_fresh("repro", "input.json", "--plot", name, cwd=tmp_path, before=before)
    assert result.returncode == 2
    assert message in result.stderr
    assert (result.stdout, result.stderr.count("\n")) == ("", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["input.json"]
