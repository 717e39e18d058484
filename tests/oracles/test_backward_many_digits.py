"""Gradients in many digits equal difference quotients of the loss, and lie in the balls."""

import math

import numpy as np
import pytest
from tests.oracles.conftest import assert_balls_contain, make_numbers

from attncheck import oracles
from attncheck.core.errors import UsageError
from attncheck.core.mod_spec import Spec
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.mods.mpmath_algebra import MPMATH
from attncheck.oracles.backward_recurrences import dense_backward, flash2_backward
from attncheck.oracles.mp_numbers import Mp
from attncheck.oracles.recurrence_steps import Scores, safe, sink_of

DIGITS, STEP, PROMISED = 50, -15, -25  # error of a central difference: h² · third derivative

CASES = {
    "plain": {},
    "causal, a group": {"heads": 2, "mask": Spec.of("causal")},
    "softcap": {"score": Spec.of("softcap", cap=1.5), "mask": Spec.of("causal")},
    "alibi, sink": {"score": Spec.of("alibi"), "sink": True, "heads": 2},
    "window with dead rows": {"query": 5, "kv": 2, "mask": Spec.of("sliding_window", window=2)},
    "two sequences, sink": {"batch": 2, "sink": True, "mask": Spec.of("padding", lengths=[0, 2])},
    "no loss of LSE": {"dlse": False},
    "piecewise": {"score": Spec.of("expression", text="where(score > 0, score, score * 0.5)")},
}


def _inputs(**changes):
    sizes = {"query": 3, "kv": 4, "head_dim": 2, "value_dim": 3, "kv_heads": 1}
    return draw_inputs(Problem(**(sizes | {"backward": True, "dlse": True} | changes)))


def _loss(mp, inputs, tensors):
    """Σ dout·out + Σ dLSE·LSE over the rows with an LSE, from the forward's definition alone."""
    problem = inputs.problem
    k, v = (mp.repeat_heads(tensors[name], problem.group) for name in "kv")
    every = range(problem.query), range(problem.kv)
    scores, attended = Scores.of(mp, inputs)(tensors["q"], k, *every)
    weights, lse = safe(mp, scores, attended, tensors.get("sink"))
    out = mp.weigh(weights, v, attended)
    dout, dlse = (mp.exact(x) for x in inputs.loss())
    alive = mp.select(~mp.is_minus_infinity(lse), lse, 0.0)
    return (dout * out).sum() + (dlse[..., None] * alive).sum()


def _quotients(mp, inputs, name):
    """The central difference of the loss by each element of one tensor."""
    tensors = {n: mp.exact(x) for n, x in zip("qkv", inputs.promoted(), strict=True)}
    if inputs.sink is not None:
        tensors["sink"] = sink_of(mp, inputs)
    step, quotients = mp.context.mpf(10) ** STEP, np.empty_like(tensors[name])
    for place in np.ndindex(quotients.shape):
        ends = []
        for sign in (1, -1):
            moved = tensors[name].copy()
            moved[place] = moved[place] + sign * step
            ends.append(_loss(mp, inputs, tensors | {name: moved}))
        quotients[place] = (ends[0] - ends[1]) / (2 * step)
    return quotients


def _distance(mp, one, exact):
    """log10 of the largest error, relative to the exact numbers or to 1."""
    sizes = [max(1, abs(x)) for x in exact.flat]
    largest = max(abs(x - y) / s for x, y, s in zip(one.flat, exact.flat, sizes, strict=True))
    return float(mp.context.log10(largest)) if largest else -math.inf


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_gradients_equal_difference_quotients(changes):
    inputs, mp = _inputs(**changes), Mp(DIGITS, MPMATH.score, MPMATH.slope)
    results = {
        "dense": dense_backward(mp, inputs),
        "flash2": flash2_backward(mp, inputs, block_query=2, block_kv=3),
    }
    for name in ["q", "k", "v"] + ["sink"] * inputs.problem.sink:
        exact = _quotients(mp, inputs, name)
        for by, gradients in results.items():
            one = getattr(gradients, f"d{name}")
            assert _distance(mp, one, exact) <= PROMISED, (by, name)
        both = [getattr(gradients, f"d{name}") for gradients in results.values()]
        assert _distance(mp, *both) <= -40, name
    rounded = results["dense"].rounded(mp)
    for by, backward in oracles.BACKWARDS.items():
        for name, tensor in backward(inputs).gradients().items():
            other = rounded.gradients()[name]
            # A hundred roundings of numbers near 1; a fault would make far larger errors.
            assert (tensor - other).abs().max() <= 100 * 2.0**-53 * max(1, other.abs().max()), by


FAULTS = {
    "delta": ("(dp + rows)", "dp"),
    "f'": (" * tile.slopes, 0.0)\n    by", ", 0.0)\n    by"),
    "scale": ("q, by_key) * problem.scale", "q, by_key)"),
    "dLSE": ("dout, dlse, attended", "dout, dlse * 0.0, attended"),
}


@pytest.mark.parametrize(("right", "wrong"), FAULTS.values(), ids=FAULTS)
def test_planted_fault_differs_from_the_quotients(right, wrong, plant):
    from attncheck.oracles import backward_recurrences

    inputs, mp = _inputs(**CASES["softcap"]), Mp(30, MPMATH.score, MPMATH.slope)
    results = plant(backward_recurrences, right, wrong).dense_backward(mp, inputs)
    exact = {name: _quotients(mp, inputs, name) for name in "qk"}
    assert max(_distance(mp, getattr(results, f"d{n}"), x) for n, x in exact.items()) > -10


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_balls_contain_the_gradients(changes):
    ball, mp = (make_numbers(each, "score", "slope", digits=60) for each in ("Ball", "Mp"))
    inputs = _inputs(**changes)
    exact = dense_backward(mp, inputs)
    for backward in oracles.BACKWARD_RECURRENCES.values():
        balls = backward(ball, inputs)
        for name in ["dq", "dk", "dv"] + ["dsink"] * inputs.problem.sink:
            assert_balls_contain(getattr(balls, name).array.flat, getattr(exact, name).flat, mp)


@pytest.mark.parametrize("system", ["Mp", "Ball"])
def test_number_system_without_slope_refuses_a_score_mod(system):
    inputs = _inputs(score=Spec.of("softcap", cap=1.5))
    with pytest.raises(UsageError, match=f"needs {system}'s `slope`"):
        dense_backward(make_numbers(system, "score"), inputs)
