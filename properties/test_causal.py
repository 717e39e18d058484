"""Causal attention, aligned top-left and bottom-right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.cases.strategies.score_strategies import scores
from attncheck.suite import asks

if TYPE_CHECKING:
    from attncheck.inputs.problem import Case
    from attncheck.suite import UnderTest

BOTH = ("causal", "causal_bottom_right")


@asks("compare", families=BOTH)
def test_attention_is_exact(kernel: UnderTest, case: Case) -> None:
    """Every element, and LSE, is that of exact causal attention up to rounding."""
    kernel.must_hold(case)


@asks("decode", "isolated", families=BOTH)
def test_rows_see_their_keys(kernel: UnderTest, case: Case) -> None:
    """Each row counts the keys that it must see, and no other, whatever the lengths."""
    kernel.must_hold(case)


@asks("future_keys", families=BOTH, shapes={"shortest_kv": 2}, scores=scores)
def test_future_keys_do_not_matter(kernel: UnderTest, case: Case) -> None:
    """No bit of a row moves when the keys and values after it are others."""
    kernel.must_hold(case)


@asks("first_row", families=("causal",), scores=scores)
def test_first_row_is_the_first_value(kernel: UnderTest, case: Case) -> None:
    """Row 0 sees key 0 alone and returns its value, that of the right kv head."""
    kernel.must_hold(case)
