"""Sinks: one further logit per head in the softmax of every row, without a value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.cases.strategies.score_strategies import scores
from attncheck.suite import asks

if TYPE_CHECKING:
    from attncheck.inputs.problem import Case, Problem
    from attncheck.suite import UnderTest

MASKS = ("full", "causal", "sliding_window", "padding")


def sees_nothing_somewhere(problem: Problem) -> bool:
    """Return whether a row sees no key: its out is 0 and its LSE the sink."""
    if problem.mask.name == "padding":
        return 0 in problem.mask.values["lengths"]
    return problem.mask.values["window"] == 0 or problem.query > problem.kv


@asks("compare", families=MASKS, sinks=True)
def test_attention_with_a_sink_is_exact(kernel: UnderTest, case: Case) -> None:
    """Every element, and LSE with the sink in it, is exact up to rounding."""
    kernel.must_hold(case)


@asks("compare", families=("causal",), scores=scores, sinks=True)
def test_score_mods_are_not_for_the_sink(kernel: UnderTest, case: Case) -> None:
    """Scale and score mod are of scores alone; the sink stands beside what they give."""
    kernel.must_hold(case)


@asks("compare", families=("full",), sinks=True, amplitudes=(60, 400))
def test_large_sinks_are_exact(kernel: UnderTest, case: Case) -> None:
    """Sinks of hundreds of nats, above every score or below: nothing overflows."""
    kernel.must_hold(case)


@asks("compare", families=("sliding_window", "padding"), where=sees_nothing_somewhere, sinks=True)
def test_rows_without_keys_have_the_sink_alone(kernel: UnderTest, case: Case) -> None:
    """A row that sees no key gives 0 and the sink, and its neighbours what they must."""
    kernel.must_hold(case)


@asks("hidden_keys", families=("causal", "padding"), sinks=True)
def test_hidden_keys_do_not_matter(kernel: UnderTest, case: Case) -> None:
    """No bit of a row moves with what it does not see, the sink beside it or not."""
    kernel.must_hold(case)


@asks(
    "head_permutation",
    families=("full",),
    where=lambda problem: problem.heads > 1,
    sinks=True,
)
def test_each_head_has_its_own(kernel: UnderTest, case: Case) -> None:
    """Heads in another order, sinks with them, give the same heads in that order."""
    kernel.must_hold(case)


@asks("split_merge", families=("full", "causal"), shapes={"shortest_kv": 2}, sinks=True)
def test_it_is_one_key(kernel: UnderTest, case: Case) -> None:
    """Keys in two parts, the sink in one of them, are merged through LSE to the whole."""
    kernel.must_hold(case)
