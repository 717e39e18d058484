"""Every library mask against a matrix typed by hand: rows are queries, columns keys."""

from __future__ import annotations

import pytest
import torch

from attncheck.mods import compose, masks
from attncheck.mods.library import MASKS, build_mask
from attncheck.mods.spec import Dimensions, Spec

WIDE = Dimensions(batch=2, heads=3, query=5, kv=7)
TALL = Dimensions(batch=2, heads=3, query=6, kv=4)

FULL = """
1111111
1111111
1111111
1111111
1111111
"""
CAUSAL = """
1......
11.....
111....
1111...
11111..
"""
BOTTOM_RIGHT = """
111....
1111...
11111..
111111.
1111111
"""
WINDOW_1 = """
1......
.1.....
..1....
...1...
....1..
"""
WINDOW_3 = """
1......
11.....
111....
.111...
..111..
"""
PREFIX_2 = """
11.....
11.....
111....
1111...
11111..
"""
DOCUMENTS_2_0_3_2 = """
11.....
11.....
..111..
..111..
..111..
"""
PADDING_0 = """
.......
.......
.......
.......
.......
"""
PADDING_3 = """
111....
111....
111....
111....
111....
"""
WRITTEN_IN_0 = """
11.....
.11....
..11...
..111..
...111.
"""
WRITTEN_IN_1 = """
1111...
.1111..
..1111.
1111111
.111111
"""
TALL_CAUSAL = """
1...
11..
111.
1111
1111
1111
"""
TALL_BOTTOM_RIGHT = """
....
....
1...
11..
111.
1111
"""
TALL_WINDOW_2 = """
1...
11..
.11.
..11
...1
....
"""
TALL_DOCUMENTS_1_4_1 = """
1...
.111
.111
.111
.111
....
"""

TABLES = [
    (WIDE, Spec.of("full"), [FULL, FULL]),
    (WIDE, Spec.of("causal"), [CAUSAL, CAUSAL]),
    (WIDE, Spec.of("causal_bottom_right"), [BOTTOM_RIGHT] * 2),
    (WIDE, Spec.of("sliding_window", window=0), [PADDING_0] * 2),
    (WIDE, Spec.of("sliding_window", window=1), [WINDOW_1] * 2),
    (WIDE, Spec.of("sliding_window", window=3), [WINDOW_3] * 2),
    (WIDE, Spec.of("sliding_window", window=2**31 - 1), [CAUSAL] * 2),
    (WIDE, Spec.of("prefix_lm", prefix=0), [CAUSAL] * 2),
    (WIDE, Spec.of("prefix_lm", prefix=2), [PREFIX_2] * 2),
    (WIDE, Spec.of("prefix_lm", prefix=9), [FULL] * 2),
    (WIDE, Spec.of("document", lengths=[2, 0, 3, 2]), [DOCUMENTS_2_0_3_2] * 2),
    (WIDE, Spec.of("document", lengths=[2, 0, 3, 9]), [DOCUMENTS_2_0_3_2] * 2),
    (WIDE, Spec.of("padding", lengths=[3, 0]), [PADDING_3, PADDING_0]),
    (WIDE, Spec.of("padding", lengths=[0, 7]), [PADDING_0, FULL]),
    (TALL, Spec.of("causal"), [TALL_CAUSAL] * 2),
    (TALL, Spec.of("causal_bottom_right"), [TALL_BOTTOM_RIGHT] * 2),
    (TALL, Spec.of("sliding_window", window=2), [TALL_WINDOW_2] * 2),
    (TALL, Spec.of("document", lengths=[1, 4, 1]), [TALL_DOCUMENTS_1_4_1] * 2),
    (
        WIDE,
        Spec.of("expression", text="(q_idx % 3 <= kv_idx) & (abs(q_idx - kv_idx) // 2 < b + 1)"),
        [WRITTEN_IN_0, WRITTEN_IN_1],
    ),
    (
        WIDE,
        Spec.of("and", Spec.of("causal"), Spec.of("padding", lengths=[3, 0])),
        ["1......\n11.....\n111....\n111....\n111....", PADDING_0],
    ),
    (
        WIDE,
        Spec.of("or", Spec.of("sliding_window", window=1), Spec.of("padding", lengths=[1, 0])),
        ["1......\n11.....\n1.1....\n1..1...\n1...1..", WINDOW_1],
    ),
    (
        WIDE,
        Spec.of("not", Spec.of("causal")),
        [".111111\n..11111\n...1111\n....111\n.....11"] * 2,
    ),
    (WIDE, Spec.of("and", Spec.of("full"), Spec.of("causal"), Spec.of("full")), [CAUSAL] * 2),
    (WIDE, Spec.of("not", Spec.of("full")), [PADDING_0] * 2),
]


def typed(table: str) -> torch.Tensor:
    return torch.tensor([[c == "1" for c in row] for row in table.split()])


@pytest.mark.parametrize(("dimensions", "spec", "tables"), TABLES, ids=lambda v: str(v)[:60])
def test_mask_is_the_table_typed_by_hand(
    dimensions: Dimensions, spec: Spec, tables: list[str]
) -> None:
    mask = build_mask(spec, dimensions)
    seen = mask(
        torch.arange(dimensions.batch)[:, None, None, None],
        torch.arange(dimensions.heads)[:, None, None],
        torch.arange(dimensions.query)[:, None],
        torch.arange(dimensions.kv),
    )
    assert seen.dtype is torch.bool
    shape = (dimensions.batch, dimensions.heads, dimensions.query, dimensions.kv)
    expected = torch.stack([typed(table) for table in tables])[:, None].expand(shape)
    assert torch.equal(seen.expand(shape), expected)


@pytest.mark.parametrize(("dimensions", "spec", "tables"), TABLES, ids=lambda v: str(v)[:60])
def test_mask_works_on_0d_indices_under_vmap(
    dimensions: Dimensions, spec: Spec, tables: list[str]
) -> None:
    over_keys = torch.vmap(build_mask(spec, dimensions), in_dims=(None, None, None, 0))
    over_rows = torch.vmap(over_keys, in_dims=(None, None, 0, None))
    for b, table in enumerate(tables):
        seen = over_rows(
            torch.tensor(b),
            torch.tensor(0),
            torch.arange(dimensions.query),
            torch.arange(dimensions.kv),
        )
        assert torch.equal(seen, typed(table))


def test_every_mask_has_a_table() -> None:
    assert {part.name for _, spec, _ in TABLES for part in spec.walk()} == set(MASKS)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_indices_may_be_of_either_width(index_dtype: torch.dtype) -> None:
    indices = [torch.arange(n, dtype=index_dtype) for n in (1, 1, 5, 5)]
    mask = masks.document(torch.tensor([0, 0, 1, 1, 1]))
    assert mask(*indices).all()


def test_compositions_need_a_part() -> None:
    for composition in (compose.and_masks, compose.or_masks, compose.chain):
        with pytest.raises(TypeError):
            composition()
