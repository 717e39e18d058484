"""Every tile of a block mask against the mask itself, element by element."""

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
from attncheck.core.mod_spec import Dimensions, Spec
from attncheck.mods import block_mask as block_mask_room
from attncheck.mods import masks as written
from attncheck.mods.block_mask import EMPTY, FULL, PARTIAL, BlockMask, block_mask, list_visits
from attncheck.mods.library import build_mask

LONGEST = 20


def seen_everywhere(mod, dimensions):
    """The mask on all indices at once, ``(batch, heads, query, kv)``: small ones only."""
    sizes = (dimensions.batch, dimensions.heads, dimensions.query, dimensions.kv)
    axes = torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
    return torch.as_tensor(mod(*axes)).expand(sizes)


def kind_by_definition(tile, size):
    if not tile.any():
        return EMPTY
    return FULL if tile.sum() == size else PARTIAL  # a ragged tile has too few elements


def listed(counts, indices, place):
    """Key blocks that a table lists for ``place``; what is no list of a block mask is said."""
    count, row = int(counts[place]), indices[place].tolist()
    blocks, rest = row[:count], row[count:]
    if count > len(row) or sorted(set(blocks)) != blocks or any(rest):
        return f"{row} with count {count} is no ascending list followed by zeros"
    return blocks


def faults(mask, mod, dimensions):
    """What is wrong with a block mask; read from its tables and from nothing else of it."""
    seen, wrong = seen_everywhere(mod, dimensions), []
    strips_of_rows = range(-(-dimensions.query // mask.block_query))
    width = -(-dimensions.kv // mask.block_kv)
    for b, h, i in product(range(dimensions.batch), range(dimensions.heads), strips_of_rows):
        # Of one sequence, or head, where the mask is the same for all.
        place = (min(b, mask.kv_indices.shape[0] - 1), min(h, mask.kv_indices.shape[1] - 1), i)
        partial = listed(mask.kv_num_blocks, mask.kv_indices, place)
        full = listed(mask.full_kv_num_blocks, mask.full_kv_indices, place)
        if isinstance(partial, str) or isinstance(full, str):
            wrong.append((b, h, i, partial, full))
            continue
        rows = seen[b, h, i * mask.block_query : (i + 1) * mask.block_query]
        for j in range(width):
            tile = rows[:, j * mask.block_kv : (j + 1) * mask.block_kv]
            kind = kind_by_definition(tile, mask.block_query * mask.block_kv)
            if ((j in partial), (j in full)) != (kind == PARTIAL, kind == FULL):
                wrong.append((b, h, i, j))
    return wrong


def dimensions_of(longest=LONGEST):
    lengths = st.integers(1, longest)
    return st.builds(
        Dimensions, batch=st.integers(1, 2), heads=st.integers(1, 3), query=lengths, kv=lengths
    )


def spec_of(name, dimensions):
    if name == "composition":
        return compositions(dimensions=dimensions)
    return masks(dimensions=dimensions, names=(name,))


@pytest.mark.parametrize("name", [*PLAIN_MASKS, "composition"])
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_every_tile_is_what_its_elements_are(name, data):
    dimensions = data.draw(dimensions_of(), label="dimensions")
    spec = data.draw(spec_of(name, dimensions), label="mask")
    blocks = data.draw(st.tuples(*(st.integers(1, LONGEST + 3),) * 2), label="blocks")
    mod = build_mask(spec, dimensions)
    mask = block_mask(mod, dimensions, block_query=blocks[0], block_kv=blocks[1])
    assert not faults(mask, mod, dimensions)
    assert (mask.query, mask.kv) == (dimensions.query, dimensions.kv)
    for table in (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks):
        assert table.dtype == torch.int32


def uneven(b, h, q_idx, kv_idx):
    """Reads all four indices."""
    return (q_idx - kv_idx < 3 + h + 2 * b) & (q_idx >= kv_idx - b)


SMALL = Dimensions(batch=2, heads=3, query=21, kv=18)


def small(mod=uneven, dimensions=SMALL, block_query=4, block_kv=5, **changes):
    mask = block_mask(mod, dimensions, block_query=block_query, block_kv=block_kv)
    return replace(mask, **changes)


def with_tile(kind, was, place=None):
    """A fault: the first tile that is ``was``, or the one at ``place``, is said to be ``kind``."""

    def fault(mask):
        kinds = mask.kinds.clone()
        at = place or tuple((kinds == was).nonzero()[0].tolist())
        assert kinds[at] == was
        kinds[at] = kind
        return replace(mask, kinds=kinds)

    return fault


FAULTS = {
    "a shifted index": (uneven, lambda m: replace(m, kinds=m.kinds.roll(1, 3))),
    "called full with a hidden element": (uneven, with_tile(FULL, PARTIAL)),
    "called empty with a visible element": (uneven, with_tile(EMPTY, PARTIAL)),
    "called partial without a visible element": (uneven, with_tile(PARTIAL, EMPTY)),
    "called partial though full": (written.full, with_tile(PARTIAL, FULL)),
    "ragged in its rows and called full": (written.full, with_tile(FULL, PARTIAL, (0, 0, 5, 0))),
    "ragged in its keys and called full": (written.full, with_tile(FULL, PARTIAL, (0, 0, 0, 3))),
    "another head's": (uneven, lambda m: replace(m, kinds=m.kinds.roll(1, 1))),
    "the first sequence's for all": (uneven, lambda m: replace(m, kinds=m.kinds[:1])),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    mod, plant = FAULTS[fault]
    sound = small(mod)
    assert not faults(sound, mod, SMALL)
    assert faults(plant(sound), mod, SMALL)


@pytest.mark.parametrize(
    ("mod", "outer"),
    [
        (written.causal, (1, 1)),
        (written.full, (1, 1)),
        (written.padding(torch.tensor([3, 9])), (2, 1)),
        (lambda b, h, i, j: i - j < h, (1, 3)),
        (uneven, (2, 3)),
        (lambda b, h, i, j: (i >= j) & (b * 0 == 0), (2, 1)),
    ],
    ids=["neither", "constant", "batch", "heads", "both", "in name only"],
)
def test_only_indices_that_the_mask_reads_are_enumerated(mod, outer):
    mask = small(mod)
    assert mask.kinds.shape == (*outer, 6, 4)
    assert not faults(mask, mod, SMALL)


def test_a_mask_that_cannot_be_traced_is_asked_everywhere():
    def mod(b, h, i, j):
        if i.numel() > 0 and int(i.amax()) < 0:  # control flow on a tensor
            return i >= j
        return i - j < h

    mask = small(mod)
    assert mask.kinds.shape[:2] == (2, 3)
    assert not faults(mask, mod, SMALL)


def test_a_mask_of_single_indices_is_mapped():
    table = torch.arange(21).roll(3)

    def single(b, h, i, j):
        return table[i.reshape(())] >= j.reshape(()) - h.reshape(())

    def each(b, h, i, j):
        return table[i] >= j - h

    assert not faults(small(single), each, SMALL)


def test_a_mask_may_capture_a_parameter():
    limit = torch.nn.Parameter(torch.tensor([3.5, 7.0, 11.0]))

    def mod(b, h, i, j):
        return (j < limit[h]) & ((limit[h] - i) * 1.0 < 9)

    assert not faults(small(mod), mod, SMALL)


def test_the_whole_mask_never_exists():
    asked = []

    def mod(b, h, i, j):
        asked.append((b.numel(), h.numel(), i.numel(), j.numel()))
        return uneven(b, h, i, j)

    length = 3000
    dimensions = Dimensions(batch=2, heads=3, query=length, kv=length)
    mask = block_mask(mod, dimensions, block_query=128, block_kv=64)
    largest = max(b * h * i * j for b, h, i, j in asked)
    assert largest <= block_mask_room.AT_ONCE < length * length
    assert max(i for _, _, i, _ in asked) <= 128
    calls = [place for place in asked if place != (1, 1, 1, 1)]  # the tracer's
    assert sum(b * h * i * j for b, h, i, j in calls) == 2 * 3 * length * length
    assert 0 < mask.sparsity() < 1


@pytest.mark.parametrize("at_once", [1, 7, 18, 100, 400])
def test_however_the_strips_are_cut_the_tiles_are_the_same(monkeypatch, at_once):
    whole = small().kinds
    monkeypatch.setattr(block_mask_room, "AT_ONCE", at_once)
    assert torch.equal(small().kinds, whole)


@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_transposed_is_the_block_mask_of_the_transposed_mask(data):
    dimensions = data.draw(dimensions_of(), label="dimensions")
    mod = build_mask(data.draw(compositions(dimensions=dimensions)), dimensions)
    blocks = data.draw(st.tuples(*(st.integers(1, LONGEST),) * 2), label="blocks")
    other = Dimensions(
        batch=dimensions.batch, heads=dimensions.heads, query=dimensions.kv, kv=dimensions.query
    )

    def exchanged(b, h, q_idx, kv_idx):
        return mod(b, h, kv_idx, q_idx)

    mask = block_mask(mod, dimensions, block_query=blocks[0], block_kv=blocks[1])
    direct = block_mask(exchanged, other, block_query=blocks[1], block_kv=blocks[0])
    assert torch.equal(mask.transposed().kinds, direct.kinds)
    assert torch.equal(mask.transposed().transposed().kinds, mask.kinds)


def runs_of(row):
    """The runs of one row of kinds, tile by tile."""
    found, tile = [], 0
    for kind, tiles in groupby(row.tolist()):
        many = len(list(tiles))
        if kind != EMPTY:
            found.append([4 * tile + kind, many])
        tile += many
    return found


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_the_visit_list_names_every_tile_that_is_not_empty_in_order(data):
    sizes = (*data.draw(st.tuples(*(st.integers(1, 3),) * 3)), data.draw(st.integers(1, 9)))
    drawn = st.lists(
        st.integers(0, 2), min_size=torch.Size(sizes).numel(), max_size=torch.Size(sizes).numel()
    )
    kinds = torch.tensor(data.draw(drawn), dtype=torch.uint8).view(sizes)
    mask = BlockMask(kinds=kinds, query=sizes[2] * 3, kv=sizes[3] * 5, block_query=3, block_kv=5)
    assert torch.equal(mask.kinds, kinds)
    assert mask.sparsity() == (kinds == EMPTY).sum().item() / kinds.numel()
    runs, counts = list_visits(mask)
    wanted = {place: runs_of(kinds[place]) for place in product(*map(range, sizes[:3]))}
    most = max(1, *map(len, wanted.values()))
    assert (runs.dtype, counts.dtype) == (torch.int32, torch.int32)
    assert runs.shape == (*sizes[:3], most, 2)
    assert runs.is_contiguous()
    for place, listed in wanted.items():
        assert runs[place].tolist() == listed + [[0, 0]] * (most - len(listed))
        assert counts[place] == len(listed)


def test_groups_share_a_visit_list_and_each_has_a_kind_of_every_tile():
    kinds = torch.tensor(
        [[2, 2, 1, 0, 0, 0], [0, 0, 1, 2, 0, 0], [0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1]]
    )
    mask = BlockMask(
        kinds=kinds.to(torch.uint8)[None, None], query=16, kv=24, block_query=4, block_kv=4
    )
    runs, counts = list_visits(mask, 3)
    # Tiles 0 and 1 differ for the third group; tile 4 is seen by none. The second block's other
    # groups lie beyond the last row.
    first_block = [[0b10, 1], [64 + 0b01_00_10, 1], [128 + 0b01_01, 1], [192 + 0b10_00, 1]]
    second_block = [[320 + 0b01, 1], [0, 0], [0, 0], [0, 0]]
    assert runs.tolist() == [[[first_block, second_block]]]
    assert counts.tolist() == [[[4, 1]]]


def test_a_causal_mask_skips_what_is_above_the_diagonal():
    mask = small(written.causal, Dimensions(batch=1, heads=1, query=10, kv=8), 4, 4)
    assert mask.kinds.tolist() == [[[[1, 0], [2, 1], [1, 1]]]]
    runs, counts = list_visits(mask)
    assert runs.tolist() == [[[[[1, 1], [0, 0]], [[2, 1], [5, 1]], [[1, 2], [0, 0]]]]]
    assert counts.tolist() == [[[1, 2, 1]]]
    assert mask.sparsity() == 1 / 6


def of_kinds(kinds):
    return BlockMask(kinds=kinds.to(torch.uint8), query=7, kv=9, block_query=4, block_kv=4)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: small(block_query=0), "query block size is 0: it must be at least 1."),
        (lambda: small(block_kv=-2), "kv block size is -2: it must be at least 1."),
        (
            lambda: of_kinds(torch.zeros(2, 3)),
            "have shape (2, 3): 7 rows in blocks of 4 and 9 keys in blocks of 4",
        ),
        (lambda: of_kinds(torch.zeros(1, 1, 2, 2)), "need (batch, heads, 2, 3)."),
        (
            lambda: of_kinds(torch.full((1, 1, 2, 3), 3)),
            "hold 3: a tile is 0 (empty), 1 (partial) or 2 (full).",
        ),
    ],
    ids=range(5),
)
def test_what_is_no_block_mask_is_refused(make, says):
    with one_line(ProblemError, says):
        make()


def test_a_spec_of_the_library_gives_the_same_as_its_callable():
    dimensions = Dimensions(batch=1, heads=1, query=9, kv=12)
    mod = build_mask(Spec.of("causal_bottom_right"), dimensions)
    assert not faults(small(mod, dimensions), written.causal_bottom_right(3), dimensions)
