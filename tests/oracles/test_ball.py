"""Ball arithmetic (python-flint): balls contain the exact result of every recurrence."""

import math
import subprocess
import sys

import pytest

pytest.importorskip("flint", reason="python-flint is an optional extra")
import flint
from tests.oracles.conftest import SHAPES, draw_variant

from attncheck import oracles
from attncheck.cases.variants import VARIANTS
from attncheck.core.errors import UsageError
from attncheck.core.mod_spec import Spec
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.mods.ball_algebra import BALLS
from attncheck.mods.mpmath_algebra import MPMATH
from attncheck.oracles.ball_numbers import BITS, Ball
from attncheck.oracles.mp_numbers import Mp


def exact_number(number):
    """An mpmath number as a ball of radius 0."""
    if not number.context.isfinite(number):
        return flint.arb(float(number))
    sign, man, exponent, _ = number._mpf_
    with flint.ctx.workprec(max(64, int(man).bit_length())):
        return flint.arb(-int(man) if sign else int(man)) * flint.arb(2) ** int(exponent)


def apart(ball, number, mp):
    """|number − the nearest number of the ball|, in units of the last digit of ``mp``."""
    exact = exact_number(number)
    if not exact.is_finite() or not ball.is_finite():
        return 0.0 if not exact.is_finite() and ball == exact else math.inf
    with flint.ctx.workprec(1000):
        distance = abs(exact - ball.mid()) - ball.rad()
        return float(distance * flint.arb(2) ** mp.context.prec)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_balls_contain_the_result_in_fifty_digits(name, shape, allowance):
    """Up to mpmath's own roundings, which the oracles' allowance bounds."""
    inputs, mp = draw_variant(name, shape), Mp(50, MPMATH.score)
    softmax = inputs.problem.operation == "softmax"
    every = oracles.SOFTMAX_RECURRENCES if softmax else oracles.RECURRENCES
    truth, bound = every[oracles.REFERENCE](mp, inputs), allowance(inputs)
    units = {
        "out": (bound.out * bound.spread).flatten().tolist(),
        "lse": [bound.weight + bound.kv + 2 + 2 * abs(x) for x in truth.lse.flat],
    }
    for recurrence in every.values():
        result = recurrence(Ball(evaluate=BALLS.score), inputs)
        for part, allowed in units.items():
            pairs = zip(getattr(result, part).array.flat, getattr(truth, part).flat, strict=True)
            assert all(
                apart(ball, number, mp) <= most
                for (ball, number), most in zip(pairs, allowed, strict=True)
            )


@pytest.mark.parametrize("name", VARIANTS)
def test_balls_of_all_recurrences_overlap_and_are_small(name, allowance):
    """A radius is at most the oracles' allowance, at the precision of a ball."""
    inputs = draw_variant(name, SHAPES[0])
    softmax = inputs.problem.operation == "softmax"
    every = oracles.SOFTMAX_RECURRENCES if softmax else oracles.RECURRENCES
    results = [r(Ball(evaluate=BALLS.score), inputs) for r in every.values()]
    bound = allowance(inputs)
    for result in results:
        for ball, other in zip(result.out.array.flat, results[0].out.array.flat, strict=True):
            assert ball.overlaps(other)
        for ball, spread in zip(result.out.array.flat, bound.spread.flatten(), strict=True):
            assert float(ball.rad()) <= 2.0 ** (2 - BITS) * bound.out * float(spread)


def test_apart_measures_a_distance_far_below_float64():
    """Otherwise the comparison of balls with fifty digits could not fail."""
    mp = Mp(50)
    third = mp.context.mpf(1) / 3
    with flint.ctx.workprec(BITS):
        ball = flint.arb(1) / 3
        moved = ball + flint.arb(2) ** -100
    assert apart(ball, third, mp) <= 0
    assert apart(moved, third, mp) > 2.0 ** (mp.context.prec - 101)
    assert apart(ball, mp.context.ninf, mp) == math.inf
    assert apart(flint.arb.neg_inf(), mp.context.ninf, mp) == 0


def test_maximum_of_overlapping_balls_covers_all_possible_maxima():
    numbers = Ball()
    wide = numbers.full((1, 1, 1, 2), 0.0)
    wide.array[0, 0, 0] = [flint.arb(1.0, 0.5), flint.arb(1.25, 0.5)]
    for ball in (
        numbers.rowmax(wide).array.item(),
        numbers.maximum(numbers.columns(wide, 0, 1), numbers.columns(wide, 1, 2)).array.item(),
    ):
        assert ball.contains(flint.arb(0.75))
        assert ball.contains(flint.arb(1.75))
        assert not ball.contains(flint.arb(0.625))


@pytest.mark.parametrize("bits", [52, 0, 128.0, True, None])
def test_precision_below_float64_is_refused(bits):
    with pytest.raises(UsageError, match="must be a whole number of at least 53"):
        Ball(bits)


def test_score_mod_without_an_evaluator_is_refused():
    inputs = draw_inputs(Problem(query=3, head_dim=2, score=Spec.of("alibi")))
    with pytest.raises(UsageError, match="needs Ball's `evaluate`"):
        oracles.RECURRENCES["safe"](Ball(), inputs)


def test_missing_python_flint_is_reported_with_what_to_install():
    code = """
import sys
sys.modules["flint"] = None
import attncheck.oracles
from attncheck.core.errors import UsageError
try:
    import attncheck.core.balls
except UsageError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'attncheck[exact]'" in run.stdout
    assert run.stdout.count("\n") == 1
