"""What is known of a Case whatever the kernel; above all what rounding its inputs costs."""

from __future__ import annotations

import math

import pytest
import torch

from attncheck.distributions import DISTRIBUTIONS
from attncheck.examine.evidence import Evidence
from attncheck.inputs import Inputs, draw
from attncheck.mods.spec import Spec
from attncheck.problem import Case, Problem

SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 9, "kv": 7, "head_dim": 16}
ALL = ["fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2"]


def evidence(problem: Problem) -> Evidence:
    return Evidence(Case(problem=problem), "cpu")


def attention(**changes: object) -> Problem:
    return Problem(**SIZES | {"value_dim": 5} | changes)


def softmax(**changes: object) -> Problem:
    return Problem(**{"operation": "softmax", "heads": 3, "query": 9, "kv": 7} | changes)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem) -> torch.Tensor:
    """Attention written out once more, by loops over batch and head; causal if it is asked for."""
    out = torch.empty(problem.batch, problem.heads, problem.query, problem.value_dim).double()
    for b in range(problem.batch):
        for h in range(problem.heads):
            g = h // problem.group
            scores = problem.scale * q[b, h] @ k[b, g].T
            if problem.mask.name == "causal":
                seen = torch.ones_like(scores).tril().bool()
                scores = scores.masked_fill(~seen, -math.inf)
            out[b, h] = torch.softmax(scores, -1) @ v[b, g]
    return out


def rms(difference: torch.Tensor) -> float:
    return float((difference**2).mean().sqrt())


def resolution(keys: int, score_units: float, largest: float) -> float:
    """How far two float64 evaluations of one out may lie apart.

    Args:
        keys: A row's: the sums of weights and of products have as many terms.
        score_units: By how many units of 2^-53 a score may be off; its weight is off by as much.
        largest: The largest value that is averaged.

    To the scores' units, of score and maximum, come exp (2), two sums and a quotient, twice.
    """
    return 2 * (2 * score_units + 2 + 2 * keys + 1) * 2.0**-53 * largest


def attention_resolution(problem: Problem, drawn: Inputs) -> float:
    """A score is head_dim products, their sum and a factor: off by that of scale · Σ|q||k|."""
    q, k = (x.abs().amax((1, 2)) for x in (drawn.q, drawn.k))
    largest_score = float(problem.scale * (q * k).sum(-1).max())
    units = (problem.head_dim + 2) * largest_score
    return resolution(problem.kv, units, float(drawn.v.abs().max()))


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_input_rmse_is_the_distance_of_two_exact_results(dtype, mask):
    problem = attention(dtype=dtype, mask=Spec.of(mask), seed=5)
    stored, drawn = draw(problem), draw(problem.replace(dtype="fp64"))
    expected = rms(exact(*stored.promoted(), problem) - exact(drawn.q, drawn.k, drawn.v, problem))
    found = evidence(problem).input_rmse
    assert expected > 0
    allowed = attention_resolution(problem, drawn)
    assert abs(found - expected) <= allowed
    assert allowed < expected / 1000  # the comparison says something


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_input_rmse_of_a_softmax(dtype):
    problem = softmax(dtype=dtype, distribution="large_logits")
    stored, drawn = draw(problem), draw(problem.replace(dtype="fp64"))
    difference = torch.softmax(stored.x.double(), -1) - torch.softmax(drawn.x, -1)
    # The scores are given; their difference from the maximum is rounded.
    allowed = resolution(problem.kv, float(2 * drawn.x.abs().max()), 1.0)
    assert abs(evidence(problem).input_rmse - rms(difference)) <= allowed
    assert allowed < rms(difference) / 1000


def test_coarser_inputs_cost_more():
    costs = [evidence(attention(dtype=dtype)).input_rmse for dtype in ALL if dtype != "tf32"]
    assert costs == sorted(costs)
    # Bits of the significand: 24, 11, 8, 4, 3; each bit less doubles the cost of an input.
    for finer, coarser, fewer in zip(costs, costs[1:], (13, 3, 4, 1), strict=False):
        assert 2.0 ** (fewer - 1) < coarser / finer < 2.0 ** (fewer + 1)


@pytest.mark.parametrize("name", [n for n, d in DISTRIBUTIONS.items() if d.scores])
def test_inputs_in_float64_cost_nothing(name):
    assert evidence(attention(dtype="fp64", distribution=name)).input_rmse == 0
    assert evidence(softmax(dtype="fp64", distribution=name)).input_rmse == 0


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_inputs_that_the_dtype_holds_cost_nothing(dtype):
    assert evidence(softmax(dtype=dtype, distribution="zero_q")).input_rmse == 0
    assert evidence(softmax(dtype=dtype, distribution="one_hot")).input_rmse == 0


def test_rows_that_see_no_key_do_not_count():
    """They are 0 on both sides, and would make the cost look smaller."""
    mask = Spec.of("not", Spec.of("prefix_lm", prefix=2))
    problem = attention(mask=mask, dtype="bf16")
    found = evidence(problem)
    truths = [evidence(p).truth.out for p in (problem, problem.replace(dtype="fp64"))]
    difference = (truths[0] - truths[1])[found.alive]
    assert 0 < len(difference) < found.alive.numel()
    # The same numbers, added up in another order.
    assert abs(found.input_rmse / rms(difference) - 1) <= difference.numel() * 2.0**-53
    assert found.input_rmse > rms(truths[0] - truths[1])


def test_everything_is_computed_once_and_the_originals_are_let_go():
    found = evidence(attention())
    found.establish()
    first = found.inputs, found.truth, found.input_rmse
    assert "_originals" not in found.__dict__
    found.establish()
    assert (found.inputs, found.truth, found.input_rmse) == first
    assert "_originals" not in found.__dict__
    assert torch.equal(found.alive, torch.ones(2, 4, 9, dtype=torch.bool))


@pytest.mark.parametrize("problem", [attention(dtype="e4m3"), softmax(dtype="bf16")], ids=str)
def test_its_inputs_are_those_of_the_problem(problem):
    found, drawn = evidence(problem).inputs, draw(problem)
    for name, tensor in drawn.tensors().items():
        assert torch.equal(found.tensors()[name].double(), tensor.double())
