"""Command-line options: other plugins' keep working, and wrong values are one-line errors."""

import pytest

from attncheck.suite.pytest_options import spelled_out

OPTION = """
def pytest_addoption(parser):
    parser.addoption("--{name}", default="theirs")
"""
ASKS = """
def test_it(pytestconfig):
    assert pytestconfig.getoption("{name}") == "{value}"
    assert pytestconfig.getoption("attncheck_{name}") == {mine!r}
"""


@pytest.mark.parametrize(
    ("words", "theirs", "expected"),
    [
        (
            ("--device=tpu", "--attncheck-device=cpu"),
            {"conftest": "device"},
            {"name": "device", "value": "tpu", "mine": "cpu"},
        ),
        (
            ("-p", "theirs", "--kernel=linux"),
            {"theirs": "kernel"},
            {"name": "kernel", "value": "linux", "mine": None},
        ),
        (
            ("--tier=pr",),
            {"deep__conftest": "tier"},
            {"name": "tier", "value": "theirs", "mine": "pr"},
        ),
    ],
    ids=["a conftest's", "a plugin's", "of a conftest that is found late"],
)
def test_other_plugins_keep_their_own_options(repository, words, theirs, expected):
    files = {file: OPTION.format(name=name) for file, name in theirs.items()}
    test = "deep__test_a" if "deep__conftest" in files else "test_a"
    done = repository(*words, **files, **{test: ASKS.format(**expected)})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--device=tpu", "--device 'tpu' is not known: choose from cpu, cuda."),
        ("--dtype=bf8", "--dtype 'bf8' is not known: choose from bf16, e4m3, e5m2, fp16"),
        ("--tier=hard", "tier 'hard' is not known: choose from nightly, pr, smoke."),
        ("--attncheck-tier=hard", "tier 'hard' is not known"),
    ],
)
def test_invalid_option_value_is_a_one_line_usage_error(repository, option, message):
    done = repository(option, test_a="def test_it(): pass")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert message in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


class _Parser:
    """Knows ``--device``, which takes whole numbers."""

    def parse_known_and_unknown_args(self, args: list[str]) -> tuple[object, list[str]]:
        if args[0] == "--device":
            raise pytest.UsageError("not a whole number")
        return object(), [args[0]]


def test_spelled_out_stops_at_two_dashes_and_keeps_foreign_options():
    args = ["--kernel", "a", "--tier=pr", "--device", "3", "-k", "kernel", "--", "--kernel"]
    assert spelled_out(_Parser(), args) == [
        *["--attncheck-kernel", "a", "--attncheck-tier=pr", "--device", "3"],
        *["-k", "kernel", "--", "--kernel"],
    ]


def test_help_lists_short_and_long_option_names(repository):
    done = repository("--help")
    assert "--attncheck-kernel" in done.stdout
    assert "--kernel too" in " ".join(done.stdout.split())
