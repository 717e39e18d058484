"""Hidden keys and values may be anything, for example an uninitialised cache."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from attncheck.cases.strategies.score_strategies import scores
from attncheck.suite import asks

if TYPE_CHECKING:
    from attncheck.inputs.problem import Case
    from attncheck.suite import UnderTest


@asks(
    "hidden_keys_nan",
    families=("causal", "sliding_window", "padding", "document"),
    shapes={"shortest_kv": 2},
)
def test_nan_in_hidden_keys(kernel: UnderTest, case: Case) -> None:
    """Hidden keys and values may be NaN, and no bit moves: 0 · NaN is NaN to who multiplies."""
    kernel.must_hold(case)


@asks(
    "hidden_keys_nan",
    families=("causal",),
    dtypes=("fp16",),
    scores=partial(scores, names=("none", "softcap")),
    shapes={"shortest_kv": 2, "longest": 40},
    backward=True,
)
def test_nan_in_hidden_keys_of_a_backward(kernel: UnderTest, case: Case) -> None:
    """Nor does one of dQ: the slope of a score mod at a NaN is NaN, and so is 0 times it."""
    kernel.must_hold(case)


@asks(
    "hidden_keys_huge",
    families=("causal", "sliding_window", "padding", "document"),
    shapes={"shortest_kv": 2},
)
def test_huge_hidden_keys(kernel: UnderTest, case: Case) -> None:
    """Hidden keys and values may be so large that q·k overflows, and no bit moves."""
    kernel.must_hold(case)


@asks("future_keys_nan", families=("causal",), shapes={"shortest_kv": 2})
def test_nan_in_the_future(kernel: UnderTest, case: Case) -> None:
    """Keys and values after a row may be NaN, as in a cache that is not yet full."""
    kernel.must_hold(case)


@asks("future_keys_huge", families=("causal",), shapes={"shortest_kv": 2})
def test_huge_future(kernel: UnderTest, case: Case) -> None:
    """Keys and values after a row may be huge."""
    kernel.must_hold(case)
