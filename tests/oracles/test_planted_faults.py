"""Faults planted in copies of each recurrence's source exceed the error bounds."""

import pytest
from tests.oracles import gradients_by_torch as reference
from tests.oracles.conftest import PLANTED, SMALL

from attncheck import oracles
from attncheck.core.mod_spec import Spec
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.oracles import backward_recurrences, streaming_gradients
from attncheck.oracles import forward_recurrences as forwards
from attncheck.oracles import recurrence_steps as steps
from attncheck.oracles.float64_numbers import Float64
from attncheck.oracles.forward_recurrences import dense_attention
from attncheck.oracles.mp_numbers import Mp

Definition, tiny, allowed_of = reference.Definition, reference.tiny, reference.allowed


def forward(name, module):
    """The forward called ``name`` from ``module``, with blocks of 4 rows and 3 keys."""
    if name.startswith("split"):
        splits = int(name.removeprefix("split in "))
        return lambda numbers, inputs: module.split_forward(numbers, inputs, splits=splits)
    if name.startswith("flash"):
        blocks = {"block_query": 4, "block_kv": 3}
        return lambda numbers, inputs: getattr(module, f"{name}_forward")(numbers, inputs, **blocks)
    return lambda numbers, inputs: dense_attention(numbers, inputs, getattr(module, name))


def backward(name, module, inputs):
    numbers = Float64()
    if name == "streaming":
        return module.streaming_backward(inputs, blocks=SMALL)
    if name == "flash2":
        result = module.flash2_backward(numbers, inputs, block_query=4, block_kv=3)
    else:
        result = module.dense_backward(numbers, inputs)
    return result.rounded(numbers)


@pytest.mark.parametrize("fault", PLANTED["forward"])
@pytest.mark.parametrize("digits", [None, 30])
def test_fault_in_a_forward_exceeds_the_bounds(fault, digits, allowance, plant):
    name, right, wrong = PLANTED["forward"][fault].values()
    problem = Problem(heads=2, kv_heads=1, query=8, kv=8, head_dim=4, mask=Spec.of("causal"))
    inputs, numbers = draw_inputs(problem), Mp(digits) if digits else Float64()
    bound, truth = allowance(inputs), oracles.RECURRENCES[oracles.REFERENCE](numbers, inputs)

    def misses(module):
        result = forward(name, module)(numbers, inputs)
        if digits:
            return bound.misses_in_many_digits(numbers, result, truth)
        return bound.misses(result.rounded(numbers), truth.rounded(numbers))

    module = forwards if name.startswith(("flash", "split")) else steps
    if name != oracles.REFERENCE:
        assert not misses(module)
    assert misses(plant(module, right, wrong))


@pytest.mark.parametrize("fault", PLANTED["backward"])
def test_fault_in_a_backward_exceeds_the_bounds(fault, allowance, plant):
    name, right, wrong = PLANTED["backward"][fault].values()
    score = Spec.of("softcap", cap=1.5)
    inputs = tiny(mask=Spec.of("causal"), score=score, sink=True, query=11)
    exact, allowed = Definition.of(inputs).gradients(inputs), allowed_of(inputs, allowance)
    module = streaming_gradients if name == "streaming" else backward_recurrences
    assert allowed.misses(backward(name, plant(module, right, wrong), inputs), exact)


@pytest.mark.parametrize("fault", PLANTED["bounded"])
def test_fault_in_streaming_with_bounded_scores_exceeds_the_bounds(fault, allowance, plant):
    inputs = tiny(mask=Spec.of("causal"))
    exact, allowed = Definition.of(inputs).gradients(inputs), allowed_of(inputs, allowance)
    module = plant(streaming_gradients, *PLANTED["bounded"][fault].values())
    assert allowed.misses(backward("streaming", module, inputs), exact)
