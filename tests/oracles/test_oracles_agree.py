"""The three oracles are right (against a slow loop in 160 bits) and agree with each other."""

from __future__ import annotations

import importlib
import math

import mpmath
import pytest
import torch

from attncheck import oracles
from attncheck.distributions import DISTRIBUTIONS
from attncheck.errors import UsageError
from attncheck.inputs import Inputs, draw
from attncheck.mods.spec import Spec
from attncheck.oracles.dense import dense_attention
from attncheck.oracles.flash2 import flash2_forward
from attncheck.oracles.numbers import Float64
from attncheck.oracles.tiles import Blocks
from attncheck.outputs import Outputs
from attncheck.problem import Problem

streaming_room = importlib.import_module("attncheck.oracles.streaming")

SMALL = Blocks(rows=24, query=4, query_most=8, kv=8, cell=4)
PROMISED = 1e-13  # of ordinary inputs, in the manual

ORACLES = {
    "dense": oracles.dense,
    "flash2": lambda inputs: oracles.flash2(inputs, block_query=3, block_kv=4),
    "streaming": oracles.streaming,
    "streaming, many tiles": lambda inputs: oracles.streaming(inputs, blocks=SMALL),
}
every_oracle = pytest.mark.parametrize("oracle", ORACLES.values(), ids=ORACLES.keys())

# Each mask again, in Python on integers, for lengths of 9 queries and 11 keys.
MASKS = {
    Spec.of("full"): lambda _b, _h, _i, _j: True,
    Spec.of("causal"): lambda _b, _h, i, j: j <= i,
    Spec.of("causal_bottom_right"): lambda _b, _h, i, j: j <= i + 2,
    Spec.of("sliding_window", window=3): lambda _b, _h, i, j: i - 3 < j <= i,
    Spec.of("sliding_window", window=0): lambda _b, _h, _i, _j: False,
    Spec.of("prefix_lm", prefix=4): lambda _b, _h, i, j: j < 4 or j <= i,
    Spec.of("document", lengths=[2, 5, 4]): lambda _b, _h, i, j: (
        (i >= 2) + (i >= 7) == (j >= 2) + (j >= 7)
    ),
    Spec.of("padding", lengths=[0, 7]): lambda b, _h, _i, j: j < (0, 7)[b],
    Spec.of("not", Spec.of("causal")): lambda _b, _h, i, j: j > i,
}
SCORES = {
    Spec.of("none"): lambda s, _b, _h, _i, _j: s,
    Spec.of("softcap", cap=1.5): lambda s, _b, _h, _i, _j: 1.5 * mpmath.tanh(s / 1.5),
    Spec.of("temperature", temperature=2.0): lambda s, _b, _h, _i, _j: s / 2,
    # 4 heads: slopes 2^-2, 2^-4, 2^-6, 2^-8.
    Spec.of("alibi"): lambda s, _b, h, i, j: s + mpmath.mpf(4) ** -(h + 1) * (j - i),
}
ALL_MASKS_ONCE = [(mask, Spec.of("none")) for mask in MASKS]
ALL_SCORES_CAUSAL = [(Spec.of("causal"), score) for score in SCORES]


def _tiny(**changes: object) -> Inputs:
    problem = Problem(batch=2, heads=4, kv_heads=2, query=9, kv=11, head_dim=6, value_dim=3)
    return draw(problem.replace(**changes))


@every_oracle
@pytest.mark.parametrize(("mask", "score"), ALL_MASKS_ONCE + ALL_SCORES_CAUSAL, ids=str)
def test_equals_the_definition(oracle, mask, score, python_loop, allowance):
    inputs = _tiny(mask=mask, score=score)
    truth = python_loop(inputs, MASKS[mask], SCORES[score])
    # The loop rounds once, half a unit: one side.
    assert not allowance(inputs).misses(oracle(inputs), truth, sides=1)


@every_oracle
def test_scores_of_a_thousand_neither_overflow_nor_vanish(oracle, python_loop, allowance):
    problem = Problem(query=6, kv=6, head_dim=1, value_dim=2, scale=1.0, dtype="fp16")
    q = torch.tensor([32.0, -32.0, 31.0, 1.0, 0.0, -1.0]).half().view(1, 1, 6, 1)
    k = torch.tensor([-32.0, -31.0, -30.0, 30.0, 31.0, 32.0]).half().view(1, 1, 6, 1)
    inputs = Inputs(problem=problem, q=q, k=k, v=draw(problem).v)
    truth = python_loop(inputs, MASKS[Spec.of("full")], SCORES[Spec.of("none")])
    assert truth.lse.max() > 1000
    assert not allowance(inputs).misses(oracle(inputs), truth, sides=1)


@pytest.mark.parametrize(("mask", "score"), ALL_MASKS_ONCE + ALL_SCORES_CAUSAL, ids=str)
def test_ordinary_inputs_agree_to_1e_13(mask, score, allowance):
    inputs = _tiny(query=70, kv=83, mask=_longer(mask), score=score, head_dim=32, value_dim=24)
    bound = allowance(inputs, rescales=6)
    dense = oracles.dense(inputs)
    blocks = Blocks(rows=128, query=16, query_most=32, kv=16, cell=8)
    for other in (
        oracles.flash2(inputs, block_query=16, block_kv=16),
        oracles.streaming(inputs),
        oracles.streaming(inputs, blocks=blocks),
    ):
        assert not bound.misses(dense, other)
        # What is promised, relative to the largest output; the derived allowance is above.
        assert (dense.out - other.out).abs().max() <= PROMISED * dense.out.abs().max()


def _longer(mask: Spec) -> Spec:
    if mask.name == "document":
        return Spec.of("document", lengths=[20, 33, 30])
    return mask


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("bounded", [True, False], ids=["bounded", "online"])
def test_streaming_every_distribution(distribution, bounded, allowance, monkeypatch):
    if not bounded:
        monkeypatch.setattr(streaming_room, "LARGEST_BOUNDED_SCORE", -1.0)
    inputs = _tiny(distribution=distribution, query=60, kv=60, mask=Spec.of("causal"), dtype="fp16")
    blocks = Blocks(rows=64, query=16, query_most=16, kv=16, cell=8)
    streamed = oracles.streaming(inputs, blocks=blocks)
    assert not allowance(inputs).misses(oracles.dense(inputs), streamed)


@pytest.mark.parametrize("block_query", [1, 7, 33, 1000])
@pytest.mark.parametrize("block_kv", [1, 8, 29, 1000])
def test_flash2_does_not_depend_on_its_blocks(block_query, block_kv, allowance):
    inputs = _tiny(query=33, kv=29, mask=Spec.of("sliding_window", window=5))
    one = oracles.flash2(inputs, block_query=block_query, block_kv=block_kv)
    assert not allowance(inputs).misses(oracles.dense(inputs), one)


@pytest.mark.parametrize(
    "sizes", [{"block_query": 0, "block_kv": 4}, {"block_query": 4, "block_kv": -1}]
)
def test_flash2_refuses_empty_blocks(sizes):
    with pytest.raises(UsageError, match="must be at least 1"):
        oracles.flash2(_tiny(), **sizes)


@every_oracle
@pytest.mark.parametrize(
    "mask", [Spec.of("sliding_window", window=0), Spec.of("not", Spec.of("causal"))], ids=str
)
def test_rows_that_see_nothing_are_zero_and_minus_infinity(oracle, mask):
    inputs = _tiny(mask=mask, kv=5)
    outputs = oracle(inputs)
    dead = torch.tensor([[not MASKS[mask](0, 0, i, j) for j in range(5)] for i in range(9)]).all(1)
    assert dead.any()
    assert (outputs.out[:, :, dead] == 0).all()
    assert (outputs.lse[:, :, dead] == -math.inf).all()
    assert outputs.lse[:, :, ~dead].isfinite().all()


class _CoarseExp(Float64):
    def exp(self, array):
        return array.float().exp().double()


class _NoRescale(Float64):
    def exp(self, array):
        return torch.ones_like(array) if array.shape[-1] == 1 else array.exp()


class _WrongHeads(Float64):
    def repeat_heads(self, array, times):
        return array.repeat(1, times, 1, 1)


class _ShortRowSum(Float64):
    def rowsum(self, array):
        return array[..., 1:].sum(dim=-1, keepdim=True)


@pytest.mark.parametrize("fault", [_CoarseExp, _NoRescale, _WrongHeads, _ShortRowSum])
def test_a_faulty_number_system_is_noticed(fault, allowance):
    inputs = _tiny()
    bound, truth = allowance(inputs), oracles.dense(inputs)
    assert bound.misses(flash2_forward(fault(), inputs, block_query=3, block_kv=4), truth)
    if fault is not _NoRescale:  # dense attention has no rescale
        assert bound.misses(dense_attention(fault(), inputs), truth)


def _coarse(shifted: torch.Tensor) -> torch.Tensor:
    return shifted.copy_(shifted.float().exp())


def _sees_all(self, run):
    return torch.ones(1, 1, 1, 1, dtype=torch.bool)


CAPPED, PLAIN = Spec.of("softcap", cap=1.5), Spec.of("none")
FAULTS = {
    "coarse exponential": (CAPPED, streaming_room, "_exponential", _coarse),
    "no score mod": (CAPPED, streaming_room, "scored", lambda mod, scores, indices: scores),
    "no mask, online": (CAPPED, streaming_room._Online, "visible", _sees_all),
    "no mask, bounded": (PLAIN, streaming_room._Bounded, "visible", _sees_all),
}


@pytest.mark.parametrize(("score", "place", "name", "fault"), FAULTS.values(), ids=FAULTS.keys())
def test_a_faulty_streaming_is_noticed(score, place, name, fault, allowance, monkeypatch):
    inputs = _tiny(mask=Spec.of("causal"), score=score)
    bound, truth = allowance(inputs), oracles.dense(inputs)
    assert not bound.misses(oracles.streaming(inputs, blocks=SMALL), truth)
    monkeypatch.setattr(place, name, fault)
    assert bound.misses(oracles.streaming(inputs, blocks=SMALL), truth)


def test_the_bound_on_scores_is_needed(allowance, monkeypatch):
    inputs = _tiny(distribution="large_logits", scale=30.0)
    truth = oracles.dense(inputs)
    assert not allowance(inputs).misses(oracles.streaming(inputs), truth)
    monkeypatch.setattr(streaming_room, "LARGEST_BOUNDED_SCORE", math.inf)
    assert allowance(inputs).misses(oracles.streaming(inputs), truth)


def test_nothing_is_lost_just_below_the_bound(allowance):
    """Scores of ±597 with the smallest and the largest fp32 values."""
    largest = streaming_room.LARGEST_BOUNDED_SCORE
    problem = Problem(query=2, kv=3, head_dim=1, value_dim=2, scale=1.0, dtype="fp32")
    q = torch.tensor([1.0, -1.0]).view(1, 1, 2, 1)
    k = torch.tensor([-1.0, 0.5, 1.0]).view(1, 1, 3, 1) * math.floor(largest)
    v = torch.tensor([[2.0**-126, 3e38]] * 3).view(1, 1, 3, 2)
    inputs = Inputs(problem=problem, q=q, k=k, v=v)
    tiles = streaming_room._Tiles(inputs, None)
    assert tiles.bounded
    assert not allowance(inputs).misses(oracles.streaming(inputs), oracles.dense(inputs))


def test_outputs_are_float64_of_the_declared_shapes():
    for oracle in ORACLES.values():
        outputs = oracle(_tiny())
        assert isinstance(outputs, Outputs)
        assert outputs.out.shape == (2, 4, 9, 3)
        assert outputs.lse.shape == (2, 4, 9)
        assert outputs.out.dtype == outputs.lse.dtype == torch.float64
