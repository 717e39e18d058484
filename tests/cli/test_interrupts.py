"""SIGINT at every stage: exit code 130 and one line that truly says whether files were written."""

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
NOTHING_WRITTEN = "attncheck: interrupted; nothing was written.\n"
TIMEOUT = 120.0

# Python's own SIGINT handler, as in an interactive shell, however this pytest was started.
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from attncheck.__main__ import main
sys.argv[0] = "attncheck"
{before}
main()
"""

# Raises the signal when a module is imported; the action may swallow the KeyboardInterrupt.
AT_IMPORT = """
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            {action}
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
                __import__("os").abort()  # as C++ code that calls Python may do
"""
# A kernel says that it runs by a file in the working directory: what it prints is held back.
SLOW = """
import sys, time
from attncheck.subjects.ideal import Ideal

class Slow(Ideal):
    name, summary = "slow", "never ends"

    def prepare(self, inputs):
        open("measuring", "w").close()
        time.sleep(600)

class Deaf(Ideal):
    name, summary = "deaf", "does not hear"

    def prepare(self, inputs):
        try:
            open("measuring", "w").close()
            time.sleep(600)
        except:
            pass
        return super().prepare(inputs)
"""


PAUSES = """
import time
from attncheck.subjects.ideal import Ideal

class Pauses(Ideal):
    name, summary = "pauses", "never ends its second cell"

    def prepare(self, inputs):
        if inputs.problem.kv_heads == 1:
            open("measuring", "w").close()
            time.sleep(600)
        return super().prepare(inputs)
"""


def start_attncheck(*arguments, cwd, before="", **streams):
    command = [sys.executable, "-c", PROGRAM.format(before=before), *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.Popen(command, cwd=cwd, text=True, **streams)


def children(pid):
    """The process ids of the children of a process."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(condition):
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("module", "action"),
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
def test_interrupt_during_imports(tmp_path, module, action):
    """An import may turn the interrupt into another error, swallow it or abort; the run ends."""
    before = AT_IMPORT.format(module=module, action=action)
    run = start_attncheck(*QUICK, "--kernel", "ideal", cwd=tmp_path, before=before)
    out, err = run.communicate(timeout=TIMEOUT)
    assert (run.returncode, err, out) == (130, NOTHING_WRITTEN, "")
    assert list(tmp_path.iterdir()) == []


def test_interrupt_while_the_kernel_is_imported(tmp_path):
    (tmp_path / "mine.py").write_text("import os, time\nos.write(2, b'loaded\\n')\ntime.sleep(600)")
    run = start_attncheck("check", "mine.py::kernel", "-v", cwd=tmp_path)
    assert run.stderr.readline() == "loaded\n"
    processes = children(run.pid)
    assert len(processes) == 1
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=TIMEOUT)
    assert (run.returncode, err, out) == (130, NOTHING_WRITTEN, "")
    assert [pid for pid in processes if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.parametrize("options", [(), ("--in-process",)], ids=["own process", "in-process"])
@pytest.mark.parametrize("kernel", ["Slow", "Deaf"])
def test_interrupt_while_a_kernel_runs(tmp_path, kernel, options):
    (tmp_path / "mine.py").write_text(SLOW)
    run = start_attncheck(*QUICK, "--kernel", f"mine.py::{kernel}", *options, cwd=tmp_path)
    wait_until((tmp_path / "measuring").exists)
    processes = children(run.pid)
    assert len(processes) == (not options)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=TIMEOUT)
    assert (run.returncode, err, out) == (130, NOTHING_WRITTEN, "")
    assert [pid for pid in processes if Path(f"/proc/{pid}").exists()] == []
    assert not (tmp_path / "reports").exists()


@pytest.mark.parametrize("terminal", [False, True])
def test_results_before_an_interrupt_are_shown_and_written(tmp_path, terminal):
    """On a terminal the row is shown before the run is stopped."""
    (tmp_path / "mine.py").write_text(PAUSES)
    terminal_end, program_end = pty.openpty() if terminal else os.pipe()
    run = start_attncheck(*QUICK, "--kernel", "mine.py::Pauses", cwd=tmp_path, stdout=program_end)
    os.close(program_end)
    wait_until((tmp_path / "measuring").exists)
    output = os.read(terminal_end, 2**16).decode() if terminal else ""
    assert not terminal or "pass" in output
    run.send_signal(signal.SIGINT)
    while True:
        try:
            more = os.read(terminal_end, 2**16)
        except OSError:  # a terminal raises when its last writer has closed it
            break
        if not more:
            break
        output += more.decode()
    os.close(terminal_end)
    _, err = run.communicate(timeout=TIMEOUT)
    progress = "interrupted after 1 of 2 cells"
    message = f"attncheck: interrupted; the report is written, {progress}, in 'reports'.\n"
    assert (run.returncode, err) == (130, message)
    assert f"Incomplete: {progress}." in output
    report = json.loads((tmp_path / "reports" / "rmse.json").read_text())
    assert (report["incomplete"], len(report["records"])) == (progress, 1)
    assert f"Incomplete: {progress}." in (tmp_path / "reports" / "rmse.md").read_text()


def test_second_interrupt_ends_the_process_at_once(tmp_path):
    """A kernel that swallows the first interrupt cannot keep the process alive."""
    stubborn = SLOW.replace("pass", "print('deaf', file=sys.stderr, flush=True); time.sleep(600)")
    (tmp_path / "mine.py").write_text(stubborn)
    run = start_attncheck(*QUICK, "--kernel", "mine.py::Deaf", "--in-process", cwd=tmp_path)
    try:
        wait_until((tmp_path / "measuring").exists)
        run.send_signal(signal.SIGINT)
        assert run.stderr.readline() == "deaf\n"
        run.send_signal(signal.SIGINT)
    finally:
        timer = threading.Timer(10.0, run.kill)
        timer.start()
        _, err = run.communicate(timeout=TIMEOUT)
        timer.cancel()
    assert (run.returncode, err) == (-signal.SIGINT, "")


INTERRUPTED_WRITING = """
from attncheck.reporting import rendering
write = rendering.write_report
def interrupted(*arguments, **options):
    signal.raise_signal(signal.SIGINT)
    return write(*arguments, **options)
rendering.write_report = interrupted
"""


def test_interrupt_while_files_are_written_is_deferred(tmp_path):
    """No report is left half written."""
    run = start_attncheck(
        *QUICK, "--kernel", "ideal", "--out", "here", cwd=tmp_path, before=INTERRUPTED_WRITING
    )
    _, err = run.communicate(timeout=TIMEOUT)
    assert (run.returncode, err) == (
        130,
        "attncheck: interrupted; the report is written, in 'here'.\n",
    )
    assert len(list((tmp_path / "here").iterdir())) == 3


@pytest.mark.skipif(not hasattr(fcntl, "F_SETPIPE_SZ"), reason="pipes are made small on Linux only")
def test_interrupt_while_stdout_is_blocked_reports_written_files(tmp_path):
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)  # far less than the report
    run = start_attncheck(
        *RMSE, "--kernel", "ideal", "--format", "json", cwd=tmp_path, stdout=writer
    )
    os.close(writer)
    wait_until((tmp_path / "reports" / "rmse.csv").exists)
    time.sleep(0.2)  # most likely it now waits for the reader; the assertions hold either way
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=TIMEOUT)
    os.close(reader)
    message = "attncheck: interrupted; the report is written, in 'reports'.\n"
    assert (run.returncode, err) == (130, message)


def test_ignored_sigint_stays_ignored(tmp_path):
    before = "signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + AT_IMPORT.format(
        module="torch", action=INTERRUPTED
    )
    run = start_attncheck(*QUICK, "--kernel", "ideal", cwd=tmp_path, before=before)
    _, err = run.communicate(timeout=TIMEOUT)
    assert (run.returncode, err) == (0, "")
