"""The summary at the end of a run: its counts, the exit code and the command it shows."""

import xml.etree.ElementTree as ET

import pytest

from attncheck.records.run_reports import PropertyOutcome, Tally
from attncheck.suite.outcomes import pytest_command, summary_lines

PROPERTY = """
from attncheck.suite import asks

@asks("compare", families=("full", "causal"), dtypes=("fp32", "bf16"))
def test_it(kernel, case):
    kernel.must_hold(case)
"""
KERNELS = """
from attncheck.core.outputs import Outputs
from attncheck.subjects.ideal import Ideal

class Picky(Ideal):
    name = "picky"

    def unsupported(self, problem, device):
        if problem.dtype != "bf16" or problem.mask.name == "causal":
            return f"no {problem.mask.name} in {problem.dtype}"

class Nothing(Ideal):
    name = "nothing"

    def unsupported(self, problem, device):
        if problem.mask.name != "document":
            return "only documents"

class Raising(Ideal):
    name = "raising"

    def prepare(self, inputs):
        raise RuntimeError("illegal memory access")
"""


@pytest.mark.parametrize("processes", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_summary_covers_all_processes(repository, processes):
    done = repository(
        "--kernel=kernels.py::Picky", "-rs", *processes, kernels=KERNELS, test_a=PROPERTY
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, 1 skipped" in done.stdout
    assert "no causal in bf16" in done.stdout
    assert "kernels.py::Picky  4 problems in " in done.stdout
    assert "4 problems in " in done.stdout
    assert "0 % was compiling" in done.stdout
    assert "no tests of kernels.py::Picky in fp32: no " in done.stdout


def test_nan_of_a_hidden_key_is_a_warning_in_the_summary(repository):
    """A plain function does not promise to ignore hidden NaN, unless its table says so."""
    formula = """
def unfused(query, key, value, is_causal=False, scale=None, enable_gqa=False):
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scale = query.shape[3] ** -0.5 if scale is None else scale
    scores = (query.float() @ key.float().mT) * scale
    if is_causal:
        seen = scores.new_ones(scores.shape[-2:]).tril().bool()
        scores = scores.masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ value.float()).to(query.dtype)
"""
    test = (
        PROPERTY.replace("compare", "hidden_keys_nan")
        .replace('"full", ', "")
        .replace('l")', 'l",)')
    )
    done = repository("--kernel=kernels.py::unfused", kernels=formula, test_a=test)
    assert done.returncode == 0, done.stdout + done.stderr
    warning = (
        "warning of kernels.py::unfused, test_a.py::test_it (and 1 more): hidden keys must be "
    )
    assert warning in done.stdout


@pytest.mark.parametrize(
    ("words", "output"),
    [(["--kernel=kernels.py::Nothing"], "4 skipped"), (["--kernel=ideal", "--dtype=fp16"], "")],
    ids=["all skipped", "none collected"],
)
def test_run_that_tested_nothing_exits_with_no_tests_collected(repository, words, output):
    done = repository(*words, kernels=KERNELS, test_a=PROPERTY)
    assert output in done.stdout
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED


def test_raising_kernel_fails_with_its_error_and_writes_a_failure(repository):
    done = repository(
        *("--kernel=kernels.py::Raising", "--junitxml=junit.xml", "-k", "bf16-full"),
        kernels=KERNELS,
        test_a=PROPERTY,
    )
    assert done.returncode == 1
    assert "ERROR compare: RuntimeError: illegal memory access" in done.stdout, done.stdout
    assert "Reproduce: attncheck repro " in done.stdout
    assert "Traceback" not in done.stdout
    assert "hidden" not in done.stdout
    (failure,) = (repository.path / "reports" / "failures").iterdir()
    junit = ET.parse(repository.path / "junit.xml")  # noqa: S314  # our own report
    facts = {each.get("name"): each.get("value") for each in junit.iter("property")}
    assert facts["attncheck_failure"] == failure.stem
    assert facts["attncheck_kernel"] == "kernels.py::Raising"
    assert facts["attncheck_device"] == "cpu"
    assert facts["attncheck_seed"] == "0"


def outcome(kernel: str, **tally: object) -> PropertyOutcome:
    return PropertyOutcome(
        file="test_a.py",
        test="test_it",
        kernel=kernel,
        dtype="bf16",
        family="full",
        outcome="passed",
        tally=Tally(**tally),
    )


def test_summary_lines_add_up_problems_and_seconds_by_kernel():
    outcomes = [
        outcome("b", problems={"pass": 3, "unsupported": 2}, seconds=2.0, compiling=1.0),
        outcome("b", problems={"pass": 1, "warn": 1}, seconds=2.0),
        outcome("aa", problems={"pass": 1_000}, seconds=4.0, compiling=1.0),
        outcome("none"),
    ]
    untaken = {"b": {"tf32": "no", "e4m3": "no"}, "aa": {"tf32": "never"}}
    assert list(summary_lines(outcomes, untaken, 10.0)) == [
        "aa  1,000 problems in 4.0 s, 25 % compiling",
        "b   5 problems (2 unsupported, 1 warn) in 4.0 s, 25 % compiling",
        "1,005 problems in 10 s: 100.5 a second; of the time spent on them 25 % was compiling",
        "no tests of b in tf32, b in e4m3: no",
        "no tests of aa in tf32: never",
    ]
    assert not list(summary_lines([], {}, 1.0))


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
