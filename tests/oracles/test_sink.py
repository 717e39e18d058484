"""A sink acts as one more key of value 0: oracles against a slow loop that adds such a key."""

import math
from dataclasses import dataclass

import mpmath
import numpy as np
import pytest
import torch

from attncheck import oracles
from attncheck.core.mod_spec import Spec
from attncheck.inputs.input_tensors import Inputs, draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.oracles import forward_recurrences, recurrence_steps
from attncheck.oracles.float64_numbers import Float64
from attncheck.oracles.forward_recurrences import one_head
from attncheck.oracles.mp_numbers import Mp
from attncheck.oracles.row_conditions import all_rows
from attncheck.oracles.streaming_forward import Blocks

PROMISED = 1e-13  # the manual's promise for ordinary inputs
DIGITS = 50
ALLOWED_IN_DIGITS = mpmath.mpf(10) ** -45

# Each mask as a Python function of integers, for 7 queries and 5 keys.
MASKS = {
    Spec.of("full"): lambda _b, _i, _j: True,
    Spec.of("causal_bottom_right"): lambda _b, i, j: j <= i - 2,
    Spec.of("sliding_window", window=0): lambda _b, _i, _j: False,
    Spec.of("padding", lengths=[0, 3]): lambda b, _i, j: j < (0, 3)[b],
}
SINKS = {
    "drawn": None,
    "huge": [1e4, -1e4, 1e4, 0.0],
    "beyond exp": [700.0, -700.0, 1e30, -1e30],
    "none": [-math.inf, 2.0, -math.inf, -3.0],
}
MANY_TILES = Blocks(rows=24, query=4, query_most=8, kv=2, cell=1)
FINITE = {name: run for name, run in oracles.ORACLES.items() if name not in oracles.MAY_OVERFLOW}
ALL = FINITE | {"many tiles": lambda inputs: oracles.streaming(inputs, blocks=MANY_TILES)}
every_oracle = pytest.mark.parametrize("oracle", ALL.values(), ids=ALL.keys())


@dataclass
class Exact:
    """Object arrays of mpmath numbers: out ``(batch, heads, query, dim)``, LSE without dim."""

    out: np.ndarray
    lse: np.ndarray


def _inputs(mask: Spec, sinks: str = "drawn", **changes: object) -> Inputs:
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 7, "kv": 5, "head_dim": 4}
    inputs = draw_inputs(
        Problem(**(sizes | {"value_dim": 3, "mask": mask, "sink": True} | changes))
    )
    values = SINKS[sinks]
    return inputs if values is None else inputs.replace(sink=torch.tensor(values))


def _with_one_more_key(inputs: Inputs) -> Exact:
    """Attention with one more key that all rows see, of score sink[h] and value 0."""
    p, sees = inputs.problem, MASKS[inputs.problem.mask]
    q, k, v = (tensor.tolist() for tensor in inputs.promoted())
    out = np.empty((p.batch, p.heads, p.query, p.value_dim), dtype=object)
    lse = np.empty(out.shape[:3], dtype=object)
    with mpmath.workdps(DIGITS + 20):
        for b, h, i in np.ndindex(lse.shape):
            g = h * p.kv_heads // p.heads
            pairs = [
                (mpmath.fdot(q[b][h][i], k[b][g][j]) * p.scale, v[b][g][j])
                for j in range(p.kv)
                if sees(b, i, j)
            ]
            pairs.append((mpmath.mpf(inputs.sink[h].item()), [0.0] * p.value_dim))
            weights = [mpmath.exp(score) for score, _ in pairs]
            total = mpmath.fsum(weights)
            lse[b, h, i] = mpmath.log(total) if total else mpmath.ninf
            for d in range(p.value_dim):
                terms = (w * value[d] for w, (_, value) in zip(weights, pairs, strict=True))
                out[b, h, i, d] = mpmath.fsum(terms) / total if total else mpmath.mpf(0)
    return Exact(out, lse)


def _close(one: object, exact: object, allowed: mpmath.mpf) -> bool:
    """Whether the error is at most ``allowed`` · max(1, |exact|); infinities must be equal."""
    return one == exact or abs(one - exact) <= allowed * max(1, abs(exact))


@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@every_oracle
def test_float64_oracle_equals_attention_with_one_more_key(oracle, mask, sinks):
    inputs = _inputs(mask, sinks)
    outputs, exact = oracle(inputs), _with_one_more_key(inputs)
    for tensor, right in ((outputs.out, exact.out), (outputs.lse, exact.lse)):
        pairs = zip(tensor.flatten().tolist(), right.flat, strict=True)
        assert all(_close(mpmath.mpf(one), other, PROMISED) for one, other in pairs)


def test_naive_softmax_overflows_for_a_large_sink():
    """exp(sink) enters the denominator directly, as any score does."""
    mask = Spec.of("full")
    ordinary = oracles.ORACLES["naive"](_inputs(mask))
    assert torch.allclose(ordinary.out, oracles.dense(_inputs(mask)).out, rtol=0, atol=PROMISED)
    assert oracles.ORACLES["naive"](_inputs(mask, "huge")).lse.isinf().any()


@pytest.mark.parametrize("name", oracles.RECURRENCES)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_recurrence_in_many_digits_equals_attention_with_one_more_key(name, mask):
    numbers = Mp(DIGITS)
    for sinks in ("drawn", "huge"):
        inputs = _inputs(mask, sinks, query=7)
        result, exact = oracles.RECURRENCES[name](numbers, inputs), _with_one_more_key(inputs)
        for array, right in ((result.out, exact.out), (result.lse[..., 0], exact.lse)):
            pairs = zip(array.flat, right.flat, strict=True)
            assert all(_close(a, b, ALLOWED_IN_DIGITS) for a, b in pairs)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_balls_prove_float64_results_with_a_sink(mask):
    balls = pytest.importorskip("attncheck.oracles.ball_numbers")
    inputs = _inputs(mask, "huge", batch=2)
    exact, numbers = _with_one_more_key(inputs), balls.Ball()
    for rows in all_rows(inputs.problem, "cpu"):
        enclosed = balls.enclose_rows(numbers, inputs, rows)
        proof = balls.proven_error(oracles.truth(inputs), enclosed, rows)
        assert bool((proof.out <= PROMISED).all())
        assert bool((proof.lse <= PROMISED * 1e4).all())
    # A result without the sink is proven to be far off.
    without = oracles.truth(inputs.replace(sink=torch.full((4,), -math.inf)))
    far = balls.proven_error(without, enclosed, rows)
    assert bool((far.lse > 1).any())
    assert exact.lse[0, 0, 0] >= 1e4


@pytest.mark.parametrize(
    "score", [Spec.of("softcap", cap=1.0), Spec.of("temperature", temperature=4.0)]
)
@every_oracle
def test_score_mod_does_not_apply_to_the_sink(oracle, score):
    """Compared with the result without a sink, merged with it: LSE' = ln(e^LSE + e^sink)."""
    inputs = _inputs(Spec.of("causal_bottom_right"), score=score)
    plain = oracles.dense(inputs.replace(sink=torch.full((4,), -math.inf)))
    sink = inputs.sink.double()[:, None]
    lse = torch.logaddexp(plain.lse, sink)
    out = plain.out * (plain.lse - lse).exp()[..., None]
    outputs = oracle(inputs)
    assert torch.allclose(outputs.out, out, rtol=0, atol=PROMISED)
    assert torch.allclose(outputs.lse, lse, rtol=0, atol=PROMISED)


@every_oracle
def test_rows_without_keys_have_the_sink_as_lse(oracle):
    inputs = _inputs(Spec.of("sliding_window", window=0))
    outputs = oracle(inputs)
    assert torch.equal(outputs.out, torch.zeros_like(outputs.out))
    assert torch.allclose(outputs.lse, inputs.sink.double()[:, None], rtol=0, atol=PROMISED)


def test_one_head_uses_its_own_sink():
    """Certificates enclose single heads, numbered batch · heads + head."""
    inputs = _inputs(Spec.of("full"))
    whole = oracles.dense(inputs).lse.flatten(0, 1)
    for head in range(8):
        alone = one_head(Float64(), inputs, head, torch.arange(7)).lse[0, 0, :, 0]
        assert torch.allclose(alone, whole[head], rtol=0, atol=PROMISED)


PLANTED = {
    "not in LSE": ("total = total + numbers.exp(sink - largest)", "pass"),
    "not the maximum": ("largest = numbers.maximum(largest, sink)", "pass"),
    "another head's": ("inputs.sink.double()", "inputs.sink.double().roll(1)"),
    "scaled": ("inputs.sink.double()", "(inputs.sink.double() * inputs.problem.scale)"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_differs_from_attention_with_one_more_key(fault, plant, monkeypatch):
    module = plant(recurrence_steps, *PLANTED[fault])
    monkeypatch.setattr(forward_recurrences, "sink_of", module.sink_of)
    mask = Spec.of("full")
    inputs = _inputs(mask, "beyond exp" if fault == "not the maximum" else "drawn")
    outputs = forward_recurrences.dense_attention(Float64(), inputs, module.safe).rounded(Float64())
    exact = _with_one_more_key(inputs)
    pairs = zip(outputs.lse.flatten().tolist(), exact.lse.flat, strict=True)
    assert not all(_close(mpmath.mpf(one), other, PROMISED) for one, other in pairs)
