"""A repository of somebody's, and pytest run in it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


class Repository:
    """``repository("-k", "x", test_a="…", sub__conftest="…")``: files are written, pytest runs.

    In a process of its own, since it is about what pytest and its plugins import and when.

    Attributes:
        path: Its folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, *arguments: str, **files: str) -> subprocess.CompletedProcess[str]:
        for name, text in files.items():
            path = self.path / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
            cwd=self.path,
            env=os.environ | {"PYTEST_ADDOPTS": "", "PYTEST_XDIST_WORKER": ""},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """An empty one."""
    return Repository(tmp_path)
