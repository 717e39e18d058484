"""Scores drawn for a softmax: the same bits everywhere, and the properties of each distribution."""

import hashlib
import math

import numpy as np
import pytest
from tests.messages import one_line

from attncheck.core.errors import ProblemError, UnknownName
from attncheck.inputs.distributions import DISTRIBUTIONS, Sizes, draw_scores

GOLDEN = {
    "normal": "5a1b28a2f6b0",
    "outliers": "abb0695fc4d9",
    "uniform": "cfacb2cbaed8",
    "large_logits": "0ae2d8be4368",
    "negative_logits": "b1c8af1211e9",
    "one_hot": "69a0e9ecac26",
    "constant_rows": "e233311a874f",
    "sink": "33cd63ad4990",
    "zero_q": "ea24d630f03e",
}
FP32 = np.finfo(np.float32)


def sizes_of(**changes: int) -> Sizes:
    sizes = {"batch": 2, "heads": 3, "kv_heads": 3, "query": 50, "kv": 100}
    return Sizes(**(sizes | {"head_dim": 0, "value_dim": 0} | changes))


def weights(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def naive_in_fp32(scores: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        powers = np.exp(scores.astype(np.float32))
        return powers / powers.sum(-1, keepdims=True, dtype=np.float32)


def score_hashes() -> dict[str, str]:
    hashes = {}
    for name in (name for name, distribution in DISTRIBUTIONS.items() if distribution.scores):
        scores = draw_scores(name, sizes_of(query=33, kv=70), seed=2026).astype("<f8")
        hashes[name] = hashlib.sha256(scores.tobytes()).hexdigest()[:12]
    return hashes


def test_scores_have_the_golden_bits():
    assert score_hashes() == GOLDEN


def test_bits_are_the_same_without_vector_instructions(without_vectors):
    code = "from tests.test_distribution_scores import score_hashes\nprint(score_hashes())"
    assert without_vectors(code) == str(GOLDEN)


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("kv", [1, 7])
def test_scores_are_finite_float64_and_depend_on_the_seed(name, kv):
    sizes = sizes_of(query=3, kv=kv)
    scores = draw_scores(name, sizes, seed=1)
    assert scores.shape == sizes.x == (2, 3, 3, kv)
    assert scores.dtype == np.float64
    assert scores.flags.c_contiguous
    assert scores.flags.writeable
    assert np.isfinite(scores).all()
    assert (scores == draw_scores(name, sizes, seed=1)).all()
    is_constant = name == "zero_q" or (kv == 1 and name in {"one_hot", "sink"})
    assert is_constant is bool((scores == draw_scores(name, sizes, seed=2)).all())


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("gauss", UnknownName, "distribution 'gauss' is not known: choose from constant_rows, "),
        (
            "ones_v",
            ProblemError,
            "distribution 'ones_v' has no scores for softmax: choose from normal, ",
        ),
    ],
)
def test_distribution_without_scores_is_rejected(name, error, message):
    with one_line(error, start=message):
        draw_scores(name, sizes_of(), seed=0)


def test_uniform_fills_the_unit_interval():
    scores = draw_scores("uniform", sizes_of(), seed=0)
    assert 0 < scores.min() < 0.01
    assert 0.99 < scores.max() < 1


def test_large_logits_have_deviation_32_and_overflow_exp_in_fp32():
    scores = draw_scores("large_logits", sizes_of(query=500), seed=0)
    # The variance of a normal sample's variance is 2σ⁴/n.
    assert abs((scores**2).mean() / 32**2 - 1) < 6 * math.sqrt(2 / scores.size)
    assert scores.max() > math.log(FP32.max)
    assert np.isnan(naive_in_fp32(scores)).any()


def test_negative_logits_make_a_softmax_without_max_subtraction_nan_in_every_row():
    scores = draw_scores("negative_logits", sizes_of(query=2000, kv=200), seed=0)
    assert abs(scores.mean() + 128) < 6 * 2 / math.sqrt(scores.size)
    assert np.isnan(naive_in_fp32(scores)).all()
    # For every seed: |normal| < 8.3, and half of fp32's smallest number rounds to 0.
    assert math.log(float(FP32.smallest_subnormal) / 2) > -2 * (64 - 8.3)
    assert weights(scores).max() < 1  # the exact weights are ordinary


@pytest.mark.parametrize("kv", [1, 2, 100, 2**16])
def test_one_hot_rows_give_one_column_the_weight_one(kv):
    scores = draw_scores("one_hot", sizes_of(query=50 if kv < 1000 else 2, kv=kv), seed=0)
    weight = weights(scores)
    assert (weight.max(-1) == 1).all()
    assert (np.sort(weight, axis=-1)[..., :-1] < 2.0**-53 / kv).all()
    if kv == 100:  # 300 rows choose among 100 columns
        assert len(np.unique(weight.argmax(-1))) > 50


def test_constant_rows_have_one_nonzero_score_per_row():
    scores = draw_scores("constant_rows", sizes_of(), seed=0)
    assert (scores == scores[..., :1]).all()
    assert (scores != 0).all()
    assert len(np.unique(scores)) == 2 * 3 * 50


@pytest.mark.parametrize("kv", [2, 3, 100, 1024, 1025])
def test_sink_column_takes_over_nine_tenths_of_the_weight(kv):
    weight = weights(draw_scores("sink", sizes_of(query=200, kv=kv), seed=0))[..., 0]
    assert weight.mean() > 0.95
    assert (weight > 0.9).mean() > (0.9 if kv < 10 else 0.99)  # sums of a few columns vary more
    assert weight.max() < 1


def test_zero_q_scores_are_zero():
    assert not draw_scores("zero_q", sizes_of(), seed=0).any()
