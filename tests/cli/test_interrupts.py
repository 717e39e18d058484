"""SIGINT at every stage: exit code 130, one line, and the line is true."""

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

RMSE = ("rmse", "--shape", "1x2x16x8", "--device", "cpu", "-q")
QUICK = (*RMSE, "--variant", "causal")
NOTHING = "attncheck: interrupted; nothing was written.\n"
PATIENCE = 120.0

# Python's own SIGINT handler, as in an interactive shell, whatever started this pytest.
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from attncheck.__main__ import main
sys.argv[0] = "attncheck"
{before}
main()
"""

# Raises the signal the moment that a module is looked for, and once more may swallow what comes.
AT_IMPORT = """
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            {what}
sys.meta_path.insert(0, Finder())
"""
INTERRUPTED = "signal.raise_signal(signal.SIGINT)"
AS_ANOTHER_ERROR = f"""
            try:
                {INTERRUPTED}
            except KeyboardInterrupt:
                raise RecursionError("planted") from None
"""
SWALLOWED = f"""
            try:
                {INTERRUPTED}
            except KeyboardInterrupt:
                pass
"""
ABORTED = f"""
            try:
                {INTERRUPTED}
            except KeyboardInterrupt:
                __import__("os").abort()  # as C++ does, which calls Python here and there
"""
SLOW = """
import sys, time
from attncheck.subjects.ideal import Ideal

class Slow(Ideal):
    name, summary = "slow", "never ends"

    def prepare(self, inputs):
        print("measuring", file=sys.stderr, flush=True)
        time.sleep(600)

class Deaf(Ideal):
    name, summary = "deaf", "does not hear"

    def prepare(self, inputs):
        try:
            print("measuring", file=sys.stderr, flush=True)
            time.sleep(600)
        except:
            pass
        return super().prepare(inputs)
"""


PAUSES = """
import sys, time
from attncheck.subjects.ideal import Ideal

class Pauses(Ideal):
    name, summary = "pauses", "never ends its second cell"

    def prepare(self, inputs):
        if inputs.problem.kv_heads == 1:
            print("measuring", file=sys.stderr, flush=True)
            time.sleep(600)
        return super().prepare(inputs)
"""


def started(*arguments, cwd, before="", **streams):
    command = [sys.executable, "-c", PROGRAM.format(before=before), *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.Popen(command, cwd=cwd, text=True, **streams)


def descendants(pid):
    """The children of a process."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in found.split()]


def until(holds):
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("module", "what"),
    [
        ("click", INTERRUPTED),
        ("attncheck.cli.repro", AS_ANOTHER_ERROR),
        ("attncheck.reporting.rendering", INTERRUPTED),
        ("numpy.linalg", INTERRUPTED),
        ("torch", AS_ANOTHER_ERROR),
        ("torch.nn", SWALLOWED),
        ("torch.nn", ABORTED),
        ("rich", SWALLOWED),
    ],
)
def test_an_interrupt_while_something_is_imported(tmp_path, module, what):
    before = AT_IMPORT.format(module=module, what=what)
    run = started(*QUICK, "--kernel", "ideal", cwd=tmp_path, before=before)
    out, err = run.communicate(timeout=PATIENCE)
    assert (run.returncode, err, out) == (130, NOTHING, "")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_while_the_kernel_is_loaded(tmp_path):
    (tmp_path / "mine.py").write_text("import os, time\nos.write(2, b'loaded\\n')\ntime.sleep(600)")
    run = started("check", "mine.py::kernel", "-v", cwd=tmp_path)
    assert run.stderr.readline() == "loaded\n"
    family = descendants(run.pid)
    assert len(family) == 1
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=PATIENCE)
    assert (run.returncode, err, out) == (130, NOTHING, "")
    assert [pid for pid in family if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.parametrize("how", [(), ("--in-process",)], ids=["own process", "in-process"])
@pytest.mark.parametrize("kernel", ["Slow", "Deaf"])
def test_an_interrupt_while_a_kernel_runs(tmp_path, kernel, how):
    (tmp_path / "mine.py").write_text(SLOW)
    run = started(*QUICK, "--kernel", f"mine.py::{kernel}", *how, cwd=tmp_path)
    assert run.stderr.readline() == "measuring\n"
    family = descendants(run.pid)
    assert len(family) == (not how)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=PATIENCE)
    assert (run.returncode, err, out) == (130, NOTHING, "")
    assert [pid for pid in family if Path(f"/proc/{pid}").exists()] == []
    assert not (tmp_path / "reports").exists()


@pytest.mark.parametrize("terminal", [False, True])
def test_what_was_measured_before_an_interrupt_is_shown_and_written(tmp_path, terminal):
    """On a terminal the row is there before the run is stopped."""
    (tmp_path / "mine.py").write_text(PAUSES)
    ours, theirs = pty.openpty() if terminal else os.pipe()
    run = started(*QUICK, "--kernel", "mine.py::Pauses", cwd=tmp_path, stdout=theirs)
    os.close(theirs)
    assert run.stderr.readline() == "measuring\n"
    shown = os.read(ours, 2**16).decode() if terminal else ""
    assert not terminal or "pass" in shown
    run.send_signal(signal.SIGINT)
    while True:
        try:
            more = os.read(ours, 2**16)
        except OSError:  # as a terminal says that nobody writes to it any more
            break
        if not more:
            break
        shown += more.decode()
    os.close(ours)
    _, err = run.communicate(timeout=PATIENCE)
    how_far = "interrupted after 1 of 2 cells"
    says = f"attncheck: interrupted; the report is written, {how_far}, in 'reports'.\n"
    assert (run.returncode, err) == (130, says)
    assert f"Incomplete: {how_far}." in shown
    report = json.loads((tmp_path / "reports" / "rmse.json").read_text())
    assert (report["incomplete"], len(report["records"])) == (how_far, 1)
    assert f"Incomplete: {how_far}." in (tmp_path / "reports" / "rmse.md").read_text()


def test_a_second_interrupt_ends_the_process_at_once(tmp_path):
    stubborn = SLOW.replace("pass", "print('deaf', file=sys.stderr, flush=True); time.sleep(600)")
    (tmp_path / "mine.py").write_text(stubborn)
    run = started(*QUICK, "--kernel", "mine.py::Deaf", "--in-process", cwd=tmp_path)
    try:
        for said in ("measuring\n", "deaf\n"):
            assert run.stderr.readline() == said
            run.send_signal(signal.SIGINT)
    finally:
        timer = threading.Timer(10.0, run.kill)
        timer.start()
        _, err = run.communicate(timeout=PATIENCE)
        timer.cancel()
    assert (run.returncode, err) == (-signal.SIGINT, "")


HELD = """
from attncheck.reporting import rendering
write = rendering.write_report
def interrupted(*what, **how):
    signal.raise_signal(signal.SIGINT)
    return write(*what, **how)
rendering.write_report = interrupted
"""


def test_an_interrupt_while_files_are_written_comes_after_them(tmp_path):
    run = started(*QUICK, "--kernel", "ideal", "--out", "here", cwd=tmp_path, before=HELD)
    _, err = run.communicate(timeout=PATIENCE)
    assert (run.returncode, err) == (
        130,
        "attncheck: interrupted; the report is written, in 'here'.\n",
    )
    assert len(list((tmp_path / "here").iterdir())) == 3


@pytest.mark.skipif(not hasattr(fcntl, "F_SETPIPE_SZ"), reason="pipes are made small on Linux only")
def test_an_interrupt_while_nobody_reads_says_that_the_report_is_written(tmp_path):
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)  # far less than the report
    run = started(*RMSE, "--kernel", "ideal", "--format", "json", cwd=tmp_path, stdout=writer)
    os.close(writer)
    until((tmp_path / "reports" / "rmse.csv").exists)
    time.sleep(0.2)  # most likely it now waits for the reader; it is right either way
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=PATIENCE)
    os.close(reader)
    says = "attncheck: interrupted; the report is written, in 'reports'.\n"
    assert (run.returncode, err) == (130, says)


def test_an_ignored_interrupt_stays_ignored(tmp_path):
    before = "signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + AT_IMPORT.format(
        module="torch", what=INTERRUPTED
    )
    run = started(*QUICK, "--kernel", "ideal", cwd=tmp_path, before=before)
    _, err = run.communicate(timeout=PATIENCE)
    assert (run.returncode, err) == (0, "")
