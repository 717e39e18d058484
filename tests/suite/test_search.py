"""The search for a Case that fails: what it ends with, and when nothing was tested."""

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
MOST_NEAR = 90  # problems that are tried in place of a refused one
CASES = st.integers(1, 40).map(
    lambda kv: Case(problem=Problem(query=2, kv=kv, head_dim=4, dtype="fp32"))
)


def halves(wrong: Callable[[int], bool] = lambda kv: kv >= 7, at_four: int = 0) -> Ideal:
    """Halved where ``wrong`` says so of the number of keys, and off by ``at_four`` at four."""

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


def test_it_ends_with_the_smallest_case_and_its_diagnosis():
    kernel = under_test(halves())
    with pytest.raises(WrongAnswer, match=r"FAIL bound compare: out\[0, \d, ") as raised:
        search_cases(holds, kernel, CASES)
    assert Case.from_json(raised.value.record.case).problem.kv == 7
    assert kernel.tally.problems["fail"] > 1


@pytest.mark.parametrize("holds_on", [True, False])
def test_one_failure_is_made_smaller_and_not_another(monkeypatch, *, holds_on):
    """Off by a factor from five keys on, and by one at four: no model is of that."""
    if not holds_on:
        monkeypatch.setattr(UnderTest, "_is_another", lambda *_: False)
    with pytest.raises(WrongAnswer) as raised:
        search_cases(holds, under_test(halves(lambda kv: kv >= 5, at_four=1)), CASES)
    assert Case.from_json(raised.value.record.case).problem.kv == (5 if holds_on else 4)
    assert ("the output is off by a factor" in str(raised.value)) == holds_on


def test_a_failure_of_another_case_is_raised_as_itself():
    def beside(case: Case) -> list[Case]:
        return [Case(problem=case.problem.replace(kv=case.problem.kv + 6))]

    with pytest.raises(WrongAnswer) as raised:
        search_cases(holds, under_test(halves()), CASES, beside)
    assert Case.from_json(raised.value.record.case).problem.kv == 7


def test_a_kernel_that_fails_now_and_then_is_told_so():
    """Wrong on the first long problem that it meets, and never again."""
    first = iter([True])
    seldom = halves(lambda kv: kv >= 7 and next(first, False))
    with pytest.raises(WrongAnswer, match="It does not fail every time"):
        search_cases(holds, under_test(seldom), CASES)


def test_a_kernel_that_refuses_everything_as_it_is_called_is_skipped():
    with pytest.raises(pytest.skip.Exception, match="takes no such problem on cpu: not on Mondays"):
        search_cases(holds, under_test(Refusing()), CASES)


def test_a_property_of_nothing_fails():
    with pytest.raises(pytest.fail.Exception, match="nothing was tested"):
        search_cases(holds, under_test(Ideal()), CASES.filter(lambda _: False))


def test_what_is_drawn_is_the_same_every_time_and_another_for_each_kernel():
    def drawn(name: str) -> list[int]:
        kernel = under_test(Ideal())
        kernel.name = name
        seen: list[int] = []
        search_cases(lambda _, case: seen.append(case.problem.kv), kernel, CASES)
        return seen

    assert drawn("a") == drawn("a")
    assert drawn("a") != drawn("b")
    assert len(drawn("a")) == 20


def test_each_tier_draws_as_many_as_it_says():
    for tier in TIERS.values():
        assert hypothesis.settings.get_profile(tier.profile).deadline is None
        assert tier.examples >= tier.examples_on("cpu", triton=True) > 1
        assert tier.examples_on("cuda", triton=True) > 1  # the first is the plainest


def test_a_kernel_that_refuses_the_first_few_is_not_asked_hundreds():
    class Picky(Ideal):
        name = "picky"
        asked = 0

        def unsupported(self, problem: Problem, device: str) -> str | None:
            self.asked += 1
            return "head_dim must be 512"

    kernel = under_test(picky := Picky())
    (mark,) = _property.pytestmark
    with pytest.raises(pytest.skip.Exception, match="head_dim must be 512"):
        search_cases(holds, kernel, cases(kernel, mark.args[0]))
    assert picky.asked < 200 * MOST_NEAR


@asks("compare", families=("full",))
def _property(kernel: UnderTest, case: Case) -> None: ...


def test_a_kernel_that_takes_few_is_asked_as_often_as_any():
    kernel = under_test(Ideal())
    rare = st.integers(1, 400).filter(lambda kv: kv % 20 == 3)
    search_cases(
        holds, kernel, rare.map(lambda kv: Case(problem=Problem(query=1, kv=kv, head_dim=2)))
    )
    assert kernel.tally.total >= 20
