"""Blocks of keys that a mask hides or shows completely: in both, kernels leave out work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.cases.strategies.score_strategies import scores
from attncheck.suite import asks

if TYPE_CHECKING:
    from attncheck.inputs.problem import Case, Problem
    from attncheck.suite import UnderTest

FAMILIES = (
    "causal",
    "sliding_window",
    "document",
    "prefix_lm",
    "neighborhood",
    "composition",
    "expression",
)
# Longer than one block of any interpreted kernel, which has blocks of 32.
SEVERAL = {"shortest_query": 34, "shortest_kv": 34}
EMPTY = 32


def has_empty_blocks(problem: Problem) -> bool:
    """Return whether ``EMPTY`` consecutive rows see no key, judging by the mask's numbers."""
    if problem.mask.name == "padding":
        return 0 in problem.mask.values["lengths"]
    return problem.query - problem.kv >= EMPTY


@asks("compare", families=FAMILIES, shapes=SEVERAL, sinks=None)
def test_attention_is_exact(kernel: UnderTest, case: Case) -> None:
    """Every element is exact at lengths of several blocks, of which some are hidden or whole."""
    kernel.must_hold(case)


@asks(
    "launches",
    families=("full", "causal", "sliding_window", "document", "expression"),
    shapes=SEVERAL,
    scores=scores,
    sinks=None,
)
def test_launches_agree(kernel: UnderTest, case: Case) -> None:
    """Other blocks, other splits and a walk over all blocks give the same."""
    kernel.must_hold(case)


@asks(
    "hidden_keys_nan",
    families=("causal", "sliding_window", "document", "prefix_lm"),
    shapes=SEVERAL,
)
def test_nan_in_hidden_blocks(kernel: UnderTest, case: Case) -> None:
    """Keys and values of hidden blocks, and hidden ones of others, may be NaN: no bit moves."""
    kernel.must_hold(case)


@asks(
    "compare",
    "empty_rows",
    families=("padding", "causal_bottom_right"),
    shapes={"shortest_query": EMPTY + 1},
    where=has_empty_blocks,
)
def test_blocks_of_empty_rows(kernel: UnderTest, case: Case) -> None:
    """Blocks of rows that see no key give 0 and −∞, and those beside them what is exact."""
    kernel.must_hold(case)
