"""Rules of other libraries' tests, also for gradients: what they pass and what they reject."""

import pytest
import torch
from peers import PEERS, PeerReference

from attncheck import oracles
from attncheck.core.formats import round_to
from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.faults.peer_rules import RULES
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.subjects.torch_kernels import Sdpa

DTYPES = ("fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2")
RULES_WITHOUT_LSE = ("2×", "3×", "1.1× mean", "ε·Σp|v|", "oneDNN")


def make_reference(dtype="bf16", **changes):
    mask = Spec.of("causal_bottom_right")
    problem = Problem(heads=2, kv_heads=1, query=16, kv=100, head_dim=80, dtype=dtype, mask=mask)
    inputs = draw_inputs(problem.replace(**changes))
    return PeerReference(inputs, oracles.truth(inputs))


def make_gradient_reference(dtype="bf16", **changes):
    problem = Problem(heads=4, kv_heads=2, query=16, kv=50, head_dim=24, dtype=dtype, backward=True)
    inputs = draw_inputs(problem.replace(**({"mask": Spec.of("causal_bottom_right")} | changes)))
    return PeerReference(inputs, oracles.truth(inputs))


def rounded_truth(facts):
    """Return the exact outputs, and gradients if there are any, rounded once."""
    output = facts.inputs.problem.formats.output
    rounded = {
        name: round_to(exact, output).to(output.torch_dtype)
        for name, exact in facts.truth.tensors().items()
        if name != "lse"
    }
    return Outputs(lse=facts.truth.lse.float(), **rounded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", PEERS)
def test_truth_rounded_once_passes(rule, dtype):
    facts = make_reference(dtype)
    assert PEERS[rule](rounded_truth(facts), facts)


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16"])
@pytest.mark.parametrize("rule", RULES)
def test_true_gradients_rounded_once_pass(rule, dtype):
    facts = make_gradient_reference(dtype)
    assert RULES[rule].gradients(rounded_truth(facts), facts)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 100.0])
@pytest.mark.parametrize("rule", PEERS)
def test_one_wrong_element_is_rejected(rule, wrong):
    """A rule about the mean also rejects it, since it is large beside the sum of all errors."""
    facts = make_reference("fp16")
    outputs = rounded_truth(facts)
    outputs.out[0, 1, 3, 5] = wrong
    assert not PEERS[rule](outputs, facts)


@pytest.mark.parametrize("rule", PEERS)
def test_only_some_rules_check_lse(rule):
    facts = make_reference()
    outputs = rounded_truth(facts)
    wrong = Outputs(outputs.out, outputs.lse * 1.4)
    assert PEERS[rule](wrong, facts) == (rule in RULES_WITHOUT_LSE)


def test_kernel_without_lse_is_judged_by_out():
    facts = make_reference()
    assert all(rule(Outputs(rounded_truth(facts).out, None), facts) for rule in PEERS.values())


def test_flash_attention_rule_allows_twice_the_error_of_the_unfused_formula():
    facts = make_reference("fp16", distribution="large_logits")
    unfused = facts.unfused.half()
    error = (unfused - facts.out).abs().max()
    place = torch.zeros_like(facts.out)
    place[0, 0, 2, 1] = error

    def shifted(times):
        return Outputs((facts.out + times * place).half(), None)

    assert PEERS["2×"](shifted(1), facts)
    assert not PEERS["2×"](shifted(64), facts)
    assert PEERS["3×"](Outputs(unfused, None), facts)


def test_mean_rule_limits_the_mean_error():
    facts = make_reference()
    error = (facts.eager.double() - facts.truth.out).abs().mean()
    assert PEERS["1.1× mean"](Outputs(facts.truth.out + error, None), facts)
    assert not PEERS["1.1× mean"](Outputs(facts.truth.out + 1.2 * error, None), facts)


def test_weighted_magnitude_rule_limits_each_element_by_its_own_magnitude():
    facts = make_reference("fp32")
    floor = 2.0**-23 * facts.magnitude
    inside, outside = (Outputs(facts.truth.out + times * floor, None) for times in (0.5, 2.0))
    assert PEERS["ε·Σp|v|"](inside, facts)
    assert not PEERS["ε·Σp|v|"](outside, facts)


def test_rows_without_keys_are_zero_in_the_references():
    facts = make_reference(query=100, kv=20)
    assert (facts.unfused[:, :, :80] == 0).all()
    assert all(rule(rounded_truth(facts), facts) for rule in PEERS.values())


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("wrong", [float("nan"), 1000.0])
def test_one_wrong_element_of_any_gradient_is_rejected(rule, name, wrong):
    facts = make_gradient_reference("fp16")
    outputs = rounded_truth(facts)
    outputs.gradients()[name][0, 1, 3, 5] = wrong
    assert not RULES[rule].gradients(outputs, facts)


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
def test_unfused_fp32_gradients_are_near_the_exact_ones(changes):
    facts = make_gradient_reference("fp32", **changes)
    for name, exact in facts.gradients.items():
        error = (facts.unfused_gradients[name] - exact).abs().max() / exact.abs().max()
        assert error < 2.0**-18, name


def test_unfused_bf16_gradients_are_about_as_wrong_as_torchs():
    """torch's unfused backward also rounds dP."""
    facts = make_gradient_reference("bf16", kv_heads=4, query=50, mask=Spec.of("full"))
    torchs = Sdpa("math").run(facts.inputs).gradients()
    for name, exact in facts.truth.gradients().items():
        error, torchs_error = (
            (gradients[name].double() - exact).norm()
            for gradients in (facts.unfused_gradients, torchs)
        )
        assert 0.3 < float(error / torchs_error) < 3, name


def test_unfused_gradients_themselves_pass_the_flash_attention_rule():
    facts = make_gradient_reference("fp16")
    unfused = {name: gradient.half() for name, gradient in facts.unfused_gradients.items()}
    assert RULES["2×"].gradients(Outputs(facts.truth.out, None, **unfused), facts)
