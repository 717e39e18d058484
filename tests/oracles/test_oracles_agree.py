"""The oracles equal a slow loop in 160 bits within error bounds, and agree with each other."""

import dataclasses
import importlib
import math
from functools import partial

import mpmath
import pytest
import torch
from tests.oracles.conftest import SMALL, CoarseExp

from attncheck import oracles
from attncheck.core.errors import UsageError
from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.inputs.distributions import DISTRIBUTIONS
from attncheck.inputs.input_tensors import Descale, Inputs, draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.oracles.float64_numbers import Float64
from attncheck.oracles.mp_numbers import Mp
from attncheck.oracles.streaming_forward import Blocks

streaming_module = importlib.import_module("attncheck.oracles.streaming_forward")

PROMISED = 1e-13  # the manual's promise for ordinary inputs

ORACLES = oracles.ORACLES | {
    "flash1": lambda inputs: oracles.flash1(inputs, block_query=2, block_kv=3),
    "flash2": lambda inputs: oracles.flash2(inputs, block_query=3, block_kv=4),
    "split": lambda inputs: oracles.split(inputs, splits=4),
    "split, more than keys": lambda inputs: oracles.split(inputs, splits=14),
    "streaming, many tiles": lambda inputs: oracles.streaming(inputs, blocks=SMALL),
}
every_oracle = pytest.mark.parametrize("oracle", ORACLES.values(), ids=ORACLES.keys())

# Each mask as a Python function of integers, for 9 queries and 11 keys.
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
    Spec.of("expression", text="abs(q_idx - kv_idx) % 3 <= h + b"): lambda b, h, i, j: (
        abs(i - j) % 3 <= h + b
    ),
    Spec.of("not", Spec.of("causal")): lambda _b, _h, i, j: j > i,
}
SCORES = {
    Spec.of("none"): lambda s, _b, _h, _i, _j: s,
    Spec.of("softcap", cap=1.5): lambda s, _b, _h, _i, _j: 1.5 * mpmath.tanh(s / 1.5),
    Spec.of("temperature", temperature=2.0): lambda s, _b, _h, _i, _j: s / 2,
    Spec.of("expression", text="score * 0.5 - kv_idx / 3"): lambda s, _b, _h, _i, j: (
        s / 2 - mpmath.mpf(j) / 3
    ),
    # 4 heads: slopes 2^-2, 2^-4, 2^-6, 2^-8.
    Spec.of("alibi"): lambda s, _b, h, i, j: s + mpmath.mpf(4) ** -(h + 1) * (j - i),
}
ALL_MASKS_ONCE = [(mask, Spec.of("none")) for mask in MASKS]
ALL_SCORES_CAUSAL = [(Spec.of("causal"), score) for score in SCORES]


def _tiny(**changes: object) -> Inputs:
    problem = Problem(batch=2, heads=4, kv_heads=2, query=9, kv=11, head_dim=6, value_dim=3)
    return draw_inputs(problem.replace(**changes))


@pytest.mark.parametrize(
    ("mask", "score", "dtype"),
    [(mask, score, "bf16") for mask, score in ALL_MASKS_ONCE + ALL_SCORES_CAUSAL]
    + [(Spec.of("causal"), Spec.of("none"), dtype) for dtype in ("e4m3", "e5m2", "fp64")],
    ids=str,
)
def test_oracles_equal_the_definition(mask, score, dtype, python_loop, allowance):
    inputs = _tiny(mask=mask, score=score, dtype=dtype)
    truth, bound = python_loop(inputs, MASKS[mask], SCORES[score]), allowance(inputs)
    # The loop rounds once, by half a unit, so the errors of one side are allowed.
    missing = [name for name, oracle in ORACLES.items() if bound.misses(oracle(inputs), truth, 1)]
    assert not missing


@every_oracle
def test_scores_of_a_thousand_do_not_overflow(oracle, python_loop, allowance):
    problem = Problem(query=6, kv=6, head_dim=1, value_dim=2, scale=1.0, dtype="fp16")
    q = torch.tensor([32.0, -32.0, 31.0, 1.0, 0.0, -1.0]).half().view(1, 1, 6, 1)
    k = torch.tensor([-32.0, -31.0, -30.0, 30.0, 31.0, 32.0]).half().view(1, 1, 6, 1)
    inputs = Inputs(problem=problem, q=q, k=k, v=draw_inputs(problem).v)
    truth = python_loop(inputs, MASKS[Spec.of("full")], SCORES[Spec.of("none")])
    assert truth.lse.max() > 1000
    bound, outputs = allowance(inputs), oracle(inputs)
    if oracle is not oracles.ORACLES["naive"]:
        assert not bound.misses(outputs, truth, sides=1)
        return
    # The naive formula overflows, but visibly: every row of finite numbers is right.
    overflowed = outputs.lse.isinf() | outputs.out.isnan().any(-1)
    assert overflowed.flatten().tolist() == [True, True, True, False, False, False]
    kept = Outputs(outputs.out[:, :, 3:], outputs.lse[:, :, 3:])
    rest = dataclasses.replace(bound, spread=bound.spread[:, :, 3:])
    assert not rest.misses(kept, Outputs(truth.out[:, :, 3:], truth.lse[:, :, 3:]), sides=1)


@pytest.mark.parametrize("scale", [-0.7, 0.0, 2.0**-149, 300.0])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_oracles_equal_the_definition_for_any_scale(scale, mask, python_loop, allowance):
    inputs = _tiny(mask=mask, scale=scale)
    truth, bound = python_loop(inputs, MASKS[mask], SCORES[Spec.of("none")]), allowance(inputs)
    # The naive formula overflows for scores of thousands.
    others = {name: oracle for name, oracle in ORACLES.items() if name != "naive"}
    missing = [name for name, oracle in others.items() if bound.misses(oracle(inputs), truth, 1)]
    assert not missing


@pytest.mark.parametrize(("mask", "score"), ALL_MASKS_ONCE + ALL_SCORES_CAUSAL, ids=str)
def test_oracles_agree_to_1e_13_on_ordinary_inputs(mask, score, allowance):
    mask = Spec.of("document", lengths=[20, 33, 30]) if mask.name == "document" else mask
    inputs = _tiny(query=70, kv=83, mask=mask, score=score, head_dim=32, value_dim=24)
    dense = oracles.dense(inputs)
    blocks = Blocks(rows=128, query=16, query_most=32, kv=16, cell=8)
    tiled = oracles.streaming(inputs, blocks=blocks)
    every = {name: oracle(inputs) for name, oracle in oracles.ORACLES.items()} | {"tiled": tiled}
    for name, other in every.items():
        # Registered recurrences have blocks of 16 keys; the online softmax rescales at every key.
        bound = allowance(inputs, rescales=None if name == "online" else 6)
        assert not bound.misses(dense, other), name
        # The manual's promise, relative to the largest output, beside the derived bound above.
        assert (dense.out - other.out).abs().max() <= PROMISED * dense.out.abs().max()


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("bounded", [True, False], ids=["bounded", "online"])
def test_streaming_equals_dense_for_every_distribution(
    distribution, bounded, allowance, monkeypatch
):
    if not bounded:
        monkeypatch.setattr(streaming_module, "LARGEST_BOUNDED_SCORE", -1.0)
    inputs = _tiny(distribution=distribution, query=60, kv=60, mask=Spec.of("causal"), dtype="fp16")
    blocks = Blocks(rows=64, query=16, query_most=16, kv=16, cell=8)
    streamed = oracles.streaming(inputs, blocks=blocks)
    assert not allowance(inputs).misses(oracles.dense(inputs), streamed)


blocked = pytest.mark.parametrize("oracle", [oracles.flash1, oracles.flash2])


@blocked
@pytest.mark.parametrize("block_query", [1, 7, 33, 1000])
@pytest.mark.parametrize("block_kv", [1, 8, 29, 1000])
def test_flash_oracles_equal_dense_for_any_block_size(oracle, block_query, block_kv, allowance):
    inputs = _tiny(query=33, kv=29, mask=Spec.of("sliding_window", window=5))
    one = oracle(inputs, block_query=block_query, block_kv=block_kv)
    assert not allowance(inputs).misses(oracles.dense(inputs), one)


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 28, 29, 30, 100])
def test_split_equals_dense_for_any_number_of_splits(splits, allowance):
    """Even for more splits than keys; in most splits some rows see no key."""
    inputs = _tiny(query=33, kv=29, mask=Spec.of("sliding_window", window=3))
    outputs = oracles.split(inputs, splits=splits)
    assert not allowance(inputs).misses(oracles.dense(inputs), outputs)
    assert (outputs.lse[:, :, 31:] == -math.inf).all()


@every_oracle
@pytest.mark.parametrize(
    "mask", [Spec.of("sliding_window", window=0), Spec.of("not", Spec.of("causal"))], ids=str
)
def test_rows_without_keys_give_zero_and_minus_infinity(oracle, mask):
    inputs = _tiny(mask=mask, kv=5)
    outputs = oracle(inputs)
    dead = torch.tensor([[not MASKS[mask](0, 0, i, j) for j in range(5)] for i in range(9)]).all(1)
    assert dead.any()
    assert (outputs.out[:, :, dead] == 0).all()
    assert (outputs.lse[:, :, dead] == -math.inf).all()
    assert outputs.lse[:, :, ~dead].isfinite().all()


class _NoRescale(Float64):
    def exp(self, array):
        return torch.ones_like(array) if array.shape[-1] == 1 else array.exp()


class _WrongHeads(Float64):
    def repeat_heads(self, array, times):
        return array.repeat(1, times, 1, 1)


class _ShortRowSum(Float64):
    def rowsum(self, array):
        return array[..., 1:].sum(dim=-1, keepdim=True)


FAULTY_NUMBERS = [
    (fault, name)
    for fault in (CoarseExp, _NoRescale, _WrongHeads, _ShortRowSum)
    for name in oracles.RECURRENCES
    # The naive and safe softmax never rescale; the online one never sums a whole row.
    if (fault, name) not in {(_NoRescale, "naive"), (_NoRescale, "safe"), (_ShortRowSum, "online")}
]


@pytest.mark.parametrize(("fault", "name"), FAULTY_NUMBERS)
def test_faulty_number_system_exceeds_the_bounds(fault, name, allowance):
    inputs, numbers = _tiny(kv=40), fault()  # the registered recurrences have blocks of 16
    outputs = oracles.RECURRENCES[name](numbers, inputs).rounded(numbers)
    assert allowance(inputs).misses(outputs, oracles.dense(inputs))


def _coarse(shifted: torch.Tensor) -> torch.Tensor:
    return shifted.copy_(shifted.float().exp())


def _sees_all(self, run):
    return torch.ones(1, 1, 1, 1, dtype=torch.bool)


CAPPED, PLAIN = Spec.of("softcap", cap=1.5), Spec.of("none")
FAULTS = {
    "coarse exponential": (CAPPED, streaming_module, "exponential", _coarse),
    "no score mod": (
        CAPPED,
        streaming_module,
        "call_score_mod",
        lambda mod, scores, indices: scores,
    ),
    "no mask, online": (CAPPED, streaming_module._Online, "visible", _sees_all),
    "no mask, bounded": (PLAIN, streaming_module._Bounded, "visible", _sees_all),
}


@pytest.mark.parametrize(("score", "place", "name", "fault"), FAULTS.values(), ids=FAULTS.keys())
def test_fault_in_streaming_exceeds_the_bounds(score, place, name, fault, allowance, monkeypatch):
    inputs = _tiny(mask=Spec.of("causal"), score=score)
    bound, truth = allowance(inputs), oracles.dense(inputs)
    assert not bound.misses(oracles.streaming(inputs, blocks=SMALL), truth)
    monkeypatch.setattr(place, name, fault)
    assert bound.misses(oracles.streaming(inputs, blocks=SMALL), truth)


def test_largest_bounded_scores_lose_no_precision(allowance):
    """Scores of ±597, the bound, with the smallest and the largest fp32 values."""
    largest = streaming_module.LARGEST_BOUNDED_SCORE
    problem = Problem(query=2, kv=3, head_dim=1, value_dim=2, scale=1.0, dtype="fp32")
    q = torch.tensor([1.0, -1.0]).view(1, 1, 2, 1)
    k = torch.tensor([-1.0, 0.5, 1.0]).view(1, 1, 3, 1) * math.floor(largest)
    v = torch.tensor([[2.0**-126, 3e38]] * 3).view(1, 1, 3, 2)
    inputs = Inputs(problem=problem, q=q, k=k, v=v)
    tiles = streaming_module._Tiles(inputs)
    assert tiles.bounded
    assert not allowance(inputs).misses(oracles.streaming(inputs), oracles.dense(inputs))


def _at_the_bound(signs, value, *, dtype="fp64", scale=1.0, descale=None):
    """One row and two keys with scores of (nearly) ±LARGEST_BOUNDED_SCORE and the same value."""
    problem = Problem(query=1, kv=2, head_dim=1, value_dim=1, scale=scale, dtype=dtype)
    largest = math.floor(streaming_module.LARGEST_BOUNDED_SCORE)
    tensors = ([1.0], [sign * largest / problem.scale for sign in signs], [value, value])
    storage = problem.formats.storage.torch_dtype
    q, k, v = (torch.tensor(t, dtype=torch.float64).to(storage).view(1, 1, -1, 1) for t in tensors)
    return Inputs(problem=problem, q=q, k=k, v=v, descale=descale)


# exp(±597) = 2^±861: weight times value leaves float64's range.
@pytest.mark.parametrize(("signs", "value"), [((-1, 1), 2.0**200), ((-1, -1), 2.0**-300)])
def test_values_beyond_fp32_use_the_unbounded_path(signs, value, allowance, monkeypatch):
    inputs = _at_the_bound(signs, value)
    assert not streaming_module._Tiles(inputs).bounded
    bound, truth = allowance(inputs), oracles.dense(inputs)
    assert not bound.misses(oracles.streaming(inputs), truth)
    monkeypatch.setattr(streaming_module, "all_moderate", lambda *_: True)
    assert bound.misses(oracles.streaming(inputs), truth)


def test_fp8_values_are_bounded_only_if_their_descale_keeps_them_moderate(allowance):
    one, huge = torch.ones(1, 1), torch.full((1, 1), 2.0**127)
    scales = Descale(q=one, k=one, v=one)
    small = _at_the_bound((0.5, 0.25), 57344.0, scale=1 / 64, dtype="e5m2", descale=scales)
    large = small.replace(descale=Descale(q=one, k=one, v=huge))
    assert streaming_module._Tiles(small).bounded
    assert not streaming_module._Tiles(large).bounded  # 2^127 · 57344 is 2^143
    for inputs in (small, large):
        assert not allowance(inputs).misses(oracles.streaming(inputs), oracles.dense(inputs))


def test_outputs_are_float64_and_have_the_problems_shapes():
    for oracle in ORACLES.values():
        outputs = oracle(_tiny())
        assert isinstance(outputs, Outputs)
        assert outputs.out.shape == (2, 4, 9, 3)
        assert outputs.lse.shape == (2, 4, 9)
        assert outputs.out.dtype == outputs.lse.dtype == torch.float64


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: oracles.flash1(_tiny(), block_query=0, block_kv=4), "block_query=0 must be at"),
        (lambda: oracles.flash2(_tiny(), block_query=4, block_kv=-1), "block_kv=-1 must be at"),
        (lambda: oracles.flash1(_tiny(), block_query=4, block_kv=-1), "block_kv=-1 must be at"),
        (lambda: oracles.flash2(_tiny(), block_query=0, block_kv=4), "block_query=0 must be at"),
        (lambda: oracles.split(_tiny(), splits=0), "splits=0 must be at least 1"),
        (lambda: oracles.split(_tiny(), splits=-1), "splits=-1 must be at least 1"),
        *(
            (partial(Mp, digits), "must be a whole number of at least 17")
            for digits in (16, 0, -3, 50.0, "50", True, None)
        ),
        (lambda: oracles.SOFTMAXES["safe"](_tiny()), "attention has no scores as inputs"),
    ],
)
def test_invalid_blocks_splits_and_digits_are_refused(call, message):
    with pytest.raises(UsageError, match=message):
        call()
