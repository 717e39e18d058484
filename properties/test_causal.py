"""Causal attention: what holds to the last bit, without an oracle and without a tolerance."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from attncheck.problem import Case
from attncheck.relations import relation_named
from attncheck.strategies import causal_masks, masks, parameters, problems, scores, shapes

if TYPE_CHECKING:
    from attncheck.examine.under_test import UnderTest


@given(data=st.data())
def test_future_keys_do_not_matter(kernel: UnderTest, data: st.DataObject) -> None:
    """Keys and values after a row may be others, or huge: no bit of the row moves."""
    question = data.draw(st.sampled_from(("future_keys", "future_keys_huge")), label="question")
    future_must_not_matter(kernel, data, question)


@given(data=st.data())
def test_nan_in_future_keys_does_not_matter(kernel: UnderTest, data: st.DataObject) -> None:
    """Keys and values after a row may be NaN, as in a cache that nobody has written to yet.

    A test of its own, since many kernels multiply a hidden value by 0, which leaves a NaN.
    """
    future_must_not_matter(kernel, data, "future_keys_nan")


@given(data=st.data())
def test_first_row_is_the_first_value(kernel: UnderTest, data: st.DataObject) -> None:
    """Row 0 sees key 0 alone and returns its value, that of the right kv head."""
    problem = data.draw(
        problems(
            masks=partial(masks, names=("causal", "sliding_window")),
            scores=scores(names=("none", "alibi", "softcap", "temperature")),
            supports=kernel.supports,
        ),
        label="problem",
    )
    kernel.must_hold(Case(problem=problem, question="first_row"))


@given(data=st.data())
def test_zero_values_give_zero(kernel: UnderTest, data: st.DataObject) -> None:
    """V = 0 gives 0 in every row, whether it sees a key or not."""
    problem = data.draw(
        problems(masks=causal_masks, scores=scores(), supports=kernel.supports), label="problem"
    )
    kernel.must_hold(Case(problem=problem, question="zero_values"))


@given(data=st.data())
def test_two_runs_agree(kernel: UnderTest, data: st.DataObject) -> None:
    """The same inputs give the same bits."""
    problem = data.draw(
        problems(masks=causal_masks, scores=scores(), supports=kernel.supports), label="problem"
    )
    kernel.must_hold(Case(problem=problem, question="repeat"))


def future_must_not_matter(kernel: UnderTest, data: st.DataObject, question: str) -> None:
    """Asks ``question`` of a drawn Problem in which some key is hidden, and of one of its rows."""
    problem = data.draw(
        problems(
            shapes=shapes(shortest_kv=2),  # so that there is a key to hide
            masks=causal_masks,
            scores=scores(),
            supports=kernel.supports,
        ),
        label="problem",
    )
    allowed = relation_named(question).allowed(problem)
    chosen = data.draw(parameters(allowed=allowed), label="parameters")
    kernel.must_hold(Case(problem=problem, question=question, parameters=chosen))
