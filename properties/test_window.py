"""Sliding windows: a row sees the last ``window`` keys up to and including its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.suite import asks

if TYPE_CHECKING:
    from attncheck.inputs.problem import Case
    from attncheck.suite import UnderTest


@asks("compare", families=("sliding_window",))
def test_attention_is_exact(kernel: UnderTest, case: Case) -> None:
    """Every element, and LSE, is that of exact windowed attention up to rounding."""
    kernel.must_hold(case)


@asks("decode", "isolated", families=("sliding_window",))
def test_rows_see_their_keys(kernel: UnderTest, case: Case) -> None:
    """Each row sees as many keys as the window is long, both ends where they belong."""
    kernel.must_hold(case)


@asks("hidden_keys", "future_keys", families=("sliding_window",), shapes={"shortest_kv": 2})
def test_far_keys_do_not_matter(kernel: UnderTest, case: Case) -> None:
    """No bit of a row moves when keys and values outside of its window are others."""
    kernel.must_hold(case)


@asks("window_beyond", families=("sliding_window",))
def test_window_beyond_the_length_is_none(kernel: UnderTest, case: Case) -> None:
    """A window of the length or longer is causal attention without a window, bit for bit."""
    kernel.must_hold(case)
