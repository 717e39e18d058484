"""Rows that 32 bits do not count up to, in memory that nobody takes."""

from pathlib import Path

import pytest
import torch
from tests.planted_kernels import kernel as planted

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

FAR, CAUSAL = relation_named("strides_far"), Spec.of("causal")
TENSORS = {"q": 0, "k": 1, "v": 2, "dout": 3}
INT32 = 2**31


def far(problem, name):
    """The tensor called ``name`` of the last run."""
    _, laid_out = FAR.runs(inputs_room.draw_inputs(problem), {"tensor": TENSORS[name]})
    return laid_out, laid_out.tensors()[name]


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_the_ideal_kernel_keeps_every_bit(name, dtype, small, ask):
    asked = small(CAUSAL, dtype=dtype, distribution="large_logits")
    assert ask(Ideal(), "strides_far", asked, tensor=TENSORS[name]) is None


@pytest.mark.parametrize("kernel", ["ideal", "triton-flash2", "sdpa-math"])
def test_gradients_are_kept_too(kernel, small, ask):
    asked = small(CAUSAL, batch=1, heads=2, dtype="fp32", backward=True)
    assert ask(kernel, "strides_far", asked, tensor=3) is None


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "e4m3"])
@pytest.mark.parametrize("name", TENSORS)
def test_offsets_of_32_bits_are_found(name, dtype, small, ask):
    backward = name == "dout"
    asked = small(dtype="fp32" if backward else dtype, backward=backward)
    found = ask(planted("WrappedOffsets"), "strides_far", asked, tensor=TENSORS[name])
    assert isinstance(found, Finding)


@pytest.mark.parametrize("length", [3, 4, 7, 70])
@pytest.mark.parametrize("name", TENSORS)
def test_a_wrapped_offset_is_inside(name, length, small):
    _, tensor = far(small(query=length, kv=length, backward=True), name)
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    row, last = tensor.stride(2), (length - 1) * tensor.stride(2)
    assert INT32 <= last < 2 * INT32  # as an int32 it is negative
    assert row < INT32
    assert tensor.storage_offset() + last - 2 * INT32 >= 0
    assert tensor.storage_offset() + last < elements
    assert row * tensor.element_size() % 16 == 0


def test_a_clone_is_as_far_apart_and_takes_no_more(small):
    laid_out, tensor = far(small(), "k")
    before = _resident()
    clone = laid_out.clone().k
    with GuardBands("pattern", tensor.device) as guards:
        guarded = guards.copied(laid_out).k
    for copy in (clone, guarded):
        assert torch.equal(copy, tensor)
        assert copy.stride() == tensor.stride()
        assert copy.storage_offset() == tensor.storage_offset()
        assert copy.data_ptr() != tensor.data_ptr()
    assert _resident() - before < 1 << 26


def test_no_kernel_is_blamed_for_too_small_a_machine(small, ask, monkeypatch):
    class Lacking(Ideal):
        def prepare(self, inputs):
            raise MemoryError

    found = ask(Lacking(), "strides_far", small(), tensor=0)
    assert (found.kind, "too small" in found.message) == ("refused", True)
    assert ask(Lacking(), "strides_gapped", small()).kind == "oom"

    def nothing(*_, **__):
        raise torch.OutOfMemoryError("48 GiB are needed, and 2 are free.")

    monkeypatch.setattr(strided_alloc, "reserve_memory", nothing)
    found = ask(Ideal(), "strides_far", small(), tensor=0)
    assert isinstance(found, Failure)
    assert "48 GiB are needed" in found.message


def test_in_its_own_question_no_memory_is_a_fault_of_ours(small, ask, monkeypatch):
    def nothing(*_):
        raise MemoryError

    monkeypatch.setattr(inputs_room, "draw_inputs", nothing)
    with pytest.raises(MemoryError):
        ask(Ideal(), "strides_gapped", small())
    case = Case(problem=small(), question="strides_gapped")
    record = run_case(Ideal(), case, device="cpu")
    assert (record.status, record.reason) == ("error", "out of memory for the relation")


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
