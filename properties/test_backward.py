"""The backward: gradients of q, k, v, sinks and tables, from what the kernel's forward saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncheck.cases.strategies.score_strategies import captured_scores, scores
from attncheck.suite import asks

if TYPE_CHECKING:
    from attncheck.inputs.problem import Case, Problem
    from attncheck.suite import UnderTest

# The families whose tiles a backward visits in another order than its forward does.
MASKS = ("full", "causal", "sliding_window", "prefix_lm", "document", "padding", "composition")
OUT: dict[str, Any] = {"backward": True}
EITHER = OUT | {"dlse": None}


def grouped(problem: Problem) -> bool:
    """Return whether a kv head has several query heads."""
    return problem.group > 1


@asks("compare", families=MASKS, **EITHER)
def test_gradients_are_exact(kernel: UnderTest, case: Case) -> None:
    """Every element of dQ, dK and dV is exact up to rounding; 0 where nothing is seen."""
    kernel.must_hold(case)


@asks("compare", families=("causal", "full"), scores=scores, **EITHER)
def test_through_score_mods(kernel: UnderTest, case: Case) -> None:
    """Gradients pass through the score mod's derivative."""
    kernel.must_hold(case)


@asks("compare", families=("causal", "full"), scores=captured_scores, dcaptured=True, **EITHER)
def test_captured_gradients(kernel: UnderTest, case: Case) -> None:
    """Slopes, tables and biases that a score mod reads have gradients; hidden keys add nothing."""
    kernel.must_hold(case)


@asks("compare", families=("causal",), sinks=True, **EITHER)
def test_with_a_sink(kernel: UnderTest, case: Case) -> None:
    """A sink takes its share of P, and has a gradient of its own."""
    kernel.must_hold(case)


@asks("compare", "group_sums", families=("causal",), where=grouped, **OUT)
def test_groups_are_summed(kernel: UnderTest, case: Case) -> None:
    """The gradient of a shared key head is the sum over the query heads that read it."""
    kernel.must_hold(case)


@asks("zero_loss", families=("full", "causal"), **EITHER)
def test_no_loss_has_no_gradients(kernel: UnderTest, case: Case) -> None:
    """A loss that depends on nothing has gradients of exactly 0: no buffer keeps another call's."""
    kernel.must_hold(case)


@asks("lse_loss", families=("full", "causal"), backward=True, dlse=True)
def test_lse_alone_moves_no_values(kernel: UnderTest, case: Case) -> None:
    """A loss of LSE alone has a gradient of exactly 0 in V."""
    kernel.must_hold(case)


@asks("euler", families=("full", "causal"), **OUT)
def test_query_and_key_gradients_belong_together(kernel: UnderTest, case: Case) -> None:
    """Σ q·dQ over the rows that read a key head is Σ k·dK over its keys."""
    kernel.must_hold(case)


@asks("key_shift", families=("full", "causal"), **EITHER)
def test_a_shift_of_keys_leaves_them(kernel: UnderTest, case: Case) -> None:
    """A vector added to every key moves no gradient, but for the loss's part of LSE."""
    kernel.must_hold(case)


@asks("key_permutation", families=("full", "padding"), **OUT)
def test_keys_in_another_order(kernel: UnderTest, case: Case) -> None:
    """Keys in another order have their gradients in that order."""
    kernel.must_hold(case)


@asks("head_permutation", "batch_permutation", families=("causal",), **OUT)
def test_heads_and_sequences_know_no_place(kernel: UnderTest, case: Case) -> None:
    """Heads, or sequences, in another order have their gradients in that order."""
    kernel.must_hold(case)


@asks(
    "strides_heads_last",
    "strides_gapped",
    "strides_packed",
    "strides_expanded",
    "strides_far",
    families=("causal",),
    **OUT,
)
def test_layouts(kernel: UnderTest, case: Case) -> None:
    """q, k, v and dOut laid out otherwise in memory, dOut with strides of 0, give the same."""
    kernel.must_hold(case)


@asks("repeat", "call_order", families=("causal", "document"), **OUT)
def test_runs_agree(kernel: UnderTest, case: Case) -> None:
    """The same call gives the same gradients, also after a call on other inputs."""
    kernel.must_hold(case)
