"""The probabilistic bound: hand calculations, shared errors and simulated roundings."""

import math
from dataclasses import replace

import pytest
import torch
from tests.judge import small_conditions as make

from attncheck.core.conditions import ScoreModError
from attncheck.core.declared_arithmetic import default_arithmetic
from attncheck.core.formats import DTYPES, round_to
from attncheck.inputs.problem import Case, Problem
from attncheck.judge.probabilistic_bound import (
    MISSED,
    probabilistic_bound,
    quadrature,
    sigmas_needed,
)
from attncheck.judge.score_errors import score_error
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal
from attncheck.verify.evidence_builder import EvidenceBuilder

NOISE = 64 * 2.0**-53
# The relative change of a bf16 rounding error when a few fp32 roundings are added to it.
FP32 = 64 * 2.0**-16
BF16 = DTYPES["bf16"]


def probable(known, arithmetic, mod=None, elements=2**16):
    return probabilistic_bound(
        known, arithmetic, score_error(known, arithmetic), mod, elements=elements
    )


def test_sigmas_needed_follow_hoeffdings_inequality():
    for elements in (1, 1000, 2**24):
        wide = sigmas_needed(elements)
        assert 2 * elements * math.exp(-(wide**2) / 2) == pytest.approx(MISSED, rel=NOISE)


def grouped_squares(weight, logs, values, center, width):
    """The same sum of squares for one row of one head, in plain Python."""
    groups: dict[float, torch.Tensor] = {}
    for w, log, v in zip(weight, logs, values, strict=True):
        if w > 0:
            key = float((log / width).floor())
            groups[key] = groups.get(key, 0 * v) + w * (v - center)
    alone = (weight[:, None] * (values - center)).square().sum(0)
    return torch.maximum(alone, sum((g.square() for g in groups.values()), 0 * center))


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("width", [0.5, 2.0**-20])
def test_quadrature_adds_equal_weights_before_squaring(width, centered):
    heads, rows, kv, dim = 2, 3, 12, 4
    log = (4 * make.normal(heads, rows, kv)).round() / 4
    weight = log.exp() * (make.normal(heads, rows, kv, seed=1) > -1)
    values = make.normal(heads, kv, dim, seed=2).abs()
    center = make.normal(heads, rows, dim, seed=3) if centered else None
    got = quadrature(weight, log, values, center, width)
    for h in range(heads):
        for r in range(rows):
            about = values.new_zeros(dim) if center is None else center[h, r]
            hand = grouped_squares(weight[h, r], log[h, r], values[h], about, width)
            assert bool((got[h, r] >= hand * (1 - NOISE)).all())
            # At least the larger of the two sums, and at most both together.
            assert bool((got[h, r] <= 2 * hand * (1 + NOISE)).all())


def test_rounding_of_equal_weights_adds_up_coherently():
    """16 equal keys and values: all P are rounded alike, by at most 2^-8 of themselves."""
    same = make.attention(torch.zeros(1, 1, 4), torch.ones(1, 16, 4), torch.ones(1, 16, 1))
    equal = probable(same, default_arithmetic(BF16)).sd_out.item()
    # 1/16 · 16 · 2^-8 / √3, and half an ulp of the output at random.
    coherent = math.hypot(2.0**-8 / math.sqrt(3), 2.0**-7 / math.sqrt(12))
    assert equal == pytest.approx(coherent, rel=FP32)
    alone = math.hypot(2.0**-8 / math.sqrt(3 * 16), 2.0**-7 / math.sqrt(12))
    assert equal > alone


def test_probabilistic_bound_is_never_above_the_deterministic_one():
    known = make.random_attention()
    for name in ("fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2"):
        for capability in (None, (9, 0)):
            likely = probable(known, default_arithmetic(DTYPES[name], capability))
            assert bool((likely.out <= likely.certain.out).all())
            assert bool((likely.lse <= likely.certain.lse).all())
            assert bool((likely.sd_out <= likely.out).all())


def test_probabilistic_bound_of_empty_and_unbounded_rows():
    seen = torch.ones(2, 5, 24, dtype=torch.bool)
    seen[1, 3] = False
    known = make.random_attention(seen=seen)
    known = make.attention(known.q, known.k, known.v, seen=seen, scores=known.scores)
    zero = torch.zeros_like(known.scores)
    radius, jump = zero.clone(), torch.zeros_like(seen)
    radius[0, 1, 2] = math.inf
    jump[0, 4, 7] = True
    error = ScoreModError(radius=radius, own=zero, jump=jump)
    likely = probable(known, default_arithmetic(BF16), error)
    for tensor in (likely.out, likely.lse, likely.sd_out, likely.sd_lse):
        assert not tensor[1, 3].any()
        assert bool(torch.isinf(tensor[0, 1]).all())
    # At a jump errors are not independent: only the deterministic bound holds.
    assert torch.equal(likely.out[0, 4], likely.certain.out[0, 4])
    assert bool(torch.isinf(likely.sd_out[0, 4]).all())
    assert bool(torch.isfinite(likely.sd_out[0, 0]).all())


def test_more_elements_widen_the_probabilistic_bound():
    known = make.random_attention()
    few, many = (probable(known, default_arithmetic(BF16), elements=n) for n in (1, 2**30))
    assert bool((many.out >= few.out).all())
    assert bool((many.out > few.out).any())


def simulated_error(known, seed):
    """Error of out when only the weights are rounded, to bf16 relative to a random maximum."""
    generator = torch.Generator().manual_seed(seed)
    frame = torch.rand(known.total.shape, generator=generator).double()[..., None]
    weights = torch.exp(known.scores - known.maximum[..., None] - frame)
    rounded = round_to(weights, BF16.weights) @ known.v / weights.sum(-1, keepdim=True)
    return round_to(rounded, BF16.output) - known.out


def test_predicted_deviation_matches_simulated_roundings():
    known = make.random_attention(heads=4, rows=32, kv=64, dim=32)
    likely = probable(known, default_arithmetic(BF16))
    z = torch.stack([simulated_error(known, seed) for seed in range(8)]) / likely.sd_out
    size = float(z.square().mean().sqrt())
    # Half an ulp is 2^-9 to 2^-8 of a number, on average less than the predicted 2^-8.
    assert 0.5 < size < 1
    assert bool((z.abs() * likely.sd_out <= likely.out).all())


def largest_share(kernel, name):
    problem = Problem(
        batch=1, heads=2, kv_heads=2, query=64, kv=192, head_dim=32, dtype=name, seed=1
    )
    evidence = EvidenceBuilder(Case(problem=problem), "cpu")
    allowance = evidence.allowance(Ideal().arithmetic(problem, "cpu"))
    error = (kernel.run(evidence.inputs).out.double() - evidence.truth.out)[0].abs()
    shares = [
        error[list(s.rows.heads)][:, s.rows.query] / s.probable_out for s in allowance.samples
    ]
    return max(float(s.max()) for s in shares)


class CoarseWeights(Ideal):
    """P is rounded to 5 bits: within fp8's bound, far beyond bf16's."""

    def operand(self, values, fmt):
        if fmt.name == "bf16" and values.min() >= 0:
            values = round_to(values.double(), DTYPES["e4m3"].weights).float()
        return super().operand(values, fmt)


@pytest.mark.parametrize("name", ["fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2"])
def test_ideal_kernel_stays_within_the_probabilistic_bound(name):
    assert largest_share(Ideal(Tiling(block_query=16, block_kv=32)), name) < 1


def test_coarsely_rounded_weights_exceed_the_probabilistic_bound():
    assert largest_share(CoarseWeights(Tiling(block_query=16, block_kv=32)), "bf16") > 1


def test_bound_covers_weights_flushed_to_zero():
    """255 keys of P below half the smallest e5m2 lose their values, all in one direction."""
    e5m2 = replace(default_arithmetic(DTYPES["e5m2"]), weights_scale=1.0)
    k = torch.zeros(1, 256, 1)
    k[0, 0] = 18 * math.log(2)
    values = torch.ones(1, 256, 1)
    values[0, 0] = 0
    known = make.attention([[[1.0]]], k, values)
    likely = probable(known, e5m2)
    lost = 255 * 2.0**-18
    assert known.out.item() == pytest.approx(lost, rel=255 * 2.0**-18)  # the row sum is 1 + that
    assert lost < likely.out.item()
    scaled = probable(known, replace(e5m2, weights_scale=2.0**15))
    assert scaled.out.item() < lost


def test_probabilistic_bound_of_a_softmax_is_below_the_deterministic_one():
    likely = probable(make.softmax(make.normal(1, 4, 33)), default_arithmetic(DTYPES["fp32"]))
    assert bool((likely.out < likely.certain.out).all())
    assert bool((likely.sd_out > 0).all())


def test_bound_covers_two_roundings_of_a_subnormal_weight():
    """exp is rounded to a subnormal number, and its product with 1 ÷ sum once more."""
    likely = probable(make.softmax([[[0.0, -100.0]]]), default_arithmetic(DTYPES["fp32"]))
    assert likely.out[0, 0, 1].item() > 2 * 2.0**-150
