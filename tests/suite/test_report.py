"""The pytest command that a report shows."""

import pytest

from attncheck.suite.outcomes import pytest_command

pytest_plugins = ["pytester"]


@pytest.mark.parametrize(
    ("args", "command"),
    [
        (["properties", "-n", "2"], "pytest properties -n 2"),
        (["--attncheck-report", "some/dir", "-q"], "pytest -q"),
        (["--attncheck-report=some/dir", "-q"], "pytest -q"),
        (["/home/me/properties/test_causal.py::test_x"], "pytest test_causal.py::test_x"),
        (["--known-failures=/home/me/mine.toml"], "pytest --known-failures=mine.toml"),
        (["-k", "causal and bf16"], "pytest -k 'causal and bf16'"),
    ],
)
def test_reported_command_contains_no_folder(args, command):
    assert pytest_command(args) == command
