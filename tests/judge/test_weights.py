"""The bound of errors of softmax weights, against every corner of the box of score errors."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from tests.judge import small_conditions as make

from attncheck.core.conditions import ScoreModError
from attncheck.core.declared_arithmetic import default_arithmetic
from attncheck.core.formats import DTYPES
from attncheck.judge.deterministic_bound import weighted_spread
from attncheck.judge.score_errors import exponent_errors, score_error
from attncheck.judge.weight_errors import weight_errors

BF16 = default_arithmetic(DTYPES["bf16"])
# Some dozens of float64 roundings, in softmax, product and bound, relative to P and V.
NOISE = 64 * 2.0**-52


def weight_errors_of(scores, rho):
    """Weight errors where scores (kv,) are off by rho (kv,) and nothing else of the kernel errs."""
    known = make.attention(
        torch.zeros(1, 1, 1), torch.zeros(1, len(scores), 1), torch.zeros(1, len(scores), 1)
    )
    known = make.attention(known.q, known.k, known.v, scores=scores.view(1, 1, -1))
    radius = rho.view(1, 1, -1)
    error = ScoreModError(radius=radius, own=0 * radius, jump=torch.zeros_like(known.seen))
    errors = exponent_errors(known, BF16, score_error(known, BF16), error)
    errors = replace(errors, exponent=torch.zeros_like(radius))
    return weight_errors(known, BF16, errors)


def random_scores(seed, spread, size):
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 7, (), generator=generator))
    scores = spread * torch.randn(count, generator=generator).double()
    return scores, size * torch.rand(count, generator=generator).double()


CASES = list(
    itertools.product(range(6), (0.125, 1.0, 5.0, 30.0), (2.0**-20, 2.0**-7, 0.25, 3.0, 50.0))
)


@pytest.mark.parametrize(("seed", "spread", "size"), CASES)
def test_no_corner_of_score_errors_exceeds_the_bounds(seed, spread, size):
    scores, rho = random_scores(seed, spread, size)
    values = make.normal(1, len(scores), 3, seed=seed)
    errors = weight_errors_of(scores, rho)
    exact = torch.softmax(scores, 0)
    out = exact @ values[0]
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=len(scores)))).double()
    corners = torch.softmax(scores + signs * rho, -1)

    out_moved = (corners @ values[0] - out).abs().amax(0)
    for weight in (errors.relative, errors.changed):
        allowed = weighted_spread(weight, values, out[None, None])[0, 0]
        within = out_moved <= allowed + NOISE * values.abs().max()
        assert bool((within | ~torch.isfinite(allowed)).all())
    assert bool(torch.isfinite(allowed).all())

    changed = errors.changed[0, 0]
    assert bool(((corners - exact).abs().amax(0) <= changed + NOISE).all())
    assert bool((corners.amax(0) <= errors.upper[0, 0] + NOISE).all())

    log_sum = torch.logsumexp(scores + signs * rho, -1) - torch.logsumexp(scores, 0)
    largest = float(log_sum.abs().max())
    # The bound of LSE is attained where all errors point upwards.
    size_of_lse = 1 + spread * len(scores) + size
    assert errors.total_error.item() == pytest.approx(largest, abs=NOISE * size_of_lse, rel=NOISE)


def test_bound_of_out_is_exceeded_if_halved():
    """The bound is nearly attained in more than half of the cases, so half of it is no bound."""
    exceeded = 0
    for seed, spread, size in CASES:
        scores, rho = random_scores(seed, spread, size)
        values = make.normal(1, len(scores), 3, seed=seed)
        out = torch.softmax(scores, 0) @ values[0]
        signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=len(scores)))).double()
        corners = torch.softmax(scores + signs * rho, -1) @ values[0]
        errors = weight_errors_of(scores, rho)
        both = (
            weighted_spread(w, values, out[None, None])[0, 0]
            for w in (errors.relative, errors.changed)
        )
        half = torch.fmin(*both) / 2
        exceeded += bool(((corners - out).abs().amax(0) > half).any())
    assert exceeded > len(CASES) // 2


def test_two_equal_keys_match_hand_calculation():
    """P = ½, ½ with both exponents off by r: at most P e^r is compared with P e^-r."""
    rho = torch.full((2,), 0.0625, dtype=torch.float64)
    errors = weight_errors_of(torch.zeros(2).double(), rho)
    growth = 0.5 * math.expm1(0.0625)
    least = math.exp(-0.0625)
    assert errors.relative.flatten().tolist() == pytest.approx([growth / least] * 2, rel=NOISE)
    # A weight moves by half its own growth and half the other's.
    assert errors.changed.flatten().tolist() == pytest.approx([growth / least] * 2, rel=NOISE)
    assert errors.upper.flatten().tolist() == pytest.approx([(0.5 + growth) / least] * 2, rel=NOISE)
    assert errors.total_error.item() == pytest.approx(math.log1p(2 * growth), rel=NOISE)


def test_only_key_keeps_its_weight_whatever_the_error():
    errors = weight_errors_of(torch.tensor([1e4]).double(), torch.tensor([1e3]).double())
    assert errors.upper.item() == 1
    values = torch.tensor([[[7.0]]]).double()
    # v − O is 0, except for float64's own rounding.
    lost = math.sqrt((1 + 8) * 2.0**-53) * 4 * 7
    assert weighted_spread(errors.changed, values, values).item() <= lost


def test_error_of_a_key_of_weight_zero_does_not_widen_the_others():
    """With finfo.min added to a score its own error is 1e31, and its weight is still 0."""
    scores, rho = torch.tensor([1.0, 2.0, -3.4e38]).double(), torch.tensor([0.0, 0.0, 1e31])
    with_it = weight_errors_of(scores, rho.double())
    without = weight_errors_of(scores[:2], rho[:2].double())
    assert torch.equal(with_it.changed[..., :2], without.changed)
    assert with_it.changed[..., 2].item() == 0
    assert with_it.total_error.item() == without.total_error.item()


def test_unrounded_weights_have_no_rounding_error():
    known = make.attention(make.normal(1, 4, 8), make.normal(1, 8, 8), make.normal(1, 8, 2))
    fp32 = default_arithmetic(DTYPES["fp32"])
    score_errors = exponent_errors(known, fp32, score_error(known, fp32), None)
    assert not weight_errors(known, fp32, score_errors).rounded.any()


@pytest.mark.parametrize("scale", [1.0, 256.0])
def test_subnormal_fp8_weight_is_off_by_half_the_spacing(scale):
    """Of two keys 2^-12 apart: e4m3 has spacing 2^-9 below 2^-6, so 2^-12 is rounded to 0."""
    e4m3 = replace(default_arithmetic(DTYPES["e4m3"]), weights_scale=scale)
    gap = 12 * math.log(2)
    known = make.attention([[[1.0]]], [[[gap], [0.0]]], [[[0.0], [1.0]]])
    exponents = exponent_errors(known, e4m3, score_error(known, e4m3), None)
    errors = weight_errors(known, e4m3, exponents)
    small = errors.upper[0, 0, 1].item()
    if scale == 1:
        assert errors.rounded[0, 0, 1].item() == small
    else:
        # 256 · 2^-12 is normal: 2^-4 relative, or half of 2^-9 / 256.
        assert errors.rounded[0, 0, 1].item() == pytest.approx(
            max(2.0**-4 * small, errors.floor.item()), rel=NOISE
        )
        assert errors.rounded[0, 0, 1].item() < small
    assert errors.rounded[0, 0, 0].item() == 2.0**-4 * errors.upper[0, 0, 0].item()


def test_weights_normalised_before_rounding_become_subnormal_in_fp16():
    """1,024 equal keys: P = 2^-10 is normal in fp16, the other 1,024 keys' 2^-15 · 2^-10 is not."""
    gap = 15 * math.log(2)
    k = torch.cat([torch.full((1, 1024, 1), gap), torch.zeros(1, 1024, 1)], 1)
    known = make.attention([[[1.0]]], k, torch.ones(1, 2048, 1))
    fused = default_arithmetic(DTYPES["fp16"])
    unfused = replace(fused, normalised_weights=True)
    errors = [
        weight_errors(
            known, profile, exponent_errors(known, profile, score_error(known, profile), None)
        )
        for profile in (fused, unfused)
    ]
    assert [f.floor.item() for f in errors][1] == 2.0**-25
    small = [f.rounded[0, 0, -1].item() for f in errors]
    # Fused, a weight of 2^-15 is rounded within 2^-25; the row sum has 1,024 of them.
    # The others add 2^-15 of it to the row sum; exponents of 15 binades move it by 2^-15 at most.
    assert small[0] == pytest.approx(2.0**-25 / 1024, rel=2 * 2.0**-15)
    assert small[1] == pytest.approx(2.0**-25, rel=2 * 2.0**-15)
