"""A user's repository in a temporary folder, with pytest run in it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


class Repository:
    """``repository("-k", "x", test_a="…", sub__conftest="…")`` writes the files and runs pytest.

    It runs in a process that has imported torch; ``run_in_new_process`` uses one that has not.

    Attributes:
        path: The repository's folder.
    """

    def __init__(self, path: Path, warm_python: Any) -> None:
        self.path = path
        self._warm = warm_python
        self._options = {
            "cwd": path,
            "env": os.environ | {"PYTEST_ADDOPTS": "", "PYTEST_XDIST_WORKER": ""},
            "timeout": 300,
        }

    def __call__(self, *arguments: str, **files: str) -> subprocess.CompletedProcess[str]:
        return self._warm.run(*self._words(arguments, files), **self._options)

    def run_in_new_process(self, *arguments: str, **files: str) -> subprocess.CompletedProcess[str]:
        """Like calling it, for tests of what pytest and its plugins import and when."""
        words = [sys.executable, "-m", *self._words(arguments, files)]
        return subprocess.run(words, capture_output=True, text=True, check=False, **self._options)

    def _words(self, arguments: tuple[str, ...], files: dict[str, str]) -> list[str]:
        for name, text in files.items():
            path = self.path / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return ["pytest", "-q", "-p", "no:cacheprovider", *arguments]


@pytest.fixture(scope="module", autouse=True)
def forks(forked_workers):
    """Workers started in the test's own process are forks, which import nothing anew."""


@pytest.fixture
def repository(tmp_path, warm_python):
    """An empty repository."""
    return Repository(tmp_path, warm_python)
