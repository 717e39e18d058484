"""Standard output on real closed pipes, full disks and closed descriptors."""

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
    """Run the command with a standard output whose reader has closed the pipe before."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return run(*arguments, cwd=cwd, stdout=writer)
    finally:
        os.close(writer)


def run(*arguments, cwd, **streams):
    command = [sys.executable, "-m", "attncheck", *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    # With unbuffered output, foreign code would hit the broken pipe itself.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(command, cwd=cwd, env=env, text=True, timeout=120, **streams)


def report_files(folder):
    reports = folder / "reports"
    return sorted(p.name for p in reports.iterdir()) if reports.exists() else []


@pytest.mark.parametrize("fmt", ["table", "json"])
def test_closed_pipe_keeps_files_and_exit_code(tmp_path, fmt):
    result = without_reader(*QUICK, "--format", fmt, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert report_files(tmp_path) == FILES


def test_closed_pipe_keeps_exit_code_1_of_a_raising_kernel(tmp_path):
    (tmp_path / "mine.py").write_text(RAISING)
    arguments = ("rmse", "--kernel", "mine.py::Raising", *QUICK[3:])
    result = without_reader(*arguments, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (1, "")
    assert report_files(tmp_path) == FILES


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("rmse", "--help"), ("list", "--json")],
)
def test_verbs_end_quietly_on_a_closed_pipe(tmp_path, arguments):
    result = without_reader(*arguments, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")


def test_closed_stderr_does_not_stop_the_run(tmp_path):
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
    result = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=writer)
    os.close(writer)
    assert result.returncode == 0
    assert b"ideal" in result.stdout
    assert report_files(tmp_path) == FILES


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [QUICK, ("--help",), ()])
def test_full_disk_is_one_line_and_exits_3(tmp_path, arguments):
    with FULL.open("w") as full:
        result = run(*arguments, cwd=tmp_path, stdout=full)
    message = "attncheck: standard output cannot be written to: No space left on device.\n"
    assert (result.returncode, result.stderr) == (3, message)
    assert report_files(tmp_path) == (FILES if arguments == QUICK else [])


def test_closed_stdout_keeps_files_and_exit_code(tmp_path):
    command = 'exec "$@" >&-'
    shell = ["sh", "-c", command, "sh", sys.executable, "-m", "attncheck", *QUICK]
    result = subprocess.run(shell, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
    assert report_files(tmp_path) == FILES


def test_closed_pipe_adds_no_noise_after_foreign_output(tmp_path):
    (tmp_path / "mine.py").write_text("print('hello')\n" + RAISING)
    result = without_reader("rmse", "--kernel", "mine.py::Missing", cwd=tmp_path)
    assert result.returncode == 2
    message = "attncheck: kernel 'mine.py::Missing': mine.py has no 'Missing'.\n"
    assert result.stderr == "hello\n" + message
