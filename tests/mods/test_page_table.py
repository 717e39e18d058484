"""Pages: their order, what lies in them, and masks of where keys lie, against torch's own."""

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


def table(lengths=LENGTHS, paging=PAGING, **changes):
    return draw_page_table(paging, BATCH, KV, lengths, **changes)


def indices(query, kv):
    return torch.meshgrid(*map(torch.arange, (BATCH, HEADS, query, kv)), indexing="ij")


@pytest.mark.parametrize("size", [1, 3, 16, 256])
@pytest.mark.parametrize("shared", [0, 1, 3])
def test_every_page_is_somewhere_and_none_twice(size, shared):
    of = table(paging=Paging(size=size, seed=2, shared=shared))
    counts = [math.ceil(length / size) for length in LENGTHS]
    own = [row[:count].tolist() for row, count in zip(of.table, counts, strict=True)]
    common = own[0][: min(shared, counts[1])]
    assert own[1][: len(common)] == common
    alone = [page for pages in own for page in pages[shared:]]
    used = {page for pages in own for page in pages}
    assert len(used) == len(alone) + min(shared, counts[0])
    free = set(range(of.pages)) - used
    assert free >= set(of.table[~of.own].tolist())
    assert of.pages - 1 in free
    assert len(free) >= 2
    assert of.table.shape == (BATCH, math.ceil(KV / size) + 1)
    assert of.table.dtype is torch.int32


def test_the_order_is_the_seeds_alone():
    """As one run gave it: the same on every machine, as ``draws`` are."""
    assert table().table.tolist() == [
        [6, 7, 2, 8, 5, 3, 9],
        [1, 4, 0, 9, 12, 10, 11],
        [9, 12, 10, 11, 9, 12, 10],
    ]
    assert not torch.equal(table().table, table(paging=Paging(size=SIZE, seed=2)).table)


def test_the_inverse_says_which_page_of_a_sequence_a_page_is():
    of = table(paging=Paging(size=SIZE, seed=4, shared=1))
    inverse = of.inverse()
    assert inverse.shape == (BATCH, of.pages)
    for b, length in enumerate(LENGTHS):
        pages = {of.table[b, j].item(): j for j in range(math.ceil(length / SIZE))}
        assert {p: j for p, j in enumerate(inverse[b].tolist()) if j >= 0} == pages


@pytest.mark.parametrize("lengths", [(1, 2), (91, 1, 1), (-1, 1, 1)])
def test_lengths_that_cannot_be(lengths):
    with pytest.raises(ProblemError, match=r"lengths=.* must be 3 numbers, each 0–90"):
        table(lengths)


DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_lie_where_the_table_says_and_all_else_is_nan(dtype):
    keys = torch.randn(BATCH, HEADS, 3, KV).to(dtype).mT  # not contiguous
    of = table()
    cache = pack_pages(keys, of)
    assert cache.shape == (of.pages, SIZE, HEADS, 3)
    assert cache.dtype is dtype
    assert cache.is_contiguous()
    kept = torch.zeros(of.pages, SIZE, dtype=torch.bool)
    for b, length in enumerate(LENGTHS):
        # The last page of a sequence is whole: what lies behind the length is what keys have there.
        for key in range(min(math.ceil(length / SIZE) * SIZE, KV)):
            page, slot = of.table[b, key // SIZE], key % SIZE
            assert torch.equal(cache[page, slot].float(), keys[b, :, key].float())
            kept[page, slot] = True
    assert cache.float()[~kept].isnan().all()
    assert not kept.all()


def test_a_shared_page_lies_there_once():
    keys = torch.randn(1, HEADS, KV, 3).expand(BATCH, -1, -1, -1)
    lengths = (90, 80, 40)
    apart, shared = (table(lengths, shared=n) for n in (0, 2))
    assert shared.pages < apart.pages
    for of in (apart, shared):
        again = pack_pages(keys, of)[of.table[2, :2].long()].flatten(0, 1)
        assert torch.equal(again.transpose(0, 1), keys[2, :, : 2 * SIZE])


def test_a_tensor_of_other_sequences_is_refused():
    with pytest.raises(ProblemError, match="2 sequences of 90 keys"):
        pack_pages(torch.zeros(2, HEADS, KV, 3), table())
    with pytest.raises(ProblemError, match="3 sequences of 89 keys"):
        pack_pages(torch.zeros(BATCH, HEADS, KV - 1, 3), table())


def theirs(of):
    """torch's paged attention with our table in place of the one that it would make."""
    filled = PagedAttention(of.pages, SIZE, BATCH, device="cpu")
    most = of.table.shape[1]
    filled.page_table[:, :most] = torch.where(of.own, of.table, -1).long()
    filled.physical_to_logical[:] = of.inverse()
    return filled


@pytest.mark.parametrize("spec", MASKS, ids=str)
def test_masks_of_memory_are_torchs(spec):
    of, mask = table(), build_mask(spec, DIMENSIONS)
    at = indices(QUERY, of.pages * SIZE)
    expected = theirs(of).get_mask_mod(_clamped(mask), torch.tensor(LENGTHS))(*at)
    got = physical_mask(mask, of)(*at)
    assert torch.equal(got, expected)
    # And it is a gather: every logical key that is there is seen where it lies.
    for b, length in enumerate(LENGTHS):
        seen = torch.broadcast_to(mask(*indices(QUERY, KV)), (BATCH, HEADS, QUERY, KV))
        keys = torch.arange(length)
        places = of.table[b, keys // SIZE].long() * SIZE + keys % SIZE
        assert torch.equal(got[b][:, :, places], seen[b, :, :, :length])
        assert got[b].sum() == seen[b, :, :, :length].sum()


def _clamped(mask):
    """torch calls a mask with keys of −1 page, and those of a captured tensor it would misread."""
    return lambda b, h, q_idx, kv_idx: mask(b, h, q_idx, kv_idx.clamp(0, KV - 1))


def test_score_mods_of_memory_are_torchs():
    of = table()
    mod = scores.alibi(torch.tensor([0.5, 0.25]))
    at = indices(QUERY, of.pages * SIZE)
    score = torch.randn(at[0].shape)
    expected = theirs(of).get_score_mod(mod, torch.tensor(LENGTHS))(score, *at)
    assert torch.equal(physical_score(mod, of)(score, *at), expected)


@pytest.mark.parametrize("spec", MASKS, ids=str)
def test_block_masks_of_memory_are_torchs(spec):
    of, mask = table(), build_mask(spec, DIMENSIONS)
    logical = flex.create_block_mask(
        mask, BATCH, HEADS, QUERY, KV, device="cpu", BLOCK_SIZE=(QUERY, SIZE)
    )
    # torch converts what the mask shows; what no page holds has to be hidden by the mask.
    padded = build_mask(Spec.of("and", spec, PADDED), DIMENSIONS)
    hidden = flex.create_block_mask(
        padded, BATCH, HEADS, QUERY, KV, device="cpu", BLOCK_SIZE=(QUERY, SIZE)
    )
    expected = from_torch_block_mask(theirs(of).convert_logical_block_mask(hidden))
    got = physical_block_mask(from_torch_block_mask(logical), of)
    assert torch.equal(got.kinds, expected.kinds)
    assert got.kv == of.pages * SIZE


def test_a_block_mask_without_batch_gets_one():
    alone = block_mask(build_mask(MASKS[1], DIMENSIONS), DIMENSIONS, block_query=4, block_kv=SIZE)
    assert alone.kinds.shape[0] == 1
    assert physical_block_mask(alone, table()).kinds.shape == (BATCH, 1, 5, table().pages)


@pytest.mark.parametrize(
    ("block_kv", "batch", "said"),
    [(32, 3, "block_kv=32 is not the size of a page, 16"), (16, 2, "a block mask of 2 sequences")],
)
def test_block_masks_that_are_not_of_the_table(block_kv, batch, said):
    kinds = torch.ones(batch, 1, 1, math.ceil(KV / block_kv), dtype=torch.uint8)
    other = BlockMask(kinds=kinds, query=QUERY, kv=KV, block_query=QUERY, block_kv=block_kv)
    with pytest.raises(ProblemError, match=said):
        physical_block_mask(other, table())


@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("spec", MASKS, ids=str)
def test_flex_attention_on_the_packed_cache_is_that_on_the_keys(spec, shared):
    """torch's flex_attention, eager, on all of memory with converted mods."""
    torch.manual_seed(0)
    q = torch.randn(BATCH, HEADS, QUERY, 8)
    k, v = torch.randn(2, BATCH, HEADS, KV, 8)
    k[:, :, : shared * SIZE], v[:, :, : shared * SIZE] = 0.5, 0.25
    of = table(paging=Paging(size=SIZE, seed=1, shared=shared))
    mask = build_mask(Spec.of("and", spec, PADDED), DIMENSIONS)
    mod = scores.alibi(torch.tensor([0.5, 0.25]))
    logical = block_mask(mask, DIMENSIONS, block_query=QUERY, block_kv=SIZE)
    converted = physical_block_mask(logical, of)
    # flex_attention in eager multiplies hidden values by 0, and 0 · NaN is NaN.
    k_cache, v_cache = (_one_sequence(pack_pages(tensor, of).nan_to_num(0.0)) for tensor in (k, v))
    with mock.patch.object(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", new=True):
        expected = flex.flex_attention(q, k, v, mod, to_torch_block_mask(logical, mask))
        in_memory = physical_score(mod, of), to_torch_block_mask(converted, physical_mask(mask, of))
        got = flex.flex_attention(q, k_cache, v_cache, *in_memory)
    torch.testing.assert_close(got, expected)


def _one_sequence(cache):
    """``(pages, size, heads, dim)`` → ``(batch, heads, pages · size, dim)``, of all sequences."""
    return cache.flatten(0, 1).transpose(0, 1).expand(BATCH, -1, -1, -1)


def test_converted_mods_trace_and_print():
    """Our kernels take them, as they do any mod."""
    of = table()
    memory = Dimensions(batch=BATCH, heads=HEADS, query=QUERY, kv=of.pages * SIZE)
    mask = physical_mask(build_mask(MASKS[4], DIMENSIONS), of)
    score = physical_score(scores.alibi(torch.tensor([0.5, 0.25])), of)
    for expression, mod in ((trace_mask(mask), mask), (trace_score(score), score)):
        assert count_disagreements(expression, mod, memory) == 0
        assert to_triton(expression).captured
