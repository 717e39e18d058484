"""The command line in a process of its own."""

import subprocess
from typing import Any

import pytest


@pytest.fixture(scope="session")
def attncheck(warm_python):
    """``attncheck(word, …, cwd=…)``, as ``python -m attncheck`` but for what is imported first.

    A file that has its own ``attncheck`` calls it in the process of the test, or starts Python.
    """

    def run(*words: str, **how: Any) -> subprocess.CompletedProcess[str]:
        return warm_python.run("attncheck", *words, **how)

    return run
