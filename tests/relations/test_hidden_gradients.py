"""dQ of a row does not depend on the keys that are hidden from it, even if they are NaN."""

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


def leaking_kernel(**promises):
    """A kernel in which every key adds 0 times itself to dQ of every row."""

    def add_leak(inputs, right):
        leak = by_query_head(inputs, (inputs.k.float() * 0.0).sum(2, keepdim=True))
        return replace(right, dq=(right.dq + leak).to(right.dq.dtype))

    return spoiled(add_leak, **promises)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kernel", ["ideal", "triton-flash2"])
def test_right_kernel_passes(kernel, dtype, small, ask):
    problem = small(CAUSAL, batch=1, heads=2, dtype=dtype, score=CAPPED, backward=True)
    assert ask(kernel, "hidden_keys_nan", problem, row=2) is None


@pytest.mark.parametrize("kernel", [leaking_kernel(), leaking_kernel(promises_gradients=False)])
def test_nan_in_dq_is_found(kernel, small, ask):
    finding = ask(kernel, "hidden_keys_nan", small(CAUSAL, backward=True), row=2)
    assert isinstance(finding, Finding)
    assert (finding.tensor, finding.place[2]) == ("dq", 2)


def test_dq_bits_are_compared_only_if_promised(small):
    problem = small(CAUSAL, dtype="fp32", backward=True)
    case = Case(problem=problem, question="hidden_keys_nan", parameters={"row": 2})

    def perturb(right, number):
        """Change dQ by a rounding in every other call, as atomic sums do."""
        return replace(right, dq=right.dq * (1 + number % 2 * 2.0**-22))

    kernel = spoiled(in_turns(perturb), promises_gradients=False)
    assert run_case(kernel, case, device="cpu").status == "pass"
    kernel.promises_gradients = True
    assert run_case(kernel, case, device="cpu").status == "fail"


def test_captured_gradients_use_bounds_of_first_run(small, ask):
    """They are compared within bounds, and inputs with NaN have none."""
    score = Spec.of("chain", Spec.of("alibi"), CAPPED)
    problem = small(CAUSAL, dtype="fp32", score=score, backward=True, dcaptured=True)
    assert ask(Ideal(), "hidden_keys_nan", problem, row=2) is None


def test_dk_and_dv_are_not_compared(small, ask):
    def poison_dk(inputs, right):
        nan = torch.full_like(right.dk, torch.nan)
        return replace(right, dk=nan if inputs.k.isnan().any() else right.dk)

    assert ask(spoiled(poison_dk), "hidden_keys_nan", small(CAUSAL, backward=True), row=2) is None
