"""What is known of a Case whatever the kernel; above all what rounding its inputs costs."""

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
    """Attention written out once more, by loops over batch and head; causal if it is asked for."""
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
        keys: A row's: the sums of weights and of products have as many terms.
        score_units: By how many units of 2^-53 a score may be off; its weight is off by as much.
        largest: The largest value that is averaged.

    To the scores' units, of score and maximum, come exp (2), two sums and a quotient, twice.
    """
    return 2 * (2 * score_units + 2 + 2 * keys + 1) * 2.0**-53 * largest


def attention_resolution(problem: Problem, drawn: Inputs) -> float:
    """A score is head_dim products, their sum and a factor: off by that of scale · Σ|q||k|."""
    q, k = (x.abs().amax((1, 2)) for x in (drawn.q, drawn.k))
    largest_score = float(problem.scale * (q * k).sum(-1).max())
    units = (problem.head_dim + 2) * largest_score
    return resolution(problem.kv, units, float(drawn.v.abs().max()))


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_input_rmse_is_the_distance_of_two_exact_results(dtype, mask):
    problem = attention(dtype=dtype, mask=Spec.of(mask), seed=5)
    stored, drawn = draw_inputs(problem), draw_inputs(problem.replace(dtype="fp64"))
    expected = rms(exact(*stored.promoted(), problem) - exact(drawn.q, drawn.k, drawn.v, problem))
    found = evidence(problem).input_rmse
    assert expected > 0
    allowed = attention_resolution(problem, drawn)
    assert abs(found - expected) <= allowed
    assert allowed < expected / 1000  # the comparison says something


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_input_rmse_of_a_softmax(dtype):
    problem = softmax(dtype=dtype, distribution="large_logits")
    stored, drawn = draw_inputs(problem), draw_inputs(problem.replace(dtype="fp64"))
    difference = torch.softmax(stored.x.double(), -1) - torch.softmax(drawn.x, -1)
    # The scores are given; their difference from the maximum is rounded.
    allowed = resolution(problem.kv, float(2 * drawn.x.abs().max()), 1.0)
    assert abs(evidence(problem).input_rmse - rms(difference)) <= allowed
    assert allowed < rms(difference) / 1000


def test_coarser_inputs_cost_more():
    costs = [evidence(attention(dtype=dtype)).input_rmse for dtype in ALL if dtype != "tf32"]
    assert costs == sorted(costs)
    # Bits of the significand: 24, 11, 8, 4, 3; each bit less doubles the cost of an input.
    for finer, coarser, fewer in zip(costs, costs[1:], (13, 3, 4, 1), strict=False):
        assert 2.0 ** (fewer - 1) < coarser / finer < 2.0 ** (fewer + 1)


@pytest.mark.parametrize("name", [n for n, d in DISTRIBUTIONS.items() if d.scores])
def test_inputs_in_float64_cost_nothing(name):
    assert evidence(attention(dtype="fp64", distribution=name)).input_rmse == 0
    assert evidence(softmax(dtype="fp64", distribution=name)).input_rmse == 0


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_inputs_that_the_dtype_holds_cost_nothing(dtype):
    assert evidence(softmax(dtype=dtype, distribution="zero_q")).input_rmse == 0
    assert evidence(softmax(dtype=dtype, distribution="one_hot")).input_rmse == 0


def test_rows_that_see_no_key_do_not_count():
    """They are 0 on both sides, and would make the cost look smaller."""
    mask = Spec.of("not", Spec.of("prefix_lm", prefix=2))
    problem = attention(mask=mask, dtype="bf16")
    found = evidence(problem)
    truths = [evidence(p).truth.out for p in (problem, problem.replace(dtype="fp64"))]
    difference = (truths[0] - truths[1])[found.alive]
    assert 0 < len(difference) < found.alive.numel()
    # The same numbers, added up in another order.
    assert abs(found.input_rmse / rms(difference) - 1) <= difference.numel() * 2.0**-53
    assert found.input_rmse > rms(truths[0] - truths[1])


def test_everything_is_computed_once_and_the_originals_are_let_go():
    found = evidence(attention())
    found.establish()
    first = found.inputs, found.truth, found.input_rmse
    assert "_originals" not in found.__dict__
    found.establish()
    assert (found.inputs, found.truth, found.input_rmse) == first
    assert "_originals" not in found.__dict__
    assert torch.equal(found.alive, torch.ones(2, 4, 9, dtype=torch.bool))


@pytest.mark.parametrize("problem", [attention(dtype="e4m3"), softmax(dtype="bf16")], ids=str)
def test_its_inputs_are_those_of_the_problem(problem):
    found, drawn = evidence(problem).inputs, draw_inputs(problem)
    for name, tensor in drawn.tensors().items():
        assert torch.equal(found.tensors()[name].double(), tensor.double())


def declared(problem: Problem):
    return Ideal().arithmetic(problem, "cpu")


@pytest.mark.parametrize("problem", [attention(), softmax()], ids=str)
def test_an_allowance_is_kept_for_each_arithmetic(problem):
    found = evidence(problem)
    arithmetic = declared(problem)
    first = found.allowance(arithmetic)
    assert found.allowance(dataclasses.replace(arithmetic)) is first  # an equal one
    other = found.allowance(dataclasses.replace(arithmetic, exp2_ulps=64.0))
    assert other is not first
    assert bool((other.lse > first.lse).all())


def test_conditions_of_the_sample_come_in_the_order_of_the_allowance(monkeypatch):
    monkeypatch.setattr(conditions_room, "_CPU_PAIRS", 20)
    problem = attention(mask=Spec.of("causal"))
    found = evidence(problem)
    samples = found.allowance(declared(problem)).samples
    known = list(found.sampled_conditions())
    assert len(samples) == len(known) > 1
    for sample, one in zip(samples, known, strict=True):
        assert sample.rows.heads == one.rows.heads
        assert torch.equal(sample.rows.query, one.rows.query)
        assert sample.probable_out.shape == one.out.shape


def test_the_blind_spot_is_computed_once_for_what_a_kernel_exposes():
    problem = attention(score=Spec.of("softcap", cap=2.0))
    found, arithmetic = evidence(problem), declared(problem)
    with_lse = found.blind_spot(arithmetic, exposes_lse=True)
    assert with_lse is not None
    assert found.blind_spot(arithmetic, exposes_lse=True) is with_lse
    without = found.blind_spot(arithmetic, exposes_lse=False)
    assert without is not None
    assert with_lse.weight < without.weight  # LSE sees more
    assert with_lse.scale < math.inf  # the score mod has its slopes


def test_the_ideal_kernel_at_a_tiling_runs_once(monkeypatch):
    found, tiling = evidence(attention()), Tiling(block_query=16, block_kv=4)
    first = found.ideal_outputs(tiling)
    monkeypatch.setattr(Ideal, "run", None)
    assert found.ideal_outputs(Tiling(block_query=16, block_kv=4)) is first
    assert found.ideal_outputs(tiling, truncates=True) is first  # no tf32
    expected = rms((first.out.double() - found.truth.out)[found.alive])
    assert abs(found.ideal_rmse(tiling) / expected - 1) <= first.out.numel() * 2.0**-53


def test_tf32_is_truncated_where_the_kernel_does_it():
    found, tiling = evidence(attention(dtype="tf32")), Tiling(block_query=16, block_kv=4)
    nearest, cut = (found.ideal_outputs(tiling, truncates=t) for t in (False, True))
    assert not torch.equal(nearest.out, cut.out)
    assert torch.equal(cut.out, Ideal(tiling, tf32="truncate").run(found.inputs).out)


@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
def test_an_ensemble_is_of_right_kernels_that_differ(dtype):
    problem = attention(dtype=dtype, query=150, kv=140)
    found = evidence(problem)
    tilings = ensemble_tilings(problem)
    assert len(set(tilings)) == 4
    assert any(tiling.reverse for tiling in tilings)
    assert any(tiling.lazy_rescale for tiling in tilings) == (dtype == "bf16")
    outputs = list(found.ensemble())
    for i, one in enumerate(outputs):
        assert not any(torch.equal(one.lse, other.lse) for other in outputs[:i])
        tiling = tilings[i]
        arithmetic = Ideal(tiling).arithmetic(problem, "cpu")
        arithmetic = dataclasses.replace(arithmetic, lazy_rescale=tiling.lazy_rescale)
        error = (one.out.double() - found.truth.out).abs()
        assert bool((error <= found.allowance(arithmetic).out).all())
    assert len(list(evidence(softmax()).ensemble())) == 1


def test_the_inputs_of_a_probe_are_the_probe_s():
    case = probes.case("decode", attention(mask=Spec.of("causal")))
    found = EvidenceBuilder(case, "cpu")
    found.establish()
    for name, tensor in probes.inputs(case).tensors().items():
        assert torch.equal(found.inputs.tensors()[name], tensor)
    assert found.input_rmse == 0
    assert not found.evidence.generic
    assert evidence(attention()).evidence.generic
    assert not evidence(attention(distribution="zero_q")).evidence.generic
    allowed = found.allowance(declared(case.problem))
    given = Ideal().run(found.inputs)
    assert bool(((given.out.double() - found.truth.out).abs() <= allowed.out).all())


def test_a_gpu_runs_ideal_kernels_before_the_first_kernel_and_a_verdict_alone_none():
    case, tiling = Case(problem=attention()), Tiling(block_query=16, block_kv=16)
    ahead = EvidenceBuilder(case, "cpu", tilings=[tiling])
    ahead.establish()
    assert not ahead._ideals
    ahead.device = "cuda"  # of which nothing is asked any more
    ahead.establish(reference_errors=False)
    assert not ahead._ideals
    ahead.establish()
    assert [of for of, _ in ahead._ideals] == [tiling]
    assert torch.equal(ahead.ideal_outputs(tiling).out, Ideal(tiling).run(ahead.inputs).out)


def test_sums_are_cut_once_for_all_kernels(monkeypatch):
    """What accumulators of few bits would give hangs on the inputs alone."""
    shapes = []
    cut_sums = blind_spots._cut_sums

    def noting(steps, bits):
        shapes.append(tuple(steps.shape))
        return cut_sums(steps, bits)

    monkeypatch.setattr(blind_spots, "_cut_sums", noting)
    known = evidence(attention(kv=64))
    declared = Ideal().arithmetic(known.case.problem, "cpu")
    for each in (declared, dataclasses.replace(declared, exp2_ulps=9.0)):
        assert known.blind_spot(each, exposes_lse=True) is not None
    of_values = [shape for shape in shapes if shape[0] == 64 // blind_spots.STEP]
    assert len(of_values) == 1
