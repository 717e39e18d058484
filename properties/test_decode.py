"""Decoding: a few rows after many keys, with several query heads on each kv head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

from attncheck.core.mod_spec import Spec
from attncheck.suite import asks

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from attncheck.inputs.problem import Case, Problem
    from attncheck.suite import UnderTest

# One row, or a few as in speculative decoding; up to 8 query heads on a kv head.
MOST_ROWS = 4
FEW = {"longest_query": MOST_ROWS, "most_heads": 8, "largest_group": 8}
# The prefill whose last rows are decoded: as many rows as a kernel for decoding takes.
PREFILL = {**FEW, "longest_query": 16, "shortest_query": 2}


def few(problem: Problem) -> bool:
    """Return whether so few rows could be decoded at once."""
    return problem.query <= MOST_ROWS


def grouped(problem: Problem) -> bool:
    """Return whether a kv head has several query heads."""
    return few(problem) and problem.group > 1


def nothing_but_padding(problem: Problem) -> bool:
    """Return whether a sequence has no key."""
    return few(problem) and 0 in problem.mask.values["lengths"]


def alibi() -> SearchStrategy[Spec]:
    """Return a strategy of ALiBi alone."""
    return st.just(Spec.of("alibi"))


def later_alibi() -> SearchStrategy[Spec]:
    """Return a strategy of ALiBi after earlier rows: none, some, or more than there are keys."""
    rows = st.sampled_from((1, 0, 33, 1000))
    return rows.map(lambda n: Spec.of("offset", Spec.of("alibi"), rows=n))


@asks(
    "compare",
    families=("full", "causal_bottom_right", "padding", "offset", "bottom_right"),
    shapes=FEW,
    where=few,
)
def test_attention_is_exact(kernel: UnderTest, case: Case) -> None:
    """Every element, and LSE, of one to four rows is exact up to rounding."""
    kernel.must_hold(case)


@asks(
    "decode", families=("full", "causal_bottom_right", "padding", "offset"), shapes=FEW, where=few
)
def test_rows_see_their_keys(kernel: UnderTest, case: Case) -> None:
    """Each row sees exactly the keys that the mask shows it, each of them once."""
    kernel.must_hold(case)


@asks("compare", families=("causal_bottom_right",), where=grouped, shapes=FEW)
def test_groups_are_exact(kernel: UnderTest, case: Case) -> None:
    """The same where 2 to 8 heads read one kv head."""
    kernel.must_hold(case)


@asks(
    "compare", families=("causal_bottom_right", "offset"), scores=later_alibi, shapes=FEW, where=few
)
def test_distances_are_exact(kernel: UnderTest, case: Case) -> None:
    """The same with a bias by the distance from the row's place behind earlier ones."""
    kernel.must_hold(case)


@asks("prefill_rows", families=("causal", "sliding_window", "padding"), shapes=PREFILL)
def test_decoding_is_the_end_of_prefill(kernel: UnderTest, case: Case) -> None:
    """The last rows alone, their mask told how many came before, are those of all rows."""
    kernel.must_hold(case)


@asks("prefill_rows", families=("causal",), scores=alibi, shapes=PREFILL)
def test_decoding_is_biased_as_prefill_is(kernel: UnderTest, case: Case) -> None:
    """The same of a bias by distance."""
    kernel.must_hold(case)


@asks("launches", families=("full", "padding", "offset"), shapes=FEW, where=few)
def test_splits_do_not_matter(kernel: UnderTest, case: Case) -> None:
    """One split or several, also more than there are blocks of keys, give the same."""
    kernel.must_hold(case)


@asks("hidden_keys", families=("padding", "offset"), shapes={**FEW, "shortest_kv": 2}, where=few)
def test_hidden_keys_do_not_matter(kernel: UnderTest, case: Case) -> None:
    """No bit of a row moves for keys and values that it does not see."""
    kernel.must_hold(case)


@asks("hidden_keys_nan", families=("padding",), shapes={**FEW, "shortest_kv": 2}, where=few)
def test_stale_keys_may_be_nan(kernel: UnderTest, case: Case) -> None:
    """What a cache holds behind the last key reaches no row."""
    kernel.must_hold(case)


@asks("empty_rows", families=("padding",), where=nothing_but_padding, shapes=FEW)
def test_sequences_without_keys_are_zero(kernel: UnderTest, case: Case) -> None:
    """A sequence that has no key yet gives 0 and an LSE of −∞."""
    kernel.must_hold(case)
