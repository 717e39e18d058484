"""Documents as the tests see them; ``snippets.py`` runs what is in them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

_SNIPPETS = Path(__file__).with_name("snippets.py")


@pytest.fixture
def run_snippets(tmp_path: Path) -> Callable[[Path], subprocess.CompletedProcess[str]]:
    """Runs every snippet of a document in a process and a folder of its own, without a GPU."""
    folder = tmp_path / "snippets"
    folder.mkdir()
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONIOENCODING": "utf-8"}
    environment.pop("TRITON_INTERPRET", None)

    def run(document: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(_SNIPPETS), str(document)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def reader() -> ModuleType:
    """The module that reads documents: ``blocks(path)``, ``EXEMPT``."""
    spec = importlib.util.spec_from_file_location("attncheck_snippets", _SNIPPETS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module
