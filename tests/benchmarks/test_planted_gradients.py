"""Planted faults of a backward are faults of it: the forward is right, some gradient is another."""

import gradient_rules
import planted_gradients
import pytest
import torch
import wrong_gradient_arithmetic
import wrong_gradient_sums
import wrong_gradients
from planted_gradients import FAULTS, KINDS
from wrong_structure import TILING

from attncheck.inputs.input_tensors import draw_inputs
from attncheck.subjects.ideal import Ideal


def inputs_for(fault, dtype):
    """90 keys: a ragged second tile of 26."""
    return draw_inputs(gradient_rules.Task("cpu", dtype, 90, 0, fault.kind).problem)


def same(a, b):
    """Of a padded row NaN is the same as NaN."""
    return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_a_gradient_and_nothing_else(fault):
    dtype = fault.dtypes[-1]
    inputs = inputs_for(fault, dtype)
    right, wrong = Ideal(TILING).run(inputs), fault.kernel().run(inputs)
    assert same(right.out, wrong.out)
    assert same(right.lse, wrong.lse)
    assert list(right.gradients()) == list(wrong.gradients())
    moved = {
        name
        for name, gradient in right.gradients().items()
        if not same(gradient, wrong.gradients()[name])
    }
    assert moved
    assert moved <= set(fault.kernel.only)


def test_the_base_of_the_faults_is_right():
    for kind in KINDS:
        inputs = draw_inputs(gradient_rules.Task("cpu", "bf16", 70, 0, kind).problem)
        right = Ideal(TILING).run(inputs).tensors()
        found = wrong_gradients.WrongBackward().run(inputs).tensors()
        assert all(torch.equal(found[name], tensor) for name, tensor in right.items())


def test_every_wrong_backward_has_a_row_of_its_own():
    base = wrong_gradients.WrongBackward
    written = {
        kernel
        for room in (wrong_gradients, wrong_gradient_sums, wrong_gradient_arithmetic)
        for kernel in vars(room).values()
        if isinstance(kernel, type) and issubclass(kernel, base)
    }
    assert written - {fault.kernel for fault in FAULTS} == {base}
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {fault.kind for fault in FAULTS} == set(KINDS)
    assert all(fault.summary for fault in FAULTS)
    assert {dtype for fault in FAULTS for dtype in fault.dtypes} == set(planted_gradients.DTYPES)
