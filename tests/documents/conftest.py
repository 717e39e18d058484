"""Documents as the tests see them; ``snippets.py`` runs what is in them."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

_SNIPPETS = Path(__file__).with_name("snippets.py")


@pytest.fixture
def run_snippets(tmp_path, reader, warm_python):
    """Runs every snippet of a document in a process and a folder of its own, without a GPU.

    Neither that process nor those of commands import torch first, unless they are to be ``fresh``.
    """
    folder = tmp_path / "snippets"
    folder.mkdir()
    of_commands = reader.environment(folder)
    own = {"PYTHONPATH", "PYTEST_ADDOPTS"}
    environment = {name: value for name, value in of_commands.items() if name not in own}

    def run(document: Path, *, fresh: bool = False) -> subprocess.CompletedProcess[str]:
        if fresh:
            return subprocess.run(
                [sys.executable, str(_SNIPPETS), str(document)],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
        for program in ("attncheck", "pytest"):  # the snippets find them there
            warm_python.start(program, of_commands)
        words = (str(_SNIPPETS), str(document), str(warm_python.folder))
        return warm_python.run(*words, cwd=folder, env=environment)

    return run


@pytest.fixture(scope="session")
def reader():
    """The module that reads documents: ``blocks(path)``, ``EXEMPT``."""
    spec = importlib.util.spec_from_file_location("attncheck_snippets", _SNIPPETS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module
