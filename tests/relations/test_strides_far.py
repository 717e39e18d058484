"""The relation ``strides_far``: rows over 2^31 elements apart, in memory that is only reserved."""

from pathlib import Path

import pytest
import torch
from tests.planted_kernels import kernel as planted_kernel

from attncheck.core import strided_alloc
from attncheck.core.mod_spec import Spec
from attncheck.inputs import input_tensors as inputs_room
from attncheck.inputs.problem import Case
from attncheck.relations import relation_named
from attncheck.relations.relation import Finding
from attncheck.subjects.ideal import Ideal
from attncheck.verify.executor import Failure
from attncheck.verify.memory_patterns import GuardBands
from attncheck.verify.run_case import run_case

STRIDES_FAR, CAUSAL = relation_named("strides_far"), Spec.of("causal")
TENSORS = {"q": 0, "k": 1, "v": 2, "dout": 3}
INT32 = 2**31


def far_inputs(problem, name):
    """The inputs of the last run, and their tensor ``name``."""
    _, inputs = STRIDES_FAR.runs(inputs_room.draw_inputs(problem), {"tensor": TENSORS[name]})
    return inputs, inputs.tensors()[name]


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_ideal_kernel_keeps_every_bit(name, dtype, small, ask):
    problem = small(CAUSAL, dtype=dtype, distribution="large_logits")
    assert ask(Ideal(), "strides_far", problem, tensor=TENSORS[name]) is None


@pytest.mark.parametrize("kernel", ["ideal", "triton-flash2", "sdpa-math"])
def test_right_kernel_keeps_gradients(kernel, small, ask):
    problem = small(CAUSAL, batch=1, heads=2, dtype="fp32", backward=True)
    assert ask(kernel, "strides_far", problem, tensor=3) is None


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "e4m3"])
@pytest.mark.parametrize("name", TENSORS)
def test_32_bit_offsets_are_found(name, dtype, small, ask):
    backward = name == "dout"
    problem = small(dtype="fp32" if backward else dtype, backward=backward)
    finding = ask(planted_kernel("WrappedOffsets"), "strides_far", problem, tensor=TENSORS[name])
    assert isinstance(finding, Finding)


@pytest.mark.parametrize("length", [3, 4, 7, 70])
@pytest.mark.parametrize("name", TENSORS)
def test_wrapped_offset_stays_inside_allocation(name, length, small):
    """A kernel with 32-bit offsets must read wrong numbers, not crash the process."""
    _, tensor = far_inputs(small(query=length, kv=length, backward=True), name)
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    row, last = tensor.stride(2), (length - 1) * tensor.stride(2)
    assert INT32 <= last < 2 * INT32  # as an int32 it is negative
    assert row < INT32
    assert tensor.storage_offset() + last - 2 * INT32 >= 0
    assert tensor.storage_offset() + last < elements
    assert row * tensor.element_size() % 16 == 0


def test_clone_keeps_strides_without_more_memory(small):
    inputs, tensor = far_inputs(small(), "k")
    before = _resident_bytes()
    clone = inputs.clone().k
    with GuardBands("pattern", tensor.device) as guards:
        guarded = guards.copied(inputs).k
    for copy in (clone, guarded):
        assert torch.equal(copy, tensor)
        assert copy.stride() == tensor.stride()
        assert copy.storage_offset() == tensor.storage_offset()
        assert copy.data_ptr() != tensor.data_ptr()
    assert _resident_bytes() - before < 1 << 26


def test_out_of_memory_is_refused_rather_than_failed(small, ask, monkeypatch):
    """With ``strides_far`` the machine may be too small; with others the kernel is at fault."""

    class OutOfMemory(Ideal):
        def prepare(self, inputs):
            raise MemoryError

    failure = ask(OutOfMemory(), "strides_far", small(), tensor=0)
    assert (failure.kind, "too small" in failure.message) == ("refused", True)
    assert ask(OutOfMemory(), "strides_gapped", small()).kind == "oom"

    def fail_to_reserve(*_, **__):
        raise torch.OutOfMemoryError("48 GiB are needed, and 2 are free.")

    monkeypatch.setattr(strided_alloc, "reserve_memory", fail_to_reserve)
    failure = ask(Ideal(), "strides_far", small(), tensor=0)
    assert isinstance(failure, Failure)
    assert "48 GiB are needed" in failure.message


def test_memory_error_in_our_own_code_is_an_error(small, ask, monkeypatch):
    def fail_to_draw(*_):
        raise MemoryError

    monkeypatch.setattr(inputs_room, "draw_inputs", fail_to_draw)
    with pytest.raises(MemoryError):
        ask(Ideal(), "strides_gapped", small())
    case = Case(problem=small(), question="strides_gapped")
    record = run_case(Ideal(), case, device="cpu")
    assert (record.status, record.reason) == ("error", "out of memory for the relation")


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
