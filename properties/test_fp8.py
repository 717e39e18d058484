"""fp8: stored numbers with descales, and P in fp8, under everything that other dtypes have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.cases.strategies.sizes import pagings
from attncheck.suite import asks

if TYPE_CHECKING:
    from attncheck.inputs.problem import Case, Problem
    from attncheck.suite import UnderTest

FP8 = ("e4m3", "e5m2")
SMALL_PAGES = (16, 32, 3)


def decoding(problem: Problem) -> bool:
    """Return whether there are up to four rows, and at least as many keys."""
    return problem.query <= 4 and problem.kv >= problem.query


def grouped(problem: Problem) -> bool:
    """Return whether there are several kv heads, each with its descales and several query heads."""
    return problem.group > 1 and problem.kv_heads > 1


def several(problem: Problem) -> bool:
    """Return whether there are several sequences, each with its own descales."""
    return problem.batch > 1


@asks("compare", families=("full", "causal", "sliding_window", "document"), dtypes=FP8)
def test_attention_is_exact(kernel: UnderTest, case: Case) -> None:
    """Every element, and LSE, is exact for the stored numbers times their descales."""
    kernel.must_hold(case)


@asks("compare", families=("full", "causal_bottom_right"), dtypes=FP8, where=decoding)
def test_decoding_is_exact(kernel: UnderTest, case: Case) -> None:
    """The same of one row or a few over many keys."""
    kernel.must_hold(case)


@asks("compare", families=("causal",), dtypes=FP8, where=grouped, shapes={"most_heads": 8})
def test_grouped_queries_are_exact(kernel: UnderTest, case: Case) -> None:
    """A head of q has the descales of the kv head that it reads."""
    kernel.must_hold(case)


@asks("compare", families=("full", "padding"), dtypes=FP8, where=several)
def test_sequences_are_exact(kernel: UnderTest, case: Case) -> None:
    """A sequence has its own descales."""
    kernel.must_hold(case)


@asks("compare", families=("full",), dtypes=FP8, sinks=True)
def test_a_sink_is_exact(kernel: UnderTest, case: Case) -> None:
    """A sink is a natural logit, and no descale is for it."""
    kernel.must_hold(case)


@asks(
    "compare",
    "two_level",
    families=("full", "causal"),
    dtypes=FP8,
    distributions=("sink", "outliers", "large_logits"),
)
def test_small_weights_are_kept(kernel: UnderTest, case: Case) -> None:
    """P is scaled before it is rounded: weights below the format's smallest number count."""
    kernel.must_hold(case)


@asks("compare", families=("full", "padding"), dtypes=FP8, pagings=pagings(sizes=SMALL_PAGES))
def test_pages_are_exact(kernel: UnderTest, case: Case) -> None:
    """Keys and values in pages keep the descales of their sequence."""
    kernel.must_hold(case)


@asks("descale", families=("full", "document"), dtypes=FP8)
def test_descales(kernel: UnderTest, case: Case) -> None:
    """Stored numbers half as large with twice the descale mean the same."""
    kernel.must_hold(case)


@asks("zero_values", "values_scaled", families=("full", "causal"), dtypes=FP8)
def test_values_are_linear(kernel: UnderTest, case: Case) -> None:
    """Values of 0 give exactly 0, and twice the values twice the out."""
    kernel.must_hold(case)


@asks("decode", "ramp", "ones", families=("full", "causal"), dtypes=FP8)
def test_exact_sums(kernel: UnderTest, case: Case) -> None:
    """Whole numbers, stored with descales that are powers of two, come out whole."""
    kernel.must_hold(case)
