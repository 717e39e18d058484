"""Imports without a search for garbage, and an end of a process that takes nothing down."""

import gc
import os
import subprocess
import sys

import pytest

from attncheck.cli.standard_output import Interrupts
from attncheck.core.own_process import no_garbage_collection


@pytest.mark.parametrize("within", [no_garbage_collection, Interrupts().importing])
@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_within_and_then_as_before(within, enabled):
    (gc.enable if enabled else gc.disable)()
    try:
        with within():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


def test_an_interrupt_that_an_import_swallowed_is_raised_after_it():
    interrupts = Interrupts()
    interrupts.raised = True
    with pytest.raises(KeyboardInterrupt), interrupts.importing():
        pass
    assert gc.isenabled()


def ended(program):
    """How a process of this program ends, with Python's own buffers."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, env=env)


# What Python itself would do in the end, in its order, and what it would take down.
ENDS = """
import atexit, sys, threading, time
from attncheck.core.own_process import FOREIGN_CODE, end_process

class Kept:
    def __del__(self):
        print("taken down")

kept = Kept()
kept.itself = kept
atexit.register(print, "registered")
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread"))).start()
print("printed")
"""
OURS = """
try:
    end_process(7)
except SystemExit:
    print("goes on")  # what Python does then is its own
    raise
"""
# Python 3.12 and later tell their tools apart from a profiler.
TOOL = """
if hasattr(sys, "monitoring"):
    sys.monitoring.use_tool_id(2, "profiler")
else:
    sys.setprofile(lambda *_: None)
"""


@pytest.mark.parametrize(("end", "more"), [(OURS, []), ("sys.exit(7)", ["taken down"])])
def test_a_process_ends_as_python_ends_but_takes_nothing_down(end, more):
    done = ended(ENDS + end)
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout.splitlines() == ["printed", "a thread", "registered", *more]


@pytest.mark.parametrize(
    "before",
    ["FOREIGN_CODE.set()", "sys.settrace(lambda *_: None)", TOOL],
    ids=["somebody's code", "a debugger", "a profiler"],
)
def test_what_is_not_ours_ends_as_python_ends_it(before):
    done = ended(f"{ENDS}{before}{OURS}")
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout.splitlines()[:2] == ["printed", "goes on"]


def test_an_error_of_the_end_changes_no_exit_code():
    broken = "def raises(*_): raise RuntimeError('broken')\nthreading._shutdown = raises\n"
    assert ended(f"{ENDS}{broken}{OURS}").returncode == 7


def test_an_end_that_nobody_reads_is_no_error():
    done = ended(f"{ENDS}sys.stdout.close()\n{OURS}".replace("print,", "str,"))
    assert done.returncode == 7


@pytest.mark.parametrize("how", ["file", "module"])
def test_code_of_somebodys_is_noticed(how, tmp_path, monkeypatch):
    (tmp_path / "somebodys_code.py").write_text("value = 1\n")
    monkeypatch.chdir(tmp_path)
    program = """
from attncheck.core import own_process, source_files
assert not own_process.FOREIGN_CODE.is_set()
if HOW == "file":
    source_files.load_member("somebodys_code.py::value", "it")
else:
    source_files.load_module_member("somebodys_code:value", "it")
assert own_process.FOREIGN_CODE.is_set()
"""
    done = ended(f"HOW = {how!r}\n{program}")
    assert (done.returncode, done.stderr) == (0, "")


KEPT = """
import runpy, sys

class Kept:
    def __del__(self):
        print("taken down")

kept = Kept()
"""
COMMAND = "sys.argv = ['', WORD]\nrunpy.run_module('attncheck', run_name='__main__')"
WORKER = """
from attncheck.workers import worker_main
worker_main.main = lambda: print("served")
worker_main.run()
"""


@pytest.mark.parametrize(
    ("program", "code", "lines"),
    [
        ("", 0, ["taken down"]),
        (COMMAND.replace("WORD", "'--version'"), 0, None),
        (COMMAND.replace("WORD", "'no such verb'"), 2, []),
        (WORKER, 0, ["served"]),
    ],
    ids=["Python", "command", "refusal", "worker"],
)
def test_the_command_line_and_a_worker_end_so(program, code, lines):
    done = ended(KEPT + program)
    assert done.returncode == code
    assert done.stderr.count("\n") == (code != 0)
    shown = done.stdout.splitlines()
    assert shown == lines if lines is not None else len(shown) == 1
