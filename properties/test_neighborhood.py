"""Neighborhoods on a canvas: a window of cells around a row's own, in three orders of the cells."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.suite import asks

if TYPE_CHECKING:
    from attncheck.inputs.problem import Case
    from attncheck.suite import UnderTest


@asks("compare", families=("neighborhood",))
def test_attention_is_exact(kernel: UnderTest, case: Case) -> None:
    """Every element, and LSE, is that of exact attention within windows up to rounding."""
    kernel.must_hold(case)


@asks("decode", "isolated", families=("neighborhood",))
def test_rows_see_their_keys(kernel: UnderTest, case: Case) -> None:
    """Each cell counts a whole window, moved inside at the edges, and what is beyond none."""
    kernel.must_hold(case)


@asks("hidden_keys", families=("neighborhood",), shapes={"shortest_kv": 2})
def test_far_cells_do_not_matter(kernel: UnderTest, case: Case) -> None:
    """No bit of a cell moves when keys and values outside of its window are others."""
    kernel.must_hold(case)


@asks("neighborhood_order", families=("neighborhood",))
def test_orders_of_cells_agree(kernel: UnderTest, case: Case) -> None:
    """Tiles and the Z curve give what rows one after another give, in their order."""
    kernel.must_hold(case)
