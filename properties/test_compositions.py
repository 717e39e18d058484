"""Masks of masks, and masks beyond the library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.cases.strategies.score_strategies import score_chains
from attncheck.suite import asks

if TYPE_CHECKING:
    from attncheck.inputs.problem import Case
    from attncheck.suite import UnderTest


@asks("compare", families=("composition", "expression"))
def test_attention_is_exact(kernel: UnderTest, case: Case) -> None:
    """Every element, and LSE, is that of exact attention under any mask up to rounding."""
    kernel.must_hold(case)


@asks("decode", "isolated", families=("composition", "expression"))
def test_rows_see_their_keys(kernel: UnderTest, case: Case) -> None:
    """Each row counts the keys that the mask shows it, however it is nested or written."""
    kernel.must_hold(case)


@asks("compare", families=("composition",), scores=score_chains)
def test_masks_with_score_mods(kernel: UnderTest, case: Case) -> None:
    """Masks and score mods do not get into each other's way."""
    kernel.must_hold(case)
