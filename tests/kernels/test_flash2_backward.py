"""FlashAttention-2's gradients: torch's in float64 within what fp32 sums and roundings allow, the
same bits whatever the tiles' list and the strides are, and every planted fault is noticed."""

import math

import pytest
import torch
from tests.kernels.backward_calls import (
    SMALL,
    lists,
    run,
    same,
    scattered,
    worst,
    worst_of,
    wrong_list,
)
from tests.kernels.gradient_reference import Score, given
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
# Beside a sink the reference's allowance knows nothing of scores of −∞.
HIDING = {
    "hides later rows": Score(mod=lambda s, b, h, i, j: torch.where(i > 35, -math.inf, s)),
}


@pytest.mark.parametrize("listed", [False, True], ids=["all tiles", "listed"])
@pytest.mark.parametrize("mask", MASKS)
def test_any_mask(mask, listed):
    asked = given(MASKS[mask])
    found = run(asked, listed=listed)
    assert worst_of(asked, found) <= 1
    seen = asked.seen()
    dead, unseen = ~seen.any(-1), ~seen.any((1, 2))[:, None]
    assert not found[2]["dq"][dead].any()
    assert not found[2]["dk"][unseen].any()
    assert not found[2]["dv"][unseen].any()


@pytest.mark.parametrize("mask", ["causal", "window", "of heads", "nothing"])
def test_the_listed_tiles_give_what_all_give(mask):
    """To the bit: what a hidden key adds is 0."""
    asked = given(MASKS[mask], "bf16", sink=True)
    assert same(run(asked), run(asked, listed=True))


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("score", SCORES)
def test_any_score_mod(score, mask):
    asked = given(MASKS[mask], score=SCORES[score], sink=True)
    assert worst(asked) <= 1


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
def test_any_shape(shape, mask):
    assert worst(given(MASKS[mask], shape=SHAPES[shape])) <= 1


@pytest.mark.parametrize("blocks", [(16, 16), (32, 16), (64, 64), (128, 32)])
def test_any_tiles(blocks):
    asked = given(masks.causal, "bf16")
    assert worst(asked, Launch(block_query=blocks[0], block_kv=blocks[1]), listed=True) <= 1


def test_keys_may_have_tiles_of_their_own():
    asked = given(masks.causal)
    first, mixed = run(asked), run(asked, launch_by_keys=Launch(block_query=16, block_kv=64))
    assert worst_of(asked, mixed) <= 1
    assert torch.equal(mixed[2]["dq"], first[2]["dq"])
    assert not torch.equal(mixed[2]["dk"], first[2]["dk"])


def in_wider_memory(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, other ones behind each row."""
    return torch.cat([x, torch.ones_like(x)], -1)[..., : x.shape[-1]]


MOVED = {"scattered": scattered, "in_wider_memory": in_wider_memory}


POISONS = [(7.0, -7.0), (1e30, -1e30), (math.inf, -math.inf), (math.nan, math.nan)]


@pytest.mark.parametrize(
    ("how", "keys", "values"),
    [(how, *poison) for how in ({}, {"listed": True}) for poison in POISONS]
    + [(how, 1e30, math.nan) for how in ({}, {"atomic": True})],
    ids=str,
)
def test_hidden_keys_move_no_bit(how, keys, values):
    asked = given(masks.causal, sink=True)  # 40 rows, 50 keys
    k, v = asked.k.clone(), asked.v.clone()
    k[:, :, 40:], v[:, :, 40:] = keys, values
    assert same(run(asked.but(k=k, v=v), **how), run(asked, **how))


def test_a_score_mod_may_leave_a_row_without_keys():
    """Its scores are −∞ then, and the mask hides none of them."""
    none_of, all_of = (
        Score(mod=lambda s, b, h, i, j, row=row: torch.where(i == row, -math.inf, s))
        for row in (3, -1)
    )
    found = run(given(masks.full, score=none_of))
    assert not found[2]["dq"][:, :, 3].any()
    assert same(found, run(given(lambda b, h, i, j: i != 3, score=all_of)))


def test_atomic_sums_change_dq_alone():
    asked = given(masks.causal, "bf16", sink=True)
    one, other = run(asked)[2], run(asked, atomic=True)[2]
    assert all(torch.equal(one[name], other[name]) for name in ("dk", "dv", "dsink"))


def test_slopes_of_hidden_scores_may_be_infinite():
    """As those of a bias that grows without end above the diagonal are."""

    def divided(by):
        mod = Score(mod=lambda s, b, h, i, j: s / torch.where(j <= i, 1.0, by))
        return run(given(masks.causal, score=mod))

    assert same(divided(0.0), divided(1.0))


SCORES["later keys"] = Score(mod=lambda s, b, h, i, j: torch.where(j > 49, 100, s))
SCORES["later rows"] = Score(mod=lambda s, b, h, i, j: torch.where(i > 39, math.inf, s))


@pytest.mark.parametrize("fault", PLANTED["flash2_backward"])
def test_planted_faults_are_noticed(fault, tmp_path):
    changes = dict(PLANTED["flash2_backward"][fault])
    planted = faulty(tmp_path, FLASH2, *(changes.pop(name) for name in ("where", "right", "wrong")))
    moved = {name: MOVED[changes.pop(name)] for name in ("q", "k", "dout") if name in changes}
    listed = changes.pop("listed", False)
    score = (SCORES | HIDING).get(changes.pop("score", None))
    asked = given(MASKS[changes.pop("mask", "causal")], score=score, **changes)
    asked = asked.but(**{name: move(getattr(asked, name)) for name, move in moved.items()})
    assert worst(asked, listed=listed) <= 1
    assert worst(asked, listed=listed, backward=planted) > 1


def test_a_careless_kernel_lets_hidden_keys_through(tmp_path):
    careless = faulty(tmp_path, FLASH2, "row_gradients", "    if CAREFUL:", "    if False:")
    asked = given(masks.causal)
    k = asked.k.clone()
    k[:, :, 40:] = math.nan
    assert run(asked.but(k=k), backward=careless)[2]["dq"].isnan().any()


@pytest.mark.parametrize("which", ["tiles", "by_keys"])
@pytest.mark.parametrize(
    "fault", ["nothing", "last run dropped", "last tile short", "partial called full"]
)
def test_a_wrong_list_is_noticed(fault, which):
    asked = given(masks.causal, shape=(1, 2, 1, 50, 50, 20, 12))
    found = lists(asked, SMALL)
    found[which] = wrong_list(fault, found[which])
    assert (worst(asked, **found) <= 1) == (fault == "nothing")


@pytest.mark.parametrize("name", ["tiles", "by_keys"])
def test_a_list_of_other_blocks_is_refused(name):
    """Along its own axis, and of tiles that are not there along the other: 40 rows, 50 keys."""
    asked = given(masks.full)
    own, across = ("block_query", "block_kv") if name == "tiles" else ("block_kv", "block_query")
    length, other = (40, 50) if name == "tiles" else (50, 40)
    wrong = lists(asked, Launch(**{own: 16, across: 32}))[name]
    with pytest.raises(UsageError) as error:
        run(asked, **{name: wrong})
    blocks = -(-length // 16)
    assert f"{name} lists the tiles of {blocks} blocks: {length} in blocks" in str(error.value)
    wrong = lists(asked, Launch(**{own: 32, across: 16}))[name]
    said = f"{name} lists tile {-(-other // 16) - 1}, counted from 0: {other} in tiles of 32 are 2."
    with one_line(UsageError, whole=said):
        run(asked, **{name: wrong})
