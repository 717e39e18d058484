"""Fixtures that read documents and run their snippets, by ``snippets.py``."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

_SNIPPETS = Path(__file__).with_name("snippets.py")


@pytest.fixture
def run_snippets(tmp_path, reader, warm_python):
    """``run_snippets(document)`` runs its snippets in a new process and folder, without a GPU.

    The process and its commands are forks of one that has imported torch, unless ``fresh`` is set.
    """
    folder = tmp_path / "snippets"
    folder.mkdir()
    command_environment = reader.environment(folder)
    environment = {
        name: value
        for name, value in command_environment.items()
        if name not in {"PYTHONPATH", "PYTEST_ADDOPTS"}
    }

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
        for program in ("attncheck", "pytest"):  # the process itself may start no servers
            warm_python.start(program, command_environment)
        words = (str(_SNIPPETS), str(document), str(warm_python.folder))
        return warm_python.run(*words, cwd=folder, env=environment)

    return run


@pytest.fixture(scope="session")
def reader():
    """The module ``snippets.py``."""
    spec = importlib.util.spec_from_file_location("attncheck_snippets", _SNIPPETS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module
