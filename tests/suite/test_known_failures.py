"""The known-failures file: strict parsing, and errors for stale or unmatched entries."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.messages import one_line

from attncheck.core.errors import UsageError
from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.ideal import Ideal
from attncheck.suite.known_failures import known_failures, read_known_failures
from attncheck.suite.pytest_options import MARK, Options
from attncheck.suite.session import Kernel, Param, Session

CAUSAL = Case(problem=Problem(query=3, head_dim=4, mask=Spec.of("causal")))
CASE = json.dumps(CAUSAL.to_json())
GOOD = {
    "test": '"test_a.py::test_it"',
    "kernel": '"*ideal"',
    "reason": '"theirs"',
    "case": f"'{CASE}'",
}
PROPERTY = """
from attncheck.suite import asks

@asks("compare", families=("full", "causal"), dtypes=("bf16",))
def test_it(kernel, case):
    kernel.must_hold(case)

@asks("compare", families=("softmax",))
def test_softmax(kernel, case):
    kernel.must_hold(case)
"""
WRONG = """
import torch
from attncheck.core.outputs import Outputs
from attncheck.subjects.ideal import Ideal

class Half(Ideal):
    name = "half"

    def prepare(self, inputs):
        call = super().prepare(inputs)
        def halved():
            right = call()
            return Outputs(right.out / 2, right.lse)
        return halved
"""


def entry(**fields: str) -> str:
    lines = [f"{name} = {value}" for name, value in (GOOD | fields).items() if value]
    return "\n".join(["[[failure]]", *lines, ""])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("failure = 3", "failure must be a list"),
        ("[other]", "unknown key 'other': it holds [[failure]] alone"),
        ("[[failure", "k.toml: "),
        (entry(because='"x"'), "k.toml, entry 1: key 'because' is not known: choose from case,"),
        (entry(reason=""), "k.toml, entry 1: reason is missing"),
        (
            entry() + entry(test='"test_it"'),
            "k.toml, entry 2: test 'test_it' must be FILE.py::TEST",
        ),
        (entry(kernel="3"), "entry 1: kernel must be text, not 3"),
        (entry(device='"tpu"'), "entry 1: device 'tpu' is not known: choose from cpu, cuda"),
        (entry(dtypes='["bf17"]'), "entry 1: dtypes 'bf17' is not known: choose from bf16"),
        (entry(dtypes='"bf16"'), "entry 1: dtypes must be a list, not 'bf16'"),
        (entry(families='["diagonal"]'), "entry 1: families 'diagonal' is not known: choose from"),
        (entry(case='"{"'), "entry 1: case: "),
        (entry(case='\'{"question": "compare"}\''), "entry 1: case: a case is a JSON object"),
        (entry(case="{problem = {query = 0}}"), "entry 1: case: query=0 must be"),
    ],
)
def test_invalid_known_failures_file_is_a_one_line_error(tmp_path, text, message):
    path = tmp_path / "k.toml"
    path.write_text(text)
    with one_line(UsageError, message):
        read_known_failures(path)


def test_entry_matches_tests_kernels_dtypes_and_families_by_pattern(tmp_path):
    path = tmp_path / "k.toml"
    path.write_text(entry(test='"test_*.py::*"', dtypes='["bf16", "fp16"]', families='["causal"]'))
    (failure,) = read_known_failures(path)
    part = "my-ideal", "fp16", "causal", "cpu"
    assert failure.matches("test_b.py::test_x", *part)
    assert not failure.matches("b.py::test_x", *part)
    assert not failure.matches("test_b.py::test_x", "my-ideal", "fp16", "", "cpu")
    assert failure.case_in("fp16").problem == CAUSAL.problem.replace(dtype="fp16")
    assert failure.case_in("fp32") == CAUSAL


def test_entry_without_dtypes_takes_the_dtype_of_the_test(tmp_path):
    path = tmp_path / "k.toml"
    path.write_text(entry())
    (failure,) = read_known_failures(path)
    assert failure.dtypes == ()
    assert failure.case_in("fp32").problem == CAUSAL.problem.replace(dtype="fp32")


def test_known_failure_that_still_fails_is_xfailed(repository):
    (repository.path / "known_failures.toml").write_text(entry(kernel='"wrong.py::Half"'))
    done = repository("--kernel=wrong.py::Half", "-rx", "-n", "1", wrong=WRONG, test_a=PROPERTY)
    assert done.returncode == 1  # the softmax is wrong too, and not known to be
    assert "2 xfailed" in done.stdout, done.stdout + done.stderr
    assert "test_it[wrong.Half-bf16-causal] - theirs" in done.stdout


def test_known_failure_that_no_longer_fails_is_a_failure(repository):
    (repository.path / "known_failures.toml").write_text(entry(families='["causal"]'))
    done = repository("--kernel=ideal", "-k", "test_it", test_a=PROPERTY)
    assert "1 failed, 1 passed" in done.stdout
    assert "known failure no longer fails: ideal on cpu answers pass" in done.stdout
    assert "remove known_failures.toml, entry 1" in done.stdout


def test_machine_dependent_entry_searches_on_where_its_case_passes(repository):
    (repository.path / "known_failures.toml").write_text(
        entry(kernel='"*"', families='["causal"]', depends_on='"an old CPU"')
    )
    narrow = WRONG.replace("halved():", "halved():\n            if inputs.problem.kv == 3:")
    narrow = narrow.replace("right = call()\n", "    return call()\n            right = call()\n")
    done = repository(
        "--kernel=wrong.py::Half", "--kernel=narrow.py::Half", "--kernel=ideal", "-ktest_it",
        wrong=WRONG, narrow=narrow, test_a=PROPERTY,
    )  # fmt: skip
    # Wrong on the case, wrong elsewhere, and right; no entry covers the family full.
    output = done.stdout
    assert "3 failed, 2 passed" in output, output + done.stderr
    assert "1 xfailed" in output
    assert "test_it[narrow.Half-bf16-causal]" in output


@pytest.mark.parametrize("processes", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_entry_that_matches_no_test_is_a_usage_error(repository, processes):
    mine = repository.path / "mine.toml"
    mine.write_text(entry(test='"test_a.py::test_nobody"'))
    done = repository(
        "--kernel=ideal", "-k", "nothing", f"--known-failures={mine}", *processes, test_a=PROPERTY
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout
    message = "mine.toml, entry 1: test 'test_a.py::test_nobody' of kernel '*ideal' matches no test"
    assert message in done.stdout + done.stderr


class Item:
    """A collected test of a property for the ideal kernel."""

    originalname = name = "test_it"

    def __init__(self, path: Path) -> None:
        kernel = Kernel(name="ideal", subject=Ideal())
        self.path = path
        self.callspec = SimpleNamespace(
            params={"kernel": Param(kernel=kernel, dtype="bf16", family="causal")}
        )

    def get_closest_marker(self, name: str) -> bool:
        return name == MARK


def session_of(*args: str) -> Any:
    config = SimpleNamespace(args=args, getoption=lambda _, default: default)
    return SimpleNamespace(config=config, testsfailed=0, isinitpath=lambda path: "." in args)


def kernel_session(**options: Any) -> Session:
    result = Session(options=Options(device="cpu", **options))
    result.kernels = tuple(
        Kernel(name=name, subject=Ideal()) for name in options.get("kernels", ["ideal"])
    )
    return result


def is_unmatched(folder: Path, entry: str, args: tuple[str, ...], **options: Any) -> bool:
    """Whether an entry is an error where test_a.py and test_b.py are in ``folder``."""
    (folder / "known_failures.toml").write_text(entry)
    for file in ("test_a.py", "test_b.py"):
        (folder / file).touch()
    files = [arg for arg in args if arg.endswith(".py")] or ["test_a.py", "test_b.py"]
    error = ""
    try:
        known_failures(
            session_of(*args), [Item(folder / file) for file in files], kernel_session(**options)
        )
    except pytest.UsageError as raised:
        error = str(raised)
    return "matches no test that was collected" in error


TYPO = '"test_a.py::test_typo"'


def test_unmatched_entry_is_an_error_only_if_its_file_was_collected_whole(tmp_path):
    assert is_unmatched(tmp_path, entry(test=TYPO), (".",))
    assert is_unmatched(tmp_path, entry(test=TYPO), ("test_a.py",))
    assert is_unmatched(tmp_path, entry(test='"test_typo.py::test_it"'), (".",))
    assert not is_unmatched(tmp_path, entry(test='"test_typo.py::test_it"'), ("test_a.py",))
    assert not is_unmatched(tmp_path, entry(test=TYPO), ("test_b.py",))
    assert not is_unmatched(tmp_path, entry(test=TYPO), ("test_a.py::test_it", "test_b.py"))
    assert not is_unmatched(tmp_path, entry(), (".",))


def test_unmatched_entry_is_an_error_only_if_its_kernel_and_dtype_were_requested(tmp_path):
    assert is_unmatched(tmp_path, entry(kernel='"idael"'), (".",))
    assert not is_unmatched(
        tmp_path, entry(kernel='"flex"'), (".",)
    )  # built in, and not available here
    assert not is_unmatched(tmp_path, entry(kernel='"idael"'), (".",), kernels=("ideal",))
    assert is_unmatched(tmp_path, entry(dtypes='["fp16"]'), (".",))
    assert not is_unmatched(tmp_path, entry(dtypes='["fp16"]'), (".",), dtypes=("bf16",))
    assert is_unmatched(tmp_path, entry(test=TYPO, device='"cpu"'), (".",))
    assert not is_unmatched(tmp_path, entry(test=TYPO, device='"cuda"'), (".",))


def test_missing_known_failures_file_is_a_usage_error(tmp_path):
    with pytest.raises(pytest.UsageError, match=r"--known-failures: no\.toml: No such file"):
        known_failures(
            session_of("."),
            [Item(tmp_path / "test_a.py")],
            kernel_session(known_failures="no.toml"),
        )
