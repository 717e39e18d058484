"""Score mods on Arb's balls: results enclose the exact (mpmath) value of every number in a ball."""

import math

import mpmath
import numpy as np
import pytest
import torch
from tests.mods.sample_mods import DIVISIONS, REAL_FUNCTIONS

pytest.importorskip("flint", reason="python-flint is an optional extra")
import flint

from attncheck.core.balls import balls_of, is_known
from attncheck.core.errors import TraceError
from attncheck.mods.ball_algebra import BALLS, to_ball
from attncheck.mods.mpmath_algebra import to_mpmath
from attncheck.mods.trace import trace_score

BITS = 128
SPECIAL = [-math.inf, -7.5, -2.0, -0.3, 0.0, 0.3, 1.0, 2.5, 7.0, 1e-300, 1e300, math.inf]
Q, K = torch.tensor(5), torch.tensor(9)
ZERO = [np.zeros((), np.int64)] * 4
TABLE = torch.tensor([0.1, -math.inf, 0.3, 7.0])

MODS = {
    **REAL_FUNCTIONS,
    **DIVISIONS,
    "exp": lambda s: torch.exp(torch.clamp(s, -1e5, 1e5)),
    "exp2": lambda s: torch.exp2(torch.clamp(s, -1e5, 1e5)),
    "s + s": lambda s: s + s * 0.1 - 3.0,
    "s <= 1": lambda s: torch.where(s <= 1.0, s, -s),
    "s > 1": lambda s: torch.where(s > 1.0, s, 9.0),
    "s >= 1": lambda s: torch.where(s >= 1.0, s, s / 3.0),
    "s == 1": lambda s: torch.where(s == 1.0, 2.0, s),
    "s != 1": lambda s: torch.where(s != 1.0, 2.0, s),
    "and, or, not": lambda s: torch.where((s > 0) & ~(s > 2) | (s < -3), s, 1.0),
    "hides": lambda s: torch.where(s > 0.5, s, -math.inf),
    "cut": lambda s: s + torch.clamp(s, -3, 3).to(torch.int64),
    "read": lambda s: TABLE[torch.clamp(s, 0, 3).to(torch.int64)] + s,
    "bits": lambda s: torch.where((Q - K) // 3 > -2, s, ((Q >> 1) ^ (K << 1) & ~Q) * s),
    "whole where": lambda s: torch.where(s > 0.5, 3, 5) * 0.5 + s,
}


def interval(context, ball):
    """The ends of a ball as two exact mpmath numbers."""
    ends = []
    for end in (ball.lower(), ball.upper()):
        if not end.is_finite():
            ends.append(context.inf if end > 0 else context.ninf)
        else:
            man, exp = end.man_exp()
            ends.append(context.ldexp(int(man), int(exp)))
    return ends


def encloses(context, ball, exact):
    if not is_known(ball):
        return True
    low, high = interval(context, ball)
    # mpmath's own last bits: its value is rounded to 400 bits, and 128 bits decide nothing finer.
    slack = abs(exact) * context.ldexp(1, -390) if context.isfinite(exact) else 0
    return low - slack <= exact <= high + slack


@pytest.fixture
def context():
    own = mpmath.MPContext()
    own.prec = 400
    return own


@pytest.mark.parametrize("function", MODS.values(), ids=MODS)
def test_ball_encloses_exact_value(function, context):
    expression = trace_score(lambda s, b, h, q, k: function(s))
    balls = to_ball(expression, BITS)(balls_of(np.array(SPECIAL)), *ZERO)
    exact = to_mpmath(expression, context)(np.array(SPECIAL), *ZERO)
    for score, ball, value in zip(SPECIAL, balls, exact, strict=True):
        if context.isnan(value):
            assert not is_known(ball), score
        else:
            assert encloses(context, ball, value), (score, ball, value)
        if math.isfinite(score) and context.isfinite(value):
            assert is_known(ball), (score, ball)


@pytest.mark.parametrize("function", MODS.values(), ids=MODS)
@pytest.mark.parametrize("radius", [2.0**-40, 0.3125, 1.5])
def test_wide_ball_encloses_values_across_it(function, radius, context):
    expression = trace_score(lambda s, b, h, q, k: function(s))
    mids = [-7.5, -2.0, -0.3125, 0.0, 0.3125, 1.0, 2.5, 7.0]
    wide = np.array([flint.arb(mid, radius) for mid in mids], dtype=object)
    balls = to_ball(expression, BITS)(wide, *ZERO)
    for part in (-1.0, -0.5, 0.0, 0.25, 1.0):
        inside = np.array(mids) + part * radius
        exact = to_mpmath(expression, context)(inside, *ZERO)
        for score, ball, value in zip(inside, balls, exact, strict=True):
            enclosed = (
                not is_known(ball) if context.isnan(value) else encloses(context, ball, value)
            )
            assert enclosed, (score, ball, value)


def test_undecided_comparison_encloses_both_branches():
    expression = trace_score(lambda s, b, h, q, k: torch.where(s > 1.0, 5.0, -2.0).to(s.dtype))
    wide = np.array([flint.arb(1.0, 2.0**-60), flint.arb(1.5, 0.25)], dtype=object)
    undecided, decided = to_ball(expression, BITS)(wide, *ZERO)
    assert undecided.contains(flint.arb(5)) and undecided.contains(flint.arb(-2))  # noqa: PT018  (one fact)
    assert decided == flint.arb(5)


def test_score_that_may_be_hidden_is_unknown():
    expression = trace_score(lambda s, b, h, q, k: torch.where(s > 1.0, s, -math.inf))
    wide = np.array([flint.arb(1.0, 2.0**-60), flint.arb(0.5)], dtype=object)
    undecided, hidden = to_ball(expression, BITS)(wide, *ZERO)
    assert not is_known(undecided)
    assert is_known(hidden)
    assert hidden == flint.arb.neg_inf()


def test_read_at_too_many_possible_indices_is_unknown():
    table = torch.arange(1000.0)
    expression = trace_score(lambda s, b, h, q, k: table[torch.clamp(s, 0, 999).to(torch.int64)])
    wide = np.array([flint.arb(500.0, 400.0), flint.arb(3)], dtype=object)
    balls = to_ball(expression, BITS)(wide, *ZERO)
    assert not any(is_known(ball) for ball in balls)


def test_evaluator_broadcasts_and_indexes_captured_tensors():
    slopes = torch.tensor([0.5, 0.25], dtype=torch.float32)
    axes = [
        np.arange(n).reshape([n if i == a else 1 for i in range(4)])
        for a, n in enumerate((1, 2, 3, 4))
    ]
    expression = trace_score(lambda s, b, h, q, k: s + slopes[h] * (k - q))
    balls = to_ball(expression, BITS)(balls_of(np.zeros((1, 2, 3, 4))), *axes)
    expected = slopes.double().numpy().reshape(1, 2, 1, 1) * (axes[3] - axes[2])
    assert np.array_equal(np.vectorize(float, otypes=[float])(balls), expected)
    with pytest.raises(IndexError):
        to_ball(expression, BITS)(balls_of(np.zeros(())), *ZERO[:1], np.array(2), *ZERO[:2])


def test_global_flint_precision_is_unchanged():
    before = flint.ctx.prec
    third = BALLS.score(lambda s, b, h, q, k: s / 3.0, 300)(balls_of(np.array(1.0)), *ZERO).item()
    assert flint.ctx.prec == before
    assert 0 < third.rad() <= flint.arb(2) ** -300  # one rounding to 300 bits of what is below 1
    with pytest.raises(TraceError):
        BALLS.score(lambda s, b, h, q, k: s if q > 0 else -s, BITS)
