"""Run the command line in a process of its own, or in the process of the test."""

import copy
import os
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from attncheck.cli import main
from attncheck.core.errors import AttncheckError


@pytest.fixture(scope="module", autouse=True)
def forks(forked_workers):
    """Fork the workers of verbs that run in the test's process: it saves their imports."""


@pytest.fixture
def project(request, tmp_path, monkeypatch):
    """The working directory, with ``KERNELS`` of the test's file as ``mine.py``."""
    (tmp_path / "mine.py").write_text(request.module.KERNELS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def attncheck(warm_python):
    """``attncheck(word, …, cwd=…)``: ``python -m attncheck`` in a process with warm imports.

    A file that defines its own ``attncheck`` runs the command in the process of the test.
    """
    return lambda *words, **options: warm_python.run("attncheck", *words, **options)


@pytest.fixture(scope="session")
def run_fresh():
    """``run_fresh(word, …, cwd=…)``: in a new process without warm imports.

    ``before`` is code that the process executes first; keywords are environment variables.
    """

    def run(*words, cwd, before="", **environment):
        program = f"import sys\n{before}\nfrom attncheck.cli import main\nmain()"
        return subprocess.run(
            [sys.executable, *(("-c", program) if before else ("-m", "attncheck")), *words],
            cwd=cwd,
            env=os.environ | environment,  # explicit, as readline sets COLUMNS only outside of it
            capture_output=True,
            text=True,
        )

    return run


@pytest.fixture
def run_in_process(monkeypatch, capfd):
    """``run_in_process(word, …)``: exit code, stdout and stderr, in the process of the test."""
    handler = signal.getsignal(signal.SIGINT)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["attncheck", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, *capfd.readouterr()

    yield run
    signal.signal(signal.SIGINT, handler)


@pytest.fixture
def run_verb(monkeypatch, capsys):
    """``run_verb(word, …)``: a verb's return value and stdout; probes try only two head dims."""
    from attncheck.cli import attncheck as group
    from attncheck.verify import capability_detection

    monkeypatch.setattr(capability_detection, "HEAD_DIMS", (64, 80))
    repeat = {"repeat": capability_detection.RELATIONS["repeat"]}
    monkeypatch.setattr(capability_detection, "RELATIONS", repeat)
    monkeypatch.setenv("COLUMNS", "160")  # pytest-xdist sets another in its processes

    def run(*words):
        code = group.main(list(words), standalone_mode=False)
        return code, capsys.readouterr().out

    return run


@pytest.fixture
def invoke():
    """``invoke(verb, word, …)``: click's result of a verb, with the error that would be printed."""

    def run(verb, *words):
        # A copy, because click stores the help option's name in the command.
        result = CliRunner().invoke(copy.copy(verb), list(words), standalone_mode=False)
        if result.exception and not isinstance(result.exception, AttncheckError):
            raise result.exception
        return result

    return run
