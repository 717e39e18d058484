"""The peers' rules pass what they are meant to pass and refuse what they are meant to refuse."""

from __future__ import annotations

import pytest
import torch
from peers import PEERS, PeerReference

from attncheck import oracles
from attncheck.core.formats import round_to
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.mods.spec import Spec

DTYPES = ("fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2")
NO_LSE = ("2×", "3×", "1.1× mean", "ε·Σp|v|", "oneDNN")


def given(dtype="bf16", **changes):
    mask = Spec.of("causal_bottom_right")
    problem = Problem(heads=2, kv_heads=1, query=16, kv=100, head_dim=80, dtype=dtype, mask=mask)
    inputs = draw_inputs(problem.replace(**changes))
    return PeerReference(inputs, oracles.truth(inputs))


def best(facts):
    """The truth, rounded once."""
    output = facts.inputs.problem.formats.output
    out = round_to(facts.truth.out, output).to(output.torch_dtype)
    return Outputs(out, facts.truth.lse.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", PEERS)
def test_the_truth_rounded_once_passes(rule, dtype):
    facts = given(dtype)
    assert PEERS[rule](best(facts), facts)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 100.0])
@pytest.mark.parametrize("rule", PEERS)
def test_one_wrong_element_is_refused(rule, wrong):
    """Except by a mean, when it is finite and small beside all the others' sum."""
    facts = given("fp16")
    outputs = best(facts)
    outputs.out[0, 1, 3, 5] = wrong
    assert not PEERS[rule](outputs, facts)


@pytest.mark.parametrize("rule", PEERS)
def test_who_looks_at_lse(rule):
    facts = given()
    outputs = best(facts)
    wrong = Outputs(outputs.out, outputs.lse * 1.4)
    assert PEERS[rule](wrong, facts) == (rule in NO_LSE)


def test_a_kernel_without_lse_is_judged_by_out():
    facts = given()
    assert all(rule(Outputs(best(facts).out, None), facts) for rule in PEERS.values())


def test_the_flash_attention_rule_is_twice_the_error_of_the_unfused_formula():
    facts = given("fp16", distribution="large_logits")
    unfused = facts.unfused.half()
    error = (unfused - facts.out).abs().max()
    place = torch.zeros_like(facts.out)
    place[0, 0, 2, 1] = error

    def shifted(times):
        return Outputs((facts.out + times * place).half(), None)

    assert PEERS["2×"](shifted(1), facts)
    assert not PEERS["2×"](shifted(64), facts)
    assert PEERS["3×"](Outputs(unfused, None), facts)


def test_the_mean_rule_looks_at_the_mean():
    facts = given()
    error = (facts.eager.double() - facts.truth.out).abs().mean()
    assert PEERS["1.1× mean"](Outputs(facts.truth.out + error, None), facts)
    assert not PEERS["1.1× mean"](Outputs(facts.truth.out + 1.2 * error, None), facts)


def test_the_floor_of_an_element_is_its_weighted_magnitude():
    facts = given("fp32")
    floor = 2.0**-23 * facts.magnitude
    inside, outside = (Outputs(facts.truth.out + times * floor, None) for times in (0.5, 2.0))
    assert PEERS["ε·Σp|v|"](inside, facts)
    assert not PEERS["ε·Σp|v|"](outside, facts)


def test_rows_that_see_nothing_are_no_error_of_the_references():
    facts = given(query=100, kv=20)
    assert (facts.unfused[:, :, :80] == 0).all()
    assert all(rule(best(facts), facts) for rule in PEERS.values())
