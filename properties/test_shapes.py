"""Lengths, tiles and head dims: ragged, unequal, extreme."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.suite import asks

if TYPE_CHECKING:
    from attncheck.inputs.problem import Case
    from attncheck.suite import UnderTest


@asks("compare", "decode", families=("full",), shapes={"head_dims": (16, 64)})
def test_ragged_lengths_are_exact(kernel: UnderTest, case: Case) -> None:
    """Lengths within one of a tile's edge lose no key, count none twice, and pad with none."""
    kernel.must_hold(case)


@asks(
    "compare", families=("full",), shapes={"head_dims": (1, 2, 3, 17, 80, 129, 256), "longest": 40}
)
def test_extreme_head_dims_are_exact(kernel: UnderTest, case: Case) -> None:
    """Head dims of 1, odd, beyond 128 and of another value_dim are exact up to rounding."""
    kernel.must_hold(case)


@asks("rectangular", families=("causal_bottom_right", "sliding_window"))
def test_rows_alone_are_rows_of_all(kernel: UnderTest, case: Case) -> None:
    """The last rows alone, as when decoding, equal these rows of the square problem."""
    kernel.must_hold(case)


@asks("split_merge", families=("full",), shapes={"shortest_kv": 2})
def test_split_and_merge(kernel: UnderTest, case: Case) -> None:
    """Attention over two parts of the keys, merged by LSE, is attention over all of them."""
    kernel.must_hold(case)


@asks("pad_head_dim", "pad_value_dim", families=("full",))
def test_padded_dims(kernel: UnderTest, case: Case) -> None:
    """Columns of zeros behind q and k move nothing, and behind v give columns of zeros."""
    kernel.must_hold(case)
