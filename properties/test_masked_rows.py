"""Rows that see no key: out is 0 and LSE −∞, and neighbouring rows stay right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.suite import asks

if TYPE_CHECKING:
    from attncheck.inputs.problem import Case, Problem
    from attncheck.suite import UnderTest


def may_be_empty(problem: Problem) -> bool:
    """Return whether a row sees no key, judging by the mask's numbers."""
    if problem.mask.name == "causal_bottom_right":
        return problem.query > problem.kv
    if problem.mask.name == "padding":
        return 0 in problem.mask.values["lengths"]
    return problem.mask.values["window"] == 0 or problem.query > problem.kv


@asks(
    "empty_rows", families=("sliding_window", "padding", "causal_bottom_right"), where=may_be_empty
)
def test_empty_rows_are_zero(kernel: UnderTest, case: Case) -> None:
    """A row without keys gives 0 and an LSE of −∞."""
    kernel.must_hold(case)


@asks("compare", families=("padding", "causal_bottom_right"), where=may_be_empty)
def test_rows_beside_them_are_exact(kernel: UnderTest, case: Case) -> None:
    """Rows with keys are exact beside rows without."""
    kernel.must_hold(case)
