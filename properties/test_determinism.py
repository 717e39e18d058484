"""Same inputs, same bits: run to run, in any batch, after any call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.cases.strategies.score_strategies import scores
from attncheck.suite import asks

if TYPE_CHECKING:
    from attncheck.inputs.problem import Case
    from attncheck.suite import UnderTest


@asks("repeat", "call_order", families=("full", "causal"), scores=scores)
def test_two_runs_agree(kernel: UnderTest, case: Case) -> None:
    """Two runs on the same inputs agree in every bit, whatever ran between them."""
    kernel.must_hold(case)


@asks(
    "mask_order",
    families=("causal", "sliding_window"),
    shapes={"shortest_query": 2, "shortest_kv": 2},
)
def test_masks_are_not_kept(kernel: UnderTest, case: Case) -> None:
    """A call under another mask, at the same lengths, leaves nothing for the next one."""
    kernel.must_hold(case)


@asks("alone_in_batch", families=("causal",))
def test_alone_equals_in_a_batch(kernel: UnderTest, case: Case) -> None:
    """A sequence alone gives the bits that it gives in a batch."""
    kernel.must_hold(case)


@asks("head_permutation", "batch_permutation", families=("full",))
def test_order_of_heads_and_sequences(kernel: UnderTest, case: Case) -> None:
    """Heads or sequences in another order give the same rows in that order."""
    kernel.must_hold(case)
