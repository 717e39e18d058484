"""What tests of several rooms need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.warm_python import Servers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Triton decides at its import whether it compiles or interprets; without a GPU it must interpret.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

_FEATURES = """
try:
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__
except ImportError:
    from numpy.core._multiarray_umath import __cpu_dispatch__, __cpu_features__
on = [name for name in __cpu_dispatch__ if __cpu_features__.get(name)]
"""


def _python(code: str, **environment: str) -> str:
    """What ``code`` prints in a Python process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture(scope="session")
def warm_python() -> Iterator[Servers]:
    """``warm_python.run("attncheck", …, cwd=…)``: a process that has imported torch already."""
    servers = Servers()
    yield servers
    servers.stop()


@pytest.fixture(scope="session")
def vector_features() -> list[str]:
    """Optional vector instructions that NumPy uses on this machine."""
    features = _python(f"{_FEATURES}\nprint(*on)").split()
    if not features:
        pytest.skip("NumPy finds no optional vector instructions on this machine")
    return features


@pytest.fixture
def without_vectors(vector_features: list[str]) -> Callable[[str], str]:
    """Run code in a process whose NumPy uses no optional vector instructions; what it prints."""
    disabled = " ".join(vector_features)
    check = f"{_FEATURES}\nassert not on, on\n"
    return lambda code: _python(check + code, NPY_DISABLE_CPU_FEATURES=disabled)
