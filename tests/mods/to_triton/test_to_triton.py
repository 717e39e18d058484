"""The printed Triton function computes what the callable does, also beyond the last index."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.mods import masks
from attncheck.mods.library import build_mask, build_score
from attncheck.mods.masks import MASKS
from attncheck.mods.scores import SCORES
from attncheck.mods.spec import Spec
from attncheck.mods.to_triton import to_triton
from attncheck.mods.trace import trace_mask, trace_score

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

PLAIN_MASKS = [
    Spec.of("full"),
    Spec.of("causal"),
    Spec.of("causal_bottom_right"),
    Spec.of("sliding_window", window=0),
    Spec.of("sliding_window", window=1),
    Spec.of("sliding_window", window=6),
    Spec.of("prefix_lm", prefix=3),
    Spec.of("document", lengths=[3, 0, 10, 80]),
    Spec.of("padding", lengths=[3, 21]),
    Spec.of("documents", query_lengths=[3, 0, 99], kv_lengths=[0, 9, 12]),
    Spec.of("neighborhood", canvas=[3, 5], kernel=[2, 3]),  # blocks end beyond the canvas
    Spec.of("neighborhood_tiled", canvas=[3, 5], kernel=[3, 3], tile=[2, 3]),
    Spec.of("neighborhood_tiled", canvas=[7, 4], kernel=[3, 3], tile=[2, 2]),
    Spec.of("neighborhood_morton", canvas=[3, 5], kernel=[3, 2]),
    Spec.of("offset", Spec.of("causal_bottom_right"), rows=3),
    Spec.of("offset", Spec.of("neighborhood_morton", canvas=[4, 4], kernel=[3, 3]), rows=5),
    Spec.of("expression", text="(minimum(q_idx, 9) % 4 <= kv_idx // 2) | ~(h * 3 - b != 3)"),
]
PLAIN_SCORES = [
    Spec.of("none"),
    Spec.of("alibi"),
    Spec.of("relative_bias", distance=4, seed=1),
    Spec.of("relative_bias", distance=0, seed=1),
    *(
        Spec.of("bias", seed=1, per_batch=batch, per_head=head)
        for batch, head in ((0, 0), (0, 1), (1, 0), (1, 1))
    ),
    Spec.of("offset", Spec.of("alibi"), rows=3),
    Spec.of("offset", Spec.of("bias", seed=1, per_batch=0, per_head=1), rows=3),
    Spec.of("temperature", temperature=2.5),
    Spec.of("temperature", temperature=1),
    Spec.of("expression", text="where(q_idx % 2 == 0, score, -score * 0.5)"),
]


def assert_same_mask(grid: Any, mask_mod: Callable[..., Tensor]) -> None:
    assert torch.equal(grid.seen(mask_mod)[grid.existing], grid.inside(mask_mod).to(torch.int32))


@pytest.mark.parametrize("spec", PLAIN_MASKS, ids=str)
def test_library_mask(spec: Spec, grid: Any) -> None:
    assert_same_mask(grid, build_mask(spec, grid.dimensions))


@pytest.mark.parametrize("spec", PLAIN_SCORES, ids=str)
def test_library_score_has_the_bits_of_fp32_torch(spec: Spec, grid: Any) -> None:
    mod = build_score(spec, grid.dimensions)
    assert torch.equal(
        grid.scored(mod, grid.start())[grid.existing], grid.inside(mod, grid.start())
    )


def test_every_library_mod_is_here() -> None:
    assert {spec.name for spec in PLAIN_MASKS} | {"and", "or", "not"} == set(MASKS)
    assert {spec.name for spec in PLAIN_SCORES} | {"chain", "softcap"} == set(SCORES)


any_mask = st.recursive(
    st.sampled_from(PLAIN_MASKS),
    lambda parts: st.one_of(
        st.lists(parts, min_size=1, max_size=3).map(lambda of: Spec.of("and", *of)),
        st.lists(parts, min_size=1, max_size=3).map(lambda of: Spec.of("or", *of)),
        parts.map(lambda of: Spec.of("not", of)),
        parts.map(lambda of: Spec.of("offset", of, rows=2)),
    ),
    max_leaves=5,
)
any_chain = st.lists(st.sampled_from(PLAIN_SCORES), min_size=1, max_size=4)


@given(spec=any_mask)
@settings(max_examples=20, deadline=None)
def test_composed_masks(spec: Spec, grid: Any) -> None:
    assert_same_mask(grid, build_mask(spec, grid.dimensions))


@given(parts=any_chain)
@settings(max_examples=10, deadline=None)
def test_chained_scores(parts: list[Spec], grid: Any) -> None:
    mod = build_score(Spec.of("chain", *parts), grid.dimensions)
    assert torch.equal(
        grid.scored(mod, grid.start())[grid.existing], grid.inside(mod, grid.start())
    )


def test_a_wrong_mask_differs(grid: Any) -> None:
    causal = grid.inside(masks.causal).to(torch.int32)
    assert not torch.equal(grid.seen(lambda b, h, q, k: q > k)[grid.existing], causal)


def test_indices_beyond_a_captured_tensor_read_its_last_element(grid: Any) -> None:
    around = torch.full((40,), 99)  # neighbours in memory, which must not be read
    around[10:23] = torch.arange(13)
    seen = grid.seen(masks.document(around[10:23]))
    clamped = torch.arange(grid.keys).clamp(max=12)
    expected = clamped[: grid.rows, None] == clamped
    assert torch.equal(seen, expected.to(torch.int32).expand(grid.shape))


BIAS = torch.arange(12, dtype=torch.float32).reshape(3, 4) / 8
CUBE = torch.arange(2 * 3 * 32).reshape(2, 3, 32)
FLAGS = torch.tensor([True, False, True])

MODS: dict[str, Callable[..., Tensor]] = {
    "floor division": lambda s, b, h, q, k: s + (q - k) // 3,
    "floor division, negative": lambda s, b, h, q, k: s + (q - k) // -3,
    "remainder": lambda s, b, h, q, k: s + (q - k) % 5,
    "remainder, negative": lambda s, b, h, q, k: s + (q - k) % -5,
    "division by 1": lambda s, b, h, q, k: s + (q - k) // 1 + (q - k) % 1,
    "computed divisor": lambda s, b, h, q, k: s + (q - k) // (b - h * 3 - 2),
    "true division": lambda s, b, h, q, k: s + q / (k + 1) + (q - 3) / 4,
    "where with a number": lambda s, b, h, q, k: torch.where(q > k, s, -float("inf")),
    "negative index": lambda s, b, h, q, k: s + BIAS[h, -1 - h],
    "3-d table": lambda s, b, h, q, k: s + CUBE[b, h, k],
    "flags": lambda s, b, h, q, k: torch.where(FLAGS[h], s, -s),
    "logical": lambda s, b, h, q, k: torch.where(torch.logical_xor(q, h) & (k > 1), s, s.abs()),
    "rsub": lambda s, b, h, q, k: s + (1 - q) - (2.5 - s),
    "minimum": lambda s, b, h, q, k: torch.minimum(s, q) + torch.maximum(s, k * 0.5),
    "one-sided clamps": lambda s, b, h, q, k: s.clamp(min=-1) + s.clamp(max=2) + s.clamp_min(0),
    "bool as number": lambda s, b, h, q, k: s + (q > k) - (h == 1) * 2,
    "xor of whole numbers": lambda s, b, h, q, k: s + ((q ^ k) & 3),
    "not of a whole number": lambda s, b, h, q, k: s + ~q,
    "nan": lambda s, b, h, q, k: torch.where(q == k, float("nan"), s).clamp(-1, 1),
    "comparisons": lambda s, b, h, q, k: (
        s + (q >= k) + 2 * (q <= k) + 4 * (q < k) + 8 * (q == k) + 16 * (q != k)
    ),
    "a number of 40 bits": lambda s, b, h, q, k: s + (q < 2**40),
}


@pytest.mark.parametrize("name", MODS)
def test_neighbouring_operations_have_the_bits_of_fp32_torch(name: str, grid: Any) -> None:
    mod = MODS[name]
    result = grid.scored(mod, grid.start())[grid.existing]
    expected = grid.inside(mod, grid.start())
    assert ((result == expected) | (result.isnan() & expected.isnan())).all()


def test_truncating_division_would_be_noticed(grid: Any) -> None:
    mod = MODS["floor division"]
    cut = grid.inside(
        lambda s, b, h, q, k: s + torch.div(q - k, 3, rounding_mode="trunc"), grid.start()
    )
    assert not torch.equal(grid.scored(mod, grid.start())[grid.existing], cut)


def test_numbers_and_tensors_are_passed_as_the_kernel_reads_them() -> None:
    wide = torch.tensor([0, 2**40])
    assert to_triton(trace_mask(masks.document(wide))).captured[0].dtype is torch.int64
    narrow = to_triton(trace_mask(masks.document(torch.tensor([0, 2**31 - 1, -(2**31)]))))
    assert narrow.captured[0].dtype is torch.int32
    assert narrow.captured[1:] == (3,)
    flags = to_triton(trace_score(MODS["flags"]))
    assert flags.captured[0].dtype is torch.int8
    table = to_triton(trace_score(lambda s, b, h, q, k: s + BIAS.T[k, h]))
    assert table.captured[0].tolist() == BIAS.T.flatten().tolist()
    assert table.captured[1:] == (4, 3)
    assert to_triton(trace_score(lambda s, *_: s * 0.1)).captured == (float(np.float32(0.1)),)
    assert to_triton(trace_mask(masks.full)).captured == ()


def test_one_function_serves_every_number() -> None:
    short, long = (to_triton(trace_mask(masks.sliding_window(w))) for w in (3, 64))
    assert short.function is long.function
    assert (short.captured, long.captured) == ((3,), (64,))
    assert to_triton(trace_mask(masks.causal)).function is not short.function


def test_the_source_can_be_read_where_triton_looks() -> None:
    mod = to_triton(trace_mask(masks.sliding_window(3)))
    assert inspect.getsource(mod.function.fn) == mod.source
    assert mod.source == (
        "def mask_mod(b, h, q_idx, kv_idx, captured):\n"
        "    v0 = q_idx - kv_idx\n"
        "    v1 = v0 < captured[0]\n"
        "    v2 = q_idx >= kv_idx\n"
        "    v3 = v1 & v2\n"
        "    return v3\n"
    )
