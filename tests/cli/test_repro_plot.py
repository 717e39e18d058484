"""``attncheck repro --plot``: where the error of a failure is, as an image."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="plots need the extra plot")

WRONG = f"{Path(__file__).parents[1] / 'cases' / 'planted_kernels.py'}::sees_the_next_key"
PROBLEM = {"query": 3, "kv": 5, "head_dim": 8, "mask": {"name": "causal"}}


@pytest.fixture
def repro(tmp_path, attncheck):
    """``repro(word, …)`` of a Problem that is a file, in an empty folder."""
    (tmp_path / "given.json").write_text(json.dumps(PROBLEM))

    def run(*words, kernel=WRONG):
        arguments = ("repro", "given.json", "--kernel", kernel, "--device", "cpu", *words)
        return attncheck(*arguments, cwd=tmp_path)

    return run


def test_the_error_is_drawn_wherever_it_is_asked_for(repro, tmp_path):
    done = repro("--plot", "error.png", "--plot", "new/error.svg")
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("FAIL bound compare: out[")
    assert (tmp_path / "error.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    text = (tmp_path / "new" / "error.svg").read_text()
    assert text.startswith("<?xml")
    assert "sees_the_next_key on cpu" in text


def test_of_what_is_right_nothing_is_drawn(repro, tmp_path):
    done = repro("--plot", "error.png", kernel="ideal")
    assert done.returncode == 0
    assert done.stderr == ("attncheck: nothing is known of where an error is: no plot is drawn.\n")
    assert [path.name for path in tmp_path.iterdir()] == ["given.json"]


@pytest.mark.parametrize(
    ("before", "name", "says"),
    [
        ("", "error.pdf", "plot 'error.pdf' does not end in .png or .svg: "),
        ("", "given.json/a.png", "plots cannot be written to 'given.json': Not a directory"),
        (
            "sys.modules['matplotlib'] = None",
            "error.png",
            "a plot needs matplotlib, which is not installed: pip install 'attncheck[plot]'.",
        ),
    ],
    ids=["another ending", "no folder", "no matplotlib"],
)
def test_a_plot_that_cannot_be_is_refused_in_one_line(repro, tmp_path, before, name, says):
    (tmp_path / "given.json").write_text("{}")
    program = f"import sys\n{before}\nfrom attncheck.cli import main\nmain()"
    done = subprocess.run(
        [sys.executable, "-c", program, "repro", "given.json", "--plot", name],
        cwd=tmp_path,
        env=dict(os.environ),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert says in done.stderr
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["given.json"]
