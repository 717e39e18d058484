"""The printed Triton function computes what the callable does, also beyond the last index."""

import inspect

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tests.mods.sample_mods import EXACT_SCORES, LIBRARY_MASKS, any_mask, exact_chain

from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import Problem
from attncheck.mods import masks, scores
from attncheck.mods.library import build_mask, build_score
from attncheck.mods.to_triton import to_triton
from attncheck.mods.trace import trace_mask, trace_score
from attncheck.subjects.kernel_mods import triton_score


def assert_triton_mask_matches(grid, mask_mod):
    assert torch.equal(grid.seen(mask_mod)[grid.existing], grid.inside(mask_mod).to(torch.int32))


def assert_triton_score_matches(grid, score_mod):
    result = grid.scored(score_mod, grid.start())[grid.existing]
    assert torch.equal(result, grid.inside(score_mod, grid.start()))


@pytest.mark.parametrize("spec", LIBRARY_MASKS, ids=str)
def test_library_mask_in_triton_matches_callable(spec, grid):
    assert_triton_mask_matches(grid, build_mask(spec, grid.dimensions))


@pytest.mark.parametrize("spec", EXACT_SCORES, ids=str)
def test_library_score_has_bits_of_fp32_torch(spec, grid):
    assert_triton_score_matches(grid, build_score(spec, grid.dimensions))


@given(spec=any_mask)
@settings(max_examples=20, deadline=None)
def test_drawn_mask_in_triton_matches_callable(spec, grid):
    assert_triton_mask_matches(grid, build_mask(spec, grid.dimensions))


@given(spec=exact_chain)
@settings(max_examples=10, deadline=None)
def test_drawn_chain_of_scores_has_bits_of_fp32_torch(spec, grid):
    assert_triton_score_matches(grid, build_score(spec, grid.dimensions))


def test_wrong_mask_is_detected(grid):
    causal = grid.inside(masks.causal).to(torch.int32)
    assert not torch.equal(grid.seen(lambda b, h, q, k: q > k)[grid.existing], causal)


def test_index_beyond_captured_tensor_reads_last_element(grid):
    around = torch.full((40,), 99)  # neighbours in memory, which must not be read
    around[10:23] = torch.arange(13)
    seen = grid.seen(masks.document(around[10:23]))
    clamped = torch.arange(grid.keys).clamp(max=12)
    expected = clamped[: grid.rows, None] == clamped
    assert torch.equal(seen, expected.to(torch.int32).expand(grid.shape))


BIAS = torch.arange(12, dtype=torch.float32).reshape(3, 4) / 8
FLAGS = torch.tensor([True, False, True])


def test_captured_values_are_converted_for_kernel():
    wide = torch.tensor([0, 2**40])
    assert to_triton(trace_mask(masks.document(wide))).captured[0].dtype is torch.int64
    narrow = to_triton(trace_mask(masks.document(torch.tensor([0, 2**31 - 1, -(2**31)]))))
    assert narrow.captured[0].dtype is torch.int32
    assert narrow.captured[1:] == (3,)
    flags = to_triton(trace_score(lambda s, b, h, q, k: torch.where(FLAGS[h], s, -s)))
    assert flags.captured[0].dtype is torch.int8
    table = to_triton(trace_score(lambda s, b, h, q, k: s + BIAS.T[k, h]))
    assert table.captured[0].tolist() == BIAS.T.flatten().tolist()
    assert table.captured[1:] == (4, 3)
    assert to_triton(trace_score(lambda s, *_: s * 0.1)).captured == (float(np.float32(0.1)),)
    assert to_triton(trace_mask(masks.full)).captured == ()


def test_mods_that_differ_in_numbers_share_one_function():
    short, long = (to_triton(trace_mask(masks.sliding_window(w))) for w in (3, 64))
    none = to_triton(trace_mask(masks.sliding_window(0)), short=True)
    assert short.function is long.function is none.function
    assert (short.captured, long.captured) == ((3,), (64,))
    assert to_triton(trace_mask(masks.causal)).function is not short.function


def test_short_indices_use_real_distances():
    """Up to 2^23 keys a distance is the difference of two fp32 numbers, without a conversion."""
    expression = trace_score(scores.alibi(torch.ones(3)))
    converted = "(kv_idx + 0x4b000000).to(tl.float32, bitcast=True) - (q_idx +"
    assert converted not in to_triton(expression).source
    assert converted in to_triton(expression, short=True).source
    for kv, exact in (2**23, True), (2**23 + 1, False):
        problem = Problem(
            heads=3, query=1, kv=kv, head_dim=16, dtype="bf16", score=Spec.of("alibi")
        )
        assert (converted in triton_score(problem, "cpu").source) == exact


def test_inspect_finds_printed_source():
    mod = to_triton(trace_mask(masks.sliding_window(3)))
    assert inspect.getsource(mod.function.fn) == mod.source
    assert mod.source == (
        "def mask_mod(b, h, q_idx, kv_idx, captured, offset=None, distance=None):\n"
        "    if offset is None:\n"
        "        offset = kv_idx - q_idx\n"
        "    v0 = -offset\n"
        "    v1 = v0 < captured[0]\n"
        "    v2 = q_idx >= kv_idx\n"
        "    v3 = v1 & v2\n"
        "    return v3\n"
    )
