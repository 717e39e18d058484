"""Properties of paged attention: a correct kernel passes them, and all of them draw pages."""

import dataclasses

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from attncheck.suite.property_spec import cases

FAMILIES = {
    "attention_is_exact": "causal_bottom_right",
    "decoding_is_exact": "padding",
    "rows_see_their_keys": "padding",
    "pages_may_lie_anywhere": "padding",
    "stale_values_do_not_matter": "padding",
    "shared_pages_are_exact": "padding",
    "grouped_queries_are_exact": "causal_bottom_right",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_correct_kernel_passes(suite, name):
    """Kernels with planted faults in their pages differ from this one in the fault alone."""
    kernel = suite.under_test("Gathering", FAMILIES[name], "bf16")
    few = settings(max_examples=6, derandomize=True, database=None, deadline=None)

    @settings(few, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(cases(kernel, suite.properties[f"paged.{name}"]))
    def holds(case) -> None:
        kernel.must_hold(case)

    holds()
    statuses = kernel.tally.problems
    assert statuses["pass"] == sum(statuses.values()) == few.max_examples


def test_every_paged_property_draws_pages(suite):
    paged = {name for name in suite.properties if name.startswith("paged.")}
    assert paged == {f"paged.{name}" for name in FAMILIES}
    assert all(suite.properties[name].kind.paged for name in paged)
    assert not dataclasses.replace(
        suite.properties["paged.attention_is_exact"], problems={}
    ).kind.paged
