"""The interval holds every right evaluation, and hardly anything else."""

import math
from importlib.util import find_spec

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import libmp
from tests.mods.sample_mods import REAL_FUNCTIONS

from attncheck.core.errors import ProblemError
from attncheck.core.formats import FORMATS, fp32
from attncheck.mods import interval_algebra, mpmath_algebra
from attncheck.mods.expression import OPERATIONS
from attncheck.mods.interval_algebra import Rounding, to_interval
from attncheck.mods.operation_errors import KERNEL_FP32, TORCH_FP64, TRITON_ULP, Arithmetic
from attncheck.mods.running_error import RADII
from attncheck.mods.trace import trace_mask, trace_score

ZERO = [np.zeros((), np.int64)] * 4
NEAREST = Rounding(FORMATS["fp32"], 0.5)


def inside(pair, value):
    low, high = (libmp.to_float(end) for end in pair)
    return low <= value <= high


def interval(mod, scores, arithmetic=KERNEL_FP32, kv_idx=0):
    return to_interval(trace_score(mod), arithmetic)(
        np.asarray(scores, np.float64), *ZERO[:3], np.asarray(kv_idx)
    )


@given(st.floats(allow_nan=False))
@settings(deadline=None)
def test_rounding_holds_the_nearest_and_what_is_flushed(number):
    found = NEAREST(interval_algebra.exact_pair(number))
    assert inside(found, fp32(number))
    flushed = 0.0 if abs(number) < 2.0**-126 else fp32(number)
    assert inside(found, flushed)


@given(st.floats(2.0**-125, 2.0**127), st.sampled_from((-1.0, 1.0)))
def test_rounding_holds_no_other_number(number, sign):
    found = NEAREST(interval_algebra.exact_pair(sign * number))
    # Half an ulp is at most u and at least u/2 of the number: two ulp are outside.
    ulp = math.ldexp(1.0, math.frexp(number)[1] - 24)
    assert not inside(found, sign * (number + 2 * ulp))
    assert not inside(found, sign * (number - 2 * ulp))


@given(st.floats(width=32, allow_nan=False, allow_subnormal=False))
def test_a_number_that_the_format_holds_stays(number):
    assert NEAREST(interval_algebra.exact_pair(number)) == interval_algebra.exact_pair(number)


def test_a_rounding_past_the_largest_number_may_be_infinite():
    largest = FORMATS["fp32"].max
    assert inside(NEAREST(interval_algebra.exact_pair(2 * largest)), math.inf)
    assert inside(NEAREST(interval_algebra.exact_pair(2 * largest)), largest)
    assert not inside(NEAREST(interval_algebra.exact_pair(largest / 2)), math.inf)


UNARY = {
    **REAL_FUNCTIONS,
    "log": lambda s: torch.log(s.abs() + 0.25),
    "log2": lambda s: torch.log2(s.abs() + 0.25),
    "sqrt": lambda s: torch.sqrt(s.abs()),
    "rsqrt": lambda s: torch.rsqrt(s.abs() + 0.25),
    "add": lambda s: s + 0.1,
    "sub": lambda s: 0.1 - s,
    "mul": lambda s: s * 0.7,
    "div": lambda s: s / 3.0,
    "floor_divide": lambda s: s // 0.3,
    "remainder": lambda s: s % 0.3,
    "minimum": lambda s: torch.minimum(s, s * 0 + 0.5),
    "maximum": lambda s: torch.maximum(s, s * 0 + 0.5),
    "where": lambda s: torch.where(s > 0.1, s * 3.0, s / 3.0),
    "ge": lambda s: torch.where(s >= 0.1, 1.0, 2.0).to(s.dtype),
    "cast": lambda s: s + (s * 1.1).to(torch.int64),
    "softcap": lambda s: 20.0 * torch.tanh(s / 20.0),
    "gate": lambda s: s * torch.sigmoid(s),
    "fp32 inside": lambda s: s + s.to(torch.float32) / 3.0,
}
SCORES = np.concatenate([np.arange(-64, 65) / 16.0, [1e-3, 2.0**-30, 40.0]])


@pytest.mark.parametrize("function", UNARY.values(), ids=UNARY)
@pytest.mark.parametrize("arithmetic", [KERNEL_FP32, TORCH_FP64], ids=["fp32", "fp64"])
def test_torch_is_inside_and_a_wrong_value_is_not(function, arithmetic):
    found = interval(lambda score, b, h, q, k: function(score), SCORES, arithmetic)
    given_scores = torch.from_numpy(SCORES).to(arithmetic.format.torch_dtype)
    values = np.broadcast_to(function(given_scores).double().numpy(), SCORES.shape)
    assert not found.unknown().any()
    assert found.contains(values).all()
    # Off by a part in a thousand, or by 2^-20 where it is 0; floors may be off by their unit.
    wrong = values + np.where(values == 0, 2.0**-20, np.abs(values) * 1e-3)
    low, high = found.bounds()
    sharp = high - low < 0.25
    assert sharp.mean() > 0.75
    assert not found.contains(wrong)[sharp & (np.abs(values) < 1e6)].any()


def test_every_algebra_of_real_numbers_has_every_operation():
    real, compared = set(interval_algebra.INTERVAL_OPERATIONS), {"ge", "gt", "le", "lt", "eq", "ne"}
    others = {"where", "index", "cast", "left_shift", "right_shift", "and", "or", "xor", "not"}
    assert real | compared | others == set(OPERATIONS)
    assert set(TRITON_ULP) - real == {"cast", "number"}
    assert set(RADII) == real
    assert set(mpmath_algebra._real_functions(mpmath.MPContext())) == real | compared
    if find_spec("flint"):
        from attncheck.mods import ball_algebra

        assert set(ball_algebra._REAL) == real


def test_a_fused_multiplication_and_addition_is_inside():
    scores = np.array([fp32(1.0 + n * 2.0**-20) for n in range(64)])
    found = interval(lambda score, b, h, q, k: score * score - 1.0, scores)
    exact = scores * scores - 1.0  # 48 bits: float64 holds it
    assert found.contains(exact.astype(np.float32).astype(np.float64)).all()
    twice = (scores.astype(np.float32) ** 2 - np.float32(1)).astype(np.float64)
    assert (twice != exact).any()
    assert found.contains(twice).all()


def test_a_comparison_that_may_go_either_way_gives_both_branches():
    tenth = fp32(0.1)
    found = interval(lambda s, b, h, q, k: torch.where(s * 3.0 < 0.3, 5.0, 7.0).to(s.dtype), tenth)
    assert found.contains(5.0)
    assert found.contains(7.0)
    clear = interval(lambda s, b, h, q, k: torch.where(s * 3.0 < 0.4, 5.0, 7.0).to(s.dtype), tenth)
    assert clear.contains(5.0)
    assert not clear.contains(7.0)
    mask = to_interval(trace_mask(lambda b, h, q, k: k * 0.1 < 0.3), KERNEL_FP32)
    truth = mask(*ZERO[:3], np.arange(6))
    np.testing.assert_array_equal(truth.yes, [True, True, True, True, False, False])
    np.testing.assert_array_equal(truth.no, [False, False, False, True, True, True])


def test_a_mask_of_whole_numbers_is_known_everywhere():
    def mask(b, h, q, k):
        return (((q - k) // 3 > -2) ^ (k % 5 == 2)) & ~((q >> 1) == (k << 1)) | ((q & k) == (q ^ 3))

    there = [np.zeros((1, 1), np.int64), np.zeros((1, 1), np.int64)]
    there += [np.arange(20)[:, None], np.arange(30)[None, :]]
    truth = to_interval(trace_mask(mask), KERNEL_FP32)(*there)
    expected = mask(*map(torch.from_numpy, there)).numpy()
    np.testing.assert_array_equal(truth.yes, expected)
    np.testing.assert_array_equal(truth.no, ~expected)


def test_an_index_after_rounding_may_read_either_element():
    table = torch.tensor([10.0, 20.0, 30.0, 40.0])

    def mod(score, b, h, q, k):
        return score + table[(k * 0.1 * 10.0).floor().to(torch.int64)]

    found = interval(mod, 0.0, kv_idx=[0, 3])
    low, high = found.bounds()
    assert (low[0], high[0]) == (10.0, 10.0)
    assert found.contains(np.array(30.0))[1]
    assert found.contains(np.array(40.0))[1]


def test_subnormal_numbers_may_be_flushed():
    found = interval(lambda score, b, h, q, k: score * 2.0**-100, 2.0**-40)
    assert found.contains(0.0)
    assert found.contains(2.0**-140)
    assert not found.contains(-(2.0**-140))
    assert not found.contains(2.0**-125)


def test_where_nothing_can_be_said_it_says_so():
    divided = interval(lambda score, b, h, q, k: score / k, 1.0, kv_idx=[0, 2])
    np.testing.assert_array_equal(divided.unknown(), [True, False])
    np.testing.assert_array_equal(divided.contains(np.array([math.inf, 0.5])), [False, True])
    chosen = interval(
        lambda score, b, h, q, k: torch.where(k == 0, score, score / k), 1.0, kv_idx=[0, 2]
    )
    assert not chosen.unknown().any()
    infinite = interval(lambda score, b, h, q, k: score - torch.exp(score), [math.inf, -math.inf])
    np.testing.assert_array_equal(infinite.unknown(), [True, False])


def test_a_whole_number_that_rounding_leaves_open_is_refused():
    table = torch.arange(1000.0)

    def mod(score, b, h, q, k):
        return score + table[(torch.exp(score) * 1e9).to(torch.int64) % 1000]

    with pytest.raises(ProblemError, match="cannot be bounded"):
        interval(mod, 1.0)


def test_a_wider_declared_error_gives_a_wider_interval():
    loose = Arithmetic(format=FORMATS["fp32"], ulps={"tanh": 1000.0})
    tight = interval(lambda score, b, h, q, k: torch.tanh(score), 1.0)
    wide = interval(lambda score, b, h, q, k: torch.tanh(score), 1.0, loose)
    (low, high), (lower, higher) = tight.bounds(), wide.bounds()
    assert lower < low < math.tanh(1.0) < high < higher
