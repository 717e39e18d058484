"""Processes of pytest-xdist: each uses a GPU of its own, and each kernel runs in a process."""

import os

import pytest
import torch

from attncheck.suite.pytest_options import choose_gpu


@pytest.fixture
def four_gpus(monkeypatch):
    """Four pretended GPUs; the list of those that became the current device."""
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return current


@pytest.mark.parametrize(
    ("worker", "visible", "gpu"),
    [
        ("gw0", None, "0"),
        ("gw3", None, "3"),
        ("gw6", None, "2"),
        ("gw1", "7,5,3,1", "5"),
        ("", None, None),  # without xdist
    ],
)
def test_each_xdist_worker_sees_one_of_the_visible_gpus(
    monkeypatch, four_gpus, worker, visible, gpu
):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    choose_gpu()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == gpu


def test_gpu_becomes_the_current_device_where_cuda_is_initialized(monkeypatch, four_gpus):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw5")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    choose_gpu()
    assert four_gpus == [1]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


DIES = """
import os
from torch.nn.functional import scaled_dot_product_attention
def kernel(q, k, v, is_causal=False):
    if k.shape[2] == 1:
        os._exit(0)
    return scaled_dot_product_attention(q, k, v, is_causal=is_causal)
"""
ASKS = """
import sys
from attncheck.inputs.problem import Case
def test_mine(kernel, problem):
    kernel.must_hold(Case(problem=problem))
    assert "attncheck_file_dies" not in sys.modules
"""


@pytest.mark.parametrize("processes", ["0", "1"])
def test_kernel_that_dies_fails_its_test_and_the_next_one_passes(repository, processes):
    options = ("--kernel", "dies.py::kernel", "--device", "cpu", "-n", processes)
    run = repository(*options, "test_mine.py", dies=DIES, test_mine=ASKS)
    assert run.returncode == 1
    assert "1 failed, " in run.stdout
    assert "its process ended with exit code 0 before it answered" in run.stdout
    assert "[dies.kernel-one-key] - " in run.stdout or "[one-key-dies.kernel] - " in run.stdout
    in_process = repository(*options, "--in-process", "test_mine.py", "-k", "plain")
    assert in_process.returncode == 1
    assert "attncheck_file_dies" in in_process.stdout


def test_kernel_file_that_exits_when_loaded_is_a_one_line_usage_error(repository):
    run = repository("--kernel", "dies.py::kernel", dies="import os\nos._exit(0)")
    assert run.returncode == 4
    message = "--kernel: dies.py::kernel: as it was loaded, its process ended with exit code 0"
    assert message in run.stdout + run.stderr


def test_function_is_called_by_its_detected_convention_within_its_claims(repository):
    """Only a trial shows that its heads are inside its rows.

    Called as sdpa every test would fail.
    """
    mine = (
        "from torch.nn.functional import scaled_dot_product_attention as sdpa\n"
        "def kernel(q, k, v, causal=False):\n"
        "    assert q.shape[-1] == 64 and q.shape[1] == k.shape[1]\n"
        "    q, k, v = (x.transpose(1, 2) for x in (q, k, v))\n"
        "    return sdpa(q, k, v, is_causal=causal).transpose(1, 2)\n"
    )
    asks = "def test_it(kernel):\n    assert 'flash_attn' in kernel.subject.summary\n"
    run = repository("--kernel", "mine.py::kernel", "test_mine.py", mine=mine, test_mine=asks)
    assert run.returncode == 0, run.stdout
    assert "mine.py::kernel called as flash_attn, the only convention" in run.stdout
    assert "mine.py::kernel supports " in run.stdout


def test_silently_wrong_lengths_are_not_excluded_from_the_claims(repository):
    """The function is silently wrong at ragged lengths; without these it would pass."""
    mine = (
        "from torch.nn.functional import scaled_dot_product_attention as sdpa\n"
        "def kernel(q, k, v, is_causal=False):\n"
        "    out = sdpa(q, k, v, is_causal=is_causal)\n"
        "    return out if k.shape[2] % 64 == 0 else out * 1.5\n"
    )
    run = repository("--kernel", "mine.py::kernel", "test_mine.py", mine=mine, test_mine=RAGGED)
    assert run.returncode == 0, run.stdout
    assert "mine.py::kernel supports " not in run.stdout


RAGGED = """
from attncheck.inputs.problem import Problem

def test_it(kernel):
    assert kernel.subject.unsupported(Problem(query=77, kv=77, dtype="bf16"), "cpu") is None
"""
