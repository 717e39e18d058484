"""Whose an option is: ours never breaks another's, and wrong values end in one line."""

import pytest

from attncheck.suite.pytest_options import spelled_out

OPTION = """
def pytest_addoption(parser):
    parser.addoption("--{name}", default="theirs")
"""
ASKS = """
def test_it(pytestconfig):
    assert pytestconfig.getoption("{name}") == "{value}"
    assert pytestconfig.getoption("attncheck_{ours}") == {mine!r}
"""


def test_a_conftest_keeps_its_own_option(repository):
    done = repository(
        "--device=tpu",
        "--attncheck-device=cpu",
        conftest=OPTION.format(name="device"),
        test_a=ASKS.format(name="device", value="tpu", ours="device", mine="cpu"),
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_plugin_keeps_its_own_option(repository):
    done = repository(
        "-p",
        "theirs",
        "--kernel=linux",
        theirs=OPTION.format(name="kernel"),
        test_a=ASKS.format(name="kernel", value="linux", ours="kernel", mine=None),
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_option_of_a_conftest_that_is_found_late_does_not_collide(repository):
    done = repository(
        "--tier=pr",
        deep__conftest=OPTION.format(name="tier"),
        deep__test_a=ASKS.format(name="tier", value="theirs", ours="tier", mine="pr"),
    )
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
def test_a_wrong_value_ends_run_pytest_one_line(repository, option, message):
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


def test_short_names_are_spelled_out_up_to_two_dashes():
    args = ["--kernel", "a", "--tier=pr", "--device", "3", "-k", "kernel", "--", "--kernel"]
    assert spelled_out(_Parser(), args) == [
        *["--attncheck-kernel", "a", "--attncheck-tier=pr", "--device", "3"],
        *["-k", "kernel", "--", "--kernel"],
    ]


def test_ours_is_said_in_the_help(repository):
    done = repository("--help")
    assert "--attncheck-kernel" in done.stdout
    assert "--kernel too" in " ".join(done.stdout.split())
