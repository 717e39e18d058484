"""Checks of memory and determinism, asked of Triton kernels: interpreted, and on a GPU."""

import pytest
import torch
from tests.verify import planted_calls_in_triton as planted

from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import Case, Problem
from attncheck.kernels import interpreter
from attncheck.subjects.load import load_subject
from attncheck.verify.call_checks import CHECKS
from attncheck.verify.environment import prepare
from attncheck.verify.run_case import run_case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cuda" and interpreter.enabled():
    pytest.skip("this process interprets, and a GPU compiles", allow_module_level=True)
prepare(DEVICE)  # before Triton is imported

SMALL = Problem(heads=2, query=37, kv=41, head_dim=16, mask=Spec.of("causal"), dtype="fp16")
on_a_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU: it has streams")


def ask(kernel, question, **numbers):
    subject = load_subject(kernel) if isinstance(kernel, str) else kernel
    smallest = {name: of[0] for name, of in CHECKS[question].allowed(SMALL).items()}
    case = Case(problem=SMALL, question=question, parameters=smallest | numbers)
    return run_case(subject, case, device=DEVICE)


@pytest.mark.parametrize("question", ["guards", "unwritten", "repeats", "elsewhere"])
def test_a_right_copy_passes(question):
    record = ask(planted.Copying(), question)
    assert record.status == "pass", (record.reason, record.judgement)


@pytest.mark.parametrize(
    ("fault", "question", "said"),
    [
        ("WholeTiles", "guards", "after its output lse"),
        ("FullTiles", "unwritten", "left 10 of 74 elements of lse, first [0, 1, 27], unwritten"),
        ("ReadsBeyond", "unwritten", "reads poison: 74 of 74 elements of lse"),
    ],
)
def test_a_fault_at_the_last_tile_is_found(fault, question, said):
    record = ask(getattr(planted, fault)(), question)
    assert (record.status, record.judgement.rule) == ("fail", "memory")
    assert said in record.judgement.reason


@on_a_gpu
@pytest.mark.parametrize("kernel", ["triton-flash2", "triton-varlen", "sdpa-flash", "sdpa-cudnn"])
@pytest.mark.parametrize("question", CHECKS)
def test_right_kernels_pass_on_a_gpu(kernel, question):
    if CHECKS[question].unfit(SMALL):
        pytest.skip("one sequence has no neighbours")
    record = ask(kernel, question)
    said = record.judgement.reason if record.judgement else ""
    unreached = record.status == "inconclusive" and "may have held anything before" in said
    assert record.status in {"pass", "unsupported"} or unreached, (record.reason, said)


@on_a_gpu
def test_atomics_are_found():
    record = ask(planted.Atomic(), "repeats", calls=32)
    assert (record.status, record.judgement.rule) == ("fail", "determinism")


@on_a_gpu
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
def test_an_unsynchronised_stream_is_found(fault):
    record = ask(getattr(planted, fault)(), "streams")
    assert (record.status, record.judgement.rule) == ("fail", "determinism")


@on_a_gpu
def test_a_stream_that_is_joined_passes():
    record = ask(planted.OwnStreamJoined(), "streams")
    assert record.status == "pass", (record.reason, record.judgement)
