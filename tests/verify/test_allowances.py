"""Error allowances for a whole Problem: one bound per row, infinite where no bound is known."""

import dataclasses
import math

import pytest
import torch

from attncheck.core.conditions import kept_step
from attncheck.core.declared_arithmetic import AMPERE, default_arithmetic
from attncheck.core.formats import FORMATS, round_to
from attncheck.core.judgement import Place
from attncheck.core.mod_spec import Entry, Spec
from attncheck.inputs.problem import Case, Problem
from attncheck.judge.deterministic_bound import deterministic_bound
from attncheck.judge.score_errors import score_error
from attncheck.mods.masks import MASKS
from attncheck.mods.scores import SCORES
from attncheck.oracles import row_conditions as conditions_room
from attncheck.oracles.row_conditions import compute_conditions
from attncheck.subjects.ideal import Ideal
from attncheck.verify import allowances as room
from attncheck.verify.allowances import allowances, budget
from attncheck.verify.evidence_builder import EvidenceBuilder

HALF_THE_DIGITS = 2.0**-26
"""Half of float64's digits: the square root of a cancelling sum keeps no more than these when
the sum is added up in another order."""

SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 40, "kv": 24, "head_dim": 16}


def attention(**changes: object) -> Problem:
    return Problem(**SIZES | {"value_dim": 5} | changes)


def softmax(**changes: object) -> Problem:
    return Problem(**{"operation": "softmax", "heads": 3, "query": 9, "kv": 7} | changes)


def evidence(problem: Problem) -> EvidenceBuilder:
    return EvidenceBuilder(Case(problem=problem), "cpu")


def ideal_arithmetic(problem: Problem):
    return Ideal().arithmetic(problem, "cpu")


def allowance_of(problem: Problem):
    (only,) = allowances(evidence(problem).evidence, [ideal_arithmetic(problem)])
    return only


def conditions_of(problem: Problem):
    return next(iter(evidence(problem).sampled_conditions()))


def register_score(monkeypatch, mod, name="own"):
    entry = Entry(summary="", build=lambda values, dimensions, device: mod)
    monkeypatch.setitem(SCORES, name, entry)
    return Spec.of(name)


PROBLEMS = [
    attention(),
    attention(dtype="e4m3", mask=Spec.of("causal")),
    attention(dtype="tf32", mask=Spec.of("causal_bottom_right"), distribution="large_logits"),
    attention(mask=Spec.of("padding", lengths=[0, 3]), dtype="fp32"),
    attention(score=Spec.of("chain", Spec.of("alibi"), Spec.of("softcap", cap=2.0))),
    attention(score=Spec.of("relative_bias", distance=5, seed=1), dtype="fp16"),
    softmax(),
    softmax(dtype="fp32", distribution="large_logits"),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_allowance_admits_ideal_kernel_and_rejects_faults(problem):
    """Two planted faults exceed the allowance: a doubled ``out``, and an LSE without one key."""
    facts = evidence(problem)
    allowed = facts.allowance(ideal_arithmetic(problem))
    outputs, exact = Ideal().run(facts.inputs), facts.truth
    assert bool(allowed.out[facts.alive].isfinite().all())
    assert bool(((outputs.out.double() - exact.out).abs() <= allowed.out).all())
    lse = torch.where(facts.alive, outputs.lse.double() - exact.lse, 0.0).abs()
    assert bool((lse <= allowed.lse).all())
    assert bool((allowed.out[~facts.alive] == 0).all())
    assert bool((allowed.lse[~facts.alive] == 0).all())
    assert bool(((2 * outputs.out.double() - exact.out).abs() > allowed.out).any())
    assert bool((allowed.lse < 1 / problem.kv)[facts.alive].any())  # a key of average weight
    assert 0 < allowed.oracle_share < 2.0**-20


@pytest.mark.parametrize("problem", PROBLEMS[:5], ids=str)
def test_allowance_does_not_depend_on_how_rows_are_split(monkeypatch, problem):
    """Rows computed in several pieces get the allowance of one pass, and each row is sampled once.

    The pieces add up in another order, hence the tolerance.
    """
    whole = allowance_of(problem)
    assert len(whole.samples) == 1
    monkeypatch.setattr(conditions_room, "_CPU_PAIRS", 13 * problem.kv)
    parts = allowance_of(problem)
    assert len(parts.samples) > 1
    for one, other in ((parts.out, whole.out), (parts.lse, whole.lse)):
        assert bool(((one - other).abs() <= HALF_THE_DIGITS * other).all())
    seen = torch.zeros(8, 40)
    for sample in parts.samples:
        seen[sample.rows.heads.start : sample.rows.heads.stop, sample.rows.query] += 1
    assert bool((seen == 1).all())


def test_large_problem_bounds_every_row_and_samples_a_few(monkeypatch):
    problem = attention(mask=Spec.of("causal"))
    whole = allowance_of(problem)
    monkeypatch.setattr(conditions_room, "_CPU_WHOLE", 1)
    monkeypatch.setattr(conditions_room, "_FEWEST_ROWS", 8)
    some = allowance_of(problem)
    assert torch.equal(some.out, whole.out)
    assert torch.equal(some.lse, whole.lse)
    (sample,), (every,) = some.samples, whole.samples
    assert len(sample.rows.query) == 8
    certain = whole.out.flatten(0, 1)[:, sample.rows.query]
    assert bool((sample.probable_out <= certain * (1 + HALF_THE_DIGITS)).all())
    assert bool((sample.sd_out < sample.probable_out).all())
    both = (sample.probable_out, every.probable_out[:, sample.rows.query])
    assert bool(((both[0] - both[1]).abs() <= both[1] * HALF_THE_DIGITS).all())


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_budget_terms_sum_to_the_allowance(problem):
    facts = evidence(problem)
    arithmetic = ideal_arithmetic(problem)
    allowed = facts.allowance(arithmetic)
    b, query = problem.batch - 1, problem.query - 1
    for at, total in (
        (Place(batch=b, head=2, query=query, dim=3), allowed.out[b, 2, query, 3]),
        (Place(batch=b, head=2, query=query), allowed.lse[b, 2, query]),
    ):
        terms = budget(facts.evidence, arithmetic, at)
        assert abs(sum(terms.values()) - float(total)) <= float(total) * HALF_THE_DIGITS
        assert ("score mod" in terms) == (problem.score.name != "none")
        assert sum(amount > 0 for amount in terms.values()) > 2


def test_score_mod_jump_is_counted_and_widens_its_row(monkeypatch):
    """A score that rounds to the other side of a jump in the score mod is no fault.

    Only the row of that score gets the wide allowance, and no tighter probable error.
    """
    plain = attention(dtype="fp32")
    known = conditions_of(plain)
    limit = float(known.products[3, 30, 11])

    def at(least):
        def mod(score, b, h, q_idx, kv_idx):
            return torch.where(score > least, score + 5.0, score)

        return register_score(monkeypatch, mod, f"beyond {least:.17g}")

    above, below = (plain.replace(score=at(limit * (1 + side * 2.0**-40))) for side in (-1, 1))
    allowed = allowance_of(above)
    assert allowed.jumps == 1
    differ = [(evidence(above).truth.out - evidence(below).truth.out).abs().flatten(0, 1)]
    differ.append((evidence(above).truth.lse - evidence(below).truth.lse).abs().flatten(0, 1))
    for apart, wide in zip(differ, (allowed.out, allowed.lse), strict=True):
        assert bool((apart[3, 30] > 2.0**-10).any())
        assert bool((apart <= wide.flatten(0, 1)).all())
    others = torch.ones(8, 40, dtype=torch.bool)
    others[3, 30] = False
    assert bool((allowed.lse.flatten(0, 1)[others] < 2.0**-10).all())
    sample = allowed.samples[0]
    assert bool((sample.probable_lse[3, 30] >= allowed.lse.flatten(0, 1)[3, 30]).all())


def test_row_is_unbounded_where_rounding_may_hide_a_key(monkeypatch):
    limit = float(conditions_of(attention(dtype="fp32")).products[3, 7, 11])

    def hides(score, b, h, q_idx, kv_idx):
        return torch.where(score >= limit * (1 + 2.0**-40), score, -math.inf)

    problem = attention(score=register_score(monkeypatch, hides), dtype="fp32")
    allowed = evidence(problem).allowance(ideal_arithmetic(problem))
    assert bool(allowed.out.flatten(0, 1)[3, 7].isinf().all())
    assert int(allowed.lse.isinf().sum()) == 1
    # A mask that hides this key makes the row finite again.
    masked = Spec.of("own mask")
    entry = Entry(
        summary="", build=lambda values, dimensions, device: lambda b, h, q, k: (k != 11) | (q < 0)
    )
    monkeypatch.setitem(MASKS, "own mask", entry)
    problem = problem.replace(mask=masked)
    assert int(allowance_of(problem).lse.isinf().sum()) == 0


def test_nonfinite_inputs_make_only_their_rows_unbounded():
    problem = attention(mask=Spec.of("causal"), dtype="fp32")
    facts = evidence(problem)
    facts.inputs.v[0, 1, 4, 2] = math.nan
    facts.inputs.k[1, 0, 6, 3] = math.nan
    allowed = allowances(facts.evidence, [ideal_arithmetic(problem)])[0]
    expected = torch.zeros_like(facts.truth.out, dtype=torch.bool)
    expected[0, 2:, 4:, 2] = True
    expected[1, :2, 6:] = True
    assert torch.equal(allowed.out.isinf(), expected)
    assert torch.equal(allowed.lse.isinf(), expected[..., 0] & expected[..., 1])
    assert not allowed.out.isnan().any()


def test_untraceable_score_mod_makes_every_row_unbounded(monkeypatch):
    def mod(score, b, h, q_idx, kv_idx):
        return score + torch.erf(score)

    problem = attention(score=register_score(monkeypatch, mod))
    allowed = allowance_of(problem)
    assert bool(allowed.out.isinf().all())
    assert bool(allowed.lse.isinf().all())
    assert allowed.oracle_share == 0


def test_oracle_share_exposes_an_imprecise_oracle(monkeypatch):
    """Planted fault: an oracle that computes in fp32 takes over half of the allowance."""
    problem = attention(dtype="fp32")
    coarse = dataclasses.replace(ideal_arithmetic(problem), block_kv=1)
    monkeypatch.setattr(room, "FP64_ORACLE", coarse)
    assert allowance_of(problem).oracle_share > 0.5


def test_allowance_equals_the_deterministic_bound():
    problem = attention()
    facts, arithmetic = evidence(problem), ideal_arithmetic(problem)
    allowed = facts.allowance(arithmetic)
    known = compute_conditions(facts.inputs, facts.truth, allowed.samples[0].rows)
    bound = deterministic_bound(known, arithmetic, score_error(known, arithmetic))
    assert torch.equal(allowed.out.flatten(0, 1), bound.out)
    assert torch.equal(allowed.lse.flatten(0, 1), bound.lse)


def test_probable_error_uses_score_mod_slope_within_likely_errors():
    """At scale 1e6 a likely input error moves a score across the whole softcap.

    A slope taken at the exact score alone would be almost 0, and the error far underestimated.
    """
    mod = Spec.of("softcap", cap=2.0)
    problem = Problem(
        query=64, kv=512, head_dim=64, value_dim=4, dtype="tf32", score=mod, scale=1e6
    )
    case = evidence(problem)
    q, k, v = (x.double() for x in (case.inputs.q, case.inputs.k, case.inputs.v))
    scores = [
        2 * torch.tanh(1e6 * (q @ k.mT) / 2)
        for q, k in ((q, k), (round_to(q, FORMATS["tf32"]), round_to(k, FORMATS["tf32"])))
    ]
    assert ((scores[1] - scores[0]).abs() > 3.9).any()  # from one end of the cap to the other
    error = (torch.softmax(scores[1], -1) - torch.softmax(scores[0], -1)) @ v
    for sample in allowances(case.evidence, [ideal_arithmetic(problem)])[0].samples:
        apart = error[0][:, sample.rows.query].abs()
        assert (apart <= sample.probable_out).all()


# Each changes a parameter that some steps of the computation read and others do not.
ARITHMETIC_CHANGES = (
    {},
    {"divides_each_step": True},
    {"normalised_weights": True},
    {"exp2_ulps": 1024.0},
    {"sums_rounded_weights": True},
    {"splits": 4},
    {"tanh_error": 0.0},
    {"values": AMPERE},
    {"scores": AMPERE, "scaled_query": FORMATS["fp16"]},
)


@pytest.mark.parametrize("score", ["none", "softcap"])
@pytest.mark.parametrize("sampled", [False, True])
def test_allowances_computed_together_equal_those_computed_alone(score, sampled, monkeypatch):
    """Arithmetics share their common steps: sharing must not change a bit, nor mix them up."""
    mods = {} if score == "none" else {"score": Spec.of("softcap", cap=0.5)}
    problem = Problem(query=48, heads=2, head_dim=16, mask=Spec.of("causal"), **mods)
    if sampled:
        monkeypatch.setattr(conditions_room, "_CPU_WHOLE", 1)
    usual = default_arithmetic(problem.formats)
    arithmetics = [dataclasses.replace(usual, **changes) for changes in ARITHMETIC_CHANGES]
    facts = evidence(problem).evidence
    together = allowances(facts, arithmetics)
    for arithmetic, shared in zip(arithmetics, together, strict=True):
        (alone,) = allowances(facts, [arithmetic])
        assert shared.oracle_share == alone.oracle_share
        assert torch.equal(shared.out, alone.out)
        assert torch.equal(shared.lse, alone.lse)
        for one, other in zip(shared.samples, alone.samples, strict=True):
            for name in ("probable_out", "probable_lse", "sd_out", "sd_lse"):
                assert torch.equal(getattr(one, name), getattr(other, name)), (arithmetic, name)
    # Most of the changes move the allowance: equal results would mean that they were mixed up.
    assert len({(each.out.sum().item(), each.lse.sum().item()) for each in together}) > 6


def test_kept_step_is_cached_by_the_parameters_it_read():
    """A changed field that the step never read is a cache hit; a changed argument is not."""
    problem = Problem(query=4, head_dim=16)
    usual, computed = default_arithmetic(problem.formats), []

    @kept_step
    def step(conditions, arithmetic, factor):
        computed.append(arithmetic.exp2_ulps * factor)
        return computed[-1]

    known = conditions_of(problem)
    other = dataclasses.replace(usual, exp2_ulps=4.0)
    for arithmetic in (usual, dataclasses.replace(usual, splits=3), other, usual):
        assert step(known, arithmetic, 3.0) == arithmetic.exp2_ulps * 3
    assert computed == [6.0, 12.0]
    # Another argument and other rows are computed anew.
    assert step(known, usual, 5.0) == 10.0
    assert step(conditions_of(problem), usual, 3.0) == 6.0
    assert computed == [6.0, 12.0, 10.0, 6.0]
