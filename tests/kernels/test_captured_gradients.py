"""Gradients of the numbers that a score mod reads from tensors: torch's in float64 within what fp32
sums allow, hidden keys have no part in them, and every planted fault is noticed."""

import functools
import math

import pytest
import torch
from tests.kernels import backward_calls
from tests.kernels.backward_calls import NAMES
from tests.kernels.gradient_reference import Score, given, worst
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
    """By its row and by its key."""
    return lambda s, b, h, i, j: s + column[i].to(s.dtype) - column[j].to(s.dtype)


def of_rows(column):
    return lambda s, b, h, i, j: s + column[i].to(s.dtype) * (1 + (i + j) % 3)


def of_keys(column):
    return lambda s, b, h, i, j: s + column[j].to(s.dtype)


def of_one_number(number):
    return lambda s, b, h, i, j: s + number[h * 0].to(s.dtype) * ((i + j) % 3)


def factors(column):
    """Of the score itself: what is read has a derivative that depends on the score."""
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
    """The slopes and places of what a score mod reads, in Triton."""
    found = captured_reads.trace_reads(score.mod)
    return tuple((to_triton(r.slope), to_triton(r.place), r.start) for r in found)


def run(asked, *, rooms=(gradient_terms, flash2_backward), asks=True, **keywords):
    """out, lse and the gradients by name."""
    terms, backward = rooms
    count = sum(tensor.numel() for tensor in asked.score.tensors)
    captured = terms.CapturedReads(reads_of(asked.score), count) if asks else None
    return backward_calls.run(asked, backward=backward, captured=captured, **keywords)


def share(asked, **keywords) -> float:
    """The largest error of dcaptured over what is allowed."""
    out, lse, found = run(asked, **keywords)
    return worst(found, asked, out, lse)["dcaptured"]


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("score", SCORES)
def test_any_read(score, mask):
    asked = given(MASKS[mask], shape=SHAPE, score=SCORES[score])
    assert share(asked) <= 1


@pytest.mark.parametrize("atomic", [False, True], ids=["", "atomic"])
@pytest.mark.parametrize("score", ["alibi", "a cap over a bias"])
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16"])
def test_any_dtype(dtype, score, atomic):
    """In 16 bits dZ is not rounded on its way; beside dQ that is added up in memory, too."""
    asked = given(masks.causal, dtype, shape=SHAPE, score=SCORES[score], sink=True)
    assert share(asked, atomic=atomic) <= 1
    found = run(asked, atomic=atomic)[2]["dcaptured"]
    assert found.dtype == torch.float32
    assert found.shape == (asked.score.tensors[0].numel(),)


@pytest.mark.parametrize("listed", [False, True], ids=["all tiles", "listed"])
@pytest.mark.parametrize("mask", MASKS)
def test_what_is_read_for_hidden_keys_alone_has_a_gradient_of_0(mask, listed):
    asked = given(MASKS[mask], shape=SHAPE, score=SCORES["bias of heads"])
    found = run(asked, listed=listed)
    assert worst(found[2], asked, *found[:2])["dcaptured"] <= 1
    seen = asked.seen().any(0)  # by a sequence
    assert not found[2]["dcaptured"].view(2, 40, 50)[~seen].any()
    assert found[2]["dcaptured"].view(2, 40, 50)[seen].any()


@pytest.mark.parametrize("score", ["alibi", "bias of heads", "one tensor twice"])
@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_hidden_keys_have_no_part_and_what_is_done_again_counts_once(score, poison):
    """A key that is not finite has its blocks of rows done again."""
    asked = given(masks.causal, shape=SHAPE, score=SCORES[score])  # 40 rows, 50 keys
    k, v = asked.k.clone(), asked.v.clone()
    k[:, :, 40:], v[:, :, 40:] = poison, -poison
    found, plain = run(asked.but(k=k, v=v))[2], run(asked)[2]
    assert torch.equal(found["dcaptured"], plain["dcaptured"])
    assert torch.equal(found["dq"], plain["dq"])


def test_hidden_numbers_may_be_nan():
    table = numbers(1, 2, 40, 50)
    hidden = ~given(masks.causal, shape=SHAPE).seen()[:1]
    asked = given(masks.causal, shape=SHAPE, score=Score.of(scores.bias, table))
    poisoned = Score.of(scores.bias, table.masked_fill(hidden, math.nan))
    found, plain = run(asked.but(score=poisoned))[2], run(asked)[2]
    assert torch.equal(found["dcaptured"], plain["dcaptured"])


def test_what_a_row_sees_and_is_nan_reaches_what_it_reads():
    asked = given(masks.causal, shape=SHAPE, score=SCORES["rows"])
    v = asked.v.clone()
    v[:, :, 20] = math.nan
    isnan = run(asked.but(v=v))[2]["dcaptured"].isnan()
    assert isnan[20:].all()
    assert not isnan[:20].any()


def test_no_other_gradient_moves_by_a_bit():
    asked = given(masks.causal, "bf16", shape=SHAPE, score=SCORES["bias"], sink=True)
    found, plain = run(asked)[2], run(asked, asks=False)[2]
    assert plain["dcaptured"] is None
    assert all(torch.equal(found[name], plain[name]) for name in NAMES[:4])


def test_a_loss_that_is_0_has_none():
    asked = given(masks.causal, shape=SHAPE, score=SCORES["alibi"], dlse=False)
    assert not run(asked.but(dout=torch.zeros_like(asked.dout)))[2]["dcaptured"].any()


def test_it_needs_a_score_mod():
    asked = given(masks.causal, score=SCORES["alibi"])

    def without(*tensors, **keywords):
        return flash2_backward(*tensors, **keywords | {"score": None, "slope": None})

    with pytest.raises(UsageError, match="give no captured"):
        run(asked, rooms=(gradient_terms, without))


@pytest.mark.parametrize(
    ("score", "additions"),
    # Of four heads: three tiles have a key that is seen. Rows 32 to 39 see keys in two.
    [("alibi", 4 * 3), ("rows", 4 * (40 + 8)), ("keys", 4 * (32 + 40))],
)
def test_what_is_one_place_in_a_tile_is_one_addition_of_it(score, additions, monkeypatch):
    """Additions to one place in memory wait for one another."""
    from triton.runtime import interpreter

    builder, counted = interpreter.InterpreterBuilder, []
    right = builder.create_atomic_rmw

    def counting(self, operation, pointers, values, mask, *rest):
        counted.append(int(mask.data.sum()))
        return right(self, operation, pointers, values, mask, *rest)

    monkeypatch.setattr(builder, "create_atomic_rmw", counting)
    run(given(masks.causal, shape=SHAPE, score=SCORES[score]))
    assert sum(counted) == additions


def with_a_fault(folder, where, right, wrong):
    """The rooms' copies, one of which has a fault: of terms, and the backward itself."""
    copies = copy_kernels(folder, FLASH2, where, right, wrong)
    return copies.gradient_terms, copies.flash2_backward.flash2_backward


@pytest.mark.parametrize("fault", PLANTED["captured_gradients"])
def test_planted_faults_are_noticed(fault, tmp_path):
    where, right, wrong, score = PLANTED["captured_gradients"][fault].values()
    asked = given(masks.causal, shape=SHAPE, score=SCORES[score])
    k = asked.k.clone()
    k[:, :, 40:] = math.nan  # hidden: the blocks of rows are done again
    out, lse, found = run(asked.but(k=k), rooms=with_a_fault(tmp_path, where, right, wrong))
    assert worst(found, asked, out, lse)["dcaptured"] > 1


def test_the_copy_without_a_fault_is_right(tmp_path):
    asked = given(masks.causal, shape=SHAPE, score=SCORES["two tensors"])
    assert share(asked, rooms=with_a_fault(tmp_path, "weights", "power", "power")) <= 1
