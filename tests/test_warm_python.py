"""A command in a fork of ``warm_python.py`` runs and ends as in a real Python."""

import os
import signal
import subprocess
import sys

import pytest

PROGRAMS = {
    "nothing": "",
    "what it writes": "import os, subprocess, sys; print('out ×', flush=True); os.write(1, b'1'); "
    "os.write(2, b'2'); subprocess.run(['echo', 'child']); print('err', file=sys.stderr, end='')",
    "at the end, by a thread": "import atexit, threading; atexit.register(print, 'last'); "
    "threading.Timer(0.05, print, ['late']).start()",
    "exit code 0": "raise SystemExit",
    "exit code 256": "raise SystemExit(256)",
    "words as exit code": "raise SystemExit('words')",
    "a signal": f"import os; os.kill(os.getpid(), {signal.SIGTERM})",
    "its arguments, folder and environment": "import os, sys, beside, elsewhere; print(sys.argv, "
    "os.getcwd(), sys.path[0], beside.__file__, os.environ.get('PLANTED'), elsewhere.__name__)",
    "its streams": "import sys; print(repr(sys.stdin.read()), sys.stdin.isatty(), "
    "sys.stdout.isatty(), sys.stdout.encoding)",
    "its state": "import signal, sys; x = 7; print(sys.modules['__main__'].x, sys.warnoptions, "
    "signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGCHLD), 'triton' in sys.modules)",
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "elsewhere.py").write_text("")
    return tmp_path


@pytest.fixture
def how(folder):
    others = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = {"PYTHONPATH": str(folder / "path"), "PLANTED": "planted"}
    return {"cwd": folder, "env": others | path | {"PYTHONIOENCODING": "utf-8"}}


def real(*words, **how):
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, **how)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_says_and_ends_as_in_a_real_python(warm_python, how, program):
    words = ("-c", PROGRAMS[program], "one", "two")
    run, expected = warm_python.run(*words, **how), real(*words, **how)
    assert (run.returncode, run.stdout) == (expected.returncode, expected.stdout)
    assert run.stderr == expected.stderr


def test_an_error_is_its_traceback_and_exit_code_1(warm_python, how):
    run = warm_python.run("-c", "def f():\n    raise KeyError('planted')\nf()", **how)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("Traceback (most recent call last):\n")
    assert run.stderr.endswith("in f\nKeyError: 'planted'\n")


@pytest.mark.parametrize("module", ["attncheck", "pytest"])
def test_a_module_runs_as_a_real_python_runs_it(warm_python, how, module):
    run, expected = (
        warm_python.run(module, "--version", **how),
        real("-m", module, "--version", **how),
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, expected.stdout, expected.stderr)


def test_a_file_runs_as_a_real_python_runs_it(warm_python, how, folder):
    file = folder / "path" / "mine.py"
    file.write_text("import sys, elsewhere\nprint(sys.argv, sys.path[0], __name__, __file__)\n")
    run, expected = warm_python.run(str(file), "one", **how), real(str(file), "one", **how)
    assert (run.returncode, run.stdout, run.stderr) == (0, expected.stdout, expected.stderr)


def test_what_takes_long_is_there_already(warm_python, how):
    run = warm_python.run("-c", "import sys; print('torch' in sys.modules)", **how)
    assert run.stdout == "True\n"


def test_what_one_command_does_the_next_does_not_see(warm_python, how):
    change = "import os, sys, torch; sys.planted = os.environ['NEW'] = '1'; torch.planted = 1"
    assert warm_python.run("-c", change, **how).returncode == 0
    ask = "print('NEW' in os.environ, *(hasattr(module, 'planted') for module in (sys, torch)))"
    assert (
        warm_python.run("-c", f"import os, sys, torch\n{ask}", **how).stdout
        == "False False False\n"
    )


def test_what_python_reads_when_it_starts_is_heeded(warm_python, how):
    how["env"]["PYTHONIOENCODING"] = "ascii:replace"
    assert warm_python.run("-c", "print('×')", **how).stdout == "?\n"


def test_a_command_that_takes_too_long_is_ended(warm_python, how, folder):
    program = "import os, time; open('id', 'w').write(str(os.getpid())); time.sleep(600)"
    with pytest.raises(subprocess.TimeoutExpired):
        warm_python.run("-c", program, timeout=2, **how)
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "id").read_text()), 0)


def test_another_process_uses_servers_and_starts_none(warm_python, how):
    others = type(warm_python)(warm_python.folder)
    warm_python.start("-c", how["env"])
    assert others.run("-c", "print(7)", **how).stdout == "7\n"
    how["env"]["PYTHONHASHSEED"] = "7"
    with pytest.raises(AssertionError, match="no server"):
        others.run("-c", "print(7)", **how)
