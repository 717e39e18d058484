"""``run_sanitizer``: with a fake compute-sanitizer on PATH, and with the real one on a GPU."""

import sys

import pytest
import torch

from attncheck.core.errors import UsageError
from attncheck.inputs.problem import Case, Problem
from attncheck.records.failure_causes import without_place
from attncheck.verify import sanitizer

CASES = [Case(problem=Problem(query=4, head_dim=4, dtype="fp16", seed=seed)) for seed in range(3)]

# Runs the given command, and prints a memcheck report once the second case has begun.
_FAKE = """#!{python}
import os, subprocess, sys
assert sys.argv[1:5] == ["--tool", "memcheck", "--error-exitcode", "99"], sys.argv
assert sys.argv[5:7] == ["--report-api-errors", "no"], sys.argv
assert os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
print("========= COMPUTE-SANITIZER")
done = subprocess.run(sys.argv[7:], capture_output=True, text=True)
for line in done.stdout.splitlines():
    print(line)
    if " begin 1" in line:
        print({report!r})
print("========= ERROR SUMMARY: 1 error")
sys.exit({code} if {code} else done.returncode)
"""
_REPORT = """========= Invalid __global__ write of size 2 bytes
=========     at _forward+0x2c0 in flash.py:120
=========     by thread (3,0,0) in block (0,0,0)
=========     Address 0x7f00 is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
========= Invalid __global__ write of size 2 bytes
=========     at _forward+0x2c0 in flash.py:120"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """``fake(report)`` puts a program named compute-sanitizer, which prints ``report``, first on
    PATH."""

    def make(report="", code=0, text=_FAKE):
        program = tmp_path / "compute-sanitizer"
        program.write_text(text.format(python=sys.executable, report=report, code=code))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return make


def test_missing_compute_sanitizer_is_unsupported(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    (record,) = sanitizer.run_sanitizer("ideal", CASES[:1], "memcheck", device="cpu")
    assert (record.status, record.reason) == ("unsupported", sanitizer.ABSENT)


def test_memcheck_report_fails_the_case_that_was_running(fake):
    fake(_REPORT, code=99)
    before, wrong, after = sanitizer.run_sanitizer("ideal", CASES, "memcheck", device="cpu")
    assert (before.status, wrong.status, after.status) == ("pass", "fail", "pass")
    assert wrong.case_id == CASES[1].id
    assert wrong.judgement.rule == "memory"
    assert wrong.judgement.reason == (
        "memcheck: Invalid __global__ write of size 2 bytes at _forward+0x2c0 in flash.py:120 "
        "(2 in all)"
    )


def test_exception_is_an_error_and_death_is_a_crash(fake, tmp_path):
    fake()
    kernel = tmp_path / "kernel.py"
    kernel.write_text(
        "import os\n"
        "from attncheck.subjects.ideal import Ideal\n"
        "class Kernel(Ideal):\n"
        "    name, summary = 'planted', 'planted'\n"
        "    def prepare(self, inputs):\n"
        "        if inputs.problem.seed == 1: raise ValueError('planted')\n"
        "        if inputs.problem.seed == 2: os._exit(0)\n"
        "        return super().prepare(inputs)\n"
    )
    records = sanitizer.run_sanitizer(f"{kernel}::Kernel", CASES, "memcheck", device="cpu")
    assert [each.status for each in records] == ["pass", "error", "crash"]
    assert without_place(records[1].reason) == "ValueError: planted"


def test_hanging_sanitizer_is_killed_as_a_timeout(fake):
    fake(text="#!/bin/sh\nexec sleep 1000\n")
    (record,) = sanitizer.run_sanitizer("ideal", CASES[:1], "memcheck", device="cpu", seconds=0.2)
    assert record.status == "timeout"


def test_unknown_tool_is_a_usage_error():
    with pytest.raises(UsageError, match="memcheck"):
        sanitizer.run_sanitizer("ideal", CASES, "memchek")


@pytest.mark.skipif(
    not torch.cuda.is_available() or sanitizer.sanitizer() is None,
    reason="needs a CUDA GPU and compute-sanitizer",
)
@pytest.mark.parametrize("tool", sanitizer.TOOLS)
def test_triton_flash2_passes_every_tool_on_a_gpu(tool):
    case = Case(problem=Problem(heads=2, query=80, kv=100, head_dim=64, dtype="fp16"))
    (record,) = sanitizer.run_sanitizer("triton-flash2", [case], tool)
    assert record.status == "pass", (record.reason, record.judgement)
