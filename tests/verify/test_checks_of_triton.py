"""Memory and determinism checks of Triton kernels: in the interpreter, or compiled on a GPU."""

from functools import partial

import pytest
import torch
from tests.verify import call_check_runs
from tests.verify import planted_triton_faults as planted

from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import Problem
from attncheck.kernels import interpreter
from attncheck.verify.call_checks import CHECKS
from attncheck.verify.environment import prepare

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cuda" and interpreter.enabled():
    pytest.skip("this process interprets, and a GPU compiles", allow_module_level=True)
prepare(DEVICE)

SMALL = Problem(heads=2, query=37, kv=41, head_dim=16, mask=Spec.of("causal"), dtype="fp16")
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU: it has streams")
run_check = partial(call_check_runs.run_check, problem=SMALL, device=DEVICE)


@pytest.mark.parametrize("question", ["guards", "unwritten", "repeats", "elsewhere"])
def test_correct_triton_copy_passes(question):
    record = run_check(planted.Copying(), question)
    assert record.status == "pass", (record.reason, record.judgement)


@pytest.mark.parametrize(
    ("fault", "question", "reason"),
    [
        ("WholeTiles", "guards", "after its output lse"),
        ("FullTiles", "unwritten", "left 10 of 74 elements of lse, first [0, 1, 27], unwritten"),
        ("ReadsBeyond", "unwritten", "reads poison: 74 of 74 elements of lse"),
    ],
)
def test_fault_at_the_last_tile_fails(fault, question, reason):
    record = run_check(getattr(planted, fault)(), question)
    assert (record.status, record.judgement.rule) == ("fail", "memory")
    assert reason in record.judgement.reason


@needs_gpu
@pytest.mark.parametrize("kernel", ["triton-flash2", "triton-varlen", "sdpa-flash", "sdpa-cudnn"])
@pytest.mark.parametrize("question", CHECKS)
def test_correct_kernels_pass_on_a_gpu(kernel, question):
    if CHECKS[question].unfit(SMALL):
        pytest.skip("one sequence has no neighbours")
    record = run_check(kernel, question)
    reason = record.judgement.reason if record.judgement else ""
    unreached = record.status == "inconclusive" and "may have held anything before" in reason
    assert record.status in {"pass", "unsupported"} or unreached, (record.reason, reason)


@needs_gpu
def test_repeats_detects_atomics():
    record = run_check(planted.Atomic(), "repeats", calls=32)
    assert (record.status, record.judgement.rule) == ("fail", "determinism")


@needs_gpu
@pytest.mark.parametrize(
    "fault",
    [
        "OwnStream",
        "OwnStreamNotWaitedFor",
        "OwnStreamDoesNotWait",
        "OwnStreamKept",
        "AllOnOwnStream",
    ],
)
def test_streams_detects_unsynchronised_stream(fault):
    record = run_check(getattr(planted, fault)(), "streams")
    assert (record.status, record.judgement.rule) == ("fail", "determinism")


@needs_gpu
def test_streams_passes_synchronised_stream():
    record = run_check(planted.OwnStreamJoined(), "streams")
    assert record.status == "pass", (record.reason, record.judgement)
