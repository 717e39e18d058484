"""What is asked of pages, of a kernel that finds every key where it lies."""

import dataclasses

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from attncheck.suite.property_spec import cases

ASKED = {
    "attention_is_exact": "causal_bottom_right",
    "decoding_is_exact": "padding",
    "rows_see_their_keys": "padding",
    "pages_may_lie_anywhere": "padding",
    "stale_values_do_not_matter": "padding",
    "shared_pages_are_exact": "padding",
    "grouped_queries_are_exact": "causal_bottom_right",
}


@pytest.mark.parametrize("name", ASKED)
def test_a_right_kernel_passes(suite, name):
    """The faults of its pages are faults of it: nothing else of them is wrong."""
    kernel = suite.under_test("Gathering", ASKED[name], "bf16")
    few = settings(max_examples=6, derandomize=True, database=None, deadline=None)

    @settings(few, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(cases(kernel, suite.properties[f"paged.{name}"]))
    def holds(case) -> None:
        kernel.must_hold(case)

    holds()
    asked = kernel.tally.problems
    assert asked["pass"] == sum(asked.values()) == few.max_examples


def test_every_property_of_pages_draws_pages(suite):
    of_pages = {name for name in suite.properties if name.startswith("paged.")}
    assert of_pages == {f"paged.{name}" for name in ASKED}
    assert all(suite.properties[name].kind.paged for name in of_pages)
    assert not dataclasses.replace(
        suite.properties["paged.attention_is_exact"], problems={}
    ).kind.paged
