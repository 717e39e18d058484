"""Score mods: biases, caps, temperatures, of the library and beyond."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.cases.strategies.score_strategies import score_chains, score_expressions, scores
from attncheck.suite import asks

if TYPE_CHECKING:
    from attncheck.inputs.problem import Case
    from attncheck.suite import UnderTest


@asks("compare", families=("full", "causal"), scores=scores)
def test_library_is_exact(kernel: UnderTest, case: Case) -> None:
    """ALiBi, a soft cap, a temperature or a relative bias is exact up to rounding."""
    kernel.must_hold(case)


@asks("compare", families=("full",), scores=score_chains)
def test_chains_are_exact(kernel: UnderTest, case: Case) -> None:
    """Score mods in a chain apply from left to right, each to what the last one gave."""
    kernel.must_hold(case)


@asks("compare", families=("full",), scores=score_expressions)
def test_expressions_are_exact(kernel: UnderTest, case: Case) -> None:
    """Any arithmetic of score and indices is exact up to rounding, as are the library's mods."""
    kernel.must_hold(case)


@asks("softcap_infinite", families=("full",))
def test_endless_cap_is_none(kernel: UnderTest, case: Case) -> None:
    """A soft cap beyond every score is no cap."""
    kernel.must_hold(case)
