"""Log-sum-exp, in natural logarithms, which backward passes and merges of splits need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.suite import asks

if TYPE_CHECKING:
    from attncheck.inputs.problem import Case
    from attncheck.suite import UnderTest


@asks("zero_query", families=("causal", "padding"))
def test_zero_query_counts_keys(kernel: UnderTest, case: Case) -> None:
    """With q = 0 every LSE is the logarithm of the number of keys that the row sees."""
    kernel.must_hold(case)


@asks("logit_shift", families=("full",))
def test_shift_of_logits_shifts_it(kernel: UnderTest, case: Case) -> None:
    """A constant added to all scores of a row moves its LSE by that constant."""
    kernel.must_hold(case)


@asks("negative", "positive", "two_level", families=("full",))
def test_levels_of_logits(kernel: UnderTest, case: Case) -> None:
    """Scores far below 0, far above, and of two levels give the weights and LSE they must."""
    kernel.must_hold(case)
