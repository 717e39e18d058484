"""Gradients of *captured* numbers, which a score mod reads from tensors: against torch's in
float64, within the error that fp32 sums allow."""

import functools
import math

import pytest
import torch
from tests.kernels import backward_calls
from tests.kernels.backward_calls import NAMES
from tests.kernels.gradient_reference import Score, make_question, worst
from tests.kernels.patched_kernels import FLASH2, PLANTED, copy_kernels

from attncheck.core.errors import UsageError
from attncheck.kernels import gradient_terms
from attncheck.kernels.flash2_backward import flash2_backward
from attncheck.mods import captured_reads, masks, scores
from attncheck.mods.to_triton import to_triton

SHAPE = (2, 2, 1, 40, 50, 20, 12)


def numbers(*shape) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


SLOPES = numbers(2) / 4


def capped(table):
    return scores.chain_scores(scores.bias(table), scores.softcap(2.0))


def under_a_cap(slopes):
    return scores.chain_scores(scores.softcap(2.0), scores.alibi(slopes))


def two_tensors(slopes, table):
    def both(score, b, h, i, j):
        far = slopes[h].to(score.dtype) * (j - i) * 0.25
        return score + far + table[h, (j - i).clamp(-3, 3) + 3].to(score.dtype)

    return both


def read_twice(column):
    return lambda s, b, h, i, j: s + column[i].to(s.dtype) - column[j].to(s.dtype)


def of_rows(column):
    return lambda s, b, h, i, j: s + column[i].to(s.dtype) * (1 + (i + j) % 3)


def of_keys(column):
    return lambda s, b, h, i, j: s + column[j].to(s.dtype)


def of_one_number(number):
    return lambda s, b, h, i, j: s + number[h * 0].to(s.dtype) * ((i + j) % 3)


def factors(column):
    """Factors of the score: their derivative depends on the score."""
    return lambda s, b, h, i, j: s * column[j].to(s.dtype)


SCORES = {
    "alibi": Score.of(scores.alibi, SLOPES),
    "relative bias": Score.of(scores.relative_bias, numbers(2, 13)),
    "bias": Score.of(scores.bias, numbers(1, 1, 40, 50)),
    "bias of heads": Score.of(scores.bias, numbers(1, 2, 40, 50)),
    "bias of sequences": Score.of(scores.bias, numbers(2, 1, 40, 50)),
    "bias of both": Score.of(scores.bias, numbers(2, 2, 40, 50)),
    "alibi under a cap": Score.of(under_a_cap, SLOPES, bend=0.5),
    "a cap over a bias": Score.of(capped, numbers(1, 2, 40, 50), bend=0.5),
    "two tensors": Score.of(two_tensors, SLOPES, numbers(2, 7)),
    "one tensor twice": Score.of(read_twice, numbers(50)),
    "rows": Score.of(of_rows, numbers(40)),
    "keys": Score.of(of_keys, numbers(50)),
    "one number": Score.of(of_one_number, numbers(1)),
    "factors": Score.of(factors, numbers(50).sigmoid(), bend=1.0),
}
MASKS = {
    "full": masks.full,
    "causal": masks.causal,
    "window": masks.sliding_window(9),
    "later rows see nothing": masks.causal_bottom_right(-20),
}


@functools.cache
def reads_of(score):
    """Slope and place, in Triton, of each captured number of a score mod."""
    reads = captured_reads.trace_reads(score.mod)
    return tuple((to_triton(r.slope), to_triton(r.place), r.start) for r in reads)


def run(question, *, kernel=(gradient_terms, flash2_backward), with_captured=True, **keywords):
    """Run forward and backward; return out, lse and the gradients by name."""
    terms, backward = kernel
    count = sum(tensor.numel() for tensor in question.score.tensors)
    captured = terms.CapturedReads(reads_of(question.score), count) if with_captured else None
    return backward_calls.run(question, backward=backward, captured=captured, **keywords)


def share(question, **keywords) -> float:
    """The largest error of dcaptured in units of its allowance."""
    out, lse, gradients = run(question, **keywords)
    return worst(gradients, question, out, lse)["dcaptured"]


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("score", SCORES)
def test_dcaptured_is_within_bounds_for_every_kind_of_read(score, mask):
    question = make_question(MASKS[mask], shape=SHAPE, score=SCORES[score])
    assert share(question) <= 1


@pytest.mark.parametrize("atomic", [False, True], ids=["", "atomic"])
@pytest.mark.parametrize("score", ["alibi", "a cap over a bias"])
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16"])
def test_dcaptured_is_within_bounds_in_every_dtype(dtype, score, atomic):
    """In 16 bits dZ is summed unrounded, whether or not dQ is summed atomically."""
    question = make_question(masks.causal, dtype, shape=SHAPE, score=SCORES[score], sink=True)
    assert share(question, atomic=atomic) <= 1
    gradient = run(question, atomic=atomic)[2]["dcaptured"]
    assert gradient.dtype == torch.float32
    assert gradient.shape == (question.score.tensors[0].numel(),)


@pytest.mark.parametrize("listed", [False, True], ids=["all tiles", "listed"])
@pytest.mark.parametrize("mask", MASKS)
def test_numbers_read_for_hidden_keys_alone_have_gradient_0(mask, listed):
    question = make_question(MASKS[mask], shape=SHAPE, score=SCORES["bias of heads"])
    results = run(question, listed=listed)
    assert worst(results[2], question, *results[:2])["dcaptured"] <= 1
    seen = question.seen().any(0)  # in any sequence
    assert not results[2]["dcaptured"].view(2, 40, 50)[~seen].any()
    assert results[2]["dcaptured"].view(2, 40, 50)[seen].any()


@pytest.mark.parametrize("score", ["alibi", "bias of heads", "one tensor twice"])
@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_blocks_redone_for_a_hidden_infinite_key_count_once(score, poison):
    """Rows near a key that is not finite are computed again, and must not be added twice."""
    question = make_question(masks.causal, shape=SHAPE, score=SCORES[score])  # 40 rows, 50 keys
    k, v = question.k.clone(), question.v.clone()
    k[:, :, 40:], v[:, :, 40:] = poison, -poison
    results, plain = run(question.but(k=k, v=v))[2], run(question)[2]
    assert torch.equal(results["dcaptured"], plain["dcaptured"])
    assert torch.equal(results["dq"], plain["dq"])


def test_captured_nan_of_hidden_keys_changes_no_gradient():
    table = numbers(1, 2, 40, 50)
    hidden = ~make_question(masks.causal, shape=SHAPE).seen()[:1]
    question = make_question(masks.causal, shape=SHAPE, score=Score.of(scores.bias, table))
    poisoned = Score.of(scores.bias, table.masked_fill(hidden, math.nan))
    results, plain = run(question.but(score=poisoned))[2], run(question)[2]
    assert torch.equal(results["dcaptured"], plain["dcaptured"])


def test_visible_nan_reaches_the_numbers_its_rows_read():
    question = make_question(masks.causal, shape=SHAPE, score=SCORES["rows"])
    v = question.v.clone()
    v[:, :, 20] = math.nan
    isnan = run(question.but(v=v))[2]["dcaptured"].isnan()
    assert isnan[20:].all()
    assert not isnan[:20].any()


def test_dcaptured_changes_no_bit_of_other_gradients():
    question = make_question(masks.causal, "bf16", shape=SHAPE, score=SCORES["bias"], sink=True)
    results, plain = run(question)[2], run(question, with_captured=False)[2]
    assert plain["dcaptured"] is None
    assert all(torch.equal(results[name], plain[name]) for name in NAMES[:4])


def test_zero_loss_gives_zero_dcaptured():
    question = make_question(masks.causal, shape=SHAPE, score=SCORES["alibi"], dlse=False)
    assert not run(question.but(dout=torch.zeros_like(question.dout)))[2]["dcaptured"].any()


def test_captured_without_a_score_mod_is_refused():
    question = make_question(masks.causal, score=SCORES["alibi"])

    def without(*tensors, **keywords):
        return flash2_backward(*tensors, **keywords | {"score": None, "slope": None})

    with pytest.raises(UsageError, match="give no captured"):
        run(question, kernel=(gradient_terms, without))


@pytest.mark.parametrize(
    ("score", "additions"),
    # Four heads; three tiles have a visible key. Rows 32 to 39 see keys in two tiles.
    [("alibi", 4 * 3), ("rows", 4 * (40 + 8)), ("keys", 4 * (32 + 40))],
)
def test_each_tile_adds_once_to_each_place(score, additions, monkeypatch):
    """Atomic additions to one place are serialised, so each tile must sum its own first."""
    from triton.runtime import interpreter

    builder, counts = interpreter.InterpreterBuilder, []
    right = builder.create_atomic_rmw

    def counting(self, operation, pointers, values, mask, *rest):
        counts.append(int(mask.data.sum()))
        return right(self, operation, pointers, values, mask, *rest)

    monkeypatch.setattr(builder, "create_atomic_rmw", counting)
    run(make_question(masks.causal, shape=SHAPE, score=SCORES[score]))
    assert sum(counts) == additions


def plant(folder, where, right, wrong):
    """The module of gradient terms and the backward, from copies with a fault in one of them."""
    copies = copy_kernels(folder, FLASH2, where, right, wrong)
    return copies.gradient_terms, copies.flash2_backward.flash2_backward


@pytest.mark.parametrize("fault", PLANTED["captured_gradients"])
def test_planted_fault_exceeds_the_bounds(fault, tmp_path):
    where, right, wrong, score = PLANTED["captured_gradients"][fault].values()
    question = make_question(masks.causal, shape=SHAPE, score=SCORES[score])
    k = question.k.clone()
    k[:, :, 40:] = math.nan  # hidden: blocks of rows are computed again
    out, lse, gradients = run(question.but(k=k), kernel=plant(tmp_path, where, right, wrong))
    assert worst(gradients, question, out, lse)["dcaptured"] > 1


def test_copy_without_a_fault_is_within_bounds(tmp_path):
    question = make_question(masks.causal, shape=SHAPE, score=SCORES["two tensors"])
    assert share(question, kernel=plant(tmp_path, "weights", "power", "power")) <= 1
