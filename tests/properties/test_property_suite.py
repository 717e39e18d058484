"""The properties as a user runs them: which kernels they fail, on what, and with which words."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLANTED = "tests/properties/planted.py"
FUTURE = "test_future_keys_do_not_matter"


def judge(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``pytest properties …`` from the root, the same examples every time."""
    command = [sys.executable, "-m", "pytest", "properties", "-q", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, "--hypothesis-profile=attncheck-ci", "--no-header", *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def kernel(name: str) -> str:
    return f"--kernel={PLANTED}::{name}"


@pytest.fixture(scope="module")
def wide() -> subprocess.CompletedProcess[str]:
    return judge("-k", "causal", kernel("wide"))


def test_a_mask_one_key_too_wide_fails(wide: subprocess.CompletedProcess[str]) -> None:
    assert wide.returncode == 1
    assert f"{FUTURE}[planted.wide]" in wide.stdout
    assert "3 failed, 2 passed" in wide.stdout


def test_it_shrinks_to_one_row_and_two_keys(wide: subprocess.CompletedProcess[str]) -> None:
    assert "problem   fp32 causal B1 H1 Q1 K2 D1 normal seed 0\n" in wide.stdout
    assert "question  future_keys row=0: " in wide.stdout
    assert re.search(
        r"out\[0, 0, 0, 0\] = \S+, but should be \S+ bit for bit \(1 of 1 ", wide.stdout
    )


def test_its_reproducer_reproduces_it(wide: subprocess.CompletedProcess[str]) -> None:
    command = re.search(r"Reproduce: (python -c .*)", wide.stdout)
    assert command
    _, *arguments = shlex.split(command[1])
    again = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    case = re.search(r"  case      (\w{10})\n", wide.stdout)
    assert case
    assert case[0] in again.stdout
    assert "bit for bit" in again.stdout


def test_a_triton_mask_one_key_too_wide_fails() -> None:
    done = judge("-k", "future_keys", kernel("WideFlash2"))
    assert done.returncode == 1
    assert "problem   fp32 causal B1 H1 Q1 K2 D1 normal seed 0\n" in done.stdout


def test_a_dropped_diagonal_fails() -> None:
    done = judge("-k", "causal", kernel("Strict"))
    assert done.returncode == 1
    assert "1 failed, 4 passed" in done.stdout
    assert "problem   fp32 causal B1 H1 Q1 K1 D1 normal seed 0\n" in done.stdout


def test_each_property_fails_on_a_fault_of_its_own() -> None:
    faults = {
        "Leaky": "test_nan_in_future_keys_does_not_matter",
        "LeakyLse": FUTURE,
        "WrongHead": "test_first_row_is_the_first_value",
        "Biased": "test_zero_values_give_zero",
        "Restless": "test_two_runs_agree",
    }
    done = judge("--tb=no", *map(kernel, faults))
    for fault, test in faults.items():
        assert f"{test}[planted.{fault}]" in done.stdout


def test_a_kernel_that_raises_fails_with_its_message() -> None:
    done = judge("-k", "two_runs", kernel("Raising"))
    assert done.returncode == 1
    assert "the kernel failed: RuntimeError: illegal memory access" in done.stdout
    assert " Q1 K2 D1 " in done.stdout


def test_a_kernel_without_fault_passes() -> None:
    done = judge("-k", "causal", kernel("right"))
    assert (done.returncode, done.stdout.count("failed")) == (0, 0)
    assert "5 passed" in done.stdout


def test_a_kernel_that_takes_nothing_does_not_pass() -> None:
    done = judge("-k", "two_runs", kernel("Picky"))
    assert done.returncode == 1
    assert "nothing was tested" in done.stdout
    assert "head_dim must be 512" in done.stdout


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--kernel=flash9", "kernel 'flash9' is not known: choose from"),
        (f"--kernel={PLANTED}::nobody", f"{PLANTED} has no 'nobody'"),
        ("--kernel=no_such_file.py::x", "there is no file no_such_file.py"),
        (kernel("not_a_subject"), "is int: it must be a Subject"),
        (kernel("Absent"), "cannot run on cpu: it needs a quantum computer"),
    ],
)
def test_a_wrong_kernel_ends_pytest_in_one_line(option: str, message: str) -> None:
    done = judge(option)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert message in done.stderr.splitlines()[0]
    assert "Traceback" not in done.stderr + done.stdout


def test_the_plugin_imports_nothing_heavy() -> None:
    code = (
        "import sys, attncheck.pytest_plugin; "
        "print(*{'torch', 'triton', 'hypothesis', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
