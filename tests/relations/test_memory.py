"""Strides, views, and what is left of another call."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attncheck.core.source_files import import_file
from attncheck.inputs import input_tensors as inputs_room
from attncheck.mods.spec import Spec
from attncheck.relations import RELATIONS, relation_named
from attncheck.relations.relation import Finding
from attncheck.subjects.ideal import Ideal
from attncheck.verify.executor import Failure

planted = import_file(Path(__file__).parent / "planted_memory.py", "planted faults")

CAUSAL = Spec.of("causal")
# Those that a whole buffer of is read here; ``strides_far`` has tests of its own.
STRIDES = [n for n in RELATIONS if n.startswith("strides_") and n != "strides_far"]


@pytest.mark.parametrize("question", [*STRIDES, "call_order"])
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2"])
def test_the_ideal_kernel_keeps_every_bit(question, dtype, small, ask, numbers) -> None:
    asked = small(CAUSAL, dtype=dtype, distribution="large_logits")
    for chosen in numbers(question, asked):
        assert ask(Ideal(), question, asked, **chosen) is None


@pytest.mark.parametrize("question", [*STRIDES, "call_order"])
def test_triton_flash2_keeps_every_bit(question, small, ask, numbers) -> None:
    asked = small(CAUSAL, batch=1, heads=2, kv_heads=2)
    assert ask("triton-flash2", question, asked, **numbers(question, asked)[-1]) is None


@pytest.mark.parametrize("question", [*STRIDES[::2], "call_order"])
def test_sdpa_passes(question, small, ask, numbers) -> None:
    asked = small(CAUSAL, dtype="fp16")
    assert ask("sdpa-math", question, asked, **numbers(question, asked)[-1]) is None


def test_strides_that_torch_does_not_take_are_refused(small, ask) -> None:
    found = ask("sdpa-flash", "strides_transposed", small(CAUSAL, value_dim=6))
    assert isinstance(found, Failure)
    assert found.kind == "refused"
    assert "stride 1" in found.message


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "e4m3"])
@pytest.mark.parametrize(
    ("fault", "question", "chosen"),
    [
        *(("Flat", question, {}) for question in STRIDES),
        ("FromTheStart", "strides_offset", {}),
        ("FromTheStart", "strides_packed", {}),
        ("WholeVectors", "strides_gapped", {}),
        *(("Leftover", "call_order", {"between": between}) for between in range(3)),
        ("StalePadding", "call_order", {"between": 2}),
    ],
)
def test_a_planted_fault_is_found(fault, question, chosen, dtype, small, ask) -> None:
    kernel = getattr(planted, fault)()
    assert isinstance(ask(kernel, question, small(dtype=dtype), **chosen), Finding)


@pytest.mark.parametrize("between", [0, 1])
def test_padding_is_stale_after_longer_calls_only(between, small, ask) -> None:
    assert ask(planted.StalePadding(), "call_order", small(), between=between) is None


@pytest.mark.parametrize("question", STRIDES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "e4m3"])
def test_a_kernel_gets_the_same_numbers_in_other_strides(question, dtype, small) -> None:
    drawn = inputs_room.draw_inputs(small(dtype=dtype))
    plain, laid_out = (each.clone() for each in relation_named(question).runs(drawn, {}))
    assert all(tensor.is_contiguous() for tensor in (plain.q, plain.k, plain.v))
    assert all(tensor.storage_offset() == 0 for tensor in (plain.q, plain.k, plain.v))
    for name in "qkv":
        one, other = getattr(plain, name), getattr(laid_out, name)
        assert torch.equal(one.float(), other.float())
    k = laid_out.k
    assert k.stride() != plain.k.stride() or k.storage_offset()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "e4m3"])
def test_no_vector_is_aligned_at_an_offset(dtype, small) -> None:
    laid_out = relation_named("strides_offset").runs(
        inputs_room.draw_inputs(small(dtype=dtype)), {}
    )[1]
    for tensor in (laid_out.q, laid_out.k, laid_out.v):
        start = tensor.data_ptr() - tensor.untyped_storage().data_ptr()
        assert start == tensor.element_size()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "e4m3", "e5m2"])
@pytest.mark.parametrize("question", ["strides_gapped", "strides_packed"])
def test_gaps_are_nan(question, dtype, small) -> None:
    laid_out = relation_named(question).runs(inputs_room.draw_inputs(small(dtype=dtype)), {})[1]
    tensors = (laid_out.q, laid_out.k, laid_out.v)
    numbers = sum(tensor.numel() for tensor in tensors)
    buffers = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    everything = torch.cat([planted.memory(t).float() for t in buffers.values()])
    assert int(everything.isfinite().sum()) == numbers < len(everything)


def test_one_row_and_one_key_have_no_shorter_call(small) -> None:
    assert relation_named("call_order").allowed(small(query=1, kv=1)) == {"between": (0,)}


@pytest.mark.parametrize("question", [*STRIDES, "call_order"])
def test_a_softmax_is_not_asked(question, softmax) -> None:
    assert relation_named(question).unfit(softmax()) == "it is about attention"
