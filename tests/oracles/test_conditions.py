"""Conditions of rows (scores, weights, sums) that error bounds use, and the choice of rows."""

import itertools
import math

import pytest
import torch

from attncheck import oracles
from attncheck.core.conditions import Rows
from attncheck.core.declared_arithmetic import FP64_ORACLE
from attncheck.core.mod_spec import Entry, Spec
from attncheck.inputs.input_tensors import Inputs, draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.judge.deterministic_bound import deterministic_bound
from attncheck.judge.score_errors import score_error
from attncheck.mods.masks import MASKS
from attncheck.mods.operation_errors import TORCH_FP64
from attncheck.mods.running_error import RunningError
from attncheck.mods.scores import SCORES
from attncheck.mods.trace import trace_score
from attncheck.oracles import row_conditions
from attncheck.oracles.row_conditions import (
    all_rows,
    compute_conditions,
    mask_visibility,
    sampled_rows,
    samples_all_rows,
    score_slopes,
    weigh_rows,
)

SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 9, "kv": 7, "head_dim": 16, "value_dim": 5}
CAUSAL = Spec.of("causal")


def attention(**changes: object) -> Problem:
    return Problem(**SIZES | changes)


def softmax(**changes: object) -> Problem:
    return Problem(**{"operation": "softmax", "heads": 3, "query": 9, "kv": 7} | changes)


@pytest.fixture
def hides(monkeypatch):
    """A score mod that hides odd keys from even heads."""

    def mod(score, b, h, q_idx, kv_idx):
        return torch.where((kv_idx % 2 == 1) & (h % 2 == 0), -math.inf, score)

    entry = Entry(summary="", build=lambda values, dimensions, device: mod)
    monkeypatch.setitem(SCORES, "hides", entry)
    return Spec.of("hides")


def conditions(inputs: Inputs, rows: Rows):
    return compute_conditions(inputs, oracles.truth(inputs), rows)


def every_row(problem: Problem) -> Rows:
    return Rows(range(problem.batch * problem.heads), torch.arange(problem.query))


def weights(known):
    shares = torch.exp(known.scores - known.maximum[..., None]) / known.total[..., None]
    return torch.where(known.seen, shares, 0.0)


def rounding(known, problem):
    """The largest difference of two float64 evaluations: of scores, out and LSE."""
    scores = score_error(known, FP64_ORACLE)
    if not known.has_score_mod:
        bound = deterministic_bound(known, FP64_ORACLE, scores)
        return 2 * scores.radius, 2 * bound.out, 2 * bound.lse
    heads = torch.tensor(known.rows.heads)[:, None, None]
    mod = RunningError(trace_score(problem.score_mod()), arithmetic=TORCH_FP64).at(
        known.products,
        scores.radius,
        heads // problem.heads,
        heads % problem.heads,
        known.rows.query[None, :, None],
        torch.arange(problem.kv),
    )
    bound = deterministic_bound(known, FP64_ORACLE, scores, mod)
    return 2 * mod.radius, 2 * bound.out, 2 * bound.lse


PROBLEMS = [
    attention(),
    attention(dtype="e4m3", mask=CAUSAL),
    attention(dtype="e5m2", batch=1, distribution="outliers"),
    attention(dtype="fp32", mask=Spec.of("causal_bottom_right"), query=12),
    attention(mask=Spec.of("padding", lengths=[0, 3])),
    attention(score=Spec.of("chain", Spec.of("alibi"), Spec.of("softcap", cap=2.0))),
    attention(kv_heads=1, scale=0.5, distribution="large_logits"),
    softmax(),
    softmax(dtype="fp32", distribution="large_logits"),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_out_and_lse_follow_from_the_conditions(problem):
    """Up to the float64 errors of both evaluations."""
    known = conditions(draw_inputs(problem), every_row(problem))
    out = weights(known) if known.given_scores else weights(known) @ known.v
    lse = known.maximum + known.total.log()
    alive = ~torch.isneginf(known.lse)
    assert torch.equal(alive, known.seen.any(-1))
    _, of_out, of_lse = rounding(known, problem)
    assert bool(((out - known.out).abs() <= of_out)[alive].all())
    assert bool(((lse - known.lse).abs() <= of_lse)[alive].all())
    assert bool((of_lse[alive] < 1e-6).all())  # the bounds are not vacuous
    assert bool((known.out[~alive] == 0).all())
    assert bool((known.maximum[~alive] == 0).all())
    assert bool((known.total[~alive] == 0).all())
    assert known.given_scores == (problem.operation == "softmax")
    assert known.has_score_mod == (problem.score.name != "none")


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_conditions_of_some_rows_are_those_of_all(problem):
    """The heads span two sequences, and the rows are in arbitrary order."""
    inputs, whole = draw_inputs(problem), conditions(draw_inputs(problem), every_row(problem))
    heads = range(1, min(problem.batch * problem.heads, problem.heads + 2))
    query = torch.tensor([5, 0, 8])
    some = conditions(inputs, Rows(heads, query))
    part = slice(heads.start, heads.stop)
    for name in ("seen", "out", "lse", "q"):
        assert torch.equal(getattr(some, name), getattr(whole, name)[part][:, query])
    radius, _, of_lse = (x[part][:, query] for x in rounding(whole, problem))
    assert bool(((some.scores - whole.scores[part][:, query]).abs() <= radius).all())
    lse = [x.maximum + x.total.log() for x in (some, whole)]
    assert bool(((lse[0] - lse[1][part][:, query]).nan_to_num(nan=0.0).abs() <= of_lse).all())
    size = (some.q.abs() @ some.k.abs().mT) * some.scale
    differ = (some.products - whole.products[part][:, query]).abs()
    if not some.given_scores:
        assert bool((differ <= 2 * (problem.head_dim + 2) * 2.0**-53 * size).all())
    for name in ("k", "v"):
        assert torch.equal(getattr(some, name), getattr(whole, name)[part])


def test_each_head_has_its_key_head_and_descale():
    problem = attention(dtype="e4m3")
    inputs = draw_inputs(problem)
    known, (q, k, v) = conditions(inputs, every_row(problem)), inputs.promoted()
    for b in range(problem.batch):
        for h in range(problem.heads):
            at = b * problem.heads + h
            assert torch.equal(known.q[at], q[b, h])
            assert torch.equal(known.k[at], k[b, h // problem.group])
            assert torch.equal(known.v[at], v[b, h // problem.group])


def test_products_are_the_scores_before_the_mod():
    problem = attention(score=Spec.of("temperature", temperature=4.0))
    known = conditions(draw_inputs(problem), every_row(problem))
    assert torch.equal(known.products / 4, known.scores)
    assert torch.equal(known.products, known.q @ known.k.mT * problem.scale)


def test_key_hidden_by_the_score_mod_is_not_seen_but_keeps_its_product(hides):
    problem = attention(score=hides, mask=CAUSAL)
    known = conditions(draw_inputs(problem), every_row(problem))
    causal = torch.arange(9)[:, None] >= torch.arange(7)
    odd = (torch.arange(7) % 2 == 1) & (torch.arange(8) % 2 == 0)[:, None, None]
    assert torch.equal(mask_visibility(problem, every_row(problem)), causal.expand(8, -1, -1))
    assert torch.equal(known.seen, causal & ~odd)
    assert bool((known.scores[~known.seen] == 0).all())
    assert bool((known.products[(causal & odd).expand(8, -1, -1)] != 0).all())
    assert bool((known.products[~causal.expand(8, -1, -1)] == 0).all())


def test_nan_and_infinity_reach_only_rows_that_see_them():
    problem = attention(mask=CAUSAL, dtype="fp32")
    inputs = draw_inputs(problem)
    inputs.v[0, 1, 4, 2] = math.nan
    inputs.k[1, 0, 6, 3] = math.inf
    known = conditions(inputs, every_row(problem))
    assert bool(known.v.isfinite().all())
    assert bool(known.k.isfinite().all())
    assert known.v[2, 4, 2] == 0
    unknown = ~known.out.isfinite()
    expected = torch.zeros_like(unknown)
    expected[2:4, 4:, 2] = True  # heads of key head 1 of sequence 0: one dim
    expected[4:6, 6:] = known.lse[4:6, 6:, None].isnan() | known.lse[4:6, 6:, None].isposinf()
    assert torch.equal(unknown, expected)
    hidden = ~known.seen
    assert bool(known.products[hidden].isfinite().all())


def test_score_slopes_are_the_derivative_of_softcap():
    cap = 2.0
    problem = attention(score=Spec.of("softcap", cap=cap), mask=CAUSAL)
    inputs = draw_inputs(problem)
    known = conditions(inputs, every_row(problem))
    exact = 1 - torch.tanh(known.products / cap) ** 2
    # With step t: the third derivative is at most 2/cap², values are rounded to cap · 2^-53.
    step = 2.0**-17 * known.products.abs().clamp(min=1)
    allowed = step**2 / 6 * 2 / cap**2 + 4 * cap * 2.0**-53 / step
    assert bool(((score_slopes(inputs, known) - exact).abs() <= allowed)[known.seen].all())
    assert bool((score_slopes(inputs, known)[~known.seen] == 0).all())
    plain = attention()
    assert bool(
        (
            score_slopes(draw_inputs(plain), conditions(draw_inputs(plain), every_row(plain))) == 1
        ).all()
    )


@pytest.mark.parametrize("pairs", [1, 20, 63, 64, 200, 10**6])
def test_all_rows_yields_each_row_once_in_blocks_of_limited_size(monkeypatch, pairs):
    monkeypatch.setattr(row_conditions, "_CPU_PAIRS", pairs)
    problem = attention()
    count = torch.zeros(8, 9, dtype=torch.int64)
    for rows in all_rows(problem, "cpu"):
        count[rows.heads.start : rows.heads.stop, rows.query] += 1
        assert len(rows.heads) * len(rows.query) * problem.kv <= max(pairs, problem.kv)
    assert bool((count == 1).all())


def test_all_rows_are_sampled_at_the_command_lines_default_size():
    problem = Problem(batch=1, heads=4, query=256, head_dim=64)
    assert samples_all_rows(problem, "cpu")
    rows = torch.cat([part.query for part in sampled_rows(problem, "cpu")])
    assert len(rows.unique()) == 256


LONG = {"batch": 1, "heads": 4, "query": 2048, "head_dim": 128}


@pytest.mark.parametrize("mask", ["full", "causal", "documents"])
def test_sampled_rows_of_a_large_problem(mask):
    """Deterministic, 64 for each head: first and last, no large gap, and rows at tile edges."""
    spec = Spec.of("document", lengths=[700, 900, 448]) if mask == "documents" else Spec.of(mask)
    problem = Problem(**LONG, mask=spec)
    assert not samples_all_rows(problem, "cpu")
    parts = sampled_rows(problem, "cpu")
    again = sampled_rows(problem, "cpu")
    assert all(torch.equal(a.query, b.query) for a, b in zip(parts, again, strict=True))
    for head in range(4):
        queries = [part.query for part in parts if head in part.heads]
        rows = torch.cat(queries).tolist()
        assert len(rows) == len(set(rows)) == 64
        assert {0, 2047} < set(rows)
        assert max(b - a for a, b in itertools.pairwise(rows)) < 2048 // 8
        assert len({15, 16, 31, 32, 63, 64, 127, 128, 255, 256} & set(rows)) >= 5


def test_sampled_rows_include_both_sides_of_document_borders(monkeypatch):
    monkeypatch.setattr(row_conditions, "_TILES", ())
    problem = Problem(**LONG, mask=Spec.of("document", lengths=[700, 900, 448]))
    rows = set(torch.cat([part.query for part in sampled_rows(problem, "cpu")]).tolist())
    assert {699, 700, 1599, 1600} < rows


def test_sampled_rows_include_the_row_where_heads_begin_to_differ(monkeypatch):
    def mask(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) & ((h > 0) | (q_idx < 1000))

    entry = Entry(summary="", build=lambda values, dimensions, device: mask)
    monkeypatch.setitem(MASKS, "some heads", entry)
    monkeypatch.setattr(row_conditions, "_TILES", ())
    problem = Problem(**LONG, mask=Spec.of("some heads"))
    rows = set(torch.cat([part.query for part in sampled_rows(problem, "cpu")]).tolist())
    assert {999, 1000} < rows


@pytest.mark.parametrize("infinite", [False, True])
@pytest.mark.parametrize(
    "mask", [Spec.of("full"), CAUSAL, Spec.of("not", CAUSAL), Spec.of("document", lengths=[3, 6])]
)
def test_weigh_rows_agrees_with_the_conditions(mask, infinite):
    """Also for rows that see no key, and for keys hidden by a score of −∞."""
    inputs = draw_inputs(attention(mask=mask, dtype="fp32", batch=1))
    if infinite:
        k = inputs.k.clone()
        k[:, 0, 2, 0] = -math.inf
        inputs = inputs.replace(q=inputs.q.abs(), k=k)
    for rows in (Rows(range(4), torch.arange(4)), every_row(inputs.problem)):
        truth = oracles.truth(inputs)
        known, short = conditions(inputs, rows), weigh_rows(inputs, truth, rows)
        seen, last = known.seen, short.weights.shape[-1]
        assert not seen[..., last:].any()
        hidden = ~seen[..., :last]
        actual = torch.zeros_like(hidden) if short.hidden is None else short.hidden
        assert actual.equal(hidden)
        # Both round q·k (products, sums and scale); weights add the exponential of the difference
        # of two such scores, and totals add the sum.
        unit = torch.finfo(torch.float64).eps / 2
        largest = known.scale * float((known.q.abs() @ known.k.abs().mT).max())
        of_score = (known.q.shape[-1] + 1) * unit * largest
        of_weight = 2 * (2 * of_score + unit * largest + unit)
        of_total = of_weight + 2 * last * unit
        weights = torch.where(seen, torch.exp(known.scores - known.maximum[..., None]), 0.0)
        for one, other, relative, absolute in (
            (short.maximum, known.maximum, 0.0, 2 * of_score),
            (short.weights, weights[..., :last], of_weight, 0.0),
            (short.total, known.total, of_total, 0.0),
        ):
            torch.testing.assert_close(one, other, rtol=relative, atol=absolute)
        for name in ("q", "k", "v", "count", "out", "lse"):
            assert getattr(short, name).equal(getattr(known, name)), name
