"""The peers' rules, of gradients too, pass what they are meant to pass and refuse the rest."""

import pytest
import torch
from peers import PEERS, PeerReference

from attncheck import oracles
from attncheck.core.formats import round_to
from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.faults.peer_rules import GRADIENT_RULES
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.subjects.torch_kernels import Sdpa

DTYPES = ("fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2")
NO_LSE = ("2×", "3×", "1.1× mean", "ε·Σp|v|", "oneDNN")


def given(dtype="bf16", **changes):
    mask = Spec.of("causal_bottom_right")
    problem = Problem(heads=2, kv_heads=1, query=16, kv=100, head_dim=80, dtype=dtype, mask=mask)
    inputs = draw_inputs(problem.replace(**changes))
    return PeerReference(inputs, oracles.truth(inputs))


def of_gradients(dtype="bf16", **changes):
    asked = Problem(heads=4, kv_heads=2, query=16, kv=50, head_dim=24, dtype=dtype, backward=True)
    inputs = draw_inputs(asked.replace(**({"mask": Spec.of("causal_bottom_right")} | changes)))
    return PeerReference(inputs, oracles.truth(inputs))


def best(facts):
    """The truth, rounded once; gradients too where there are any."""
    output = facts.inputs.problem.formats.output
    rounded = {
        name: round_to(exact, output).to(output.torch_dtype)
        for name, exact in facts.truth.tensors().items()
        if name != "lse"
    }
    return Outputs(lse=facts.truth.lse.float(), **rounded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", PEERS)
def test_the_truth_rounded_once_passes(rule, dtype):
    facts = given(dtype)
    assert PEERS[rule](best(facts), facts)


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16"])
@pytest.mark.parametrize("rule", GRADIENT_RULES)
def test_gradients_rounded_once_pass(rule, dtype):
    facts = of_gradients(dtype)
    assert GRADIENT_RULES[rule](best(facts), facts)


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


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
@pytest.mark.parametrize("rule", GRADIENT_RULES)
def test_one_wrong_element_of_any_gradient_is_refused(rule, name):
    for wrong in (float("nan"), 1000.0):
        facts = of_gradients("fp16")
        outputs = best(facts)
        outputs.gradients()[name][0, 1, 3, 5] = wrong
        assert not GRADIENT_RULES[rule](outputs, facts)


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
def test_the_unfused_gradients_are_right(changes):
    """In fp32 as near to the exact gradients as fp32 is."""
    facts = of_gradients("fp32", **changes)
    for name, exact in facts.gradients.items():
        error = (facts.unfused_gradients[name] - exact).abs().max() / exact.abs().max()
        assert error < 2.0**-18, name


def test_the_unfused_gradients_are_torchs_in_bf16():
    """torch's own unfused backward, which rounds dP too, is as far from the exact gradients."""
    facts = of_gradients("bf16", kv_heads=4, query=50, mask=Spec.of("full"))
    torchs = Sdpa("math").run(facts.inputs).gradients()
    for name, exact in facts.truth.gradients().items():
        own, its = ((x[name].double() - exact).norm() for x in (facts.unfused_gradients, torchs))
        assert 0.3 < float(own / its) < 3, name


def test_twice_the_error_of_the_unfused_gradients_is_allowed():
    facts = of_gradients("fp16")
    wrong = Outputs(
        facts.truth.out, None, **{n: x.half() for n, x in facts.unfused_gradients.items()}
    )
    assert GRADIENT_RULES["2×"](wrong, facts)
    assert torch.equal(wrong.dq, facts.unfused_gradients["dq"].half())
