from __future__ import annotations

import math

import pytest
import torch

from attncheck.formats import FORMATS
from attncheck.judge.floor import rounding_floor
from attncheck.judge.metrics import errors

TRUTH = torch.tensor([[1.0, 2.0, 4.0], [8.0, 0.0, -2.0]], dtype=torch.float64)
ALL = torch.ones(2, 3, dtype=torch.bool)


def test_errors_of_the_truth_itself_are_zero():
    found = errors(TRUTH.float(), TRUTH, ALL)
    assert (found.rmse, found.max_error, found.bias, found.elements) == (0.0, 0.0, 0.0, 6)


def test_known_errors():
    values = TRUTH.clone()
    values[0, 1] += 3.0
    values[1, 2] -= 4.0
    found = errors(values, TRUTH, ALL)
    assert found.rmse == math.sqrt(25.0 / 6)
    assert (found.max_error, found.max_at) == (4.0, (1, 2))
    assert found.bias == -1.0 / 6


def test_only_what_is_counted():
    values = TRUTH.clone()
    values[0] = math.nan
    found = errors(values, TRUTH, torch.tensor([[False], [True]]))
    assert (found.rmse, found.elements, found.nonfinite) == (0.0, 3, 0)


def test_what_is_not_counted_dilutes_nothing():
    values = TRUTH.clone()
    values[1, 2] -= 4.0
    found = errors(values, TRUTH, torch.tensor([[False], [True]]))
    assert (found.rmse, found.bias) == (math.sqrt(16.0 / 3), -4.0 / 3)
    exact = errors(TRUTH, TRUTH, torch.tensor([[False], [True]]))
    assert exact.max_at == (1, 0)  # the first element that is counted


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_close(poison):
    values = TRUTH.clone()
    values[0, 2] = values[1, 1] = poison
    found = errors(values, TRUTH, ALL)
    assert found.rmse == found.max_error == math.inf
    assert (found.max_at, found.nonfinite) == ((0, 2), 2)
    assert math.isnan(found.bias)


def test_nothing_counted():
    found = errors(TRUTH, TRUTH, torch.zeros(2, 3, dtype=torch.bool))
    assert (found.elements, found.max_at, found.rmse) == (0, None, 0.0)


@pytest.mark.parametrize("size", [2.0**-700, 2.0**700])
def test_squares_neither_vanish_nor_overflow(size):
    truth = torch.zeros(2, 3, dtype=torch.float64)
    assert errors(truth + size, truth, ALL).rmse == size


def test_the_floor_is_half_an_ulp_at_a_tie():
    truth = torch.tensor([1.0 + 2.0**-8], dtype=torch.float64)  # halfway between bf16 neighbours
    assert rounding_floor(truth, torch.tensor([True]), FORMATS["bf16"]) == 2.0**-8


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_the_floor_is_rounded_once(name):
    """Just above a tie, by less than fp32 can tell: a cast through fp32 would go down."""
    step = 2.0 * FORMATS[name].unit_roundoff
    truth = torch.tensor([1.0 + step / 2 + 2.0**-40], dtype=torch.float64)
    assert rounding_floor(truth, torch.tensor([True]), FORMATS[name]) == step / 2 - 2.0**-40


def test_no_rounding_beats_the_floor():
    truth = torch.linspace(-3, 3, 1001, dtype=torch.float64)
    counted = torch.ones(1001, dtype=torch.bool)
    floor = rounding_floor(truth, counted, FORMATS["bf16"])
    nearest = truth.float().bfloat16()
    truncated = (truth.float().view(torch.int32) & ~0xFFFF).view(torch.float32)
    assert floor <= errors(nearest, truth, counted).rmse
    assert floor < errors(truncated, truth, counted).rmse


def test_an_error_within_the_truths_own_roundings_is_none():
    truth = torch.tensor([1.0, -3.0], dtype=torch.float64)
    counted = torch.tensor([True, True])
    assert errors(truth * (1 + 2.0**-52), truth, counted).rmse == 0.0
    assert errors(truth * (1 + 2.0**-51), truth, counted).rmse > 0.0
    assert errors(truth * 0 + 2.0**-60, truth * 0, counted).rmse == 2.0**-60
