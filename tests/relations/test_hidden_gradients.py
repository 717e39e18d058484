"""dQ of a row knows nothing of the keys that are hidden from it, be they NaN."""

from dataclasses import replace

import pytest
import torch
from tests.planted_kernels.outputs_given import by_query_head, in_turns, spoiled

from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import Case
from attncheck.relations.relation import Finding
from attncheck.subjects.ideal import Ideal
from attncheck.verify.run_case import run_case

CAUSAL, CAPPED = Spec.of("causal"), Spec.of("softcap", cap=5.0)


def times_zero(**promises):
    """Every key adds 0 times itself to dQ of every row."""

    def leaking(inputs, right):
        leak = by_query_head(inputs, (inputs.k.float() * 0.0).sum(2, keepdim=True))
        return replace(right, dq=(right.dq + leak).to(right.dq.dtype))

    return spoiled(leaking, **promises)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kernel", ["ideal", "triton-flash2"])
def test_a_right_kernel_passes(kernel, dtype, small, ask):
    asked = small(CAUSAL, batch=1, heads=2, dtype=dtype, score=CAPPED, backward=True)
    assert ask(kernel, "hidden_keys_nan", asked, row=2) is None


@pytest.mark.parametrize("kernel", [times_zero(), times_zero(promises_gradients=False)])
def test_a_nan_in_dq_is_found(kernel, small, ask):
    found = ask(kernel, "hidden_keys_nan", small(CAUSAL, backward=True), row=2)
    assert isinstance(found, Finding)
    assert (found.tensor, found.place[2]) == ("dq", 2)


def test_bits_of_dq_are_for_who_promises_them(small):
    asked = small(CAUSAL, dtype="fp32", backward=True)
    case = Case(problem=asked, question="hidden_keys_nan", parameters={"row": 2})

    def rounding(right, number):
        """Every other call rounds dQ otherwise, as sums by atomics do."""
        return replace(right, dq=right.dq * (1 + number % 2 * 2.0**-22))

    kernel = spoiled(in_turns(rounding), promises_gradients=False)
    assert run_case(kernel, case, device="cpu").status == "pass"
    kernel.promises_gradients = True
    assert run_case(kernel, case, device="cpu").status == "fail"


def test_what_is_added_up_in_any_order_has_bounds_of_the_first_run(small, ask):
    """Captured gradients are compared within bounds, which NaN has none of."""
    slopes = Spec.of("chain", Spec.of("alibi"), CAPPED)
    asked = small(CAUSAL, dtype="fp32", score=slopes, backward=True, dcaptured=True)
    assert ask(Ideal(), "hidden_keys_nan", asked, row=2) is None


def test_dk_and_dv_are_left_out(small, ask):
    def poisoned(inputs, right):
        worst = torch.full_like(right.dk, torch.nan)
        return replace(right, dk=worst if inputs.k.isnan().any() else right.dk)

    assert ask(spoiled(poisoned), "hidden_keys_nan", small(CAUSAL, backward=True), row=2) is None
