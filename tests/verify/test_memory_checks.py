"""Guard bands, poison, the state of a process, leaks: each check and the fault it is for."""

import contextlib
import ctypes
import json
import subprocess
import sys

import pytest
import torch
from tests.verify import planted_calls_of_memory as planted
from tests.verify.asked_checks import RIGHT, SMALL, ask, ready

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
OF_MEMORY = [name for name, check in CHECKS.items() if check.stage == "memory"]


@pytest.mark.parametrize("question", OF_MEMORY)
@pytest.mark.parametrize("kernel", RIGHT)
def test_a_right_kernel_passes(kernel, question):
    ready(kernel)
    problem = SMALL.replace(query=17, kv=20, head_dim=16, value_dim=16, dtype="fp16")
    record = ask(kernel, question, problem)
    said = record.judgement.reason if record.judgement else ""
    unreached = record.status == "inconclusive" and UNREACHED in said and question == "unwritten"
    assert record.status == "pass" or unreached, (record.reason, said)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("question", OF_MEMORY)
def test_a_kernel_that_allocates_its_outputs_passes(question, dtype):
    record = ask(planted.Allocating(), question, SMALL.replace(dtype=dtype))
    assert (record.status, record.judgement.warnings) == ("pass", ())


LAST_ROW = "left 24 of 120 elements of out, first [0, 0, 4, 0], unwritten"
FOUND = [
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
@pytest.mark.parametrize(("question", "fault", "said"), FOUND)
def test_a_planted_fault_is_found(question, fault, said, dtype):
    record = ask(getattr(planted, fault)(), question, SMALL.replace(dtype=dtype))
    assert (record.status, record.judgement.rule) == ("fail", "memory")
    assert said in record.judgement.reason
    assert ("out-of-bounds write" in record.judgement.reason) == (question == "guards")


def test_the_two_patterns_agree_in_no_byte():
    one, other = (pattern(7, 200_000, torch.device("cpu"), fill) for fill in ("pattern", "inverse"))
    assert bool((one ^ other == 0xFF).all())
    assert len(one.unique()) == 256


def test_a_write_between_the_elements_of_an_input_is_found():
    gapped = RELATIONS["strides_gapped"].runs(inputs_room.draw_inputs(SMALL), {})[1]
    guards = GuardBands("pattern", torch.device("cpu"))
    given = guards.copied(gapped)
    assert [guards.look(), given.k.stride()] == ["", gapped.k.stride()]
    ctypes.memset(given.k[0, 0, 0].data_ptr() + given.k.shape[-1] * 2, 0x11, 1)
    assert guards.look() == "wrote 1 byte between elements of its input k"


def test_what_has_no_guard_bands_is_said():
    record = ask("sdpa-flash", "guards", SMALL.replace(value_dim=6))
    assert record.status == "pass"
    assert record.judgement.warnings == (
        "no guard bands around out: torch did not ask Python for that memory",
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_torch_s_fill_nothing_passes(dtype, monkeypatch):
    """As glibc gives what was just freed: it may hold the right numbers of the call before."""
    monkeypatch.setattr(memory_patterns, "_torch_flag", lambda fill: None)
    for fault in (planted.LastRowByItself(), planted.ByItself()):
        assert ask(fault, "unwritten", SMALL.replace(dtype=dtype)).status != "pass"


@pytest.mark.parametrize("fault", ["KeptOutput", "NumpyOutput"])
def test_memory_that_nobody_filled_is_said(fault):
    record = ask(getattr(planted, fault)(), "unwritten", SMALL.replace(dtype="fp32"))
    assert (record.status, record.judgement.rule) == ("inconclusive", "memory")
    assert record.judgement.reason == f"out {UNREACHED}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_cpp_allocates_is_filled(dtype):
    if memory_patterns._torch_flag("pattern") is None:
        pytest.skip("this torch does not fill what it allocates")
    assert ask(planted.ByItself(), "unwritten", SMALL.replace(dtype=dtype)).status == "pass"


@pytest.mark.parametrize(
    ("kernel", "question"),
    [
        (planted.EmptyUnused(), "unwritten"),  # what nobody wrote may be read and masked
        (planted.Keeping("tensor", most=6), "leaks"),  # a cache that fills: nothing in the end
    ],
)
def test_what_is_no_fault_passes(kernel, question):
    assert ask(kernel, question).status == "pass"


@pytest.mark.parametrize("part", planted.STATES)
def test_a_changed_process_is_found_and_put_right(part):
    before = process_state(torch.device("cpu"))
    record = ask(planted.Changing(part), "state")
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
def test_what_earlier_calls_have_changed_already_is_found(isolated, tmp_path):
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
        said = [
            run_case(subject, Case(problem=problem, question=each), device="cpu", executor=executor)
            for each in ("guards", "compare", "state")
        ]
    assert said[-1].status == "fail", [record.status for record in said]
    found = said[-1].judgement
    assert found is not None
    assert found.rule == "state"
    assert "environment variables" in found.reason
    assert "torch.backends.cudnn.deterministic" in found.reason


def test_what_the_first_call_in_each_mode_changes_is_a_warning():
    """As torch.compile does, which compiles once more where grad mode is another."""
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
    (said,) = record.judgement.warnings
    assert said.startswith("its first call changed the recursion limit")


def test_what_the_first_call_alone_changes_is_a_warning():
    record = ask(planted.Changing("the default dtype", once=True), "state")
    assert record.status == "pass"
    assert record.judgement.warnings == (
        "its first call changed the default dtype, and a further one did not",
    )


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("descriptor", "file descriptors"),
        ("thread", "threads"),
        ("child", "child processes"),
        ("tensor", "bytes of tensors"),
    ],
)
def test_a_leak_is_found(what, said):
    kernel = planted.Keeping(what)
    try:
        record = ask(kernel, "leaks")
    finally:
        kernel.close()
    assert (record.status, record.judgement.rule) == ("fail", "leak")
    assert said in record.judgement.reason


def test_a_record_of_a_check_is_plain_data():
    import msgspec

    record = ask(planted.ByteAfter(), "guards")
    assert json.loads(msgspec.json.encode(record))["case"]["question"] == "guards"


BROKEN_HEAP = """
import ctypes
from attncheck.verify.process_effects import stir_heap
stir_heap()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
# Two blocks that nobody has any more, one after the other in the library's list.
blocks = [libc.malloc(4096) for _ in range(4)]
libc.free(blocks[0])
libc.free(blocks[2])
ctypes.memset(blocks[2], 255, 16)
print("returned", flush=True)
stir_heap()
print("unnoticed", flush=True)
"""


def test_what_a_call_breaks_of_the_heap_ends_its_process():
    """Which nothing had noticed when the call returned."""
    done = subprocess.run(
        [sys.executable, "-c", BROKEN_HEAP], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "returned\n"
    assert done.returncode < 0
