"""Simulated roundings that weights share or that affect a whole row stay within the bounds."""

import math
from dataclasses import replace

import pytest
import torch
from tests.judge import small_conditions as make

from attncheck.core.conditions import ScoreModError
from attncheck.core.declared_arithmetic import AMPERE, HOPPER_FP8, default_arithmetic
from attncheck.core.formats import DTYPES, FORMATS, round_to
from attncheck.judge.blind_spot import cut, first_bits
from attncheck.judge.deterministic_bound import deterministic_bound
from attncheck.judge.probabilistic_bound import probabilistic_bound
from attncheck.judge.score_errors import score_error
from attncheck.judge.sum_roundings import row_sum_rounding, steps_with_keys

TF32, BF16, FP16, E4M3 = (
    default_arithmetic(DTYPES[name]) for name in ("tf32", "bf16", "fp16", "e4m3")
)
KEYS = 512


def bounds(known, arithmetic, mod=None):
    errors = score_error(known, arithmetic)
    error = None
    if mod is not None:
        slope, falls = mod
        radius = errors.radius * slope
        none = torch.zeros_like(radius)
        error = ScoreModError(radius=radius, own=none, jump=none > 0, falls=falls)
    return probabilistic_bound(known, arithmetic, errors, error, elements=known.out.numel())


def positive_tensors(dim=64, rows=8):
    """q, k and v in [0, 1), so that all keys resemble each other."""
    tensors = (make.normal(1, n, dim, seed=i) for i, n in enumerate((rows, KEYS, KEYS)))
    return [round_to(torch.special.ndtr(x), FORMATS["bf16"]) for x in tensors]


def test_bound_covers_tf32_values_beside_unrounded_weights():
    q, k, v = make.normal(1, 8, 16), make.normal(1, 4, 16, seed=1), make.normal(1, 4, 9, seed=2)
    known = make.attention(q, k, v)
    bound = bounds(known, replace(TF32, weights=FORMATS["fp32"])).out
    weights = torch.softmax(known.scores, -1)
    assert ((weights @ round_to(v, FORMATS["tf32"]) - known.out).abs() <= bound).all()


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_bound_covers_a_rounded_query_that_moves_all_scores_of_a_row(name):
    q, k, v = positive_tensors()
    known = make.attention(q, k, v, scale=0.11)
    arithmetic = replace(default_arithmetic(DTYPES[name]), scaled_query=FORMATS[name])
    moved = round_to(0.11 * q, FORMATS[name]) @ k.mT
    error = (torch.logsumexp(moved, -1) - known.lse).abs()
    assert (error <= bounds(known, arithmetic).lse).all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_bound_covers_a_rounded_query_under_a_steep_score_mod(sign):
    q, k, v = positive_tensors()
    known = make.attention(q, k, v, scale=0.11, scores=sign * 3 * 0.11 * (q @ k.mT))
    falls = torch.full_like(known.seen, sign < 0)
    arithmetic = replace(BF16, scaled_query=FORMATS["bf16"])
    moved = (1 + 2.0**-9) * known.scores  # q moved by half its largest rounding
    error = (torch.logsumexp(moved, -1) - known.lse).abs()
    assert (error <= bounds(known, arithmetic, (3.0, falls)).lse).all()


def test_bound_covers_truncation_where_a_score_mod_falls():
    q, k, v = make.normal(1, 8, 16) / 4, make.normal(1, KEYS, 16, seed=1), make.normal(1, KEYS, 4)
    products = q @ k.mT
    known = make.attention(q, k, v, scores=products.abs())
    arithmetic = replace(TF32, truncates=True)
    error = 0.75 * 2.0**-9 * (torch.softmax(known.scores, -1) * products.abs()).sum(-1)
    lse_bound = bounds(known, arithmetic, (1.0, products < 0)).lse
    assert (error <= lse_bound).all()
    assert (
        lse_bound > bounds(known, arithmetic, (1.0, None)).lse
    ).any()  # without falls, errors of both signs cancel


def test_bound_covers_a_truncating_row_sum():
    known = make.attention(
        make.normal(1, 8, 16), make.normal(1, KEYS, 16, seed=1), torch.ones(1, KEYS, 1)
    )
    arithmetic = replace(
        E4M3,
        values=HOPPER_FP8,
        weights=FORMATS["fp32"],
        sums_rounded_weights=True,
        output=FORMATS["fp32"],
    )
    weights, total = torch.softmax(known.scores, -1), torch.zeros(1, 8)
    for step in weights.split(HOPPER_FP8.block, -1):
        total = cut(total + step.sum(-1), first_bits(HOPPER_FP8.result))
    bound = bounds(known, arithmetic)
    assert (-torch.log(total) <= bound.lse).all()
    assert (1 / total - 1 <= bound.out[..., 0]).all()


def test_bound_covers_flushed_weights_missing_from_the_row_sum():
    scores = torch.full((1, 1, KEYS), -11 * math.log(2), dtype=torch.float64)
    scores[..., 0] = 0.0
    known = make.attention(scores, torch.eye(KEYS)[None], torch.ones(1, KEYS, 1))
    bound = bounds(known, replace(E4M3, sums_rounded_weights=True))
    assert (known.lse <= bound.lse).all()  # all but the first are rounded to 0


def test_step_with_few_visible_keys_truncates_as_much_as_a_full_one():
    seen = torch.arange(KEYS) % AMPERE.block == 0
    known = make.attention(*(torch.ones(1, n, 1) for n in (1, KEYS, KEYS)), seen=seen)
    arithmetic = replace(BF16, values=AMPERE, sums_rounded_weights=True, block_kv=256)
    assert steps_with_keys(known, AMPERE).item() == KEYS / AMPERE.block
    # Aligning the sum and one term truncates each, and so does the result.
    each = 2 * 2.0**-AMPERE.alignment + 2.0 ** (1 - AMPERE.result)
    assert row_sum_rounding(known, arithmetic).item() >= KEYS / AMPERE.block * each


def test_sums_that_overflow_before_the_largest_score_have_no_bound():
    keys = torch.zeros(1, 16, 1)
    keys[0, 0] = 200.0
    known = make.attention(torch.ones(1, 1, 1), keys, torch.full((1, 16, 1), 1e38))
    arithmetic = default_arithmetic(DTYPES["bf16"])
    assert deterministic_bound(known, arithmetic, score_error(known, arithmetic)).out.isinf().all()


@pytest.mark.parametrize("place", ["q", "k", "v"])
def test_operands_that_tf32_rounds_to_infinity_have_no_bound(place):
    tensors = {name: torch.full((1, 2, 1), 1e-30, dtype=torch.float64) for name in "qkv"}
    tensors[place][0, 0, 0] = FORMATS["fp32"].max
    # A hidden key's weight is 0, and 0 times infinity is NaN.
    known = make.attention(**tensors, seen=torch.tensor([place != "v", True]))
    for truncates in (False, True):
        arithmetic = replace(TF32, truncates=truncates)
        bound = deterministic_bound(known, arithmetic, score_error(known, arithmetic)).out
        assert bool(bound.isinf().any()) is not truncates


def test_bound_covers_underflow_and_overflow_of_a_scaled_query():
    q, k = make.normal(1, 8, 16), 100 * make.normal(1, 64, 16, seed=1)
    arithmetic = replace(FP16, scaled_query=FORMATS["fp16"])
    small = make.attention(q, k, k, scale=2.0**-22)
    moved = (round_to(2.0**-22 * q, FORMATS["fp16"]) @ k.mT - small.products).abs()
    assert (moved <= score_error(small, arithmetic).radius).all()
    large = make.attention(q, k, k, scale=1e6)
    assert score_error(large, arithmetic).radius.isinf().any()


def test_lazy_rescale_widens_the_logarithm_term():
    known = make.attention(
        make.normal(1, 2, 4), make.normal(1, 16, 4, seed=1), torch.ones(1, 16, 1)
    )
    terms = [
        deterministic_bound(known, arithmetic, score_error(known, arithmetic)).lse_terms[
            "logarithm"
        ]
        for arithmetic in (BF16, replace(BF16, lazy_rescale=8.0))
    ]
    # The maximum, times a rounded factor, and the logarithm of the row sum both grow by that.
    assert (terms[1] - terms[0] >= (4 + 4) * 8 * math.log(2) * BF16.unit).all()


def test_softmax_scores_that_overflow_as_exponents_have_no_bound():
    known = make.softmax(torch.tensor([[[3e38, 0.0], [1.0, 0.0]]]))
    arithmetic = default_arithmetic(DTYPES["fp32"])
    bound = deterministic_bound(known, arithmetic, score_error(known, arithmetic))
    assert bound.lse.isinf().tolist() == [[True, False]]
