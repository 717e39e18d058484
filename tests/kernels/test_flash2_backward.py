"""FlashAttention-2's gradients: against torch's in float64 within the error of fp32 sums and
roundings, the same bits for any list of tiles and strides, and planted faults exceed the bounds."""

import math

import pytest
import torch
from tests.kernels.backward_calls import (
    SMALL,
    run,
    same,
    scattered,
    visit_lists,
    worst,
    worst_of,
    wrong_list,
)
from tests.kernels.gradient_reference import Score, make_question
from tests.kernels.patched_kernels import FLASH2, PLANTED, faulty
from tests.messages import one_line

from attncheck.core.errors import UsageError
from attncheck.kernels.launch import Launch
from attncheck.mods import masks, scores


def nothing(b, h, q_idx, kv_idx):
    return q_idx + kv_idx < 0


def of_heads(b, h, q_idx, kv_idx):
    return kv_idx <= q_idx + 9 * h


MASKS = {
    "full": masks.full,
    "causal": masks.causal,
    "bottom right": masks.causal_bottom_right(10),
    "window": masks.sliding_window(9),
    "later rows see nothing": masks.causal_bottom_right(-20),
    "nothing": nothing,
    "of heads": of_heads,
    "documents": masks.document(torch.tensor([0] * 7 + [1] * 20 + [2] * 23)),
}
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
TABLE = torch.randn(4, 13, generator=torch.Generator().manual_seed(5))
SCORES = {
    "softcap": Score(mod=scores.softcap(2.0), bend=0.5),
    "alibi": Score(mod=scores.alibi(SLOPES)),
    "relative bias": Score(mod=scores.relative_bias(TABLE)),
    "both": Score(mod=lambda s, b, h, i, j: 2 * torch.tanh((s + 0.1 * (i - j)) / 2), bend=0.5),
    "rows": Score(mod=lambda s, b, h, i, j: torch.where(i % 2 == 0, s, s * 0.5)),
}
# Scores of −∞: the reference's allowance does not support them together with a sink.
HIDING = {
    "hides later rows": Score(mod=lambda s, b, h, i, j: torch.where(i > 35, -math.inf, s)),
}


@pytest.mark.parametrize("listed", [False, True], ids=["all tiles", "listed"])
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_are_within_bounds_for_mask(mask, listed):
    question = make_question(MASKS[mask])
    results = run(question, listed=listed)
    assert worst_of(question, results) <= 1
    seen = question.seen()
    empty_rows, unseen = ~seen.any(-1), ~seen.any((1, 2))[:, None]
    assert not results[2]["dq"][empty_rows].any()
    assert not results[2]["dk"][unseen].any()
    assert not results[2]["dv"][unseen].any()


@pytest.mark.parametrize("mask", ["causal", "window", "of heads", "nothing"])
def test_listed_tiles_give_the_same_bits_as_all_tiles(mask):
    """A hidden key adds exactly 0."""
    question = make_question(MASKS[mask], "bf16", sink=True)
    assert same(run(question), run(question, listed=True))


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("score", SCORES)
def test_gradients_are_within_bounds_for_score_mod(score, mask):
    question = make_question(MASKS[mask], score=SCORES[score], sink=True)
    assert worst(question) <= 1


SHAPES = {
    "one": (1, 1, 1, 1, 1, 1, 1),
    "one row": (1, 2, 1, 1, 70, 16, 16),
    "one key": (2, 2, 2, 70, 1, 16, 16),
    "wide": (1, 1, 1, 20, 20, 256, 3),
    "wide values": (1, 2, 1, 20, 33, 1, 130),
    "batch": (3, 6, 2, 17, 33, 8, 24),
    "whole tiles": (1, 2, 2, 64, 64, 16, 16),
}


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_within_bounds_for_shape(shape, mask):
    assert worst(make_question(MASKS[mask], shape=SHAPES[shape])) <= 1


@pytest.mark.parametrize("blocks", [(16, 16), (32, 16), (64, 64), (128, 32)])
def test_gradients_are_within_bounds_for_tile_size(blocks):
    question = make_question(masks.causal, "bf16")
    assert worst(question, Launch(block_query=blocks[0], block_kv=blocks[1]), listed=True) <= 1


def test_pass_by_keys_may_have_other_tiles():
    question = make_question(masks.causal)
    first, mixed = run(question), run(question, launch_by_keys=Launch(block_query=16, block_kv=64))
    assert worst_of(question, mixed) <= 1
    assert torch.equal(mixed[2]["dq"], first[2]["dq"])
    assert not torch.equal(mixed[2]["dk"], first[2]["dk"])


def in_wider_memory(x: torch.Tensor) -> torch.Tensor:
    """A view of the same numbers, with other numbers behind each row."""
    return torch.cat([x, torch.ones_like(x)], -1)[..., : x.shape[-1]]


MOVED = {"scattered": scattered, "in_wider_memory": in_wider_memory}


POISONS = [(7.0, -7.0), (1e30, -1e30), (math.inf, -math.inf), (math.nan, math.nan)]


@pytest.mark.parametrize(
    ("how", "keys", "values"),
    [(how, *poison) for how in ({}, {"listed": True}) for poison in POISONS]
    + [(how, 1e30, math.nan) for how in ({}, {"atomic": True})],
    ids=str,
)
def test_hidden_keys_change_no_bit(how, keys, values):
    question = make_question(masks.causal, sink=True)  # 40 rows, 50 keys
    k, v = question.k.clone(), question.v.clone()
    k[:, :, 40:], v[:, :, 40:] = keys, values
    assert same(run(question.but(k=k, v=v), **how), run(question, **how))


def test_row_whose_score_mod_is_minus_infinity_has_no_keys():
    """The same bits as if the mask hid the row's keys."""
    hides_row, hides_none = (
        Score(mod=lambda s, b, h, i, j, row=row: torch.where(i == row, -math.inf, s))
        for row in (3, -1)
    )
    results = run(make_question(masks.full, score=hides_row))
    assert not results[2]["dq"][:, :, 3].any()
    assert same(results, run(make_question(lambda b, h, i, j: i != 3, score=hides_none)))


def test_atomic_sums_change_dq_alone():
    question = make_question(masks.causal, "bf16", sink=True)
    one, other = run(question)[2], run(question, atomic=True)[2]
    assert all(torch.equal(one[name], other[name]) for name in ("dk", "dv", "dsink"))


def test_infinite_slope_of_a_hidden_score_changes_no_gradient():
    """Such a slope arises from a bias that grows without bound above the diagonal."""

    def divide_hidden(by):
        mod = Score(mod=lambda s, b, h, i, j: s / torch.where(j <= i, 1.0, by))
        return run(make_question(masks.causal, score=mod))

    assert same(divide_hidden(0.0), divide_hidden(1.0))


SCORES["later keys"] = Score(mod=lambda s, b, h, i, j: torch.where(j > 49, 100, s))
SCORES["later rows"] = Score(mod=lambda s, b, h, i, j: torch.where(i > 39, math.inf, s))


@pytest.mark.parametrize("fault", PLANTED["flash2_backward"])
def test_planted_fault_exceeds_the_bounds(fault, tmp_path):
    changes = dict(PLANTED["flash2_backward"][fault])
    planted = faulty(tmp_path, FLASH2, *(changes.pop(name) for name in ("where", "right", "wrong")))
    moved = {name: MOVED[changes.pop(name)] for name in ("q", "k", "dout") if name in changes}
    listed = changes.pop("listed", False)
    score = (SCORES | HIDING).get(changes.pop("score", None))
    question = make_question(MASKS[changes.pop("mask", "causal")], score=score, **changes)
    question = question.but(**{name: move(getattr(question, name)) for name, move in moved.items()})
    assert worst(question, listed=listed) <= 1
    assert worst(question, listed=listed, backward=planted) > 1


def test_without_the_careful_pass_a_hidden_nan_key_spreads(tmp_path):
    careless = faulty(tmp_path, FLASH2, "row_gradients", "    if CAREFUL:", "    if False:")
    question = make_question(masks.causal)  # 40 rows, 50 keys
    k = question.k.clone()
    k[:, :, 40:] = math.nan
    assert run(question.but(k=k), backward=careless)[2]["dq"].isnan().any()


@pytest.mark.parametrize("which", ["tiles", "by_keys"])
@pytest.mark.parametrize(
    "fault", ["nothing", "last run dropped", "last tile short", "partial called full"]
)
def test_wrong_list_of_tiles_exceeds_the_bounds(fault, which):
    question = make_question(masks.causal, shape=(1, 2, 1, 50, 50, 20, 12))
    lists = visit_lists(question, SMALL)
    lists[which] = wrong_list(fault, lists[which])
    assert (worst(question, **lists) <= 1) == (fault == "nothing")


@pytest.mark.parametrize("name", ["tiles", "by_keys"])
def test_list_for_other_tile_sizes_is_refused(name):
    """Along its own axis the number of blocks differs; along the other it names missing tiles."""
    question = make_question(masks.full)
    own, across = ("block_query", "block_kv") if name == "tiles" else ("block_kv", "block_query")
    length, other = (40, 50) if name == "tiles" else (50, 40)  # 40 rows, 50 keys
    wrong = visit_lists(question, Launch(**{own: 16, across: 32}))[name]
    with pytest.raises(UsageError) as error:
        run(question, **{name: wrong})
    blocks = -(-length // 16)
    assert f"{name} lists the tiles of {blocks} blocks: {length} in blocks" in str(error.value)
    wrong = visit_lists(question, Launch(**{own: 32, across: 16}))[name]
    last = -(-other // 16) - 1
    message = f"{name} lists tile {last}, counted from 0: {other} in tiles of 32 are 2."
    with one_line(UsageError, whole=message):
        run(question, **{name: wrong})
