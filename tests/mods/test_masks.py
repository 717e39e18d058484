"""Every library mask against a matrix typed by hand: each word is a row, each character a key."""

import pytest
import torch

from attncheck.core.mod_spec import Dimensions, Spec
from attncheck.mods import masks, scores
from attncheck.mods.library import build_mask
from attncheck.mods.masks import MASKS

WIDE = Dimensions(batch=2, heads=3, query=5, kv=7)
TALL = Dimensions(batch=2, heads=3, query=6, kv=4)
CANVAS = Dimensions(batch=1, heads=1, query=13, kv=13)
NINE = Dimensions(batch=1, heads=1, query=9, kv=9)
LAST = Dimensions(batch=1, heads=1, query=3, kv=7)

FULL = "1111111 1111111 1111111 1111111 1111111"
CAUSAL = "1...... 11..... 111.... 1111... 11111.."
BOTTOM_RIGHT = "111.... 1111... 11111.. 111111. 1111111"
WINDOW_1 = "1...... .1..... ..1.... ...1... ....1.."
WINDOW_3 = "1...... 11..... 111.... .111... ..111.."
PREFIX_2 = "11..... 11..... 111.... 1111... 11111.."
DOCUMENTS_2_0_3_2 = "11..... 11..... ..111.. ..111.. ..111.."
PADDING_0 = "....... ....... ....... ....... ......."
PADDING_3 = "111.... 111.... 111.... 111.... 111...."
WRITTEN_IN_0 = "11..... .11.... ..11... ..111.. ...111."
WRITTEN_IN_1 = "1111... .1111.. ..1111. 1111111 .111111"
TALL_CAUSAL = "1... 11.. 111. 1111 1111 1111"
TALL_BOTTOM_RIGHT = ".... .... 1... 11.. 111. 1111"
TALL_WINDOW_2 = "1... 11.. .11. ..11 ...1 ...."
TALL_DOCUMENTS_1_4_1 = "1... .111 .111 .111 .111 ...."

# A canvas of 2 × 3 and a key beyond it; windows touch all its edges.
CELLS_1_BY_2 = "11..... 11..... .11.... ...11.. ...11.."
CELLS_2_BY_1 = "1..1... .1..1.. ..1..1. 1..1... .1..1.."
# Rows of the canvas are keys 0 1 2 3, 4 5 6 7 and 8 9 10 11; the last query row is beyond it.
CANVAS_3_BY_4 = """
111.111.111..
111.111.111..
.111.111.111.
.111.111.111.
111.111.111..
111.111.111..
.111.111.111.
.111.111.111.
111.111.111..
111.111.111..
.111.111.111.
.111.111.111.
.............
"""
# Tiles of 2 × 3: keys 0–5 are columns 0–2 of rows 0 and 1, keys 6 and 7 column 3 of the two, keys
# 8–10 columns 0–2 of row 2, key 11 column 3. A window of 1 × 3 stays in its row.
TILED_3_BY_4 = """
111..........
111..........
.11...1......
...111.......
...111.......
....11.1.....
.11...1......
....11.1.....
........111..
........111..
.........111.
.........111.
.............
"""
ONE_CELL = "1...... ....... ....... ....... ......."
# Along the Z curve of 3 × 4: rows 0 and 1 are keys 0 1 4 5 and 2 3 6 7, row 2 is 8 9 10 11.
MORTON_3_BY_4 = """
11..1........
11..1........
..11..1......
..11..1......
.1..11.......
.1..11.......
...1..11.....
...1..11.....
........111..
........111..
.........111.
.........111.
.............
"""
# An even window of 2 × 2 extends to the cells before, where there are any.
EVEN_3_BY_3 = """
11.11....
11.11....
.11.11...
11.11....
11.11....
.11.11...
...11.11.
...11.11.
....11.11
"""
TWO_DOCUMENTS_AND_EMPTY_ONES = "1...... 1...... ...1111 ...1111 ...1111"
SHORTER_THAN_ROWS = "....... ....... 1...... 11..... 111...."
WINDOW_3_OF_6 = "11..... 111.... .111... ..111.. ...111."
CAUSAL_OF_4_AND_2 = "111.... 1111... ....... .....1. .....11"
WINDOW_2_OF_3_AND_4 = "11..... .11.... ...11.. ....11. .....11"
LATER_BOTTOM_RIGHT = "11111.. 111111. 1111111"
LATER_WINDOW_3 = ".111... ..111.. ...111. ....111 .....11"
LATER_DOCUMENTS = "..11... ..11... ....111 ....111 ....111"

of = Spec.of
TABLES = [
    (WIDE, of("full"), [FULL, FULL]),
    (WIDE, of("causal"), [CAUSAL, CAUSAL]),
    (WIDE, of("causal_bottom_right"), [BOTTOM_RIGHT] * 2),
    (WIDE, of("sliding_window", window=0), [PADDING_0] * 2),
    (WIDE, of("sliding_window", window=1), [WINDOW_1] * 2),
    (WIDE, of("sliding_window", window=3), [WINDOW_3] * 2),
    (WIDE, of("sliding_window", window=2**31 - 1), [CAUSAL] * 2),
    (WIDE, of("prefix_lm", prefix=0), [CAUSAL] * 2),
    (WIDE, of("prefix_lm", prefix=2), [PREFIX_2] * 2),
    (WIDE, of("prefix_lm", prefix=9), [FULL] * 2),
    (WIDE, of("document", lengths=[2, 0, 3, 2]), [DOCUMENTS_2_0_3_2] * 2),
    (WIDE, of("document", lengths=[2, 0, 3, 9]), [DOCUMENTS_2_0_3_2] * 2),
    (WIDE, of("padding", lengths=[3, 0]), [PADDING_3, PADDING_0]),
    (WIDE, of("padding", lengths=[0, 7]), [PADDING_0, FULL]),
    (TALL, of("causal"), [TALL_CAUSAL] * 2),
    (TALL, of("causal_bottom_right"), [TALL_BOTTOM_RIGHT] * 2),
    (TALL, of("sliding_window", window=2), [TALL_WINDOW_2] * 2),
    (TALL, of("document", lengths=[1, 4, 1]), [TALL_DOCUMENTS_1_4_1] * 2),
    (
        WIDE,
        of("expression", text="(q_idx % 3 <= kv_idx) & (abs(q_idx - kv_idx) // 2 < b + 1)"),
        [WRITTEN_IN_0, WRITTEN_IN_1],
    ),
    (WIDE, of("neighborhood", canvas=[2, 3], kernel=[1, 2]), [CELLS_1_BY_2] * 2),
    (WIDE, of("neighborhood", canvas=[2, 3], kernel=[2, 1]), [CELLS_2_BY_1] * 2),
    (WIDE, of("neighborhood", canvas=[1, 1], kernel=[1, 1]), [ONE_CELL] * 2),
    (CANVAS, of("neighborhood", canvas=[3, 4], kernel=[3, 3]), [CANVAS_3_BY_4]),
    (NINE, of("neighborhood", canvas=[3, 3], kernel=[2, 2]), [EVEN_3_BY_3]),
    (CANVAS, of("neighborhood_tiled", canvas=[3, 4], kernel=[1, 3], tile=[2, 3]), [TILED_3_BY_4]),
    (CANVAS, of("neighborhood_tiled", canvas=[3, 4], kernel=[3, 3], tile=[1, 4]), [CANVAS_3_BY_4]),
    (CANVAS, of("neighborhood_morton", canvas=[3, 4], kernel=[1, 3]), [MORTON_3_BY_4]),
    (
        WIDE,
        of("documents", query_lengths=[2, 0, 3, 0], kv_lengths=[1, 2, 4, 0]),
        [TWO_DOCUMENTS_AND_EMPTY_ONES] * 2,
    ),
    (
        WIDE,
        of("documents", query_lengths=[2, 0, 9], kv_lengths=[1, 2, 9]),
        [TWO_DOCUMENTS_AND_EMPTY_ONES] * 2,
    ),
    (LAST, of("offset", of("causal_bottom_right"), rows=2), [LATER_BOTTOM_RIGHT]),
    (LAST, of("offset", of("causal"), rows=4), [LATER_BOTTOM_RIGHT]),
    (WIDE, of("offset", of("sliding_window", window=3), rows=3), [LATER_WINDOW_3] * 2),
    (WIDE, of("offset", of("document", lengths=[2, 2, 5]), rows=2), [LATER_DOCUMENTS] * 2),
    (
        WIDE,
        of("offset", of("offset", of("sliding_window", window=3), rows=1), rows=2),
        [LATER_WINDOW_3] * 2,
    ),
    (
        WIDE,
        of("and", of("causal"), of("padding", lengths=[3, 0])),
        ["1......\n11.....\n111....\n111....\n111....", PADDING_0],
    ),
    (
        WIDE,
        of("or", of("sliding_window", window=1), of("padding", lengths=[1, 0])),
        ["1......\n11.....\n1.1....\n1..1...\n1...1..", WINDOW_1],
    ),
    # The last row of each sequence, or document, has the last of its own keys.
    (WIDE, of("bottom_right", of("causal"), lengths=[7, 3]), [BOTTOM_RIGHT, SHORTER_THAN_ROWS]),
    (
        WIDE,
        of("bottom_right", of("sliding_window", window=3), lengths=[0, 6]),
        [PADDING_0, WINDOW_3_OF_6],
    ),
    (
        WIDE,
        of("documents_bottom_right", of("causal"), query_lengths=[2, 0, 3], kv_lengths=[4, 1, 2]),
        [CAUSAL_OF_4_AND_2] * 2,
    ),
    (
        WIDE,
        of(
            "documents_bottom_right",
            of("sliding_window", window=2),
            query_lengths=[2, 9],
            kv_lengths=[3, 9],
        ),
        [WINDOW_2_OF_3_AND_4] * 2,
    ),
    (
        LAST,
        of("offset", of("bottom_right", of("causal"), lengths=[7]), rows=2),
        [LATER_BOTTOM_RIGHT],
    ),
    (WIDE, of("not", of("causal")), [".111111\n..11111\n...1111\n....111\n.....11"] * 2),
    (WIDE, of("and", of("full"), of("causal"), of("full")), [CAUSAL] * 2),
    (WIDE, of("not", of("full")), [PADDING_0] * 2),
]


def parse_table(table):
    return torch.tensor([[c == "1" for c in row] for row in table.split()])


@pytest.mark.parametrize(("dimensions", "spec", "tables"), TABLES, ids=lambda v: str(v)[:60])
def test_mask_matches_hand_typed_table(dimensions, spec, tables):
    mask = build_mask(spec, dimensions)
    seen = mask(
        torch.arange(dimensions.batch)[:, None, None, None],
        torch.arange(dimensions.heads)[:, None, None],
        torch.arange(dimensions.query)[:, None],
        torch.arange(dimensions.kv),
    )
    assert seen.dtype is torch.bool
    shape = (dimensions.batch, dimensions.heads, dimensions.query, dimensions.kv)
    expected = torch.stack([parse_table(table) for table in tables])[:, None].expand(shape)
    assert torch.equal(seen.expand(shape), expected)
    # On 0-d indices under vmap, as FlexAttention calls it.
    over_keys = torch.vmap(mask, in_dims=(None, None, None, 0))
    over_rows = torch.vmap(over_keys, in_dims=(None, None, 0, None))
    rows, keys, h = torch.arange(dimensions.query), torch.arange(dimensions.kv), torch.tensor(0)
    for b in range(dimensions.batch):
        assert torch.equal(over_rows(torch.tensor(b), h, rows, keys), expected[b, 0])


def test_every_library_mask_has_a_table():
    assert {part.name for _, spec, _ in TABLES for part in spec.walk()} == set(MASKS)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_mask_accepts_int32_and_int64_indices(index_dtype):
    indices = [torch.arange(n, dtype=index_dtype) for n in (1, 1, 5, 5)]
    mask = masks.document(torch.tensor([0, 0, 1, 1, 1]))
    assert mask(*indices).all()


@pytest.mark.parametrize("sides", [(1, 1), (1, 7), (5, 3), (4, 4), (6, 5)], ids=str)
def test_neighborhood_cell_sees_exactly_its_window(sides):
    """In any layout of cells, and rows and keys beyond the canvas see and show nothing."""
    cells = sides[0] * sides[1]
    longer = Dimensions(batch=1, heads=1, query=cells + 2, kv=cells + 3)
    at = torch.zeros((), dtype=torch.int64)
    indices = (at, at, torch.arange(longer.query)[:, None], torch.arange(longer.kv))
    for tall in range(1, sides[0] + 1):
        for wide in range(1, sides[1] + 1):
            canvas_and_kernel = {"canvas": list(sides), "kernel": [tall, wide]}
            for spec in (
                Spec.of("neighborhood", **canvas_and_kernel),
                Spec.of("neighborhood_morton", **canvas_and_kernel),
                Spec.of(
                    "neighborhood_tiled",
                    **canvas_and_kernel,
                    tile=[1 + sides[0] // 2, 1 + sides[1] // 3],
                ),
            ):
                seen = build_mask(spec, longer)(*indices)
                assert seen[:cells].sum(-1).eq(tall * wide).all()
                assert not seen[cells:].any()
                assert not seen[:, cells:].any()


def test_morton_order_skips_cells_outside_canvas():
    assert masks.morton_order((4, 4)).tolist() == [
        0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15
    ]  # fmt: skip
    assert masks.morton_order((3, 3)).tolist() == [0, 1, 3, 4, 2, 5, 6, 7, 8]
    assert masks.morton_order((1, 5)).tolist() == [0, 1, 2, 3, 4]


def test_document_longer_than_problem_allocates_no_memory():
    """A length may be as large as 2^31 − 1."""
    spec = Spec.of("document", lengths=[2, 2**31 - 1])
    assert build_mask(spec, NINE)(*[torch.arange(9)] * 4).all()


def test_composition_without_parts_is_refused():
    for composition in (masks.and_masks, masks.or_masks, scores.chain_scores):
        with pytest.raises(TypeError):
            composition()
