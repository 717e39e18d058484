"""Grouped queries: head h reads kv head h // group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.suite import asks

if TYPE_CHECKING:
    from attncheck.inputs.problem import Case, Problem
    from attncheck.suite import UnderTest


def grouped(problem: Problem) -> bool:
    """Several query heads on a kv head."""
    return problem.group > 1


@asks("compare", families=("causal",), where=grouped)
def test_attention_is_exact(kernel: UnderTest, case: Case) -> None:
    """Every element, and LSE, is exact up to rounding with 2–6 query heads on each kv head."""
    kernel.must_hold(case)


@asks("gqa_repeat", families=("full",), where=grouped)
def test_groups_equal_repeated_heads(kernel: UnderTest, case: Case) -> None:
    """Shared key heads give what the same heads repeated give."""
    kernel.must_hold(case)
