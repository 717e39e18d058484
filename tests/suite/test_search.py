"""The search for a failing Case: which Case it ends with, and when nothing was tested."""

import dataclasses
from collections.abc import Callable

import hypothesis
import pytest
from hypothesis import strategies as st
from tests.planted_kernels.outputs_given import spoiled

from attncheck.cases.tier import TIERS
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.capabilities.subject import Call, Refused
from attncheck.subjects.ideal import Ideal
from attncheck.suite import pytest_options
from attncheck.suite.property_spec import asks, cases
from attncheck.suite.search import search_cases
from attncheck.suite.under_test import UnderTest
from attncheck.suite.wrong_answers import WrongAnswer

pytest_options.register()
MOST_SUBSTITUTES = 90  # problems tried in place of a refused one
CASES = st.integers(1, 40).map(
    lambda kv: Case(problem=Problem(query=2, kv=kv, head_dim=4, dtype="fp32"))
)


def halving_kernel(wrong: Callable[[int], bool] = lambda kv: kv >= 7, at_four: int = 0) -> Ideal:
    """A kernel that halves out where ``wrong(keys)``, and adds ``at_four`` to it at four keys."""

    def change(inputs: Inputs, right: Outputs) -> Outputs:
        kv = inputs.problem.kv
        return Outputs(right.out / (2 if wrong(kv) else 1) + at_four * (kv == 4), right.lse)

    return spoiled(change)


class Refusing(Ideal):
    name = "refusing"

    def prepare(self, inputs: Inputs) -> Call:
        raise Refused("not on Mondays")


def under_test(subject: Ideal) -> UnderTest:
    tier = dataclasses.replace(TIERS["smoke"], examples=20)
    return UnderTest(subject.name, subject, "cpu", dtype="fp32", family="full", tier=tier)


def holds(kernel: UnderTest, case: Case) -> None:
    kernel.must_hold(case)


def test_search_ends_with_the_smallest_failing_case_and_its_diagnosis():
    kernel = under_test(halving_kernel())
    with pytest.raises(WrongAnswer, match=r"FAIL bound compare: out\[0, \d, ") as raised:
        search_cases(holds, kernel, CASES)
    assert Case.from_json(raised.value.record.case).problem.kv == 7
    assert kernel.tally.problems["fail"] > 1


@pytest.mark.parametrize("keeps_the_fault", [True, False])
def test_search_shrinks_one_failure_without_slipping_to_another(monkeypatch, *, keeps_the_fault):
    """Off by a factor from five keys on, and by one at four, which fits no fault model."""
    if not keeps_the_fault:
        monkeypatch.setattr(UnderTest, "_is_another", lambda *_: False)
    with pytest.raises(WrongAnswer) as raised:
        search_cases(holds, under_test(halving_kernel(lambda kv: kv >= 5, at_four=1)), CASES)
    assert Case.from_json(raised.value.record.case).problem.kv == (5 if keeps_the_fault else 4)
    assert ("the output is off by a factor" in str(raised.value)) == keeps_the_fault


def test_failure_of_an_additional_case_is_raised_with_that_case():
    def more_cases(case: Case) -> list[Case]:
        return [Case(problem=case.problem.replace(kv=case.problem.kv + 6))]

    with pytest.raises(WrongAnswer) as raised:
        search_cases(holds, under_test(halving_kernel()), CASES, more_cases)
    assert Case.from_json(raised.value.record.case).problem.kv == 7


def test_flaky_kernel_is_reported_as_flaky():
    """Wrong on the first long problem only, and never again."""
    first = iter([True])
    seldom = halving_kernel(lambda kv: kv >= 7 and next(first, False))
    with pytest.raises(WrongAnswer, match="It does not fail every time"):
        search_cases(holds, under_test(seldom), CASES)


def test_kernel_that_refuses_every_call_is_skipped():
    with pytest.raises(pytest.skip.Exception, match="takes no such problem on cpu: not on Mondays"):
        search_cases(holds, under_test(Refusing()), CASES)


def test_property_without_any_case_fails():
    with pytest.raises(pytest.fail.Exception, match="nothing was tested"):
        search_cases(holds, under_test(Ideal()), CASES.filter(lambda _: False))


def test_drawn_cases_are_deterministic_and_differ_between_kernels():
    def draw(name: str) -> list[int]:
        kernel = under_test(Ideal())
        kernel.name = name
        lengths: list[int] = []
        search_cases(lambda _, case: lengths.append(case.problem.kv), kernel, CASES)
        return lengths

    assert draw("a") == draw("a")
    assert draw("a") != draw("b")
    assert len(draw("a")) == 20


def test_every_tier_draws_more_than_the_plainest_case():
    for tier in TIERS.values():
        assert hypothesis.settings.get_profile(tier.profile).deadline is None
        assert tier.examples >= tier.examples_on("cpu", triton=True) > 1
        assert tier.examples_on("cuda", triton=True) > 1  # the first is the plainest


def test_kernel_that_refuses_everything_is_given_up_soon():
    class Picky(Ideal):
        name = "picky"
        calls = 0

        def unsupported(self, problem: Problem, device: str) -> str | None:
            self.calls += 1
            return "head_dim must be 512"

    kernel = under_test(picky := Picky())
    (mark,) = _property.pytestmark
    with pytest.raises(pytest.skip.Exception, match="head_dim must be 512"):
        search_cases(holds, kernel, cases(kernel, mark.args[0]))
    assert picky.calls < 200 * MOST_SUBSTITUTES


@asks("compare", families=("full",))
def _property(kernel: UnderTest, case: Case) -> None: ...


def test_kernel_that_takes_few_problems_is_asked_as_many_cases():
    kernel = under_test(Ideal())
    rare = st.integers(1, 400).filter(lambda kv: kv % 20 == 3)
    search_cases(
        holds, kernel, rare.map(lambda kv: Case(problem=Problem(query=1, kv=kv, head_dim=2)))
    )
    assert kernel.tally.total >= 20
