"""The recurrences in many digits agree to 1e-40 at 50 digits, and with attention by mpmath."""

import math
import subprocess
import sys
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from tests.oracles.conftest import SHAPES, draw_variant

from attncheck import oracles
from attncheck.cases.variants import VARIANTS
from attncheck.core.errors import UsageError
from attncheck.core.mod_spec import Spec
from attncheck.inputs.input_tensors import Inputs, draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.mods.mpmath_algebra import MPMATH
from attncheck.oracles.forward_recurrences import flash1_forward, flash2_forward, split_forward
from attncheck.oracles.mp_numbers import Mp

PROMISED = -40  # log10 of the distance at 50 digits that the manual promises

ODD = {
    "flash1, odd blocks": lambda mp, i: flash1_forward(mp, i, block_query=2, block_kv=3),
    "flash2, odd blocks": lambda mp, i: flash2_forward(mp, i, block_query=3, block_kv=2),
    "split, more than keys": lambda mp, i: split_forward(mp, i, splits=9),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_recurrences_agree_to_1e_40_at_50_digits(name, shape, allowance, relative_distance):
    inputs, mp = draw_variant(name, shape), Mp(50, MPMATH.score)
    softmax = inputs.problem.operation == "softmax"
    every = oracles.SOFTMAX_RECURRENCES if softmax else oracles.RECURRENCES | ODD
    bound, truth = allowance(inputs), every[oracles.REFERENCE](mp, inputs)
    for other, recurrence in every.items():
        result = recurrence(mp, inputs)
        assert not bound.misses_in_many_digits(mp, result, truth), other
        assert relative_distance(mp, inputs, result, truth) <= PROMISED, other
    # The float64 oracles are within their bounds of this result.
    exact = truth.rounded(mp)
    for other, oracle in (oracles.SOFTMAXES if softmax else oracles.ORACLES).items():
        assert not bound.misses(oracle(inputs), exact, sides=1), other
    assert not bound.misses(oracles.truth(inputs), exact, sides=1)


def _written_out(context):
    """Out and LSE of 3 queries and 4 keys, causal bottom right, without attncheck's code."""
    f = context.mpf
    q = [[f(3) / 4, f(-5) / 8], [f(1) / 2, f(7) / 4], [f(-2), f(1) / 8]]
    k = [[f(1), f(1) / 4], [f(-3) / 2, f(1) / 2], [f(5) / 8, f(-1)], [f(9) / 4, f(3) / 8]]
    v = [[f(1), f(-2), f(1) / 4], [f(3) / 2, f(5), f(-7) / 8]]
    v += [[f(-1) / 16, f(0), f(2)], [f(6), f(-3) / 32, f(1)]]
    rows, lses = [], []
    for i in range(3):
        weights = []
        for j in range(i + 2):
            dot = q[i][0] * k[j][0] + q[i][1] * k[j][1]
            weights.append(context.exp(dot / 2))
        total = context.fsum(weights)
        lses.append(context.log(total))
        rows.append([sum(w * v[j][d] for j, w in enumerate(weights)) / total for d in range(3)])
    return (q, k, v), rows, lses


@pytest.mark.parametrize("name", [*oracles.RECURRENCES, *ODD])
def test_recurrence_equals_attention_by_mpmath(name, allowance):
    context = mpmath.MPContext()
    context.dps = 70
    tensors, rows, lses = _written_out(context)
    problem = Problem(
        query=3,
        kv=4,
        head_dim=2,
        value_dim=3,
        scale=0.5,
        dtype="fp64",
        mask=Spec.of("causal_bottom_right"),
    )
    q, k, v = (
        torch.tensor([[float(x) for x in row] for row in tensor], dtype=torch.float64)[None, None]
        for tensor in tensors
    )
    inputs, mp = Inputs(problem=problem, q=q, k=k, v=v), Mp(50)
    result = (oracles.RECURRENCES | ODD)[name](mp, inputs)
    bound = allowance(inputs)
    unit = context.mpf(2) ** -mp.context.prec
    for i in range(3):
        apart = abs(context.convert(result.lse[0, 0, i, 0]) - lses[i])
        assert apart <= unit * (bound.weight + bound.kv + 2 + 2 * abs(lses[i]))
        for d in range(3):
            apart = abs(context.convert(result.out[0, 0, i, d]) - rows[i][d])
            assert apart <= unit * bound.out * bound.spread[0, 0, i, d].item()
    # The numbers compared were more precise than float64.
    assert float(abs(result.lse[0, 0, 0, 0] - float(lses[0]))) > 0


def test_scores_of_1e30_do_not_overflow_in_many_digits():
    problem = Problem(query=2, kv=3, head_dim=1, value_dim=1, scale=1.0, dtype="fp64")
    q = torch.tensor([1.0, -1.0], dtype=torch.float64).view(1, 1, 2, 1)
    k = torch.tensor([1e30, -1e30, 1.0], dtype=torch.float64).view(1, 1, 3, 1)
    inputs, mp = Inputs(problem=problem, q=q, k=k, v=k / k.abs() / 4), Mp(50)
    for recurrence in oracles.RECURRENCES.values():
        result = recurrence(mp, inputs)
        assert [float(x) for x in result.lse.flat] == [1e30, 1e30]
        assert [float(x) for x in result.out.flat] == [0.25, -0.25]
        assert all(number > 0 for number in result.out[0, 0, 0])


@pytest.mark.parametrize("digits", [17, 50])
def test_float64_is_converted_exactly(digits):
    mp = Mp(digits)
    floats = [1 / 3, -5e-324, 2.0**-1022, sys.float_info.max, math.pi * 1e-200, 0.0, -math.inf]
    array = mp.exact(torch.tensor(floats, dtype=torch.float64).view(1, 1, 1, -1))
    assert mp.rounded(array).flatten().tolist() == floats
    for number, converted in zip(floats[:-1], array.flat, strict=False):
        sign, man, exponent, _ = converted._mpf_
        assert (-1) ** sign * Fraction(int(man)) * Fraction(2) ** exponent == Fraction(number)


def test_subnormal_results_are_rounded_once():
    mp = Mp(50)
    # Above half the smallest step by less than 2^-53 of it: rounding twice would give 0.
    above = mp.context.ldexp(1, -1075) * (1 + mp.context.ldexp(1, -60))
    numbers = [above, mp.context.ldexp(1, -1075), mp.context.ldexp(3, -1075), -above]
    numbers += [mp.context.mpf(10) ** 400, mp.context.ldexp(1, -(10**9)), mp.context.nan]
    array = np.array(numbers, dtype=object).reshape(1, 1, 1, -1)
    rounded = mp.rounded(array).flatten().tolist()
    assert rounded[:6] == [5e-324, 0.0, 1e-323, -5e-324, math.inf, 0.0]
    assert math.isnan(rounded[6])


def test_evaluator_is_needed_only_with_a_score_mod():
    inputs = draw_inputs(Problem(query=3, head_dim=2))
    oracles.RECURRENCES["safe"](Mp(20), inputs)
    inputs = draw_inputs(Problem(query=3, head_dim=2, score=Spec.of("alibi")))
    with pytest.raises(UsageError, match="needs Mp's `evaluate`"):
        oracles.RECURRENCES["safe"](Mp(20), inputs)


def test_recurrence_traces_its_score_mod_once():
    calls = []

    def evaluate(score_mod, context):
        calls.append(score_mod)
        return MPMATH.score(score_mod, context)

    inputs = draw_inputs(Problem(query=9, head_dim=2, score=Spec.of("softcap", cap=2.0)))
    flash1_forward(Mp(20, evaluate), inputs, block_query=2, block_kv=2)
    assert len(calls) == 1


def test_global_precision_of_mpmath_is_neither_changed_nor_used():
    """In a separate process, as another test may have set it."""
    code = """
import mpmath
from attncheck import oracles
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.oracles.mp_numbers import Mp
from attncheck.inputs.problem import Problem

inputs = draw_inputs(Problem(query=3, head_dim=2))
first = oracles.RECURRENCES["flash1"](Mp(50), inputs)
assert mpmath.mp.prec == 53
mpmath.mp.dps = 5
second = oracles.RECURRENCES["flash1"](Mp(50), inputs)
assert [x._mpf_ for x in first.out.flat] == [x._mpf_ for x in second.out.flat]
"""
    subprocess.run([sys.executable, "-c", code], check=True)
