"""Memory checks (guards, unwritten, state, leaks): right kernels pass, each planted fault fails."""

import contextlib
import ctypes
import json
import subprocess
import sys

import pytest
import torch
from tests.verify import planted_memory_faults as planted
from tests.verify.call_check_runs import CORRECT_KERNELS, SMALL, require_interpreter, run_check

from attncheck.inputs import input_tensors as inputs_room
from attncheck.inputs.problem import Case
from attncheck.relations import RELATIONS
from attncheck.subjects.conventions.declarations import make_subject
from attncheck.subjects.load import load_subject
from attncheck.verify import memory_patterns
from attncheck.verify.call_checks import CHECKS
from attncheck.verify.executor import InProcess
from attncheck.verify.isolated import IsolatedKernel
from attncheck.verify.memory_patterns import GuardBands, pattern
from attncheck.verify.process_effects import changed_parts, process_state, restore_process
from attncheck.verify.run_case import run_case

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = ["fp32", "bf16", "e4m3"]
UNREACHED = "may have held anything before: torch did not ask Python for that memory"
MEMORY_CHECKS = [name for name, check in CHECKS.items() if check.stage == "memory"]


@pytest.mark.parametrize("question", MEMORY_CHECKS)
@pytest.mark.parametrize("kernel", CORRECT_KERNELS)
def test_correct_kernel_passes(kernel, question):
    require_interpreter(kernel)
    problem = SMALL.replace(query=17, kv=20, head_dim=16, value_dim=16, dtype="fp16")
    record = run_check(kernel, question, problem)
    reason = record.judgement.reason if record.judgement else ""
    unreached = record.status == "inconclusive" and UNREACHED in reason and question == "unwritten"
    assert record.status == "pass" or unreached, (record.reason, reason)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("question", MEMORY_CHECKS)
def test_kernel_that_allocates_its_outputs_passes(question, dtype):
    record = run_check(planted.Allocating(), question, SMALL.replace(dtype=dtype))
    assert (record.status, record.judgement.warnings) == ("pass", ())


LAST_ROW = "left 24 of 120 elements of out, first [0, 0, 4, 0], unwritten"
FAULTS = [
    ("guards", "ByteAfter", "1 byte after"),
    ("guards", "ByteBefore", "1 byte before"),
    ("guards", "NanAfter", "2 bytes after"),
    ("guards", "SameAsThere", "1 byte after"),
    ("guards", "FarAfter", "1 byte after"),
    ("guards", "BeyondInput", "after its input k"),
    ("guards", "BeforeWorkspace", "before a tensor (7,) of int32"),
    ("unwritten", "LastRow", LAST_ROW),
    ("unwritten", "LastRowByItself", LAST_ROW),
    ("unwritten", "EmptyWorkspace", "reads poison: 40 of 40 elements of lse"),
    ("unwritten", "Swallowing", "reads poison: 40 of 40 elements of lse"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("question", "fault", "reason"), FAULTS)
def test_planted_memory_fault_fails(question, fault, reason, dtype):
    record = run_check(getattr(planted, fault)(), question, SMALL.replace(dtype=dtype))
    assert (record.status, record.judgement.rule) == ("fail", "memory")
    assert reason in record.judgement.reason
    assert ("out-of-bounds write" in record.judgement.reason) == (question == "guards")


def test_fill_patterns_differ_in_every_byte():
    one, other = (pattern(7, 200_000, torch.device("cpu"), fill) for fill in ("pattern", "inverse"))
    assert bool((one ^ other == 0xFF).all())
    assert len(one.unique()) == 256


def test_guard_bands_detect_write_between_strided_input_elements():
    gapped = RELATIONS["strides_gapped"].runs(inputs_room.draw_inputs(SMALL), {})[1]
    guards = GuardBands("pattern", torch.device("cpu"))
    copies = guards.copied(gapped)
    assert [guards.look(), copies.k.stride()] == ["", gapped.k.stride()]
    ctypes.memset(copies.k[0, 0, 0].data_ptr() + copies.k.shape[-1] * 2, 0x11, 1)
    assert guards.look() == "wrote 1 byte between elements of its input k"


def test_guards_warns_of_output_without_guard_bands():
    record = run_check("sdpa-flash", "guards", SMALL.replace(value_dim=6))
    assert record.status == "pass"
    assert record.judgement.warnings == (
        "no guard bands around out: torch did not ask Python for that memory",
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_unwritten_never_passes_unless_torch_fills_cpp_memory(dtype, monkeypatch):
    """glibc hands out memory that was just freed: it may hold the right numbers of an earlier
    call, so a kernel that wrote nothing would look right."""
    monkeypatch.setattr(memory_patterns, "_torch_flag", lambda fill: None)
    for fault in (planted.LastRowByItself(), planted.ByItself()):
        assert run_check(fault, "unwritten", SMALL.replace(dtype=dtype)).status != "pass"


@pytest.mark.parametrize("fault", ["KeptOutput", "NumpyOutput"])
def test_unwritten_is_inconclusive_for_memory_torch_did_not_fill(fault):
    record = run_check(getattr(planted, fault)(), "unwritten", SMALL.replace(dtype="fp32"))
    assert (record.status, record.judgement.rule) == ("inconclusive", "memory")
    assert record.judgement.reason == f"out {UNREACHED}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_unwritten_passes_output_allocated_by_cpp(dtype):
    if memory_patterns._torch_flag("pattern") is None:
        pytest.skip("this torch does not fill what it allocates")
    assert run_check(planted.ByItself(), "unwritten", SMALL.replace(dtype=dtype)).status == "pass"


@pytest.mark.parametrize(
    ("kernel", "question"),
    [
        (planted.EmptyUnused(), "unwritten"),  # unwritten memory may be read if it is masked
        (planted.Keeping("tensor", most=6), "leaks"),  # a cache that stops growing is no leak
    ],
)
def test_harmless_memory_use_passes(kernel, question):
    assert run_check(kernel, question).status == "pass"


@pytest.mark.parametrize("part", planted.STATES)
def test_state_change_fails_and_is_restored(part):
    before = process_state(torch.device("cpu"))
    record = run_check(planted.Changing(part), "state")
    assert (record.status, record.judgement.rule) == ("fail", "state")
    assert part in record.judgement.reason
    assert changed_parts(before, process_state(torch.device("cpu"))) == []


FLAGGED = """
import os
import torch

def attention(q, k, v, is_causal=False):
    os.environ["PLANTED"] = "1"
    torch.backends.cudnn.deterministic = True
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
"""


@pytest.mark.parametrize("isolated", [False, True])
def test_state_detects_changes_made_by_earlier_questions(isolated, tmp_path):
    """A flag that a kernel sets in every call does not change any more once earlier questions have
    run: it must be compared with the process before them."""
    kernel = tmp_path / "flagged.py"
    kernel.write_text(FLAGGED)
    problem = SMALL.replace(kv_heads=4, dtype="fp32", value_dim=6)
    before = process_state(torch.device("cpu"))
    with contextlib.ExitStack() as stack:
        stack.callback(restore_process, before, torch.device("cpu"))
        if isolated:
            host = stack.enter_context(IsolatedKernel(f"{kernel}::attention"))
            subject, executor = host.subject, host.executor
        else:
            subject, executor = load_subject(f"{kernel}::attention", None), InProcess()
        records = [
            run_case(subject, Case(problem=problem, question=each), device="cpu", executor=executor)
            for each in ("guards", "compare", "state")
        ]
    assert records[-1].status == "fail", [record.status for record in records]
    judgement = records[-1].judgement
    assert judgement is not None
    assert judgement.rule == "state"
    assert "environment variables" in judgement.reason
    assert "torch.backends.cudnn.deterministic" in judgement.reason


def test_change_in_the_first_call_of_each_grad_mode_is_a_warning():
    """torch.compile behaves so: it compiles again when grad mode changes."""
    modes = set()

    def attention(query, key, value, is_causal=False):
        if torch.is_grad_enabled() not in modes:
            modes.add(torch.is_grad_enabled())
            sys.setrecursionlimit(sys.getrecursionlimit() + 1)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(query, key, value, is_causal=is_causal)

    case = Case(problem=SMALL.replace(kv_heads=4), question="state")
    with torch.enable_grad():
        record = run_case(make_subject(attention, "compiles"), case, device="cpu")
    assert modes == {True, False}
    assert record.status == "pass", record.judgement
    (warning,) = record.judgement.warnings
    assert warning.startswith("its first call changed the recursion limit")


def test_change_in_the_first_call_only_is_a_warning():
    record = run_check(planted.Changing("the default dtype", once=True), "state")
    assert record.status == "pass"
    assert record.judgement.warnings == (
        "its first call changed the default dtype, and a further one did not",
    )


@pytest.mark.parametrize(
    ("resource", "reason"),
    [
        ("descriptor", "file descriptors"),
        ("thread", "threads"),
        ("child", "child processes"),
        ("tensor", "bytes of tensors"),
    ],
)
def test_leak_fails(resource, reason):
    kernel = planted.Keeping(resource)
    try:
        record = run_check(kernel, "leaks")
    finally:
        kernel.close()
    assert (record.status, record.judgement.rule) == ("fail", "leak")
    assert reason in record.judgement.reason


def test_check_record_encodes_as_json():
    import msgspec

    record = run_check(planted.ByteAfter(), "guards")
    assert json.loads(msgspec.json.encode(record))["case"]["question"] == "guards"


BROKEN_HEAP = """
import ctypes
from attncheck.verify.process_effects import stir_heap
stir_heap()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
# Two freed blocks, adjacent in the allocator's free list; the second one's links are overwritten.
blocks = [libc.malloc(4096) for _ in range(4)]
libc.free(blocks[0])
libc.free(blocks[2])
ctypes.memset(blocks[2], 255, 16)
print("returned", flush=True)
stir_heap()
print("unnoticed", flush=True)
"""


def test_stir_heap_crashes_process_with_corrupted_heap():
    """Corruption that went unnoticed when the call returned must not surface in a later case."""
    done = subprocess.run(
        [sys.executable, "-c", BROKEN_HEAP], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "returned\n"
    assert done.returncode < 0
