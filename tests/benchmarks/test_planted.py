"""Planted faults are faults: they change what the right kernel gives, where they are meant to."""

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

# Inputs meant for a fault that ordinary ones do not show.
MEANT = dict.fromkeys(("m from 0", "finite mask value", "all-negative rows"), "negative_logits")
MEANT |= {"no fp8 prescale": "large_logits"}


def inputs_for(fault, dtype, distribution=None):
    """200 keys: a ragged last tile of 8; a scale that is no power of two."""
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
            distribution=distribution or MEANT.get(fault.name, "normal"),
        )
    )


def twin(fault):
    return Ideal(dataclasses.replace(TILING, lazy_rescale=fault.kernel.lazy))


def same(a, b):
    return torch.equal(a.out, b.out) and torch.equal(a.lse, b.lse)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_the_output_of_every_dtype_that_it_concerns(fault):
    for dtype in fault.dtypes:
        inputs = inputs_for(fault, dtype)
        assert not same(fault.kernel().run(inputs), twin(fault).run(inputs)), dtype


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_gives_the_same_twice(fault):
    inputs = inputs_for(fault, fault.dtypes[-1])
    call = fault.kernel().prepare(inputs)
    first = call()
    assert same(first, call())
    assert same(first, fault.kernel().run(inputs))


def test_the_base_of_the_faults_is_right():
    inputs = inputs_for(FAULTS[0], "bf16")
    assert same(planted.Planted().run(inputs), Ideal(TILING).run(inputs))


def test_every_wrong_kernel_has_a_row_of_its_own():
    kernels = [fault.kernel for fault in FAULTS]
    written = {
        kernel
        for room in (wrong_arithmetic, wrong_structure)
        for kernel in vars(room).values()
        if isinstance(kernel, type) and issubclass(kernel, planted.Planted)
    }
    assert len(set(kernels)) == len(kernels)
    assert written - set(kernels) == {planted.Planted, wrong_structure.Unrescaled}
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert all(fault.summary for fault in FAULTS)


@pytest.mark.parametrize("name", ["alpha skipped", "l skipped", "alpha skipped once"])
def test_a_skipped_rescaling_does_nothing_where_the_maximum_stays(name):
    fault = next(fault for fault in FAULTS if fault.name == name)
    inputs = inputs_for(fault, "bf16", "zero_q")
    assert same(fault.kernel().run(inputs), twin(fault).run(inputs))
