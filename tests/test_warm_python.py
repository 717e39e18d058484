"""``warm_python.py``: a command in a fork of the server behaves as in a new Python process."""

import os
import signal
import subprocess
import sys

import pytest

PROGRAMS = {
    "nothing": "",
    "output": "import os, subprocess, sys; print('out ×', flush=True); os.write(1, b'1'); "
    "os.write(2, b'2'); subprocess.run(['echo', 'child']); print('err', file=sys.stderr, end='')",
    "output of a thread and at exit": "import atexit, threading; atexit.register(print, 'last'); "
    "threading.Timer(0.05, print, ['late']).start()",
    "exit code 0": "raise SystemExit",
    "exit code 256": "raise SystemExit(256)",
    "text as exit code": "raise SystemExit('words')",
    "signal": f"import os; os.kill(os.getpid(), {signal.SIGTERM})",
    "arguments, folder and environment": "import os, sys, beside, elsewhere; print(sys.argv, "
    "os.getcwd(), sys.path[0], beside.__file__, os.environ.get('PLANTED'), elsewhere.__name__)",
    "streams": "import sys; print(repr(sys.stdin.read()), sys.stdin.isatty(), "
    "sys.stdout.isatty(), sys.stdout.encoding)",
    "interpreter": "import signal, sys; x = 7; print(sys.modules['__main__'].x, sys.warnoptions, "
    "signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGCHLD), 'triton' in sys.modules)",
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "elsewhere.py").write_text("")
    return tmp_path


@pytest.fixture
def options(folder):
    """Options of ``subprocess.run`` for the folder and an environment of the test's own."""
    others = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = {"PYTHONPATH": str(folder / "path"), "PLANTED": "planted"}
    return {"cwd": folder, "env": others | path | {"PYTHONIOENCODING": "utf-8"}}


def assert_same_run(run, *words, **options):
    """Require the exit code and output that ``python WORDS`` has in a new process."""
    expected = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        **options,
    )
    assert (run.returncode, run.stdout) == (expected.returncode, expected.stdout)
    assert run.stderr == expected.stderr


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_behaves_as_in_a_new_python(warm_python, options, program):
    words = ("-c", PROGRAMS[program], "one", "two")
    assert_same_run(warm_python.run(*words, **options), *words, **options)


def test_uncaught_exception_prints_its_traceback_and_ends_with_exit_code_1(warm_python, options):
    run = warm_python.run("-c", "def f():\n    raise KeyError('planted')\nf()", **options)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("Traceback (most recent call last):\n")
    assert run.stderr.endswith("in f\nKeyError: 'planted'\n")


@pytest.mark.parametrize("module", ["attncheck", "pytest"])
def test_module_runs_as_in_a_new_python(warm_python, options, module):
    run = warm_python.run(module, "--version", **options)
    assert run.returncode == 0
    assert_same_run(run, "-m", module, "--version", **options)


def test_file_runs_as_in_a_new_python(warm_python, options, folder):
    file = folder / "path" / "mine.py"
    file.write_text("import sys, elsewhere\nprint(sys.argv, sys.path[0], __name__, __file__)\n")
    run = warm_python.run(str(file), "one", **options)
    assert run.returncode == 0
    assert_same_run(run, str(file), "one", **options)


def test_torch_is_already_imported(warm_python, options):
    run = warm_python.run("-c", "import sys; print('torch' in sys.modules)", **options)
    assert run.stdout == "True\n"


def test_changes_of_one_command_do_not_reach_the_next(warm_python, options):
    change = "import os, sys, torch; sys.planted = os.environ['NEW'] = '1'; torch.planted = 1"
    assert warm_python.run("-c", change, **options).returncode == 0
    program = """
import os, sys, torch
print('NEW' in os.environ, hasattr(sys, 'planted'), hasattr(torch, 'planted'))
"""
    assert warm_python.run("-c", program, **options).stdout == "False False False\n"


def test_pythonioencoding_is_applied(warm_python, options):
    """Python reads it when it starts, which was before the command."""
    options["env"]["PYTHONIOENCODING"] = "ascii:replace"
    assert warm_python.run("-c", "print('×')", **options).stdout == "?\n"


def test_command_is_killed_at_its_timeout(warm_python, options, folder):
    program = "import os, time; open('id', 'w').write(str(os.getpid())); time.sleep(600)"
    with pytest.raises(subprocess.TimeoutExpired):
        warm_python.run("-c", program, timeout=2, **options)
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "id").read_text()), 0)


def test_another_process_uses_running_servers_and_starts_none(warm_python, options):
    client = type(warm_python)(warm_python.folder)
    warm_python.start("-c", options["env"])
    assert client.run("-c", "print(7)", **options).stdout == "7\n"
    options["env"]["PYTHONHASHSEED"] = "7"
    with pytest.raises(AssertionError, match="no server"):
        client.run("-c", "print(7)", **options)
