"""Block masks: each tile's kind against the mask's elements, visit lists, and refused arguments."""

import math
from dataclasses import replace
from itertools import groupby, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import one_line

from attncheck.cases.strategies.mask_strategies import PLAIN_MASKS, masks
from attncheck.cases.strategies.score_strategies import compositions
from attncheck.core.errors import ProblemError
from attncheck.core.mod_spec import Dimensions
from attncheck.mods import block_mask as block_mask_module
from attncheck.mods import masks as written
from attncheck.mods.block_mask import EMPTY, FULL, PARTIAL, BlockMask, block_mask, list_visits
from attncheck.mods.library import build_mask

LONGEST = 20


def dense_mask(mod, dimensions):
    """The mask at all indices, ``(batch, heads, query, kv)``."""
    sizes = (dimensions.batch, dimensions.heads, dimensions.query, dimensions.kv)
    axes = torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
    return torch.as_tensor(mod(*axes)).expand(sizes)


def kind_by_definition(tile, size):
    if not tile.any():
        return EMPTY
    return FULL if tile.sum() == size else PARTIAL  # a ragged tile has too few elements


def listed_blocks(counts, indices, place):
    """Key blocks that a table lists for ``place``; a message if they are not a valid list."""
    count, row = int(counts[place]), indices[place].tolist()
    blocks, rest = row[:count], row[count:]
    if count > len(row) or sorted(set(blocks)) != blocks or any(rest):
        return f"{row} with count {count} is no ascending list followed by zeros"
    return blocks


def wrong_tiles(mask, mod, dimensions):
    """The tiles where the tables of a block mask disagree with its mask, and invalid lists."""
    visible, wrong = dense_mask(mod, dimensions), []
    strips_of_rows = range(-(-dimensions.query // mask.block_query))
    width = -(-dimensions.kv // mask.block_kv)
    for b, h, i in product(range(dimensions.batch), range(dimensions.heads), strips_of_rows):
        # Tables have one sequence, or head, if the mask is the same for all.
        place = (min(b, mask.kv_indices.shape[0] - 1), min(h, mask.kv_indices.shape[1] - 1), i)
        partial = listed_blocks(mask.kv_num_blocks, mask.kv_indices, place)
        full = listed_blocks(mask.full_kv_num_blocks, mask.full_kv_indices, place)
        if isinstance(partial, str) or isinstance(full, str):
            wrong.append((b, h, i, partial, full))
            continue
        rows = visible[b, h, i * mask.block_query : (i + 1) * mask.block_query]
        for j in range(width):
            tile = rows[:, j * mask.block_kv : (j + 1) * mask.block_kv]
            kind = kind_by_definition(tile, mask.block_query * mask.block_kv)
            if ((j in partial), (j in full)) != (kind == PARTIAL, kind == FULL):
                wrong.append((b, h, i, j))
    return wrong


LENGTHS = st.integers(1, LONGEST)
DIMENSIONS = st.builds(
    Dimensions, batch=st.integers(1, 2), heads=st.integers(1, 3), query=LENGTHS, kv=LENGTHS
)


@pytest.mark.parametrize("name", [*PLAIN_MASKS, "composition"])
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_every_tile_has_the_kind_of_its_elements(name, data):
    dimensions = data.draw(DIMENSIONS, label="dimensions")
    if name == "composition":
        specs = compositions(dimensions=dimensions)
    else:
        specs = masks(dimensions=dimensions, names=(name,))
    spec = data.draw(specs, label="mask")
    blocks = data.draw(st.tuples(*(st.integers(1, LONGEST + 3),) * 2), label="blocks")
    mod = build_mask(spec, dimensions)
    mask = block_mask(mod, dimensions, block_query=blocks[0], block_kv=blocks[1])
    assert not wrong_tiles(mask, mod, dimensions)
    assert (mask.query, mask.kv) == (dimensions.query, dimensions.kv)
    for table in (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks):
        assert table.dtype == torch.int32


def reads_all_indices(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx < 3 + h + 2 * b) & (q_idx >= kv_idx - b)


SMALL = Dimensions(batch=2, heads=3, query=21, kv=18)


def small(mod=reads_all_indices, dimensions=SMALL, block_query=4, block_kv=5):
    return block_mask(mod, dimensions, block_query=block_query, block_kv=block_kv)


def with_tile(kind, was, place=None):
    """A fault that turns the first tile of kind ``was``, or the one at ``place``, into ``kind``."""

    def fault(mask):
        kinds = mask.kinds.clone()
        at = place or tuple((kinds == was).nonzero()[0].tolist())
        assert kinds[at] == was
        kinds[at] = kind
        return replace(mask, kinds=kinds)

    return fault


FAULTS = {
    "tiles shifted by one": (reads_all_indices, lambda m: replace(m, kinds=m.kinds.roll(1, 3))),
    "partial tile called full": (reads_all_indices, with_tile(FULL, PARTIAL)),
    "partial tile called empty": (reads_all_indices, with_tile(EMPTY, PARTIAL)),
    "empty tile called partial": (reads_all_indices, with_tile(PARTIAL, EMPTY)),
    "full tile called partial": (written.full, with_tile(PARTIAL, FULL)),
    "tile with ragged rows called full": (written.full, with_tile(FULL, PARTIAL, (0, 0, 5, 0))),
    "tile with ragged keys called full": (written.full, with_tile(FULL, PARTIAL, (0, 0, 0, 3))),
    "tiles of another head": (reads_all_indices, lambda m: replace(m, kinds=m.kinds.roll(1, 1))),
    "tiles of the first sequence for all": (
        reads_all_indices,
        lambda m: replace(m, kinds=m.kinds[:1]),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_detected(fault):
    mod, plant = FAULTS[fault]
    right = small(mod)
    assert not wrong_tiles(right, mod, SMALL)
    assert wrong_tiles(plant(right), mod, SMALL)


@pytest.mark.parametrize(
    ("mod", "outer"),
    [
        (written.causal, (1, 1)),
        (written.full, (1, 1)),
        (written.padding(torch.tensor([3, 9])), (2, 1)),
        (lambda b, h, i, j: i - j < h, (1, 3)),
        (reads_all_indices, (2, 3)),
        (lambda b, h, i, j: (i >= j) & (b * 0 == 0), (2, 1)),
    ],
    ids=["causal", "constant", "batch", "heads", "both", "batch without effect"],
)
def test_kinds_have_axes_only_for_indices_that_the_mask_reads(mod, outer):
    mask = small(mod)
    assert mask.kinds.shape == (*outer, 6, 4)
    assert not wrong_tiles(mask, mod, SMALL)


def test_mask_that_cannot_be_traced_is_called_for_every_sequence_and_head():
    def mod(b, h, i, j):
        if i.numel() > 0 and int(i.amax()) < 0:  # control flow on a tensor
            return i >= j
        return i - j < h

    mask = small(mod)
    assert mask.kinds.shape[:2] == (2, 3)
    assert not wrong_tiles(mask, mod, SMALL)


def test_mask_that_takes_only_single_indices_is_called_by_vmap():
    table = torch.arange(21).roll(3)

    def single(b, h, i, j):
        return table[i.reshape(())] >= j.reshape(()) - h.reshape(())

    def each(b, h, i, j):
        return table[i] >= j - h

    assert not wrong_tiles(small(single), each, SMALL)


def test_mask_may_capture_a_parameter():
    limit = torch.nn.Parameter(torch.tensor([3.5, 7.0, 11.0]))

    def mod(b, h, i, j):
        return (j < limit[h]) & ((limit[h] - i) * 1.0 < 9)

    assert not wrong_tiles(small(mod), mod, SMALL)


def test_mask_is_called_in_parts_that_cover_it_once():
    """The whole mask of a long sequence would not fit in memory."""
    calls = []

    def mod(b, h, i, j):
        calls.append((b.numel(), h.numel(), i.numel(), j.numel()))
        return reads_all_indices(b, h, i, j)

    length = 3000
    dimensions = Dimensions(batch=2, heads=3, query=length, kv=length)
    mask = block_mask(mod, dimensions, block_query=128, block_kv=64)
    largest = max(b * h * i * j for b, h, i, j in calls)
    assert largest <= block_mask_module.AT_ONCE < length * length
    assert max(i for _, _, i, _ in calls) <= 128
    calls = [sizes for sizes in calls if sizes != (1, 1, 1, 1)]  # those of the tracer
    assert sum(b * h * i * j for b, h, i, j in calls) == 2 * 3 * length * length
    assert 0 < mask.sparsity() < 1


@pytest.mark.parametrize("at_once", [1, 7, 18, 100, 400])
def test_kinds_do_not_depend_on_the_size_of_the_parts(monkeypatch, at_once):
    whole = small().kinds
    monkeypatch.setattr(block_mask_module, "AT_ONCE", at_once)
    assert torch.equal(small().kinds, whole)


@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_transposed_equals_the_block_mask_of_the_transposed_mask(data):
    dimensions = data.draw(DIMENSIONS, label="dimensions")
    mod = build_mask(data.draw(compositions(dimensions=dimensions)), dimensions)
    blocks = data.draw(st.tuples(*(st.integers(1, LONGEST),) * 2), label="blocks")
    other = Dimensions(
        batch=dimensions.batch, heads=dimensions.heads, query=dimensions.kv, kv=dimensions.query
    )

    def transposed_mod(b, h, q_idx, kv_idx):
        return mod(b, h, kv_idx, q_idx)

    mask = block_mask(mod, dimensions, block_query=blocks[0], block_kv=blocks[1])
    direct = block_mask(transposed_mod, other, block_query=blocks[1], block_kv=blocks[0])
    assert torch.equal(mask.transposed().kinds, direct.kinds)
    assert torch.equal(mask.transposed().transposed().kinds, mask.kinds)


def runs_of(row):
    """The runs of one row of kinds, found tile by tile."""
    runs, tile = [], 0
    for kind, tiles in groupby(row.tolist()):
        length = len(list(tiles))
        if kind != EMPTY:
            runs.append([4 * tile + kind, length])
        tile += length
    return runs


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_visit_list_has_every_tile_that_is_not_empty_in_order(data):
    sizes = (*data.draw(st.tuples(*(st.integers(1, 3),) * 3)), data.draw(st.integers(1, 9)))
    count = math.prod(sizes)
    values = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    kinds = torch.tensor(values, dtype=torch.uint8).view(sizes)
    mask = BlockMask(kinds=kinds, query=sizes[2] * 3, kv=sizes[3] * 5, block_query=3, block_kv=5)
    assert torch.equal(mask.kinds, kinds)
    assert mask.sparsity() == (kinds == EMPTY).sum().item() / kinds.numel()
    runs, counts = list_visits(mask)
    expected = {place: runs_of(kinds[place]) for place in product(*map(range, sizes[:3]))}
    most = max(1, *map(len, expected.values()))
    assert (runs.dtype, counts.dtype) == (torch.int32, torch.int32)
    assert runs.shape == (*sizes[:3], most, 2)
    assert runs.is_contiguous()
    for place, row in expected.items():
        assert runs[place].tolist() == row + [[0, 0]] * (most - len(row))
        assert counts[place] == len(row)


def test_visit_list_of_groups_has_a_kind_of_every_tile_for_each():
    kinds = torch.tensor(
        [[2, 2, 1, 0, 0, 0], [0, 0, 1, 2, 0, 0], [0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1]]
    )
    mask = BlockMask(
        kinds=kinds.to(torch.uint8)[None, None], query=16, kv=24, block_query=4, block_kv=4
    )
    runs, counts = list_visits(mask, 3)
    # Tiles 0 and 1 differ for the third group; no group sees tile 4. The other two groups of the
    # second block lie beyond the last row.
    first_block = [[0b10, 1], [64 + 0b01_00_10, 1], [128 + 0b01_01, 1], [192 + 0b10_00, 1]]
    second_block = [[320 + 0b01, 1], [0, 0], [0, 0], [0, 0]]
    assert runs.tolist() == [[[first_block, second_block]]]
    assert counts.tolist() == [[[4, 1]]]


def test_causal_mask_skips_tiles_above_the_diagonal():
    mask = small(written.causal, Dimensions(batch=1, heads=1, query=10, kv=8), 4, 4)
    assert mask.kinds.tolist() == [[[[1, 0], [2, 1], [1, 1]]]]
    runs, counts = list_visits(mask)
    assert runs.tolist() == [[[[[1, 1], [0, 0]], [[2, 1], [5, 1]], [[1, 2], [0, 0]]]]]
    assert counts.tolist() == [[[1, 2, 1]]]
    assert mask.sparsity() == 1 / 6


def from_kinds(kinds):
    return BlockMask(kinds=kinds.to(torch.uint8), query=7, kv=9, block_query=4, block_kv=4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: small(block_query=0), "query block size is 0: it must be at least 1."),
        (lambda: small(block_kv=-2), "kv block size is -2: it must be at least 1."),
        (
            lambda: from_kinds(torch.zeros(2, 3)),
            "have shape (2, 3): 7 rows in blocks of 4 and 9 keys in blocks of 4",
        ),
        (lambda: from_kinds(torch.zeros(1, 1, 2, 2)), "need (batch, heads, 2, 3)."),
        (
            lambda: from_kinds(torch.full((1, 1, 2, 3), 3)),
            "hold 3: a tile is 0 (empty), 1 (partial) or 2 (full).",
        ),
    ],
    ids=["query block", "kv block", "axes", "too few blocks", "unknown kind"],
)
def test_invalid_block_mask_is_refused(make, message):
    with one_line(ProblemError, message):
        make()
