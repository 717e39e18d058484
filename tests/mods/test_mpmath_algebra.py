"""Mods evaluated on mpmath numbers match their callables, to any number of digits."""

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


OPERATIONS = {
    **REAL_FUNCTIONS,
    **DIVISIONS,
    "2 % s": lambda s: torch.full_like(s, 2.0) % s,
    "s >= s": lambda s: torch.where(s / s >= 1.0, 1.0, 2.0).to(s.dtype),
    "s != s": lambda s: torch.where(s / s != s, 1.0, 2.0).to(s.dtype),
}


def rounding(expression, scores):
    """The error that float64 may have against real numbers."""
    analysis = RunningError(expression, arithmetic=TORCH_FP64, of_reals=True)
    scores, zero = torch.from_numpy(scores), torch.zeros((), dtype=torch.int64)
    return analysis.at(scores, torch.zeros_like(scores), *[zero] * 4).own.numpy()


@pytest.mark.parametrize("function", OPERATIONS.values(), ids=OPERATIONS)
def test_operation_matches_torch_including_zero_and_infinity(function, context):
    expression = trace_score(lambda score, b, h, q, k: function(score))
    result = to_mpmath(expression, context)(SPECIAL, *ZERO).astype(float)
    expected = function(torch.from_numpy(SPECIAL)).numpy()
    both_nan = np.isnan(result) & np.isnan(expected)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(result[~finite & ~both_nan], expected[~finite & ~both_nan])
    assert (np.isfinite(result) == finite).all()
    close = np.abs(result[finite] - expected[finite]) <= rounding(expression, SPECIAL)[finite]
    assert close.all()


def test_precision_of_context_is_read_at_every_call():
    context = mpmath.MPContext()
    context.dps = 50
    expression = trace_score(lambda score, b, h, q, k: torch.exp(score))
    result = to_mpmath(expression, context)(np.array(1.0), *ZERO).item()
    assert (
        context.nstr(result, 49, strip_zeros=False)
        == "2.718281828459045235360287471352662497757247093700"
    )
    context.dps = 20
    result = to_mpmath(expression, context)(np.array(1.0), *ZERO).item()
    assert context.nstr(result, 19) == "2.718281828459045235"


def test_global_mpmath_precision_is_unchanged(context):
    before = mpmath.mp.prec
    expression = trace_score(lambda score, b, h, q, k: torch.tanh(score / 3.0))
    results = to_mpmath(expression, context)(SPECIAL, *ZERO)
    assert mpmath.mp.prec == before
    assert all(type(value) is context.mpf for value in results)


def test_whole_division_and_remainder_round_down(context):
    indices = axes()
    mask = trace_mask(lambda b, h, q, k: ((q - k) // 3 == -1) | ((q - k) % 4 == 3))
    distance = indices[2] - indices[3]
    expected = (distance // 3 == -1) | (distance % 4 == 3)
    np.testing.assert_array_equal(to_mpmath(mask, context)(*indices), expected)
    truncated = (np.trunc(distance / 3) == -1) | (np.fmod(distance, 4) == 3)
    assert (truncated != expected).any()  # these indices distinguish the two


def test_whole_division_by_zero_is_refused(context):
    mask = trace_mask(lambda b, h, q, k: k // (q + 1) == 0)
    to_mpmath(mask, context)(*axes())
    with pytest.raises(ProblemError, match="divides a whole number by 0"):
        to_mpmath(mask, context)(*ZERO[:2], np.array(-1), np.array(3))


def test_cast_to_real_dtype_changes_no_number(context):
    third = context.mpf(1) / 3
    casts = trace_score(lambda score, b, h, q, k: score.to(torch.float32).to(torch.float64))
    assert to_mpmath(casts, context)(np.array(third, object), *ZERO).item() == third
    tenths = trace_score(lambda score, b, h, q, k: score + k.to(torch.float32) / 10)
    result = to_mpmath(tenths, context)(np.array(0.0), *ZERO[:3], np.array(3)).item()
    assert result == context.mpf(3) / 10


def test_cast_to_whole_numbers_truncates_and_counts_truth(context):
    expression = trace_score(
        lambda score, b, h, q, k: score.to(torch.int64) + (k > 2).to(torch.int64) + score
    )
    results = to_mpmath(expression, context)(np.array([-1.5, 1.5]), *ZERO[:3], np.array(3))
    assert list(results.astype(float)) == [-1 + 1 - 1.5, 1 + 1 + 1.5]


def test_negative_index_reads_captured_tensor_from_the_end(context):
    table = torch.tensor([0.1, 0.2, 0.3])
    expression = trace_score(lambda score, b, h, q, k: score + table[q - 1])
    result = to_mpmath(expression, context)(np.array(0.0), *ZERO).item()
    assert result == context.convert(table[-1].item())


def test_evaluator_broadcasts_and_keeps_minus_infinity(context):
    expression = trace_score(lambda score, b, h, q, k: torch.where(q >= k, score, -math.inf))
    scores = np.full((2, 2, 7, 9), -math.inf)
    scores[..., 1:] = 0.25
    indices = axes()
    result = to_mpmath(expression, context)(scores, *indices).astype(float)
    np.testing.assert_array_equal(result, np.where(indices[2] >= indices[3], scores, -math.inf))


def test_mpmath_score_traces_callable_or_refuses_it(context):
    def halved(score, b, h, q_idx, kv_idx):
        return score / 2

    assert MPMATH.score(halved, context)(np.array(3.0), *ZERO).item() == context.mpf("1.5")
    with pytest.raises(TraceError):
        MPMATH.score(lambda score, b, h, q, k: score if q > 0 else -score, context)


def test_wrong_constant_exceeds_rounding_error(context):
    """The tolerance of these tests is not so wide that a cap of 20.2 in place of 20 would pass."""
    right = trace_score(lambda score, b, h, q, k: 20.0 * torch.tanh(score / 20.0))
    wrong = trace_score(lambda score, b, h, q, k: 20.0 * torch.tanh(score / 20.2))
    scores = np.linspace(-8.0, 8.0, 33)
    zero = torch.zeros((), dtype=torch.int64)
    expected = right.evaluate(torch.from_numpy(scores), *[zero] * 4).numpy()
    error, wrong_error = (
        np.abs(to_mpmath(one, context)(scores, *ZERO).astype(float) - expected)
        for one in (right, wrong)
    )
    allowed = rounding(right, scores)
    assert (error <= allowed).all()
    assert (wrong_error > allowed)[scores != 0].all()
