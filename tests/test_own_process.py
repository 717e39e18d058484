"""Imports without a search for garbage, and an end of a process that takes nothing down."""

import gc
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


# What Python itself would do in the end, in its order, and what it would take down.
ENDS = """
import atexit, ctypes, sys, threading, time

class Kept:
    def __del__(self):
        print("taken down")

kept = Kept()
kept.itself = kept
atexit.register(print, "registered")
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread"))).start()
ctypes.CDLL(None).puts(b"printed in C")
print("printed")
"""
OURS = "from attncheck.core.own_process import end_process\nend_process(7)"


@pytest.mark.parametrize(("end", "more"), [(OURS, []), ("sys.exit(7)", ["taken down"])])
def test_a_process_ends_as_python_ends_but_takes_nothing_down(end, more):
    words = [sys.executable, "-c", ENDS + end]
    done = subprocess.run(words, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (7, "")
    # What C has printed comes when its buffer is written, which is last.
    assert [line for line in lines if line != "printed in C"] == [
        *("printed", "a thread", "registered"),
        *more,
    ]
    assert "printed in C" in lines


def test_an_end_that_nobody_reads_is_no_error():
    words = [sys.executable, "-c", f"import sys\nsys.stdout.close()\n{OURS}"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


KEPT = """
import runpy, sys

class Kept:
    def __del__(self):
        print("taken down")

kept = Kept()
"""
COMMAND = "sys.argv = ['', '--version']\nrunpy.run_module('attncheck', run_name='__main__')"
WORKER = """
from attncheck.workers import worker_main
worker_main.main = lambda: print("served")
worker_main.run()
"""


@pytest.mark.parametrize("program", ["", COMMAND, WORKER], ids=["Python", "command", "worker"])
def test_the_command_line_and_a_worker_end_so(program):
    done = subprocess.run([sys.executable, "-c", KEPT + program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1
    assert ("taken down" in done.stdout) is (program == "")
