"""Keys and values in pages, behind a table: prefill and decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.cases.strategies.sizes import pagings
from attncheck.suite import asks

if TYPE_CHECKING:
    from attncheck.inputs.problem import Case, Problem
    from attncheck.suite import UnderTest

# A few pages within the shortest lengths that are drawn.
SMALL = (16, 32, 3, 64)


def decoding(problem: Problem) -> bool:
    """Return whether there is one row, or a few as in speculative decoding, and more keys."""
    return problem.query in {1, 2, 3} and problem.kv >= problem.query


def grouped(problem: Problem) -> bool:
    """Return whether a kv head has several query heads."""
    return problem.group > 1


def shares(problem: Problem) -> bool:
    """Return whether several sequences share a page."""
    paging = problem.paging
    return problem.batch > 1 and paging is not None and paging.size * paging.shared <= problem.kv


@asks(
    "compare",
    families=("full", "causal_bottom_right", "padding", "bottom_right"),
    pagings=pagings(),
)
def test_attention_is_exact(kernel: UnderTest, case: Case) -> None:
    """Every element, and LSE, is exact up to rounding, in pages of any size and order."""
    kernel.must_hold(case)


@asks("compare", families=("full", "padding"), where=decoding, pagings=pagings(sizes=SMALL))
def test_decoding_is_exact(kernel: UnderTest, case: Case) -> None:
    """The same of one row or a few: sequences of other lengths, of none, of exactly a page."""
    kernel.must_hold(case)


@asks("decode", families=("full", "padding"), pagings=pagings(sizes=SMALL))
def test_rows_see_their_keys(kernel: UnderTest, case: Case) -> None:
    """A row sees its own sequence's keys, each once, and nothing of any other page."""
    kernel.must_hold(case)


@asks("pages", families=("full", "padding"), pagings=pagings(sizes=SMALL))
def test_pages_may_lie_anywhere(kernel: UnderTest, case: Case) -> None:
    """Pages of another size, in another order, shared or not, give the same."""
    kernel.must_hold(case)


@asks("hidden_keys_nan", families=("padding",), pagings=pagings(sizes=SMALL))
def test_stale_values_do_not_matter(kernel: UnderTest, case: Case) -> None:
    """What a sequence's last page holds behind its last key may be NaN."""
    kernel.must_hold(case)


@asks(
    "compare",
    families=("padding",),
    where=shares,
    shapes={"most_heads": 8},
    pagings=pagings(sizes=SMALL, shared=(1, 2)),
)
def test_shared_pages_are_exact(kernel: UnderTest, case: Case) -> None:
    """Sequences that begin with the same pages are exact, whether they end in them or not."""
    kernel.must_hold(case)


@asks("compare", families=("causal_bottom_right",), where=grouped, pagings=pagings(sizes=SMALL))
def test_grouped_queries_are_exact(kernel: UnderTest, case: Case) -> None:
    """The same with several query heads on each kv head."""
    kernel.must_hold(case)
