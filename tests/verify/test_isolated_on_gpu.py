"""Kernels that harm their GPU: each fault is recorded, and the next right Case passes."""

from pathlib import Path

import pytest
import torch

from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.ideal import Ideal
from attncheck.verify.executor import InProcess
from attncheck.verify.isolated import Deadlines, IsolatedKernel
from attncheck.verify.run_case import run_case

if not torch.cuda.is_available():
    pytest.skip("needs a GPU: kernels that break one", allow_module_level=True)

FILE = Path(__file__).with_name("planted_on_gpu.py")
RIGHT = 2
FAULTS = (
    ("spins", 3, "timeout", "it did not answer with outputs in "),
    ("illegal", 4, "crash", "its process lost the GPU: "),
    ("illegal_and_swallowed", 5, "crash", "its process lost the GPU: "),
    ("illegal_on_another_stream", 6, "crash", "its process lost the GPU: "),
    ("takes_all", 7, "oom", "OutOfMemoryError: "),
)


@pytest.fixture(scope="module")
def host():
    deadlines = Deadlines(call=10.0, imports=10.0, compile=30.0, close=30.0)
    with IsolatedKernel(f"{FILE}::Planted", device="cuda", deadlines=deadlines) as host:
        assert run_length(host, RIGHT).status == "pass"
        yield host


def run_length(host, length):
    case = Case(problem=Problem(query=length, kv=4, head_dim=8, dtype="fp32"))
    return run_case(host.subject, case, device="cuda", executor=host.executor, brief=True)


@pytest.mark.parametrize(("name", "length", "status", "reason"), FAULTS)
def test_fault_is_recorded_and_the_next_case_passes(host, name, length, status, reason):
    record = run_length(host, length)
    assert (record.status, record.reason[: len(reason)]) == (status, reason), record
    assert run_length(host, RIGHT).status == "pass"
    torch.cuda.synchronize()  # this process has not lost its GPU


def test_one_changed_input_bit_is_a_mutation(host):
    record = run_length(host, 8)
    assert (record.status, record.judgement.rule) == ("fail", "mutation")
    assert record.judgement.reason == "wrote to its input q."


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "e4m3"])
def test_records_equal_those_of_this_process(dtype):
    case = Case(problem=Problem(heads=2, query=33, kv=40, head_dim=16, dtype=dtype))
    here = run_case(Ideal(), case, device="cuda", executor=InProcess())
    with IsolatedKernel("ideal", device="cuda") as host:
        there = run_case(host.subject, case, device="cuda", executor=host.executor)
    assert there == here
