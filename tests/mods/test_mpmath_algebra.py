"""On mpmath numbers a mod says what its callable says, with as many digits as are asked for."""

import math

import mpmath
import numpy as np
import pytest
import torch
from tests.mods.sample_mods import DIVISIONS, REAL_FUNCTIONS

from attncheck.core.errors import ProblemError, TraceError
from attncheck.mods.mpmath_algebra import MPMATH, to_mpmath
from attncheck.mods.operation_errors import TORCH_FP64
from attncheck.mods.running_error import RunningError
from attncheck.mods.trace import trace_mask, trace_score

SPECIAL = np.array([-math.inf, -7.5, -2.0, -0.3, 0.0, 0.3, 1.0, 2.5, 7.0, 1e-300, 1e300, math.inf])
ZERO = [np.zeros((), np.int64)] * 4


def axes(batch=2, heads=2, query=7, kv=9):
    sizes = (batch, heads, query, kv)
    return [
        np.arange(n).reshape([n if i == axis else 1 for i in range(4)])
        for axis, n in enumerate(sizes)
    ]


@pytest.fixture
def context():
    own = mpmath.MPContext()
    own.prec = 200
    return own


ONE = {
    **REAL_FUNCTIONS,
    **DIVISIONS,
    "2 % s": lambda s: torch.full_like(s, 2.0) % s,
    "s >= s": lambda s: torch.where(s / s >= 1.0, 1.0, 2.0).to(s.dtype),
    "s != s": lambda s: torch.where(s / s != s, 1.0, 2.0).to(s.dtype),
}


def rounding(expression, scores):
    """How far float64 may be from real numbers."""
    analysis = RunningError(expression, arithmetic=TORCH_FP64, of_reals=True)
    scores, zero = torch.from_numpy(scores), torch.zeros((), dtype=torch.int64)
    return analysis.at(scores, torch.zeros_like(scores), *[zero] * 4).own.numpy()


@pytest.mark.parametrize("function", ONE.values(), ids=ONE)
def test_an_operation_is_torchs_also_at_zero_and_infinity(function, context):
    expression = trace_score(lambda score, b, h, q, k: function(score))
    given = SPECIAL
    found = to_mpmath(expression, context)(given, *ZERO).astype(float)
    there = function(torch.from_numpy(given)).numpy()
    both_nan = np.isnan(found) & np.isnan(there)
    finite = np.isfinite(there)
    np.testing.assert_array_equal(found[~finite & ~both_nan], there[~finite & ~both_nan])
    assert (np.isfinite(found) == finite).all()
    close = np.abs(found[finite] - there[finite]) <= rounding(expression, given)[finite]
    assert close.all()


def test_it_has_as_many_digits_as_asked_for():
    own = mpmath.MPContext()
    own.dps = 50
    expression = trace_score(lambda score, b, h, q, k: torch.exp(score))
    found = to_mpmath(expression, own)(np.array(1.0), *ZERO).item()
    assert (
        own.nstr(found, 49, strip_zeros=False)
        == "2.718281828459045235360287471352662497757247093700"
    )
    own.dps = 20  # read at every call
    found = to_mpmath(expression, own)(np.array(1.0), *ZERO).item()
    assert own.nstr(found, 19) == "2.718281828459045235"


def test_the_global_precision_is_left_alone(context):
    before = mpmath.mp.prec
    expression = trace_score(lambda score, b, h, q, k: torch.tanh(score / 3.0))
    found = to_mpmath(expression, context)(SPECIAL, *ZERO)
    assert mpmath.mp.prec == before
    assert all(type(value) is context.mpf for value in found)


def test_division_of_whole_numbers_floors(context):
    there = axes()
    mask = trace_mask(lambda b, h, q, k: ((q - k) // 3 == -1) | ((q - k) % 4 == 3))
    distance = there[2] - there[3]
    expected = (distance // 3 == -1) | (distance % 4 == 3)
    np.testing.assert_array_equal(to_mpmath(mask, context)(*there), expected)
    truncated = (np.trunc(distance / 3) == -1) | (np.fmod(distance, 4) == 3)
    assert (truncated != expected).any()  # the indices tell the two apart


def test_a_whole_number_divided_by_0_is_refused_as_torch_refuses_it(context):
    mask = trace_mask(lambda b, h, q, k: k // (q + 1) == 0)
    to_mpmath(mask, context)(*axes())
    with pytest.raises(ProblemError, match="divides a whole number by 0"):
        to_mpmath(mask, context)(*ZERO[:2], np.array(-1), np.array(3))


def test_a_cast_to_a_real_dtype_changes_no_number(context):
    third = context.mpf(1) / 3
    same = trace_score(lambda score, b, h, q, k: score.to(torch.float32).to(torch.float64))
    assert to_mpmath(same, context)(np.array(third, object), *ZERO).item() == third
    tenths = trace_score(lambda score, b, h, q, k: score + k.to(torch.float32) / 10)
    found = to_mpmath(tenths, context)(np.array(0.0), *ZERO[:3], np.array(3)).item()
    assert found == context.mpf(3) / 10


def test_a_cast_to_whole_numbers_cuts_and_counts(context):
    cut = trace_score(
        lambda score, b, h, q, k: score.to(torch.int64) + (k > 2).to(torch.int64) + score
    )
    found = to_mpmath(cut, context)(np.array([-1.5, 1.5]), *ZERO[:3], np.array(3))
    assert list(found.astype(float)) == [-1 + 1 - 1.5, 1 + 1 + 1.5]


def test_captured_tensors_are_read_from_the_end_too(context):
    table = torch.tensor([0.1, 0.2, 0.3])
    expression = trace_score(lambda score, b, h, q, k: score + table[q - 1])
    found = to_mpmath(expression, context)(np.array(0.0), *ZERO).item()
    assert found == context.convert(table[-1].item())


def test_it_broadcasts_and_minus_infinity_passes(context):
    expression = trace_score(lambda score, b, h, q, k: torch.where(q >= k, score, -math.inf))
    scores = np.full((2, 2, 7, 9), -math.inf)
    scores[..., 1:] = 0.25
    found = to_mpmath(expression, context)(scores, *axes()).astype(float)
    there = axes()
    np.testing.assert_array_equal(found, np.where(there[2] >= there[3], scores, -math.inf))


def test_evaluator_is_of_a_callable(context):
    def halved(score, b, h, q_idx, kv_idx):
        return score / 2

    assert MPMATH.score(halved, context)(np.array(3.0), *ZERO).item() == context.mpf("1.5")
    with pytest.raises(TraceError):
        MPMATH.score(lambda score, b, h, q, k: score if q > 0 else -score, context)


def test_an_expression_that_says_something_else_is_told_apart(context):
    right = trace_score(lambda score, b, h, q, k: 20.0 * torch.tanh(score / 20.0))
    wrong = trace_score(lambda score, b, h, q, k: 20.0 * torch.tanh(score / 20.2))
    given = np.linspace(-8.0, 8.0, 33)
    zero = torch.zeros((), dtype=torch.int64)
    there = right.evaluate(torch.from_numpy(given), *[zero] * 4).numpy()
    off, far = (
        np.abs(to_mpmath(one, context)(given, *ZERO).astype(float) - there)
        for one in (right, wrong)
    )
    allowed = rounding(right, given)
    assert (off <= allowed).all()
    assert (far > allowed)[given != 0].all()
