"""The command line in a process of its own, or in this one."""

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
    """Workers of verbs that run in the process of the test import nothing anew."""


@pytest.fixture(scope="session")
def attncheck(warm_python):
    """``attncheck(word, …, cwd=…)``, as ``python -m attncheck`` but for what is imported first.

    A file that has its own ``attncheck`` calls it in the process of the test.
    """
    return lambda *words, **how: warm_python.run("attncheck", *words, **how)


@pytest.fixture(scope="session")
def fresh():
    """``fresh(word, …, cwd=…)``: in a process that has imported nothing, after ``before``."""

    def run(*words, cwd, before="", **environment):
        program = f"import sys\n{before}\nfrom attncheck.cli import main\nmain()"
        return subprocess.run(
            [sys.executable, *(("-c", program) if before else ("-m", "attncheck")), *words],
            cwd=cwd,
            env=os.environ | environment,  # readline sets COLUMNS, but not there
            capture_output=True,
            text=True,
        )

    return run


@pytest.fixture
def in_process(monkeypatch, capfd):
    """``in_process(word, …)``: exit code, standard output and standard error, in this process."""
    handler = signal.getsignal(signal.SIGINT)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["attncheck", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, *capfd.readouterr()

    yield run
    signal.signal(signal.SIGINT, handler)


@pytest.fixture
def by_verb(monkeypatch, capsys):
    """``by_verb(word, …)``: what a verb gives and prints; a probe tries two head dims alone."""
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
    """``invoke(verb, word, …)``: what click says of a verb, or the error that would be printed."""

    def run(verb, *words):
        # A copy: click keeps in a command what its help option is called.
        done = CliRunner().invoke(copy.copy(verb), list(words), standalone_mode=False)
        if done.exception and not isinstance(done.exception, AttncheckError):
            raise done.exception
        return done

    return run
