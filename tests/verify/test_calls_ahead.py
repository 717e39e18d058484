"""Processes that call a kernel on what will be asked of it: what they call, and how they end."""

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


def called(folder: Path) -> list[str]:
    """What all processes were asked, once there are no more of them than there were."""
    files = [path for path in folder.iterdir() if path.name.isdigit()]
    return [line for path in files for line in path.read_text().splitlines()]


def wait_for(condition) -> None:
    while not condition():
        time.sleep(0.01)


def test_each_structure_is_called_once_and_the_last_first(file):
    ahead = CallsAhead(f"{file}::kernel", convention="", device="cpu", processes=1)
    lengths = [PROBLEM.replace(query=n, kv=n) for n in (4, 5, 6)]
    others = [problem.replace(seed=9, distribution="outliers") for problem in lengths]
    ahead.expect([*lengths, *others], Terms(convention="sdpa"))
    wait_for(lambda: len(called(file.parent)) == 3)
    ahead.expect([*others, PROBLEM.replace(query=7)], Terms(convention="sdpa"))
    wait_for(lambda: len(called(file.parent)) == 4)
    ahead.close()
    assert [line.split()[0] for line in called(file.parent)] == ["6", "5", "4", "7"]


def test_a_process_that_breaks_ends_and_the_others_go_on(file):
    ahead = CallsAhead(f"{file}::kernel", convention="sdpa", device="cpu", processes=2)
    ahead.expect([PROBLEM.replace(query=n) for n in (4, 5, 6, 13)])
    wait_for(lambda: len(called(file.parent)) == 4)
    ahead.close()
    pids = [int(path.name) for path in file.parent.iterdir() if path.name.isdigit()]
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("kernel", ["nothing.py::kernel", "k.py::kernel"])
def test_it_can_be_closed_at_any_time(file, kernel, monkeypatch):
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


def test_check_tells_what_it_tries_and_what_it_asks(file, tmp_path, monkeypatch):
    from attncheck.cli.check import check

    told = []
    note = lambda _, problems, terms=None: told.append(([*problems], terms))  # noqa: E731
    monkeypatch.setattr(CallsAhead, "expect", note)
    words = ["--question", "plain", "--question", "scale", "--out", str(tmp_path / "out"), "-q"]
    CliRunner().invoke(check, [f"{file}::kernel", *words])
    (tried, first), (asked, then) = told
    assert {problem.head_dim for problem in tried} >= {16, 256}
    # It takes no scale: what it refuses is not called ahead.
    assert [problem.query for problem in asked] == [64]
    assert first == then == Terms(convention="sdpa")
