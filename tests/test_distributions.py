"""Distributions of q, k and v: the same bits everywhere, and the properties that each claims."""

import hashlib
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from attncheck.core import draws
from attncheck.core.draws import TensorDraws
from attncheck.core.errors import UnknownName
from attncheck.inputs.distributions import DISTRIBUTIONS, Sizes, draw

GOLDEN = {
    "normal": "cd3c9dbfc2a9",
    "outliers": "faaf9433c76b",
    "uniform": "6e48e060a09a",
    "large_logits": "3d2009bef670",
    "negative_logits": "1a1694f9ca5e",
    "one_hot": "fc9b862eb69e",
    "constant_rows": "bd87b60dd276",
    "sink": "6bf15c0e607e",
    "ones_v": "231a8e8cab75",
    "zero_q": "775d5469e7a3",
    "small_terms": "aab0ba1dfca6",
}


def sizes_of(head_dim: int, **changes: int) -> Sizes:
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 50, "kv": 100, "value_dim": 8}
    return Sizes(**(sizes | {"head_dim": head_dim} | changes))


def logits(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """q·k/√head_dim, ``(batch, heads, query, kv)``."""
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    return q @ k.swapaxes(2, 3) / math.sqrt(q.shape[-1])


def weights(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    scores = logits(q, k)
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def input_hashes() -> dict[str, str]:
    sizes = Sizes(batch=2, heads=4, kv_heads=2, query=33, kv=70, head_dim=24, value_dim=40)
    hashes = {}
    for name in DISTRIBUTIONS:
        digest = hashlib.sha256()
        for tensor in draw(name, sizes, seed=2026):
            digest.update(tensor.astype("<f8").tobytes())
        hashes[name] = digest.hexdigest()[:12]
    return hashes


def test_inputs_have_the_golden_bits():
    assert input_hashes() == GOLDEN


def test_bits_are_the_same_without_vector_instructions(without_vectors):
    code = "from tests.test_distributions import input_hashes\nprint(input_hashes())"
    assert without_vectors(code) == str(GOLDEN)


def test_distributions_import_neither_torch_nor_problem():
    code = (
        "import sys, attncheck.inputs.distributions\n"
        "assert not {'torch', 'triton', 'attncheck.inputs.problem'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("head_dim", [1, 5, 64])
def test_inputs_are_finite_float64_and_depend_on_the_seed(name, head_dim):
    sizes = sizes_of(head_dim, query=3, kv=7)
    drawn = draw(name, sizes, seed=1)
    for tensor, shape in zip(drawn, (sizes.q, sizes.k, sizes.v), strict=True):
        assert tensor.shape == shape
        assert tensor.dtype == np.float64
        assert tensor.flags.c_contiguous
        assert tensor.flags.writeable
        assert np.isfinite(tensor).all()
    again, other = draw(name, sizes, seed=1), draw(name, sizes, seed=2)
    assert all((a == b).all() for a, b in zip(drawn, again, strict=True))
    assert any((a != b).any() for a, b in zip(drawn, other, strict=True))


def test_unknown_distribution_lists_the_known_ones():
    with pytest.raises(UnknownName, match="distribution 'gauss' is not known: choose from const"):
        draw("gauss", sizes_of(8), seed=0)


def test_outliers_have_the_share_and_variance_of_flash_attention_3():
    for tensor in draw("outliers", sizes_of(64, query=2000, kv=4000, value_dim=64), seed=0):
        # Var = 1 + 0.001·100; the fourth moment of the mixture gives the variance of its estimate.
        fourth = 3 * (0.999 + 0.001 * 101**2)
        spread = math.sqrt((fourth - 1.1**2) / tensor.size)
        assert abs((tensor**2).mean() - 1.1) < 6 * spread
        # Only outliers exceed 8.3, which is 8.3/√101 of their standard deviations.
        expected = 0.001 * math.erfc(8.3 / math.sqrt(101) / math.sqrt(2))
        share = (abs(tensor) > 8.3).mean()
        assert abs(share - expected) < 6 * math.sqrt(expected / tensor.size)


def test_uniform_fills_the_unit_interval():
    for tensor in draw("uniform", sizes_of(64), seed=0):
        assert 0 < tensor.min() < 0.01
        assert 0.99 < tensor.max() < 1


@pytest.mark.parametrize("head_dim", [1, 16, 64, 256])
def test_large_logits_overflow_exp_in_fp32(head_dim):
    q, k, _ = draw("large_logits", sizes_of(head_dim, query=200, kv=200), seed=0)
    scores = logits(q, k)
    assert 16 < scores.std() < 64
    assert scores.max() > math.log(np.finfo(np.float32).max)


@pytest.mark.parametrize("head_dim", [1, 2, 16, 64, 256])
def test_negative_logits_are_all_far_below_zero(head_dim):
    q, k, _ = draw("negative_logits", sizes_of(head_dim), seed=0)
    scores = logits(q, k)
    assert scores.max() < -29
    assert abs(scores.mean() + 128) < 2
    if head_dim >= 16:  # every exp(score − 0) is 0 in fp32
        assert scores.max() < math.log(2.0**-150)


@pytest.mark.parametrize("head_dim", [16, 17, 40, 64, 100, 256])
@pytest.mark.parametrize("kv", [1, 2, 100, 1000])
def test_one_hot_rows_give_one_key_the_weight_one(head_dim, kv):
    q, k, _ = draw("one_hot", sizes_of(head_dim, kv=kv), seed=0)
    weight = weights(q, k)
    assert (weight.max(-1) == 1).all()
    if kv == 100:  # 400 rows choose among 100 keys: most are chosen
        assert len(np.unique(weight.argmax(-1))) > 50


@pytest.mark.parametrize("head_dim", [1, 3, 6])
def test_one_hot_in_few_dims_shares_the_weight_evenly_among_equal_keys(head_dim):
    q, k, _ = draw("one_hot", sizes_of(head_dim, kv=128), seed=0)
    largest = weights(q, k).max(-1)
    assert (largest == 1 / 2 ** (7 - head_dim)).all()


def test_one_hot_chooses_other_keys_when_key_heads_are_swapped():
    q, k, _ = draw("one_hot", sizes_of(64), seed=0)
    swapped = weights(q, k[:, ::-1])
    original = weights(q, k)
    assert (original.argmax(-1) != swapped.argmax(-1)).mean() > 0.5


def test_constant_rows_have_equal_rows_and_equal_nonzero_scores_per_head():
    q, k, v = draw("constant_rows", sizes_of(24), seed=0)
    assert (q == q[:, :, :1]).all()
    assert (k == k[:, :, :1]).all()
    assert len(np.unique(q[:, :, 0, 0])) == 8  # another row for each of 2·4 heads
    assert len(np.unique(v)) == v.size
    scores = logits(q, k)
    assert (scores == scores[..., :1, :1]).all()
    assert abs(scores).min() > 0


@pytest.mark.parametrize("head_dim", [16, 64, 256])
@pytest.mark.parametrize("kv", [2, 100, 1024])
def test_sink_key_takes_most_of_the_weight_and_has_a_small_value(head_dim, kv):
    q, k, v = draw("sink", sizes_of(head_dim, kv=kv), seed=0)
    weight = weights(q, k)[..., 0]
    assert weight.mean() > 0.95
    assert (weight > 0.9).mean() > (0.9 if kv == 2 else 0.99)  # a single other key varies more
    assert weight.max() < 1
    assert abs(v[..., 0, :]).max() < 8.3 / 64


def test_sink_with_head_dim_1_has_one_nonzero_logit_per_row():
    q, k, _ = draw("sink", sizes_of(1), seed=0)
    scores = logits(q, k)
    assert (scores[..., 1:] == 0).all()
    assert (scores[..., 0] > 4).all()


def test_ones_v_sets_v_alone():
    q, _, v = draw("ones_v", sizes_of(8), seed=0)
    assert (v == 1).all()
    assert q.any()


def test_zero_q_sets_q_alone():
    q, k, v = draw("zero_q", sizes_of(8), seed=0)
    assert not q.any()
    assert k.all()
    assert v.all()


@pytest.mark.parametrize("query", [16, 5000])
def test_small_terms_are_too_small_for_a_16_bit_sum_but_matter_together(query):
    """Each sum over the longer direction has one large term.

    Each small term is below 2⁻¹² of it, but their sum exceeds a rounding error of bf16.
    """
    sizes = sizes_of(64, batch=1, heads=1, kv_heads=1, query=query, kv=4096, value_dim=64)
    q, k, _ = draw("small_terms", sizes, seed=3)
    if query > sizes.kv:
        terms = q[0, 0, :, 2:]
        assert (weights(q[:, :, :8], k) == 1.0 / sizes.kv).all()
    else:
        terms = abs(k[0, 0, :, 2:])
        rows = weights(q, k)[0, 0]
        rows = rows[rows.max(-1) > 0.5]
        assert len(rows) == 12
        rest = 1.0 - rows.max(-1)
        assert (rest > 2.0**-7).all()  # more than a rounding of bf16, and each term far less
        assert (rows.min(-1) < 2.0**-12).all()
    assert (np.sort(terms, axis=0)[-1] == 1.0).all()
    assert (np.sort(terms, axis=0)[-2] < 2.0**-12).all()
    assert (terms.sum(0) - 1.0 > 2.0**-8).all()


@pytest.mark.parametrize("name", [name for name, each in DISTRIBUTIONS.items() if each.plain])
def test_plain_distributions_drawn_by_torch_have_the_bits_of_numpy(name, monkeypatch):
    monkeypatch.setattr(draws, "SPAN", 16)
    # NumPy's root is IEEE 754's; torch's on a CPU may be MKL's.
    monkeypatch.setattr(torch, "sqrt", lambda x: torch.from_numpy(np.sqrt(x.numpy())))
    sizes = sizes_of(64)
    tensors = DISTRIBUTIONS[name].draw(TensorDraws(3, "cpu"), sizes)
    for tensor, array in zip(tensors, draw(name, sizes, seed=3), strict=True):
        np.testing.assert_array_equal(tensor.numpy().view(np.int64), array.view(np.int64))
