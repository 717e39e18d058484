"""Imports without garbage collection, and a process's end that frees no objects."""

import gc
import os
import subprocess
import sys

import pytest

from attncheck.cli.standard_output import Interrupts
from attncheck.core.own_process import no_garbage_collection


@pytest.mark.parametrize("within", [no_garbage_collection, Interrupts().importing])
@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_off_during_imports_and_then_as_before(within, enabled):
    (gc.enable if enabled else gc.disable)()
    try:
        with within():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


def test_interrupt_swallowed_by_an_import_is_raised_after_it():
    interrupts = Interrupts()
    interrupts.raised = True
    with pytest.raises(KeyboardInterrupt), interrupts.importing():
        pass
    assert gc.isenabled()


def run_program(program):
    """Run the program in a new Python with buffered output."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, env=env)


# Has a thread, an atexit function and an object with a finaliser: Python's end handles all three.
PROGRAM = """
import atexit, sys, threading, time
from attncheck.core.own_process import FOREIGN_CODE, end_process

class Finalised:
    def __del__(self):
        print("finalised")

finalised = Finalised()
finalised.cycle = finalised
atexit.register(print, "registered")
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread"))).start()
print("printed")
"""
END_PROCESS = """
try:
    end_process(7)
except SystemExit:
    print("goes on")  # end_process left the end to Python
    raise
"""
# Since Python 3.12, sys.monitoring replaces a profile function.
PROFILER = """
if hasattr(sys, "monitoring"):
    sys.monitoring.use_tool_id(2, "profiler")
else:
    sys.setprofile(lambda *_: None)
"""


@pytest.mark.parametrize(
    ("end", "more_output"), [(END_PROCESS, []), ("sys.exit(7)", ["finalised"])]
)
def test_end_process_ends_like_sys_exit_but_frees_no_objects(end, more_output):
    """Threads are waited for, atexit functions run, and output is flushed."""
    run = run_program(PROGRAM + end)
    assert (run.returncode, run.stderr) == (7, "")
    assert run.stdout.splitlines() == ["printed", "a thread", "registered", *more_output]


@pytest.mark.parametrize(
    "before",
    ["FOREIGN_CODE.set()", "sys.settrace(lambda *_: None)", PROFILER],
    ids=["foreign code", "a debugger", "a profiler"],
)
def test_end_process_leaves_the_end_to_python_with_foreign_code_or_tools(before):
    run = run_program(f"{PROGRAM}{before}{END_PROCESS}")
    assert (run.returncode, run.stderr) == (7, "")
    assert run.stdout.splitlines()[:2] == ["printed", "goes on"]


def test_error_during_the_end_does_not_change_the_exit_code():
    broken = "def raises(*_): raise RuntimeError('broken')\nthreading._shutdown = raises\n"
    assert run_program(f"{PROGRAM}{broken}{END_PROCESS}").returncode == 7


def test_closed_standard_output_is_no_error():
    run = run_program(f"{PROGRAM}sys.stdout.close()\n{END_PROCESS}".replace("print,", "str,"))
    assert run.returncode == 7


@pytest.mark.parametrize(
    "load",
    [
        "load_member('foreign_code.py::value', 'kernel')",
        "load_module_member('foreign_code:value', 'kernel')",
    ],
    ids=["file", "module"],
)
def test_loading_a_member_sets_foreign_code(load, tmp_path, monkeypatch):
    (tmp_path / "foreign_code.py").write_text("value = 1\n")
    monkeypatch.chdir(tmp_path)
    run = run_program(f"""
from attncheck.core import own_process, source_files
assert not own_process.FOREIGN_CODE.is_set()
source_files.{load}
assert own_process.FOREIGN_CODE.is_set()
""")
    assert (run.returncode, run.stderr) == (0, "")


FINALISED = """
import runpy, sys

class Finalised:
    def __del__(self):
        print("finalised")

finalised = Finalised()
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
        ("", 0, ["finalised"]),
        (COMMAND.replace("WORD", "'--version'"), 0, None),
        (COMMAND.replace("WORD", "'no such verb'"), 2, []),
        (WORKER, 0, ["served"]),
    ],
    ids=["Python", "command", "refusal", "worker"],
)
def test_command_line_and_worker_free_no_objects_at_their_end(program, code, lines):
    """Python alone would print ``finalised``, which the first row shows."""
    run = run_program(FINALISED + program)
    assert run.returncode == code
    assert run.stderr.count("\n") == (code != 0)
    shown = run.stdout.splitlines()
    assert shown == lines if lines is not None else len(shown) == 1
