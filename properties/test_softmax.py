"""Row softmax, and laws of softmax that also hold for attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.suite import asks

if TYPE_CHECKING:
    from attncheck.inputs.problem import Case
    from attncheck.suite import UnderTest


@asks("compare", families=("softmax",))
def test_softmax_is_exact(kernel: UnderTest, case: Case) -> None:
    """Every element, and LSE, is that of the exact softmax up to rounding."""
    kernel.must_hold(case)


@asks("softmax_shift", "softmax_columns", families=("softmax",))
def test_shift_and_order_of_scores(kernel: UnderTest, case: Case) -> None:
    """A shift of a row's scores leaves its weights, and another order gives them in that order."""
    kernel.must_hold(case)


@asks("softmax_rows", "repeat", families=("softmax",))
def test_rows_alone_decide(kernel: UnderTest, case: Case) -> None:
    """A row's bits depend on its scores alone: not on its place, nor on the run."""
    kernel.must_hold(case)


@asks("ones", families=("causal",))
def test_weights_add_up_to_one(kernel: UnderTest, case: Case) -> None:
    """Where all values are equal, so is every row of out: its weights add up to 1."""
    kernel.must_hold(case)


@asks("key_permutation", families=("full",))
def test_order_of_keys_does_not_matter(kernel: UnderTest, case: Case) -> None:
    """Keys and values in another order give the same out and LSE: a sum has no order."""
    kernel.must_hold(case)


@asks("key_shift", families=("full",))
def test_shift_of_keys_leaves_out(kernel: UnderTest, case: Case) -> None:
    """A vector added to every key moves all scores of a row alike, and softmax forgets it."""
    kernel.must_hold(case)


@asks("one_hot", families=("full",))
def test_saturated_row_is_a_value(kernel: UnderTest, case: Case) -> None:
    """A row whose weight is all on one key returns that key's value."""
    kernel.must_hold(case)
