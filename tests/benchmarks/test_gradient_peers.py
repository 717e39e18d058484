"""The peers' rules for gradients pass what they are meant to pass and refuse the rest."""

from __future__ import annotations

import pytest
import torch
from peers import GRADIENT_PEERS as PEERS
from peers import PeerReference

from attncheck import oracles
from attncheck.core.formats import round_to
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.mods.spec import Spec
from attncheck.subjects.torch_kernels import Sdpa

DTYPES = ("fp32", "tf32", "fp16", "bf16")


def given(dtype="bf16", **changes):
    asked = Problem(heads=4, kv_heads=2, query=16, kv=50, head_dim=24, dtype=dtype, backward=True)
    inputs = draw_inputs(asked.replace(**({"mask": Spec.of("causal_bottom_right")} | changes)))
    return PeerReference(inputs, oracles.truth(inputs))


def best(facts):
    """The exact gradients, rounded once."""
    output = facts.inputs.problem.formats.output
    rounded = {
        name: round_to(exact, output).to(output.torch_dtype)
        for name, exact in facts.truth.gradients().items()
    }
    return Outputs(facts.truth.out, None, **rounded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", PEERS)
def test_the_truth_rounded_once_passes(rule, dtype):
    facts = given(dtype)
    assert PEERS[rule](best(facts), facts)


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
@pytest.mark.parametrize("rule", PEERS)
def test_one_wrong_element_of_any_gradient_is_refused(rule, name):
    for wrong in (float("nan"), 1000.0):
        facts = given("fp16")
        outputs = best(facts)
        outputs.gradients()[name][0, 1, 3, 5] = wrong
        assert not PEERS[rule](outputs, facts)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"score": Spec.of("softcap", cap=2.0)},
        {"score": Spec.of("alibi"), "dlse": True},
        {"sink": True, "dlse": True, "batch": 2},
        {"kv_heads": 4, "value_dim": 40},
    ],
    ids=str,
)
def test_the_unfused_formula_is_right(changes):
    """In fp32 as near to the exact gradients as fp32 is."""
    facts = given("fp32", **changes)
    for name, exact in facts.gradients.items():
        error = (facts.unfused_gradients[name] - exact).abs().max() / exact.abs().max()
        assert error < 2.0**-18, name


def test_the_unfused_formula_is_torchs_in_bf16():
    """torch's own unfused backward, which rounds dP too, is as far from the exact gradients."""
    facts = given("bf16", kv_heads=4, query=50, mask=Spec.of("full"))
    torchs = Sdpa("math").run(facts.inputs).gradients()
    for name, exact in facts.truth.gradients().items():
        own, its = ((x[name].double() - exact).norm() for x in (facts.unfused_gradients, torchs))
        assert 0.3 < float(own / its) < 3, name


def test_twice_the_error_of_the_unfused_formula_is_allowed():
    facts = given("fp16")
    wrong = Outputs(
        facts.truth.out, None, **{n: x.half() for n, x in facts.unfused_gradients.items()}
    )
    assert PEERS["2×"](wrong, facts)
    assert torch.equal(wrong.dq, facts.unfused_gradients["dq"].half())
