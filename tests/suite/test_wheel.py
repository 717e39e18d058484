"""The wheel contains the properties and templates, and runs without a clone."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the contents of the wheel."""
    pytest.importorskip("hatchling", reason="what builds the wheel is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_wheel_contains_every_property(installed):
    sources = {path.name for path in (ROOT / "properties").iterdir() if path.is_file()}
    assert {path.name for path in (installed / "attncheck" / "properties").iterdir()} == sources


def test_wheel_contains_every_template(installed):
    folder = Path("attncheck") / "reporting" / "templates"
    sources = {path.name: path.read_bytes() for path in (ROOT / "src" / folder).iterdir()}
    assert {path.name: path.read_bytes() for path in (installed / folder).iterdir()} == sources
    assert "page.html.j2" in sources


def test_properties_run_from_the_wheel(installed, tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "--pyargs", "attncheck.properties", "-q", "-v"),
            *("--kernel=ideal", "--dtype=bf16", "-k", "first_row", "-p", "no:cacheprovider"),
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
