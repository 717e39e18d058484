"""``pytest properties`` as a user runs it: which kernels fail, on what, and the report."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLANTED = "tests/properties/planted.py"
FUTURE = "test_future_keys_do_not_matter"
Judge = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def judge(warm_python):
    """``judge(*arguments)``: run ``pytest`` on properties from the root, in fp32."""
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        words = ("pytest", "-q", "-p", "no:cacheprovider", "--no-header", "--dtype=fp32")
        return warm_python.run(*words, *arguments, cwd=ROOT, env=env, timeout=300)

    return run


def kernel(name: str) -> str:
    return f"--kernel={PLANTED}::{name}"


@pytest.fixture(scope="module")
def wide(judge):
    """The run of a too wide mask in two of the four causal properties.

    ``test_each_property.py`` has a fault for each of the four.
    """
    return judge("properties/test_causal.py", "-k", "future_keys or first_row", kernel("wide"))


def test_mask_one_key_too_wide_fails(wide):
    assert wide.returncode == 1
    assert f"{FUTURE}[planted.wide-fp32-causal]" in wide.stdout
    assert "passed" not in wide.stdout


def test_failure_is_shrunk_to_one_row_and_two_keys(wide):
    assert "problem    fp32 causal B1 H1 Q1 K2 D1 normal seed 0\n" in wide.stdout
    assert "question   future_keys row=0: " in wide.stdout
    assert re.search(
        r"out\[0, 0, 0, 0\] = \S+, but should be \S+ bit for bit \(1 of 1 ", wide.stdout
    )


def test_report_has_no_traceback_and_no_text_of_hypothesis(wide):
    assert not re.search(
        r"hypothesis|traceback|\d+ hidden", wide.stdout.lower().replace("/hyp", "")
    )


def test_printed_command_reproduces_the_failure(wide, warm_python):
    _, _, after = wide.stdout.partition(f"{FUTURE}[planted.wide-fp32-causal]")
    command = re.search(r"Reproduce: attncheck (repro \w{10})\n", after)
    assert command
    again = warm_python.run("attncheck", *command[1].split(), cwd=ROOT)
    assert again.returncode == 1
    assert "bit for bit" in again.stdout


@pytest.mark.parametrize(
    ("name", "file", "expression", "texts"),
    [
        (
            "WideFlash2",
            "test_causal.py",
            "future_keys",
            ["problem    fp32 causal B1 H1 Q1 K2 D1 normal seed 0\n"],
        ),
        (
            "Strict",
            "test_causal.py",
            "exact",
            ["problem    fp32 causal B1 H1 Q1 K1 D1 normal seed 0\n"],
        ),
        (
            "Raising",
            "test_determinism.py",
            "two_runs and full",
            ["RuntimeError: illegal memory access", " Q1 K2 D1 "],
        ),
    ],
)
def test_planted_fault_fails_on_its_smallest_problem(judge, name, file, expression, texts):
    done = judge(f"properties/{file}", "-k", expression, kernel(name))
    assert done.returncode == 1
    assert all(text in done.stdout for text in texts)


def test_correct_kernel_passes(judge):
    done = judge("properties/test_causal.py", kernel("right"))
    assert (done.returncode, done.stdout.count("failed")) == (0, 0)
    assert "passed" in done.stdout


def test_kernel_that_refuses_everything_does_not_pass(judge):
    done = judge("properties/test_causal.py", kernel("Picky"))
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert f"no tests of {PLANTED}::Picky in fp32: head_dim must be 512" in done.stdout


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--kernel=flash9", "kernel 'flash9' is not known: choose from"),
        (f"--kernel={PLANTED}::nobody", f"{PLANTED} has no 'nobody'"),
        ("--kernel=no_such_file.py::x", "there is no file no_such_file.py"),
        (kernel("not_a_subject"), "is int, and must be a function"),
        (kernel("Absent"), "cannot run on cpu: it needs a quantum computer"),
    ],
)
def test_unusable_kernel_is_a_one_line_usage_error(judge, option, message):
    done = judge("properties", option)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert message in done.stderr.splitlines()[0]
    assert "Traceback" not in done.stderr + done.stdout


def test_pytest_plugin_imports_nothing_heavy():
    code = (
        "import sys, attncheck.suite.pytest_plugin; "
        "print(*{'torch', 'triton', 'hypothesis', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
