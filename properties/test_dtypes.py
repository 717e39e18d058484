"""Numbers: distributions, amplitudes, scales and descales."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.suite import asks

if TYPE_CHECKING:
    from attncheck.inputs.problem import Case
    from attncheck.suite import UnderTest

SMALL = {"head_dims": (16, 64)}


@asks("compare", families=("full",), shapes=SMALL)
def test_every_distribution_is_exact(kernel: UnderTest, case: Case) -> None:
    """Outliers, one sign, saturated and flat rows, sinks, at amplitudes up to 400."""
    kernel.must_hold(case)


@asks(
    "compare",
    families=("causal",),
    shapes=SMALL,
    amplitudes=(60.0, 400.0),
    distributions=("normal", "large_logits", "negative_logits"),
)
def test_large_logits_are_exact(kernel: UnderTest, case: Case) -> None:
    """Logits of hundreds, all of one sign too, overflow nowhere and lose nothing."""
    kernel.must_hold(case)


@asks("values_scaled", "values_added", "zero_values", families=("full",))
def test_values_are_linear(kernel: UnderTest, case: Case) -> None:
    """Out is linear in V: twice the values give twice the out, and values of 0 give 0."""
    kernel.must_hold(case)


@asks("scaled_query", families=("full",), dtypes=("fp32", "tf32", "fp16", "bf16"))
def test_scale_may_be_in_the_query(kernel: UnderTest, case: Case) -> None:
    """A scale on q·k and the same in q are one."""
    kernel.must_hold(case)


@asks("descale", families=("causal",), dtypes=("e4m3", "e5m2"))
def test_descales(kernel: UnderTest, case: Case) -> None:
    """Stored fp8 numbers twice as large with half the descale mean the same."""
    kernel.must_hold(case)


@asks("ramp", "mean", families=("full",))
def test_exact_sums(kernel: UnderTest, case: Case) -> None:
    """Sums of whole numbers come out whole: no value is dropped and none is counted twice."""
    kernel.must_hold(case)
