"""CallsAhead: processes that warm a kernel up on the Problems it is about to be asked."""

import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from attncheck.inputs.problem import Problem
from attncheck.subjects.terms import Terms
from attncheck.verify.calls_ahead import CallsAhead, processes_ahead

pytestmark = pytest.mark.usefixtures("forked_workers")

KERNEL = """
import os
from torch.nn.functional import scaled_dot_product_attention

def kernel(q, k, v):
    with open(f"{os.path.dirname(__file__)}/{os.getpid()}", "a") as file:
        file.write(f"{q.shape[2]} {q.dtype}\\n")
    if q.shape[2] == 13:
        os._exit(0)
    return scaled_dot_product_attention(q, k, v)
"""
PROBLEM = Problem(query=4, kv=4, head_dim=8, dtype="fp32")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "k.py"
    path.write_text(KERNEL)
    return path


def recorded_calls(folder: Path) -> list[str]:
    """One line per kernel call, from the files that the processes wrote."""
    files = [path for path in folder.iterdir() if path.name.isdigit()]
    return [line for path in files for line in path.read_text().splitlines()]


def wait_for(condition) -> None:
    while not condition():
        time.sleep(0.01)


def test_calls_each_structure_once_last_expected_first(file):
    """Problems that differ only in seed or distribution share one call, and those of a later
    ``expect`` that were called before are not called again."""
    ahead = CallsAhead(f"{file}::kernel", convention="", device="cpu", processes=1)
    lengths = [PROBLEM.replace(query=n, kv=n) for n in (4, 5, 6)]
    others = [problem.replace(seed=9, distribution="outliers") for problem in lengths]
    ahead.expect([*lengths, *others], Terms(convention="sdpa"))
    wait_for(lambda: len(recorded_calls(file.parent)) == 3)
    ahead.expect([*others, PROBLEM.replace(query=7)], Terms(convention="sdpa"))
    wait_for(lambda: len(recorded_calls(file.parent)) == 4)
    ahead.close()
    assert [line.split()[0] for line in recorded_calls(file.parent)] == ["6", "5", "4", "7"]


def test_crashed_process_does_not_stop_the_others(file):
    """One call ends its process with ``os._exit``; the other process makes the remaining calls,
    and ``close`` leaves no process behind."""
    ahead = CallsAhead(f"{file}::kernel", convention="sdpa", device="cpu", processes=2)
    ahead.expect([PROBLEM.replace(query=n) for n in (4, 5, 6, 13)])
    wait_for(lambda: len(recorded_calls(file.parent)) == 4)
    ahead.close()
    pids = [int(path.name) for path in file.parent.iterdir() if path.name.isdigit()]
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("kernel", ["nothing.py::kernel", "k.py::kernel"])
def test_close_is_safe_with_calls_pending_and_twice(file, kernel, monkeypatch):
    monkeypatch.chdir(file.parent)
    ahead = CallsAhead(kernel, convention="", device="cpu", processes=2)
    ahead.expect([PROBLEM.replace(query=n) for n in range(1, 99)])
    ahead.close()
    ahead.close()


def test_only_triton_kernels_on_a_gpu_are_called_ahead(file, monkeypatch):
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (33 << 30, 80 << 30))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6))
    assert processes_ahead("triton-flash2", "cuda") == 3
    assert processes_ahead("triton-flash2", "cpu") == 0
    assert processes_ahead("ideal", "cuda") == 0
    assert processes_ahead(f"{file}::kernel", "cuda") == 0
    file.write_text(f"import triton\n{KERNEL}")
    assert processes_ahead(f"{file}::kernel", "cuda") == 3
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (9 << 30, 80 << 30))
    assert processes_ahead(f"{file}::kernel", "cuda") == 1


def test_check_expects_its_trials_and_then_its_questions(file, tmp_path, monkeypatch):
    from attncheck.cli.check import check

    expected = []
    note = lambda _, problems, terms=None: expected.append(([*problems], terms))  # noqa: E731
    monkeypatch.setattr(CallsAhead, "expect", note)
    words = ["--question", "plain", "--question", "scale", "--out", str(tmp_path / "out"), "-q"]
    CliRunner().invoke(check, [f"{file}::kernel", *words])
    (trials, trial_terms), (questions, question_terms) = expected
    assert {problem.head_dim for problem in trials} >= {16, 256}
    # The kernel has no scale argument, so the question "scale" is not called ahead.
    assert [problem.query for problem in questions] == [64]
    assert trial_terms == question_terms == Terms(convention="sdpa")
