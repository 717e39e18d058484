"""Conversions between our block masks and torch's ``flex_attention`` BlockMask, both ways."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as flex

from attncheck.cases.strategies.mask_strategies import masks
from attncheck.cases.strategies.score_strategies import compositions
from attncheck.core.errors import ProblemError
from attncheck.core.mod_spec import Dimensions, Spec
from attncheck.mods import masks as written
from attncheck.mods.block_mask import (
    EMPTY,
    FULL,
    BlockMask,
    block_mask,
    from_torch_block_mask,
    to_torch_block_mask,
)
from attncheck.mods.library import build_mask

QUERY, KV = 37, 50
SHARED = Dimensions(batch=3, heads=4, query=QUERY, kv=KV)


def by_head_and_sequence(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx < 5 * (h + 1)) & (kv_idx < 50 - 11 * b)


BLOCKS = [(16, 16), (8, 32), (5, 7), (37, 50), (64, 64), (128, 128)]


def torch_block_mask(mod, dimensions, blocks, **options):
    """The block mask that torch creates, for every sequence and head."""
    d = dimensions
    return flex.create_block_mask(
        mod, d.batch, d.heads, d.query, d.kv, device="cpu", BLOCK_SIZE=blocks, **options
    )


def our_block_mask(mod, dimensions, blocks):
    return block_mask(mod, dimensions, block_query=blocks[0], block_kv=blocks[1])


def listed_blocks(counts, indices):
    """The lists of a pair of torch's tables; entries beyond a count are arbitrary."""
    places = product(*map(range, counts.shape))
    return {place: indices[place][: int(counts[place])].tolist() for place in places}


TABLES = (
    ("kv_num_blocks", "kv_indices"),
    ("full_kv_num_blocks", "full_kv_indices"),
    ("q_num_blocks", "q_indices"),
    ("full_q_num_blocks", "full_q_indices"),
)


def all_tables(mask, dimensions):
    """All lists that ``flex_attention`` reads from a BlockMask, for every sequence and head."""
    outer = (dimensions.batch, dimensions.heads)
    return {
        names: listed_blocks(
            *(getattr(mask, n).expand(*outer, *getattr(mask, n).shape[2:]) for n in names)
        )
        for names in TABLES
    }


def assert_same(mod, dimensions, blocks):
    """Assert that our block mask and torch's are equal, and so are conversions both ways."""
    mine, other = our_block_mask(mod, dimensions, blocks), torch_block_mask(mod, dimensions, blocks)
    tables = all_tables(other, dimensions)
    converted = to_torch_block_mask(mine, mod)
    assert all_tables(converted, dimensions) == tables
    assert converted.BLOCK_SIZE == other.BLOCK_SIZE
    assert converted.seq_lengths == other.seq_lengths
    assert converted.mask_mod is mod
    back = from_torch_block_mask(other)
    assert torch.equal(back.kinds, mine.kinds.expand_as(back.kinds))
    assert torch.equal(from_torch_block_mask(converted).kinds, mine.kinds)
    sizes = ("query", "kv", "block_query", "block_kv")
    assert all(getattr(back, size) == getattr(mine, size) for size in sizes)


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize("mod", [written.causal, by_head_and_sequence], ids=["shared", "each"])
def test_tables_equal_those_of_torch(mod, blocks):
    assert_same(mod, SHARED, blocks)


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_random_masks_and_lengths_equal_those_of_torch(data):
    lengths = st.integers(1, 24)
    dimensions = Dimensions(batch=2, heads=2, query=data.draw(lengths), kv=data.draw(lengths))
    specs = masks(dimensions=dimensions) | compositions(dimensions=dimensions)
    mod = build_mask(data.draw(specs, label="mask"), dimensions)
    assert_same(mod, dimensions, data.draw(st.tuples(*(st.integers(1, 26),) * 2), label="blocks"))


@pytest.mark.parametrize("was", [0, 1, 2])
def test_tile_of_another_kind_changes_the_tables(was):
    mod = build_mask(Spec.of("causal_bottom_right"), SHARED)
    mine = our_block_mask(mod, SHARED, (8, 8))
    kinds = mine.kinds.clone()
    kinds[tuple((kinds == was).nonzero()[0].tolist())] = (was + 1) % 3
    wrong = BlockMask(kinds=kinds, query=QUERY, kv=KV, block_query=8, block_kv=8)
    tables = all_tables(torch_block_mask(mod, SHARED, (8, 8)), SHARED)
    assert all_tables(to_torch_block_mask(mine, mod), SHARED) == tables
    assert all_tables(to_torch_block_mask(wrong, mod), SHARED) != tables


def test_torch_mask_without_separate_full_blocks_has_only_partial_tiles():
    mod = written.causal
    merged = from_torch_block_mask(
        torch_block_mask(mod, SHARED, (8, 8), separate_full_blocks=False)
    )
    kinds = merged.kinds
    assert not (kinds == FULL).any()
    assert torch.equal(
        kinds != EMPTY, (our_block_mask(mod, SHARED, (8, 8)).kinds != EMPTY).expand(3, 4, 5, 7)
    )


def test_tables_without_batch_and_heads_and_narrower_than_the_keys_are_read():
    """``from_kv_blocks`` accepts such tables: here of two of six tiles, in any order."""
    other = flex.BlockMask.from_kv_blocks(
        torch.tensor([1, 2], dtype=torch.int32),
        torch.tensor([[3, 0], [5, 1]], dtype=torch.int32),
        BLOCK_SIZE=(16, 16),
        seq_lengths=(20, 90),
        compute_q_blocks=False,
    )
    mask = from_torch_block_mask(other)
    assert mask.kinds.tolist() == [[[[0, 0, 0, 1, 0, 0], [0, 1, 0, 0, 0, 1]]]]
    assert mask.kv_indices[0, 0].tolist() == [[3, 0, 0, 0, 0, 0], [1, 5, 0, 0, 0, 0]]


def test_tile_listed_as_partial_and_as_full_is_refused():
    one, first = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    twice = flex.BlockMask.from_kv_blocks(one, first, one, first, BLOCK_SIZE=(16, 16))
    with pytest.raises(ProblemError, match="hold 3"):
        from_torch_block_mask(twice)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("mod", [written.causal, by_head_and_sequence], ids=["shared", "each"])
def test_flex_attention_gives_the_same_bits_with_our_block_mask(heads, mod):
    """A mask's heads are query heads, however many heads the keys have."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, heads[0], QUERY, 16, generator=generator)
    k, v = (torch.randn(3, heads[1], KV, 16, generator=generator) for _ in range(2))
    from attncheck.subjects.conventions.torch_conventions import uncompiled_flex

    def attend(mask):
        with uncompiled_flex():
            return flex.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    mine = to_torch_block_mask(our_block_mask(mod, SHARED, (16, 16)), mod)
    assert torch.equal(attend(mine), attend(torch_block_mask(mod, SHARED, (16, 16))))
