"""The deterministic bound: hand calculations, its terms, and faults that exceed it."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.judge import small_conditions as make
from tests.planted_kernels.other_steps import stepping

from attncheck import oracles
from attncheck.core.conditions import Rows, ScoreModError
from attncheck.core.declared_arithmetic import FP64_ORACLE, HOPPER_FP8, default_arithmetic
from attncheck.core.formats import DTYPES, FORMATS
from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import Case, Problem
from attncheck.judge.deterministic_bound import OUTPUT, deterministic_bound
from attncheck.judge.score_errors import score_error
from attncheck.judge.sum_roundings import half_ulp, sum_roundings
from attncheck.oracles.mp_numbers import Mp
from attncheck.oracles.row_conditions import compute_conditions
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal
from attncheck.verify.evidence_builder import EvidenceBuilder

U = 2.0**-24
# For exponent errors ρ of a few hundred u: how far e^ρ − 1 differs from ρ, and P from exact P.
SECOND = 256 * U
# float64's own roundings, which every term includes, and the 2^-126 of underflow.
SMALL = 64 * 8 * 2.0**-53
NAMES = ("fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2")


def bound(known, arithmetic, mod=None):
    return deterministic_bound(known, arithmetic, score_error(known, arithmetic), mod)


@pytest.mark.parametrize(
    ("size", "name", "half"),
    [
        (1.0, "bf16", 2.0**-8),
        (2.0 - 2.0**-7, "bf16", 2.0**-8),
        (2.0, "bf16", 2.0**-7),
        (0.0, "fp16", 2.0**-25),
        (2.0**-20, "fp16", 2.0**-25),
        (2.0**-14, "fp16", 2.0**-25),
        (65504.0, "fp16", 16.0),
        (65505.0, "fp16", math.inf),
        (math.inf, "bf16", math.inf),
        (math.nan, "bf16", math.inf),
        (3.0, "fp32", 2.0**-23),
    ],
)
def test_half_ulp_by_size_and_format(size, name, half):
    result = half_ulp(torch.tensor([size], dtype=torch.float64), FORMATS[name])
    assert result.item() == half


def test_row_of_one_key_has_only_sum_division_and_output_terms():
    known = make.attention([[[3.0]]], [[[5.0]]], [[[1.5]]])
    result = bound(known, default_arithmetic(DTYPES["fp32"]))
    # Roundings of a row of 1 key: itself, two a tile, one of the parts, one product.
    added = (1 + 2 + 1 + 1) * U / (1 - 5 * U)
    exponent = result.out_terms["scores"] + result.out_terms["exponent"]
    assert exponent.item() == 0
    accumulated = result.out_terms["accumulation"].item()
    assert accumulated == pytest.approx(added * 1.5, rel=SECOND)  # P may be e^ρ too large
    before = exponent.item() + accumulated + 1.5
    division = (1 + 6 * U / (1 - 6 * U)) / (1 - added) - 1
    assert result.out_terms["division"].item() == pytest.approx(division * before, rel=SECOND)
    assert result.out_terms[OUTPUT].item() == 2.0**-24
    assert result.lse_terms["row sum"].item() == pytest.approx(-math.log1p(-added), rel=SMALL)


def test_two_equal_keys_match_hand_calculation():
    """P = ½, ½ and V = ±1: O = 0, and out moves by Σ c_j = (e^ρ − 1) / e^−ρ."""
    known = make.attention([[[0.0]]], [[[1.0], [1.0]]], [[[1.0], [-1.0]]])
    profile = replace(default_arithmetic(DTYPES["bf16"]), exp2_ulps=1.0)
    result = bound(known, profile)
    # Scores are 0 and within 2^-126, which leaves exp2's 3 roundings, in either of 2 tiles.
    rho = 2 * 3 * U / (1 - 3 * U)
    moved = math.expm1(rho) / math.exp(-rho)
    assert result.out_terms["exponent"].item() == pytest.approx(moved, rel=SMALL)
    # Each P is ½ at most e^ρ times as large, and rounded to bf16 within 2^-8 of itself.
    upper = (0.5 + 0.5 * math.expm1(rho)) / math.exp(-rho)
    assert result.out_terms["rounding of P"].item() == pytest.approx(2 * 2.0**-8 * upper, rel=SMALL)
    assert result.lse_terms["exponent"].item() == pytest.approx(rho, rel=SECOND)


@pytest.mark.parametrize("size", [1.0, 32.0])
@pytest.mark.parametrize("name", NAMES)
def test_bound_of_a_row_does_not_depend_on_other_rows(name, size):
    """Rows and heads computed along with it change only the order of float64's sums."""
    q, k, v = (make.normal(2, n, 8, seed=i) for i, n in enumerate((5, 24, 24)))
    profile = default_arithmetic(DTYPES[name], (9, 0))
    whole = bound(make.attention(size * q, k, v), profile)
    for head in range(2):
        for row in range(5):
            one = slice(head, head + 1), slice(row, row + 1)
            part = bound(make.attention(size * q[one], k[one[:1]], v[one[:1]]), profile)
            rounded = 24 * 64 * 2.0**-53
            torch.testing.assert_close(part.out, whole.out[one], rtol=rounded, atol=0)
            torch.testing.assert_close(part.lse, whole.lse[one], rtol=rounded, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_terms_sum_to_the_bound(name):
    result = bound(make.random_attention(), default_arithmetic(DTYPES[name], (9, 0)))
    for total, terms in ((result.out, result.out_terms), (result.lse, result.lse_terms)):
        assert torch.equal(torch.stack(list(terms.values())).sum(0), total)
        assert all(bool((t >= 0).all()) for t in terms.values())
        assert bool(torch.isfinite(total).all())


def test_errors_of_weights_cost_nothing_where_values_are_equal():
    known = make.random_attention()
    equal = make.attention(known.q, known.k, torch.full_like(known.v, 1.25), scale=known.scale)
    result = bound(equal, default_arithmetic(DTYPES["fp32"]))
    moved = result.out_terms["scores"] + result.out_terms["exponent"]
    # Only the rounding of the exact out itself is left.
    assert bool((moved <= 2 * 24 * 2.0**-53).all())


def test_rows_without_keys_are_allowed_no_error():
    seen = torch.ones(2, 5, 24, dtype=torch.bool)
    seen[1, 3] = False
    result = bound(make.random_attention(seen=seen), default_arithmetic(DTYPES["bf16"]))
    assert not result.out[1, 3].any()
    assert result.lse[1, 3] == 0
    assert bool((result.out[0] > 0).all())


def test_hidden_keys_do_not_change_the_bound():
    seen = torch.arange(24) < 7
    arithmetic = replace(default_arithmetic(DTYPES["bf16"]), block_kv=1)
    hidden = bound(make.random_attention(seen=seen[None, None]), arithmetic)
    known = make.random_attention()
    shorter = make.attention(known.q, known.k[:, :7], known.v[:, :7], scale=known.scale)
    short = bound(shorter, arithmetic)
    torch.testing.assert_close(hidden.out, short.out, rtol=24 * 32 * 2.0**-53, atol=0)
    torch.testing.assert_close(hidden.lse, short.lse, rtol=24 * 32 * 2.0**-53, atol=0)


def test_scaling_values_by_a_power_of_two_scales_every_term_of_out():
    known, profile = make.random_attention(), default_arithmetic(DTYPES["bf16"])
    one = bound(known, profile)
    eight = bound(make.attention(known.q, known.k, 8 * known.v, scale=known.scale), profile)
    for name in one.out_terms.keys() - {"underflow", OUTPUT}:
        torch.testing.assert_close(
            eight.out_terms[name], 8 * one.out_terms[name], rtol=SMALL, atol=0
        )
    assert torch.equal(eight.lse, one.lse)


LOOSER = {
    "exp2_ulps": 4.0,
    "block_kv": 1,
    "splits": 4,
    "scores": HOPPER_FP8,
    "values": HOPPER_FP8,
    "weights": FORMATS["e4m3"],
    "lazy_rescale": 8.0,
    "scaled_query": FORMATS["bf16"],
    "output": FORMATS["e5m2"],
}


@pytest.mark.parametrize("field", LOOSER)
def test_looser_arithmetic_allows_more(field):
    known = make.random_attention(kv=40, dim=40)
    profile = default_arithmetic(DTYPES["bf16"])
    looser = replace(profile, **{field: LOOSER[field]})
    tight, loose = bound(known, profile), bound(known, looser)
    assert bool((loose.out >= tight.out).all())
    assert bool((loose.lse >= tight.lse).all())
    assert bool((loose.out > tight.out).any() or (loose.lse > tight.lse).any())


def test_summing_rounded_weights_adds_their_rounding_to_lse():
    known, plain = make.random_attention(), default_arithmetic(DTYPES["e4m3"])
    declared = replace(plain, sums_rounded_weights=True)
    without, with_it = bound(known, plain).lse, bound(known, declared).lse
    assert bool((with_it > without + 2.0**-5).all())
    assert "rounding of P" in bound(known, declared).lse_terms


def test_infinite_score_mod_error_leaves_only_its_row_unbounded():
    known = make.random_attention()
    known = make.attention(known.q, known.k, known.v, scores=known.scores)
    zero = torch.zeros_like(known.scores)
    radius = zero.clone()
    radius[1, 2, 3] = math.inf
    result = bound(
        known,
        default_arithmetic(DTYPES["bf16"]),
        ScoreModError(radius=radius, own=zero, jump=torch.isinf(radius)),
    )
    unbounded = torch.isinf(result.lse)
    assert unbounded.nonzero().tolist() == [[1, 2]]
    assert bool(torch.isinf(result.out[1, 2]).all())
    assert bool(torch.isfinite(result.out[~unbounded]).all())


def test_bound_at_huge_logits_is_limited_by_the_values():
    """With exponents off by thousands any key may win, and out is still one of the values."""
    q = 3e4 * make.normal(1, 4, 16)
    known = make.attention(q, 3e4 * make.normal(1, 8, 16, seed=1), make.normal(1, 8, 2, seed=2))
    result = bound(known, default_arithmetic(DTYPES["e4m3"], (9, 0)))
    assert bool(torch.isfinite(result.out).all())
    # A weight moves by at most 1, a value differs from out by at most 2 max |v|; P adds 2^-4.
    assert bool((result.out <= 2 * 8 * 2 * known.v.abs().max()).all())


def test_infinite_value_leaves_its_column_unbounded_where_it_is_seen():
    known = make.random_attention(heads=1, rows=2)
    seen = torch.ones(1, 2, 24, dtype=torch.bool)
    seen[0, 0, 5] = False
    values = known.v.clone()
    values[0, 5, 1] = math.inf
    masked = make.attention(known.q, known.k, known.v, seen=seen)
    result = bound(replace(masked, v=values), default_arithmetic(DTYPES["bf16"]))
    assert torch.isinf(result.out).nonzero().tolist() == [[0, 1, 1]]


def test_softmax_of_one_score_has_only_output_rounding():
    result = bound(make.softmax([[[3.0]]]), default_arithmetic(DTYPES["fp32"]))
    assert result.out_terms["exponent"].item() <= 2 * 2.0**-52 * 2.0**-20  # float64's own, times ρ
    assert result.out_terms[OUTPUT].item() == 2.0**-24


def test_softmax_of_two_scores_matches_hand_calculation():
    result = bound(make.softmax([[[0.0, 0.0]]]), default_arithmetic(DTYPES["fp32"]))
    rho = 2 * 5 * U / (1 - 5 * U)
    change = 0.5 * (0.5 * math.expm1(rho) + 0.5 * math.expm1(rho)) / math.exp(-rho)
    assert result.out_terms["exponent"].flatten().tolist() == pytest.approx(
        [change] * 2, rel=SECOND
    )


def error_shares(kernel, **problem):
    """Largest error ÷ bound of out and of LSE."""
    case = Case(problem=Problem(batch=1, heads=2, kv_heads=2, **problem))
    evidence = EvidenceBuilder(case, "cpu")
    allowance = evidence.allowance(Ideal().arithmetic(case.problem, "cpu"))
    outputs, truth = kernel.run(evidence.inputs), evidence.truth
    out = (outputs.out.double() - truth.out).abs() / allowance.out
    lse = (outputs.lse - truth.lse).abs() / allowance.lse
    return float(out.nan_to_num(0).max()), float(lse.nan_to_num(0).max())


SHAPE = {"query": 48, "kv": 160, "head_dim": 32, "seed": 3}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("distribution", ["normal", "large_logits", "outliers"])
def test_ideal_kernel_stays_within_the_bound(name, distribution):
    kernel = Ideal(Tiling(block_query=16, block_kv=32, reverse=True))
    mask = Spec.of("causal")
    assert max(error_shares(kernel, dtype=name, distribution=distribution, mask=mask, **SHAPE)) < 1


FAULTS = {
    "not rescaled": ({"rescaled": lambda _, running, alpha: running}, ("fp32", "e4m3")),
    "log2 e in bf16": ({"log2_e": 1.4453125}, ("fp32", "bf16")),
    "scores in bf16": (
        {"scores": lambda _, products: products.bfloat16().float()},
        ("fp32", "bf16"),
    ),
    "P in fp8 as it is": ({"weights_scale": lambda *_: 1.0}, ("e4m3",)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_exceeds_the_bound(fault):
    steps, dtypes = FAULTS[fault]
    kernel = stepping(Tiling(block_query=16, block_kv=32), **steps)
    distribution = "large_logits" if dtypes == ("e4m3",) else "normal"
    for dtype in dtypes:
        assert max(error_shares(kernel, dtype=dtype, distribution=distribution, **SHAPE)) > 1, dtype


@pytest.mark.parametrize("distribution", ["normal", "large_logits", "one_hot"])
def test_every_float64_recurrence_stays_within_the_oracle_bound(distribution):
    problem = Problem(
        batch=1, heads=1, query=2, kv=9, head_dim=4, dtype="bf16", distribution=distribution
    )
    evidence = EvidenceBuilder(Case(problem=problem), "cpu")
    inputs = evidence.inputs
    rows = Rows(range(1), torch.arange(2))
    proof = bound(compute_conditions(inputs, evidence.truth, rows), FP64_ORACLE)
    exact = oracles.RECURRENCES[oracles.REFERENCE](Mp(40), inputs)
    largest_share = 0.0
    for name in oracles.ORACLES.keys() - oracles.MAY_OVERFLOW:
        result = oracles.ORACLES[name](inputs)
        for got, many, allowed in (
            (result.out[0], exact.out[0], proof.out),
            (result.lse[0], exact.lse[0], proof.lse),
        ):
            errors = [abs(x - float(y)) for x, y in zip(got.flatten(), np.ravel(many), strict=True)]
            # float(y) itself is rounded once.
            error = torch.stack(errors).view_as(allowed) - 2.0**-53 * got.abs()
            assert bool((error <= allowed).all()), name
            largest_share = max(largest_share, float((error / allowed).max()))
    assert largest_share > 0


def test_float32_exceeds_the_bound_of_float64():
    problem = Problem(batch=1, heads=1, query=4, kv=16, head_dim=4, dtype="fp32")
    evidence = EvidenceBuilder(Case(problem=problem), "cpu")
    rows = Rows(range(1), torch.arange(4))
    proof = bound(compute_conditions(evidence.inputs, evidence.truth, rows), FP64_ORACLE)
    out = Ideal().run(evidence.inputs).out.double()
    assert bool(((out - evidence.truth.out)[0].abs() > proof.out).any())


@pytest.mark.parametrize(
    "profile", [default_arithmetic(DTYPES["fp32"]), FP64_ORACLE], ids=["fp32", "fp64"]
)
def test_huge_score_mod_errors_stay_attributed_to_the_score_mod(profile):
    """A score mod that makes 2e20 of a score is off by 5e16, and LSE with it."""
    known = make.random_attention()
    known = make.attention(known.q, known.k, known.v, scores=1e20 * known.scores)
    radius = torch.full_like(known.scores, 5e16)
    mod = ScoreModError(radius=radius, own=radius / 2, jump=torch.zeros_like(known.seen))
    result = bound(known, profile, mod)
    assert bool((result.lse >= 5e16).all())
    assert bool(torch.isfinite(result.lse).all())
    attributed = result.lse_terms["scores"] + result.lse_terms["score mod"]
    assert bool((attributed > result.lse / 4).all())
    # Out stays a mean of the values, and is rounded.
    assert bool((result.out <= 2 * (1 + 2.0**-10) * known.v.abs().amax()).all())


def test_dividing_after_every_tile_counts_tiles_without_visible_keys():
    known = make.random_attention(kv=64, dim=16)  # the first row is shown its first key alone
    seen = known.seen.clone()
    seen[..., 0, 1:] = False
    known = replace(known, seen=seen)
    fused = replace(default_arithmetic(DTYPES["fp32"]), block_kv=16)
    divided = replace(fused, divides_each_step=True)
    # n + 2T + parts + 1, and n + 8 · (tiles + parts) + parts + 1.
    assert float(sum_roundings(known, fused)[0, 0, 0]) == 1 + 2 * 1 + 1 + 1
    assert float(sum_roundings(known, divided)[0, 0, 0]) == 1 + 8 * (4 + 1) + 1 + 1
