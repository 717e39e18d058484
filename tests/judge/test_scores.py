"""The bound of score errors: hand calculations, and an accumulator simulated bit by bit."""

from dataclasses import replace

import pytest
import torch
from tests.judge import small_conditions as make

from attncheck.core.declared_arithmetic import HOPPER_FP8, Accumulator, default_arithmetic
from attncheck.core.formats import DTYPES, FORMATS, round_to
from attncheck.judge.score_errors import score_error, truncation_error

U = 2.0**-24
# float64 computes the bound, in some dozens of operations; underflow adds 2^-126 and less.
ROUNDINGS = 64 * 2.0**-53


def gamma(n):
    return n * U / (1 - n * U)


def test_error_of_a_one_product_score_matches_hand_calculation():
    known = make.attention([[[3.0]]], [[[5.0]]], [[[1.0]]], scale=0.5)
    radius = score_error(known, default_arithmetic(DTYPES["bf16"])).radius
    # The sum of one exact product rounds once; then two roundings of the factor.
    contracted = 0.5 * gamma(1) * 15
    assert radius.item() == pytest.approx(contracted + gamma(2) * (7.5 + contracted), rel=ROUNDINGS)


def test_error_of_fp32_scores_matches_hand_calculation():
    known = make.attention([[[3.0, 1.0]]], [[[5.0, -1.0]]], [[[1.0]]])
    radius = score_error(known, default_arithmetic(DTYPES["fp32"])).radius
    contracted = gamma(2 + 1 + 4) * 16
    assert radius.item() == pytest.approx(contracted + gamma(2) * (14 + contracted), rel=ROUNDINGS)


def test_truncated_tf32_operands_lose_twice_as_much_and_are_biased():
    known = make.attention([[[3.0]]], [[[5.0]]], [[[1.0]]])
    near, cut = (
        score_error(known, default_arithmetic(DTYPES["tf32"], capability))
        for capability in (None, (9, 0))
    )
    assert cut.radius.item() > 15 * 2 * 2.0**-10 > near.radius.item() > 15 * 2 * 2.0**-11
    assert near.bias is None
    assert cut.bias is not None
    assert cut.bias.item() == 15 * 2 * 2.0**-10


def test_rounding_the_scaled_query_adds_one_operand_error():
    known = make.attention([[[3.0]]], [[[5.0]]], [[[1.0]]])
    plain = default_arithmetic(DTYPES["bf16"])
    rounds = replace(plain, scaled_query=FORMATS["bf16"])
    more = score_error(known, rounds).radius - score_error(known, plain).radius
    assert more.item() == pytest.approx(15 * 2.0**-8, rel=64 * U)  # of the other roundings


def test_scores_of_a_softmax_have_no_error():
    error = score_error(make.softmax([[[1.0, 2.0]]]), default_arithmetic(DTYPES["fp32"]))
    assert not error.radius.any()
    assert not error.variance.any()


def test_scaling_queries_by_a_power_of_two_scales_errors_exactly():
    q, k, v = make.normal(1, 4, 16), make.normal(1, 8, 16, seed=1), make.normal(1, 8, 4, seed=2)
    one, four = (
        score_error(make.attention(s * q, k, v), default_arithmetic(DTYPES["fp32"])) for s in (1, 4)
    )
    # Except for underflow, which is 2^-126 whatever the numbers.
    assert torch.equal(four.radius, 4 * one.radius)
    assert torch.equal(four.variance, 16 * one.variance)


@pytest.mark.parametrize(("big", "seen_as"), [(8e18, "finite"), (1e19, "infinite")])
def test_scores_that_may_overflow_fp32_have_no_bound(big, seen_as):
    known = make.attention([[[big, big]]], [[[big, -big]]], [[[1.0]]], scale=0.5)
    radius = score_error(known, default_arithmetic(DTYPES["fp32"])).radius
    assert bool(torch.isfinite(radius).all()) == (seen_as == "finite") == (2 * big**2 < 2.0**127)


def accumulate(q, k, accumulator, promoted=None):
    """q·kᵀ as a tensor core sums it, adding the sum to an fp32 total every ``promoted`` steps."""
    total = running = torch.zeros(q.shape[0], k.shape[0], dtype=torch.float64)
    for step, start in enumerate(range(0, q.shape[1], accumulator.block), start=1):
        keys = slice(start, start + accumulator.block)
        terms = q[:, None, keys] * k[None, :, keys]
        top = (exponent(q[:, None, keys]) + exponent(k[None, :, keys])).masked_fill(
            terms == 0, -500
        )
        top = torch.maximum(top.amax(-1), exponent(running).masked_fill(running == 0, -500))
        last = top - accumulator.alignment
        running = cut(terms, last[..., None]).sum(-1) + cut(running, last)
        running = cut(running, exponent(running) + 1 - accumulator.result)
        if promoted and step % promoted == 0:
            total, running = round_to(total + running, FORMATS["fp32"]), torch.zeros_like(running)
    return total + running


def exponent(x):
    return torch.frexp(x)[1].double() - 1


def cut(x, last):
    unit = torch.exp2(last)
    return torch.trunc(x / unit) * unit


TEN_BITS = Accumulator(name="planted", block=32, alignment=9, result=10)


def operands(dtype, dim, kind, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(48, dim, generator=generator).double() for _ in range(2))
    if kind == "positive":
        q, k = q.abs(), k.abs()
    if kind == "outliers":
        q[:, 3], k[:, 5] = q[:, 3] * 16, k[:, 5] * 16
    fmt = FORMATS[dtype]
    return round_to(q, fmt), round_to(k, fmt), fmt


@pytest.mark.parametrize("kind", ["normal", "positive", "outliers"])
@pytest.mark.parametrize("dim", [16, 32, 80, 128, 256])
@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_13_bit_accumulator_stays_within_the_truncation_bound(dtype, dim, kind):
    q, k, fmt = operands(dtype, dim, kind)
    allowed = truncation_error(q[None], k[None], HOPPER_FP8, fmt.significand)[0]
    for promoted in (None, 1, 2, 3):
        lost = (accumulate(q, k, HOPPER_FP8, promoted) - q @ k.T).abs()
        assert bool((lost <= allowed).all()), (promoted, float((lost / allowed).max()))
    backwards = (accumulate(q.flip(1), k.flip(1), HOPPER_FP8) - q @ k.T).abs()
    assert dim % 32 or bool((backwards <= allowed).all())


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_10_bit_accumulator_exceeds_the_bound_of_13_bits(dtype):
    q, k, fmt = operands(dtype, 64, "normal")
    allowed = truncation_error(q[None], k[None], HOPPER_FP8, fmt.significand)[0]
    assert bool(((accumulate(q, k, TEN_BITS) - q @ k.T).abs() > allowed).any())


def test_truncation_bound_is_tighter_than_one_from_summed_magnitudes():
    q, k, _ = operands("e4m3", 64, "normal")
    known = make.attention(q[None], k[None], k[None])
    fine = score_error(known, default_arithmetic(DTYPES["e4m3"], (9, 0))).radius
    plain = HOPPER_FP8.det(64.0) * (q.abs() @ k.abs().T)
    assert bool((fine[0] < plain).all())
