"""Pipes whose reader leaves, full disks, closed streams: real ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

QUICK = ("rmse", "--kernel", "ideal", "--variant", "causal", "--shape", "1x1x16x8", "-q")
FILES = ["rmse.csv", "rmse.json", "rmse.md"]
FULL = Path("/dev/full")

RAISING = """
from attncheck.subjects.ideal import Ideal

class Raising(Ideal):
    name, summary = "raising", "fails"

    def prepare(self, inputs):
        raise RuntimeError("planted")
"""


def without_reader(*arguments, cwd):
    """The command with a standard output whose reader has left before it began."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return run(*arguments, cwd=cwd, stdout=writer)
    finally:
        os.close(writer)


def run(*arguments, cwd, **streams):
    command = [sys.executable, "-m", "attncheck", *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    # Unbuffered, foreign code would meet the broken pipe itself.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(command, cwd=cwd, env=kept, text=True, timeout=120, **streams)


def written(folder):
    reports = folder / "reports"
    return sorted(p.name for p in reports.iterdir()) if reports.exists() else []


@pytest.mark.parametrize("fmt", ["table", "json"])
def test_a_reader_that_left_costs_neither_files_nor_exit_code(tmp_path, fmt):
    done = without_reader(*QUICK, "--format", fmt, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert written(tmp_path) == FILES


def test_a_kernel_that_raises_is_exit_code_1_also_without_a_reader(tmp_path):
    (tmp_path / "mine.py").write_text(RAISING)
    arguments = ("rmse", "--kernel", "mine.py::Raising", *QUICK[3:])
    done = without_reader(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert written(tmp_path) == FILES


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("rmse", "--help"), ("list", "--json")],
)
def test_every_verb_ends_quietly_when_its_reader_leaves(tmp_path, arguments):
    done = without_reader(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_progress_that_nobody_follows_ends_no_run(tmp_path):
    program = """
import sys
from attncheck.cli import long_runs, main
long_runs._SECONDS_BETWEEN_LINES = 0.0
sys.argv = ["attncheck", *sys.argv[1:]]
main()
"""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", program, *QUICK[:-1]]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=writer)
    os.close(writer)
    assert done.returncode == 0
    assert b"ideal" in done.stdout
    assert written(tmp_path) == FILES


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [QUICK, ("--help",), ()])
def test_a_full_disk_is_one_line_and_exit_code_3(tmp_path, arguments):
    with FULL.open("w") as full:
        done = run(*arguments, cwd=tmp_path, stdout=full)
    says = "attncheck: standard output cannot be written to: No space left on device.\n"
    assert (done.returncode, done.stderr) == (3, says)
    assert written(tmp_path) == (FILES if arguments == QUICK else [])


def test_a_closed_standard_output_is_a_reader_that_left(tmp_path):
    command = 'exec "$@" >&-'
    shell = ["sh", "-c", command, "sh", sys.executable, "-m", "attncheck", *QUICK]
    done = subprocess.run(shell, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert written(tmp_path) == FILES


def test_what_foreign_code_printed_is_no_noise_at_the_end(tmp_path):
    (tmp_path / "mine.py").write_text("print('hello')\n" + RAISING)
    done = without_reader("rmse", "--kernel", "mine.py::Missing", cwd=tmp_path)
    assert done.returncode == 2
    says = "attncheck: kernel 'mine.py::Missing': mine.py has no 'Missing'.\n"
    assert done.stderr == "hello\n" + says
