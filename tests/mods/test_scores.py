"""Every library score mod against numbers calculated by hand, and properties that they share."""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from attncheck.core.draws import Draws
from attncheck.core.formats import fp32
from attncheck.core.mod_spec import Dimensions, Spec
from attncheck.mods import scores
from attncheck.mods.library import build_score, is_additive
from attncheck.mods.scores import SCORES, alibi_slopes

DIMENSIONS = Dimensions(batch=1, heads=2, query=2, kv=3)
TABLE = torch.tensor([[[[10.0, 20.0, 30.0], [40.0, 50.0, 60.0]]]])
TEXT = "where(h == 1, score * 0.5, score) + 0.25 * (kv_idx - q_idx)"
# The scores (heads, query, kv) to which every mod below is applied.
START = [[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[-1.0, 0.0, 1.0], [8.0, -8.0, 0.5]]]


def apply(mod, start=START):
    assert callable(mod)
    return mod(
        torch.tensor(start, dtype=torch.float64),
        torch.tensor(0),
        torch.arange(2)[:, None, None],
        torch.arange(2)[:, None],
        torch.arange(3),
    )


BY_HAND = {
    "none": (build_score(Spec.of("none"), DIMENSIONS), START),
    # 2 heads: slopes 2^-4 and 2^-8; kv − q = [[0, 1, 2], [-1, 0, 1]].
    "alibi": (
        build_score(Spec.of("alibi"), DIMENSIONS),
        [
            [[1.0, 2.0625, 3.125], [3.9375, 5.0, 6.0625]],
            [[-1.0, 0.00390625, 1.0078125], [7.99609375, -8.0, 0.50390625]],
        ],
    ),
    "temperature": (
        build_score(Spec.of("temperature", temperature=2), DIMENSIONS),
        [[[0.5, 1.0, 1.5], [2.0, 2.5, 3.0]], [[-0.5, 0, 0.5], [4, -4, 0.25]]],
    ),
    # kv − q + 1 clamped to 0..2 = [[1, 2, 2], [0, 1, 2]].
    "relative bias": (
        scores.relative_bias(torch.tensor([[10.0, 20.0, 30.0], [100.0, 200.0, 300.0]])),
        [
            [[21.0, 32.0, 33.0], [14.0, 25.0, 36.0]],
            [[199.0, 300.0, 301.0], [108.0, 192.0, 300.5]],
        ],
    ),
    "relative bias of distance 0": (
        scores.relative_bias(torch.tensor([[1.0], [2.0]])),
        [[[2.0, 3.0, 4.0], [5.0, 6.0, 7.0]], [[1.0, 2.0, 3.0], [10.0, -6.0, 2.5]]],
    ),
    "bias": (
        scores.bias(TABLE),
        [[[11.0, 22.0, 33.0], [44.0, 55.0, 66.0]], [[9.0, 20.0, 31.0], [48.0, 42.0, 60.5]]],
    ),
    "bias of each head": (
        scores.bias(torch.cat([TABLE, 100.0 * TABLE], 1)),
        [
            [[11.0, 22.0, 33.0], [44.0, 55.0, 66.0]],
            [[999.0, 2000.0, 3001.0], [4008.0, 4992.0, 6000.5]],
        ],
    ),
    "expression": (
        build_score(Spec.of("expression", text=TEXT), DIMENSIONS),
        [[[1.0, 2.25, 3.5], [3.75, 5.0, 6.25]], [[-0.5, 0.25, 1.0], [3.75, -4.0, 0.5]]],
    ),
}


@pytest.mark.parametrize(("mod", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_score_mod_matches_hand_calculation(mod, expected):
    assert apply(mod).tolist() == expected


def test_relative_bias_draws_table_from_seed():
    built = build_score(Spec.of("relative_bias", distance=1, seed=7), DIMENSIONS)
    drawn = Draws(7).normal("relative_bias", (2, 3)).astype(np.float32)
    assert torch.equal(apply(built), apply(scores.relative_bias(torch.from_numpy(drawn))))
    other = build_score(Spec.of("relative_bias", distance=1, seed=8), DIMENSIONS)
    assert not torch.equal(apply(built), apply(other))


def added_bias(spec, dimensions):
    """What an additive score mod adds: (batch, heads, query, kv)."""
    shape = (dimensions.batch, dimensions.heads, dimensions.query, dimensions.kv)
    indices = torch.meshgrid(*map(torch.arange, shape), indexing="ij")
    return build_score(spec, dimensions)(torch.zeros(shape, dtype=torch.float64), *indices)


@pytest.mark.parametrize("per_head", [0, 1])
@pytest.mark.parametrize("per_batch", [0, 1])
def test_bias_is_drawn_for_each_row_and_key(per_batch, per_head):
    spec = Spec.of("bias", seed=3, per_batch=per_batch, per_head=per_head)
    large, small = (Dimensions(batch=2, heads=3, query=q, kv=kv) for q, kv in ((40, 50), (7, 9)))
    table = added_bias(spec, large)
    assert torch.equal(table.float().double(), table)
    assert 0.9 < table.std() < 1.1
    assert table.abs().max() < 8.3  # the largest standard normal draw
    assert torch.equal(table[0], table[1]) == (not per_batch)
    assert torch.equal(table[:, 0], table[:, 2]) == (not per_head)
    assert len(table[0, 0].unique()) > 1990
    # A smaller problem has a part of the same bias.
    assert torch.equal(added_bias(spec, small), table[:, :, :7, :9])
    assert not torch.equal(added_bias(Spec.of("bias", **{**spec.values, "seed": 4}), large), table)


def test_offset_adds_bias_of_later_rows():
    long = Dimensions(batch=1, heads=2, query=9, kv=7)
    short = Dimensions(batch=1, heads=2, query=4, kv=7)
    for part in (
        Spec.of("alibi"),
        Spec.of("bias", seed=1, per_batch=0, per_head=1),
        Spec.of("offset", Spec.of("relative_bias", distance=3, seed=0), rows=0),
    ):
        later = added_bias(Spec.of("offset", part, rows=5), short)
        assert torch.equal(later, added_bias(part, long)[:, :, 5:])
        assert not torch.equal(later, added_bias(part, short))


def test_softcap_is_cap_times_tanh_of_quotient():
    result = apply(build_score(Spec.of("softcap", cap=2.0), DIMENSIONS)).flatten().tolist()
    flat = [number for head in START for row in head for number in row]
    for score, capped in zip(flat, result, strict=True):
        # torch's and math's tanh are each within an ulp; the doubling is exact.
        assert abs(capped - 2 * math.tanh(score / 2)) <= 2 * math.ulp(capped)
    assert abs(max(result)) < 2.0


def test_chain_applies_left_to_right():
    divide, add = scores.temperature(2.0), scores.relative_bias(torch.tensor([[1.0], [1.0]]))
    assert apply(scores.chain_scores(divide, add))[0, 0].tolist() == [1.5, 2.0, 2.5]
    assert apply(scores.chain_scores(add, divide))[0, 0].tolist() == [1.0, 1.5, 2.0]
    spec = Spec.of("chain", Spec.of("temperature", temperature=2.0), Spec.of("alibi"))
    assert apply(build_score(spec, DIMENSIONS))[0, 0].tolist() == [0.5, 1.0625, 1.625]


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 40])
def test_alibi_slopes_are_correctly_rounded_to_fp32(heads):
    for h, slope in enumerate(alibi_slopes(heads)):
        assert fp32(slope) == slope
        # slope^heads against 2^(-8(h+1)), exactly, at the two borders of the rounding interval.
        spacing = Fraction(math.ulp(slope)) * 2**29
        low, high = Fraction(slope) - spacing / 2, Fraction(slope) + spacing / 2
        assert low**heads <= Fraction(1, 2 ** (8 * (h + 1))) <= high**heads


def test_captured_fp32_numbers_are_promoted_before_arithmetic():
    slope, distance = alibi_slopes(12)[0], 100_003
    mod = scores.alibi(torch.tensor([slope]))
    zero = torch.zeros(1, dtype=torch.float64)
    index = torch.zeros(1, dtype=torch.int64)
    exact = mod(zero, index, index, index, index + distance).item()
    assert Fraction(exact) == Fraction(slope) * distance
    assert fp32(exact) != exact  # a product in fp32 would have been rounded


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", sorted(SCORES))
def test_score_mod_keeps_score_dtype(name, dtype):
    numbers = {
        "softcap": {"cap": 3.0},
        "temperature": {"temperature": 3.0},
        "relative_bias": {"distance": 2, "seed": 0},
        "bias": {"seed": 0, "per_batch": 1, "per_head": 1},
        "offset": {"rows": 1},
        "expression": {"text": "where(b == 0, 0.1, 2) * kv_idx / 3 + score"},
    }
    parts = [Spec.of("alibi")] if SCORES[name].compose else []
    dimensions = dataclasses.replace(DIMENSIONS, batch=2)
    mod = build_score(Spec.of(name, *parts, **numbers.get(name, {})), dimensions)
    index = torch.tensor(1)
    assert mod(torch.tensor(1.0, dtype=dtype), index, index, index, index).dtype is dtype
    column = torch.ones(3, dtype=dtype)
    assert mod(column, index, index, index, torch.arange(3)).dtype is dtype


def test_additive_score_mods_do_not_depend_on_score():
    cap = Spec.of("softcap", cap=2.0)
    assert is_additive(Spec.of("chain", Spec.of("alibi"), Spec.of("none")))
    assert not is_additive(Spec.of("chain", Spec.of("alibi"), cap))
    assert is_additive(Spec.of("offset", Spec.of("alibi"), rows=1))
    assert not is_additive(Spec.of("offset", cap, rows=1))
    for name, entry in SCORES.items():
        if entry.compose:
            continue
        values = {"seed": 1, "per_batch": 0, "per_head": 1, "text": "score * 0.5"}
        arguments = {k: values.get(k, 2) for k in entry.arguments}
        mod = build_score(Spec.of(name, **arguments), DIMENSIONS)
        added = apply(mod) - torch.tensor(START)
        larger = [[[x + 1 for x in row] for row in head] for head in START]
        added_to_larger = apply(mod, larger) - torch.tensor(larger)
        # Exact in float64: fp32 numbers below 16 added to small dyadic scores.
        assert torch.equal(added, added_to_larger) == entry.additive
