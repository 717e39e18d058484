"""Prefix-LM: every row sees the prefix; after it attention is causal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.suite import asks

if TYPE_CHECKING:
    from attncheck.inputs.problem import Case
    from attncheck.suite import UnderTest


@asks("compare", families=("prefix_lm",))
def test_attention_is_exact(kernel: UnderTest, case: Case) -> None:
    """Every element, and LSE, is that of exact prefix-LM attention up to rounding."""
    kernel.must_hold(case)


@asks("decode", "isolated", families=("prefix_lm",))
def test_rows_see_their_keys(kernel: UnderTest, case: Case) -> None:
    """Each row sees the whole prefix and the keys up to its own, wherever the prefix ends."""
    kernel.must_hold(case)


@asks("prefix_zero", "prefix_full", families=("prefix_lm",))
def test_prefix_of_nothing_and_of_everything(kernel: UnderTest, case: Case) -> None:
    """A prefix of nothing is causal attention, and one of every key is full attention."""
    kernel.must_hold(case)
