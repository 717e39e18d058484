"""Page tables, packed caches, and masks of physical keys, against torch's paged attention."""

import math
from unittest import mock

import pytest
import torch
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.experimental._paged_attention import PagedAttention

from attncheck.core.errors import ProblemError
from attncheck.core.mod_spec import Dimensions, Spec
from attncheck.core.paged_layout import Paging
from attncheck.mods import scores
from attncheck.mods.block_mask import (
    BlockMask,
    block_mask,
    from_torch_block_mask,
    to_torch_block_mask,
)
from attncheck.mods.library import build_mask
from attncheck.mods.page_table import (
    draw_page_table,
    pack_pages,
    physical_block_mask,
    physical_mask,
    physical_score,
)
from attncheck.mods.to_triton import to_triton
from attncheck.mods.trace import count_disagreements, trace_mask, trace_score

BATCH, HEADS, QUERY, KV, SIZE = 3, 2, 20, 90, 16
LENGTHS = (90, 33, 0)
PAGING = Paging(size=SIZE, seed=1)
DIMENSIONS = Dimensions(batch=BATCH, heads=HEADS, query=QUERY, kv=KV)
PADDED = Spec.of("padding", lengths=LENGTHS)
MASKS = (
    Spec.of("full"),
    Spec.of("causal_bottom_right"),
    Spec.of("prefix_lm", prefix=40),
    PADDED,
    Spec.of("and", PADDED, Spec.of("sliding_window", window=9)),
)


def page_table(lengths=LENGTHS, paging=PAGING, **changes):
    return draw_page_table(paging, BATCH, KV, lengths, **changes)


def indices(query, kv):
    return torch.meshgrid(*map(torch.arange, (BATCH, HEADS, query, kv)), indexing="ij")


@pytest.mark.parametrize("size", [1, 3, 16, 256])
@pytest.mark.parametrize("shared", [0, 1, 3])
def test_each_logical_page_has_its_own_physical_page(size, shared):
    """Shared pages are the exception; at least two pages stay free, the last one among them."""
    table = page_table(paging=Paging(size=size, seed=2, shared=shared))
    counts = [math.ceil(length / size) for length in LENGTHS]
    own = [row[:count].tolist() for row, count in zip(table.table, counts, strict=True)]
    common = own[0][: min(shared, counts[1])]
    assert own[1][: len(common)] == common
    alone = [page for pages in own for page in pages[shared:]]
    used = {page for pages in own for page in pages}
    assert len(used) == len(alone) + min(shared, counts[0])
    free = set(range(table.pages)) - used
    assert free >= set(table.table[~table.own].tolist())
    assert table.pages - 1 in free
    assert len(free) >= 2
    assert table.table.shape == (BATCH, math.ceil(KV / size) + 1)
    assert table.table.dtype is torch.int32


def test_page_order_depends_on_seed_only():
    """The recorded order holds on every machine, as those of ``draws`` do."""
    assert page_table().table.tolist() == [
        [6, 7, 2, 8, 5, 3, 9],
        [1, 4, 0, 9, 12, 10, 11],
        [9, 12, 10, 11, 9, 12, 10],
    ]
    assert not torch.equal(page_table().table, page_table(paging=Paging(size=SIZE, seed=2)).table)


def test_inverse_maps_physical_pages_to_logical_pages():
    table = page_table(paging=Paging(size=SIZE, seed=4, shared=1))
    inverse = table.inverse()
    assert inverse.shape == (BATCH, table.pages)
    for b, length in enumerate(LENGTHS):
        pages = {table.table[b, j].item(): j for j in range(math.ceil(length / SIZE))}
        assert {p: j for p, j in enumerate(inverse[b].tolist()) if j >= 0} == pages


@pytest.mark.parametrize("lengths", [(1, 2), (91, 1, 1), (-1, 1, 1)])
def test_invalid_lengths_are_refused(lengths):
    with pytest.raises(ProblemError, match=r"lengths=.* must be 3 numbers, each 0–90"):
        page_table(lengths)


DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_keys_lie_where_table_says_and_rest_is_nan(dtype):
    keys = torch.randn(BATCH, HEADS, 3, KV).to(dtype).mT  # not contiguous
    table = page_table()
    cache = pack_pages(keys, table)
    assert cache.shape == (table.pages, SIZE, HEADS, 3)
    assert cache.dtype is dtype
    assert cache.is_contiguous()
    written = torch.zeros(table.pages, SIZE, dtype=torch.bool)
    for b, length in enumerate(LENGTHS):
        # The last page of a sequence is written whole, with the keys behind the length.
        for key in range(min(math.ceil(length / SIZE) * SIZE, KV)):
            page, slot = table.table[b, key // SIZE], key % SIZE
            assert torch.equal(cache[page, slot].float(), keys[b, :, key].float())
            written[page, slot] = True
    assert cache.float()[~written].isnan().all()
    assert not written.all()


def test_shared_pages_are_stored_once():
    keys = torch.randn(1, HEADS, KV, 3).expand(BATCH, -1, -1, -1)
    lengths = (90, 80, 40)
    apart, shared = (page_table(lengths, shared=n) for n in (0, 2))
    assert shared.pages < apart.pages
    for table in (apart, shared):
        packed = pack_pages(keys, table)[table.table[2, :2].long()].flatten(0, 1)
        assert torch.equal(packed.transpose(0, 1), keys[2, :, : 2 * SIZE])


def test_packing_refuses_tensor_of_other_shape():
    with pytest.raises(ProblemError, match="2 sequences of 90 keys"):
        pack_pages(torch.zeros(2, HEADS, KV, 3), page_table())
    with pytest.raises(ProblemError, match="3 sequences of 89 keys"):
        pack_pages(torch.zeros(BATCH, HEADS, KV - 1, 3), page_table())


def torch_paged_attention(table):
    """torch's paged attention with our table in place of the one that it would make."""
    paged = PagedAttention(table.pages, SIZE, BATCH, device="cpu")
    most = table.table.shape[1]
    paged.page_table[:, :most] = torch.where(table.own, table.table, -1).long()
    paged.physical_to_logical[:] = table.inverse()
    return paged


@pytest.mark.parametrize("spec", MASKS, ids=str)
def test_physical_mask_matches_torch(spec):
    table, mask = page_table(), build_mask(spec, DIMENSIONS)
    at = indices(QUERY, table.pages * SIZE)
    expected = torch_paged_attention(table).get_mask_mod(
        _with_clamped_keys(mask), torch.tensor(LENGTHS)
    )(*at)
    result = physical_mask(mask, table)(*at)
    assert torch.equal(result, expected)
    # Every stored logical key is visible at its physical place, and nothing else is.
    for b, length in enumerate(LENGTHS):
        seen = torch.broadcast_to(mask(*indices(QUERY, KV)), (BATCH, HEADS, QUERY, KV))
        keys = torch.arange(length)
        places = table.table[b, keys // SIZE].long() * SIZE + keys % SIZE
        assert torch.equal(result[b][:, :, places], seen[b, :, :, :length])
        assert result[b].sum() == seen[b, :, :, :length].sum()


def _with_clamped_keys(mask):
    """torch calls a mask with keys of page −1, at which a captured tensor would be misread."""
    return lambda b, h, q_idx, kv_idx: mask(b, h, q_idx, kv_idx.clamp(0, KV - 1))


def test_physical_score_matches_torch():
    table = page_table()
    mod = scores.alibi(torch.tensor([0.5, 0.25]))
    at = indices(QUERY, table.pages * SIZE)
    score = torch.randn(at[0].shape)
    expected = torch_paged_attention(table).get_score_mod(mod, torch.tensor(LENGTHS))(score, *at)
    assert torch.equal(physical_score(mod, table)(score, *at), expected)


@pytest.mark.parametrize("spec", MASKS, ids=str)
def test_physical_block_mask_matches_torch(spec):
    table, mask = page_table(), build_mask(spec, DIMENSIONS)
    logical = flex.create_block_mask(
        mask, BATCH, HEADS, QUERY, KV, device="cpu", BLOCK_SIZE=(QUERY, SIZE)
    )
    # torch converts what the mask shows: keys without a page have to be hidden first.
    padded = build_mask(Spec.of("and", spec, PADDED), DIMENSIONS)
    hidden = flex.create_block_mask(
        padded, BATCH, HEADS, QUERY, KV, device="cpu", BLOCK_SIZE=(QUERY, SIZE)
    )
    expected = from_torch_block_mask(
        torch_paged_attention(table).convert_logical_block_mask(hidden)
    )
    result = physical_block_mask(from_torch_block_mask(logical), table)
    assert torch.equal(result.kinds, expected.kinds)
    assert result.kv == table.pages * SIZE


def test_block_mask_of_one_sequence_is_converted_for_the_batch():
    table, mask = page_table(), build_mask(MASKS[1], DIMENSIONS)
    unbatched = block_mask(mask, DIMENSIONS, block_query=4, block_kv=SIZE)
    assert unbatched.kinds.shape[0] == 1
    assert physical_block_mask(unbatched, table).kinds.shape == (BATCH, 1, 5, table.pages)


@pytest.mark.parametrize(
    ("block_kv", "batch", "message"),
    [(32, 3, "block_kv=32 is not the size of a page, 16"), (16, 2, "a block mask of 2 sequences")],
)
def test_block_mask_that_does_not_fit_table_is_refused(block_kv, batch, message):
    kinds = torch.ones(batch, 1, 1, math.ceil(KV / block_kv), dtype=torch.uint8)
    other = BlockMask(kinds=kinds, query=QUERY, kv=KV, block_query=QUERY, block_kv=block_kv)
    with pytest.raises(ProblemError, match=message):
        physical_block_mask(other, page_table())


@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("spec", MASKS, ids=str)
def test_flex_attention_on_packed_cache_matches_contiguous_keys(spec, shared):
    """torch's flex_attention, eager, over the whole cache with converted mods."""
    torch.manual_seed(0)
    q = torch.randn(BATCH, HEADS, QUERY, 8)
    k, v = torch.randn(2, BATCH, HEADS, KV, 8)
    k[:, :, : shared * SIZE], v[:, :, : shared * SIZE] = 0.5, 0.25
    table = page_table(paging=Paging(size=SIZE, seed=1, shared=shared))
    mask = build_mask(Spec.of("and", spec, PADDED), DIMENSIONS)
    mod = scores.alibi(torch.tensor([0.5, 0.25]))
    logical = block_mask(mask, DIMENSIONS, block_query=QUERY, block_kv=SIZE)
    converted = physical_block_mask(logical, table)
    # flex_attention in eager multiplies hidden values by 0, and 0 · NaN is NaN.
    k_cache, v_cache = (
        _as_one_sequence(pack_pages(tensor, table).nan_to_num(0.0)) for tensor in (k, v)
    )
    with mock.patch.object(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", new=True):
        expected = flex.flex_attention(q, k, v, mod, to_torch_block_mask(logical, mask))
        physical_mods = (
            physical_score(mod, table),
            to_torch_block_mask(converted, physical_mask(mask, table)),
        )
        result = flex.flex_attention(q, k_cache, v_cache, *physical_mods)
    torch.testing.assert_close(result, expected)


def _as_one_sequence(cache):
    """``(pages, size, heads, dim)`` → ``(batch, heads, pages · size, dim)``, for every sequence."""
    return cache.flatten(0, 1).transpose(0, 1).expand(BATCH, -1, -1, -1)


def test_physical_mods_can_be_traced_and_printed():
    """Kernels take converted mods as they take any others."""
    table = page_table()
    physical = Dimensions(batch=BATCH, heads=HEADS, query=QUERY, kv=table.pages * SIZE)
    mask = physical_mask(build_mask(MASKS[4], DIMENSIONS), table)
    score = physical_score(scores.alibi(torch.tensor([0.5, 0.25])), table)
    for expression, mod in ((trace_mask(mask), mask), (trace_score(score), score)):
        assert count_disagreements(expression, mod, physical) == 0
        assert to_triton(expression).captured
