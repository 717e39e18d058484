"""The properties and templates are in the wheel, and run where there is no clone."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with what the wheel installs."""
    pytest.importorskip("hatchling", reason="what builds the wheel is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_every_property_is_in_it(installed):
    ours = {path.name for path in (ROOT / "properties").iterdir() if path.is_file()}
    assert {path.name for path in (installed / "attncheck" / "properties").iterdir()} == ours


def test_every_template_is_in_it(installed):
    folder = Path("attncheck") / "reporting" / "templates"
    ours = {path.name: path.read_bytes() for path in (ROOT / "src" / folder).iterdir()}
    assert {path.name: path.read_bytes() for path in (installed / folder).iterdir()} == ours
    assert "page.html.j2" in ours


def test_they_run_from_it(installed, tmp_path):
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
