"""Error measures: RMSE, also per head, rounding floor, Frobenius, cosine, slope and ulps."""

import math

import pytest
import torch

from attncheck.core.formats import FORMATS
from attncheck.judge.allowance import shares
from attncheck.judge.error_measures import (
    cosine,
    frobenius,
    head_rmse,
    measure_errors,
    rounding_floor,
    slope,
    ulp_percentiles,
)

TRUTH = torch.tensor([[1.0, 2.0, 4.0], [8.0, 0.0, -2.0]], dtype=torch.float64)
ALL = torch.ones(2, 3, dtype=torch.bool)


def test_errors_of_the_exact_result_are_zero():
    errors = measure_errors(TRUTH.float(), TRUTH, ALL)
    assert (errors.rmse, errors.max_error, errors.bias, errors.elements) == (0.0, 0.0, 0.0, 6)


def test_measures_of_known_errors():
    values = TRUTH.clone()
    values[0, 1] += 3.0
    values[1, 2] -= 4.0
    errors = measure_errors(values, TRUTH, ALL)
    assert errors.rmse == math.sqrt(25.0 / 6)
    assert (errors.max_error, errors.max_at) == (4.0, (1, 2))
    assert errors.bias == -1.0 / 6


def test_uncounted_elements_do_not_dilute_the_measures():
    values = TRUTH.clone()
    values[1, 2] -= 4.0
    errors = measure_errors(values, TRUTH, torch.tensor([[False], [True]]))
    assert (errors.rmse, errors.bias) == (math.sqrt(16.0 / 3), -4.0 / 3)
    exact = measure_errors(TRUTH, TRUTH, torch.tensor([[False], [True]]))
    assert exact.max_at == (1, 0)  # the first element that is counted


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_nonfinite_values_make_rmse_and_maximum_infinite(poison):
    values = TRUTH.clone()
    values[0, 2] = values[1, 1] = poison
    errors = measure_errors(values, TRUTH, ALL)
    assert errors.rmse == errors.max_error == math.inf
    assert (errors.max_at, errors.nonfinite) == ((0, 2), 2)
    assert math.isnan(errors.bias)


def test_measures_with_no_element_counted():
    errors = measure_errors(TRUTH, TRUTH, torch.zeros(2, 3, dtype=torch.bool))
    assert (errors.elements, errors.max_at, errors.rmse) == (0, None, 0.0)


@pytest.mark.parametrize("size", [2.0**-700, 2.0**700])
def test_rmse_neither_underflows_nor_overflows(size):
    truth = torch.zeros(2, 3, dtype=torch.float64)
    assert measure_errors(truth + size, truth, ALL).rmse == size
    heads = torch.zeros_like(HEADS)
    assert head_rmse(heads + size, heads, ALIVE).tolist() == [[size, size]]


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_rounding_floor_rounds_directly_to_the_format(name):
    """Just above a tie, by less than fp32 can tell: a cast through fp32 would round down."""
    step = 2.0 * FORMATS[name].unit_roundoff
    truth = torch.tensor([1.0 + step / 2 + 2.0**-40], dtype=torch.float64)
    assert rounding_floor(truth, torch.tensor([True]), FORMATS[name]) == step / 2 - 2.0**-40


def test_rounding_floor_is_not_above_any_rounding():
    truth = torch.linspace(-3, 3, 1001, dtype=torch.float64)
    counted = torch.ones(1001, dtype=torch.bool)
    floor = rounding_floor(truth, counted, FORMATS["bf16"])
    nearest = truth.float().bfloat16()
    truncated = (truth.float().view(torch.int32) & ~0xFFFF).view(torch.float32)
    assert floor <= measure_errors(nearest, truth, counted).rmse
    assert floor < measure_errors(truncated, truth, counted).rmse


def test_errors_within_roundings_of_the_exact_result_count_as_zero():
    truth = torch.tensor([1.0, -3.0], dtype=torch.float64)
    counted = torch.tensor([True, True])
    assert measure_errors(truth * (1 + 2.0**-52), truth, counted).rmse == 0.0
    assert measure_errors(truth * (1 + 2.0**-51), truth, counted).rmse > 0.0
    assert measure_errors(truth * 0 + 2.0**-60, truth * 0, counted).rmse == 2.0**-60


# Per head

HEADS = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64).view(1, 2, 2, 1)
ALIVE = torch.ones(1, 2, 2, 1, dtype=torch.bool)


def test_head_rmse_of_known_errors():
    values = HEADS.clone()
    values[0, 0, 0] += 1.0
    values[0, 1, 1] -= 2.0
    # With torch's root, which on some processors is an ulp off the nearest number.
    expected = torch.tensor([[0.5, 2.0]], dtype=torch.float64).sqrt()
    assert head_rmse(values, HEADS, ALIVE).tolist() == expected.tolist()
    alone = torch.tensor([True, False]).view(1, 1, 2, 1)
    assert head_rmse(values, HEADS, alone).tolist() == [[1.0, 0.0]]
    assert head_rmse(values, HEADS, ~ALIVE).tolist() == [[0.0, 0.0]]


# Measures of a whole error tensor

ONE = torch.tensor([3.0, 4.0], dtype=torch.float64)


def test_frobenius_is_relative_to_the_exact_tensor():
    assert frobenius(torch.tensor([0.0, 2.5]).double(), ONE) == 0.5
    assert frobenius(0 * ONE, 0 * ONE) == 0.0
    assert frobenius(ONE, 0 * ONE) == math.inf
    assert frobenius(ONE * math.nan, ONE) == math.inf


def test_cosine_of_known_directions():
    assert cosine(2 * ONE, ONE) == 1.0
    assert cosine(-ONE, ONE) == -1.0
    assert cosine(ONE.flip(0) * torch.tensor([1.0, -1.0]), ONE) == 0.0
    assert (cosine(0 * ONE, 0 * ONE), cosine(0 * ONE, ONE)) == (1.0, 0.0)
    assert cosine(ONE * math.nan, ONE) == 0.0


def test_slope_of_the_error_over_the_exact_tensor():
    assert slope(-ONE / 2, ONE) == -0.5
    assert slope(ONE.flip(0) * torch.tensor([1.0, -1.0]), ONE) == 0.0
    assert slope(ONE, 0 * ONE) == 0.0
    assert math.isnan(slope(ONE * math.nan, ONE))


def test_ulp_percentiles_skip_elements_below_the_rms():
    """Of bf16, an ulp of 1 is 2^-7 and an ulp of 4 is 2^-5; 2^-10 is below the rms."""
    truth = torch.tensor([2.0**-10, 4.0, -4.0, 4.0], dtype=torch.float64)
    error = torch.tensor([1.0, 2.0**-5, -(2.0**-4), 2.0**-3], dtype=torch.float64)
    assert ulp_percentiles(error, truth, FORMATS["bf16"]) == (2.0, 4.0)
    assert ulp_percentiles(error[:0], truth[:0], FORMATS["bf16"]) == (0.0, 0.0)
    error[2] = math.nan
    assert ulp_percentiles(error, truth, FORMATS["bf16"]) == (4.0, math.inf)


# Shares of an allowance


def test_shares_of_an_allowance_are_infinite_where_it_is_zero_or_nan():
    error = torch.tensor([0.0, -1.0, 3.0, 0.0, 1.0, math.nan, 1.0, math.inf], dtype=torch.float64)
    allowance = torch.tensor([1.0, 2.0, 2.0, 0.0, 0.0, 1.0, math.nan, 1.0], dtype=torch.float64)
    inf = math.inf
    assert shares(error, allowance).tolist() == [0.0, 0.5, 1.5, 0.0, inf, inf, inf, inf]
