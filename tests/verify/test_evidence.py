"""EvidenceBuilder: what is known of a Case before a kernel runs, above all the input rmse."""

import dataclasses
import math

import pytest
import torch

from attncheck import probes
from attncheck.core.mod_spec import Spec
from attncheck.inputs.distributions import DISTRIBUTIONS
from attncheck.inputs.input_tensors import Inputs, draw_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.judge import blind_spot as blind_spots
from attncheck.oracles import row_conditions as conditions_room
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal
from attncheck.verify.evidence_builder import EvidenceBuilder, ensemble_tilings

SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 9, "kv": 7, "head_dim": 16}
ALL = ["fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2"]


def evidence(problem: Problem) -> EvidenceBuilder:
    return EvidenceBuilder(Case(problem=problem), "cpu")


def attention(**changes: object) -> Problem:
    return Problem(**SIZES | {"value_dim": 5} | changes)


def softmax(**changes: object) -> Problem:
    return Problem(**{"operation": "softmax", "heads": 3, "query": 9, "kv": 7} | changes)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem) -> torch.Tensor:
    """An independent implementation of attention, by loops over batch and head; full or causal."""
    out = torch.empty(problem.batch, problem.heads, problem.query, problem.value_dim).double()
    for b in range(problem.batch):
        for h in range(problem.heads):
            g = h // problem.group
            scores = problem.scale * q[b, h] @ k[b, g].T
            if problem.mask.name == "causal":
                seen = torch.ones_like(scores).tril().bool()
                scores = scores.masked_fill(~seen, -math.inf)
            out[b, h] = torch.softmax(scores, -1) @ v[b, g]
    return out


def rms(difference: torch.Tensor) -> float:
    return float((difference**2).mean().sqrt())


def resolution(keys: int, score_units: float, largest: float) -> float:
    """How far two float64 evaluations of one out may lie apart.

    Args:
        keys: Keys of a row, which is the number of terms in the sums of weights and of products.
        score_units: The error of a score in units of 2^-53; its weight has the same relative error.
        largest: The largest value that is averaged.

    Each of the two evaluations adds, to the errors of score and maximum: exp (2 units), two sums
    and a quotient.
    """
    return 2 * (2 * score_units + 2 + 2 * keys + 1) * 2.0**-53 * largest


def attention_resolution(problem: Problem, drawn: Inputs) -> float:
    """``resolution`` for scores of head_dim products, their sum and a factor: (head_dim + 2) units
    of scale · Σ|q||k|."""
    q, k = (x.abs().amax((1, 2)) for x in (drawn.q, drawn.k))
    largest_score = float(problem.scale * (q * k).sum(-1).max())
    units = (problem.head_dim + 2) * largest_score
    return resolution(problem.kv, units, float(drawn.v.abs().max()))


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_input_rmse_is_the_distance_between_exact_results_of_stored_and_drawn(dtype, mask):
    problem = attention(dtype=dtype, mask=Spec.of(mask), seed=5)
    stored, drawn = draw_inputs(problem), draw_inputs(problem.replace(dtype="fp64"))
    expected = rms(exact(*stored.promoted(), problem) - exact(drawn.q, drawn.k, drawn.v, problem))
    assert expected > 0
    allowed = attention_resolution(problem, drawn)
    assert abs(evidence(problem).input_rmse - expected) <= allowed
    assert allowed < expected / 1000  # otherwise the comparison would show nothing


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_input_rmse_of_softmax(dtype):
    problem = softmax(dtype=dtype, distribution="large_logits")
    stored, drawn = draw_inputs(problem), draw_inputs(problem.replace(dtype="fp64"))
    difference = torch.softmax(stored.x.double(), -1) - torch.softmax(drawn.x, -1)
    # The scores are given; their difference from the maximum is rounded.
    allowed = resolution(problem.kv, float(2 * drawn.x.abs().max()), 1.0)
    assert abs(evidence(problem).input_rmse - rms(difference)) <= allowed
    assert allowed < rms(difference) / 1000


def test_input_rmse_doubles_with_each_significand_bit_less():
    costs = [evidence(attention(dtype=dtype)).input_rmse for dtype in ALL if dtype != "tf32"]
    assert costs == sorted(costs)
    # Significands of 24, 11, 8, 4 and 3 bits.
    for finer, coarser, fewer in zip(costs, costs[1:], (13, 3, 4, 1), strict=False):
        assert 2.0 ** (fewer - 1) < coarser / finer < 2.0 ** (fewer + 1)


@pytest.mark.parametrize("name", [n for n, d in DISTRIBUTIONS.items() if d.scores])
def test_input_rmse_is_zero_for_fp64(name):
    assert evidence(attention(dtype="fp64", distribution=name)).input_rmse == 0
    assert evidence(softmax(dtype="fp64", distribution=name)).input_rmse == 0


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_input_rmse_is_zero_for_exactly_representable_inputs(dtype):
    assert evidence(softmax(dtype=dtype, distribution="zero_q")).input_rmse == 0
    assert evidence(softmax(dtype=dtype, distribution="one_hot")).input_rmse == 0


def test_input_rmse_excludes_rows_that_see_no_key():
    """Such rows are 0 in both results, and would make the rmse look smaller."""
    mask = Spec.of("not", Spec.of("prefix_lm", prefix=2))
    problem = attention(mask=mask, dtype="bf16")
    builder = evidence(problem)
    truths = [evidence(p).truth.out for p in (problem, problem.replace(dtype="fp64"))]
    difference = (truths[0] - truths[1])[builder.alive]
    assert 0 < len(difference) < builder.alive.numel()
    # Both sum the same numbers, in different orders.
    assert abs(builder.input_rmse / rms(difference) - 1) <= difference.numel() * 2.0**-53
    assert builder.input_rmse > rms(truths[0] - truths[1])


def test_establish_computes_once_and_frees_the_originals():
    builder = evidence(attention())
    builder.establish()
    first = builder.inputs, builder.truth, builder.input_rmse
    assert "_originals" not in builder.__dict__
    builder.establish()
    assert (builder.inputs, builder.truth, builder.input_rmse) == first
    assert "_originals" not in builder.__dict__
    assert torch.equal(builder.alive, torch.ones(2, 4, 9, dtype=torch.bool))


@pytest.mark.parametrize("problem", [attention(dtype="e4m3"), softmax(dtype="bf16")], ids=str)
def test_evidence_inputs_are_those_drawn_for_the_problem(problem):
    inputs, drawn = evidence(problem).inputs, draw_inputs(problem)
    for name, tensor in drawn.tensors().items():
        assert torch.equal(inputs.tensors()[name].double(), tensor.double())


def declared(problem: Problem):
    return Ideal().arithmetic(problem, "cpu")


@pytest.mark.parametrize("problem", [attention(), softmax()], ids=str)
def test_allowance_is_cached_by_arithmetic(problem):
    builder = evidence(problem)
    arithmetic = declared(problem)
    first = builder.allowance(arithmetic)
    assert builder.allowance(dataclasses.replace(arithmetic)) is first  # an equal one
    other = builder.allowance(dataclasses.replace(arithmetic, exp2_ulps=64.0))
    assert other is not first
    assert bool((other.lse > first.lse).all())


def test_sampled_conditions_match_the_samples_of_the_allowance(monkeypatch):
    monkeypatch.setattr(conditions_room, "_CPU_PAIRS", 20)
    problem = attention(mask=Spec.of("causal"))
    builder = evidence(problem)
    samples = builder.allowance(declared(problem)).samples
    conditions = list(builder.sampled_conditions())
    assert len(samples) == len(conditions) > 1
    for sample, one in zip(samples, conditions, strict=True):
        assert sample.rows.heads == one.rows.heads
        assert torch.equal(sample.rows.query, one.rows.query)
        assert sample.probable_out.shape == one.out.shape


def test_blind_spot_is_cached_and_smaller_with_lse():
    problem = attention(score=Spec.of("softcap", cap=2.0))
    builder, arithmetic = evidence(problem), declared(problem)
    with_lse = builder.blind_spot(arithmetic, exposes_lse=True)
    assert with_lse is not None
    assert builder.blind_spot(arithmetic, exposes_lse=True) is with_lse
    without = builder.blind_spot(arithmetic, exposes_lse=False)
    assert without is not None
    assert with_lse.weight < without.weight  # LSE reveals lighter keys
    assert with_lse.scale < math.inf  # the slopes of the score mod are known


def test_ideal_outputs_are_cached_by_tiling(monkeypatch):
    builder, tiling = evidence(attention()), Tiling(block_query=16, block_kv=4)
    first = builder.ideal_outputs(tiling)
    monkeypatch.setattr(Ideal, "run", None)
    assert builder.ideal_outputs(Tiling(block_query=16, block_kv=4)) is first
    assert builder.ideal_outputs(tiling, truncates=True) is first  # only tf32 is truncated
    expected = rms((first.out.double() - builder.truth.out)[builder.alive])
    assert abs(builder.ideal_rmse(tiling) / expected - 1) <= first.out.numel() * 2.0**-53


def test_ideal_outputs_truncate_tf32_if_the_kernel_does():
    builder, tiling = evidence(attention(dtype="tf32")), Tiling(block_query=16, block_kv=4)
    nearest, cut = (builder.ideal_outputs(tiling, truncates=t) for t in (False, True))
    assert not torch.equal(nearest.out, cut.out)
    assert torch.equal(cut.out, Ideal(tiling, tf32="truncate").run(builder.inputs).out)


@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
def test_ensemble_outputs_differ_and_stay_within_their_allowances(dtype):
    problem = attention(dtype=dtype, query=150, kv=140)
    builder = evidence(problem)
    tilings = ensemble_tilings(problem)
    assert len(set(tilings)) == 4
    assert any(tiling.reverse for tiling in tilings)
    assert any(tiling.lazy_rescale for tiling in tilings) == (dtype == "bf16")
    outputs = list(builder.ensemble())
    for i, one in enumerate(outputs):
        assert not any(torch.equal(one.lse, other.lse) for other in outputs[:i])
        tiling = tilings[i]
        arithmetic = Ideal(tiling).arithmetic(problem, "cpu")
        arithmetic = dataclasses.replace(arithmetic, lazy_rescale=tiling.lazy_rescale)
        error = (one.out.double() - builder.truth.out).abs()
        assert bool((error <= builder.allowance(arithmetic).out).all())
    assert len(list(evidence(softmax()).ensemble())) == 1


def test_probe_case_uses_the_inputs_of_the_probe():
    case = probes.case("decode", attention(mask=Spec.of("causal")))
    builder = EvidenceBuilder(case, "cpu")
    builder.establish()
    for name, tensor in probes.inputs(case).tensors().items():
        assert torch.equal(builder.inputs.tensors()[name], tensor)
    assert builder.input_rmse == 0
    assert not builder.evidence.generic
    assert evidence(attention()).evidence.generic
    assert not evidence(attention(distribution="zero_q")).evidence.generic
    allowed = builder.allowance(declared(case.problem))
    outputs = Ideal().run(builder.inputs)
    assert bool(((outputs.out.double() - builder.truth.out).abs() <= allowed.out).all())


def test_establish_runs_ideal_kernels_ahead_only_on_a_gpu_for_reference_errors():
    case, tiling = Case(problem=attention()), Tiling(block_query=16, block_kv=16)
    ahead = EvidenceBuilder(case, "cpu", tilings=[tiling])
    ahead.establish()
    assert not ahead._ideals
    ahead.device = "cuda"  # no CUDA is needed: everything on the device is cached by now
    ahead.establish(reference_errors=False)
    assert not ahead._ideals
    ahead.establish()
    assert [key for key, _ in ahead._ideals] == [tiling]
    assert torch.equal(ahead.ideal_outputs(tiling).out, Ideal(tiling).run(ahead.inputs).out)


def test_truncated_sums_are_computed_once_for_all_arithmetics(monkeypatch):
    """The results of an accumulator of few bits depend on the inputs alone."""
    shapes = []
    cut_sums = blind_spots._cut_sums

    def logged_cut_sums(steps, bits):
        shapes.append(tuple(steps.shape))
        return cut_sums(steps, bits)

    monkeypatch.setattr(blind_spots, "_cut_sums", logged_cut_sums)
    builder = evidence(attention(kv=64))
    declared = Ideal().arithmetic(builder.case.problem, "cpu")
    for each in (declared, dataclasses.replace(declared, exp2_ulps=9.0)):
        assert builder.blind_spot(each, exposes_lse=True) is not None
    sums_over_keys = [shape for shape in shapes if shape[0] == 64 // blind_spots.STEP]
    assert len(sums_over_keys) == 1
