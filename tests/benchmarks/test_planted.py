"""The benchmarks' planted faults: each changes the right kernel's output where it is meant to."""

import dataclasses

import planted
import pytest
import torch
import wrong_arithmetic
import wrong_structure
from planted import FAULTS, MASKS, TILING

from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.subjects.ideal import Ideal

# Distributions for faults that normal inputs do not show.
DISTRIBUTION = dict.fromkeys(
    ("m from 0", "finite mask value", "all-negative rows"), "negative_logits"
)
DISTRIBUTION |= {"no fp8 prescale": "large_logits"}


def inputs_for(fault, dtype, distribution=None):
    """Draw inputs with 200 keys, so the last tile has only 8, and a scale that is no power of 2."""
    heads, kv_heads = fault.heads
    return draw_inputs(
        Problem(
            heads=heads,
            kv_heads=kv_heads,
            query=200 if fault.mask == "window" else 64,
            kv=200,
            head_dim=80,
            dtype=dtype,
            mask=MASKS[fault.mask](200),
            distribution=distribution or DISTRIBUTION.get(fault.name, "normal"),
        )
    )


def right_kernel(fault):
    return Ideal(dataclasses.replace(TILING, lazy_rescale=fault.kernel.lazy))


def same(a, b):
    return torch.equal(a.out, b.out) and torch.equal(a.lse, b.lse)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_changes_the_output_in_each_of_its_dtypes(fault):
    for dtype in fault.dtypes:
        inputs = inputs_for(fault, dtype)
        assert not same(fault.kernel().run(inputs), right_kernel(fault).run(inputs)), dtype


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_gives_the_same_bits_in_every_run(fault):
    inputs = inputs_for(fault, fault.dtypes[-1])
    call = fault.kernel().prepare(inputs)
    first = call()
    assert same(first, call())
    assert same(first, fault.kernel().run(inputs))


def test_base_class_of_the_faults_is_the_ideal_kernel():
    inputs = inputs_for(FAULTS[0], "bf16")
    assert same(planted.Planted().run(inputs), Ideal(TILING).run(inputs))


def test_every_wrong_kernel_is_one_fault_with_a_name_and_a_summary():
    kernels = [fault.kernel for fault in FAULTS]
    classes = {
        kernel
        for module in (wrong_arithmetic, wrong_structure)
        for kernel in vars(module).values()
        if isinstance(kernel, type) and issubclass(kernel, planted.Planted)
    }
    assert len(set(kernels)) == len(kernels)
    assert classes - set(kernels) == {planted.Planted, wrong_structure.Unrescaled}
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert all(fault.summary for fault in FAULTS)


@pytest.mark.parametrize("name", ["alpha skipped", "l skipped", "alpha skipped once"])
def test_skipped_rescaling_changes_nothing_where_the_maximum_is_constant(name):
    fault = next(fault for fault in FAULTS if fault.name == name)
    inputs = inputs_for(fault, "bf16", "zero_q")
    assert same(fault.kernel().run(inputs), right_kernel(fault).run(inputs))
