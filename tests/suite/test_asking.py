"""What a property draws, and what it asks together with that."""

import inspect

import hypothesis
import pytest

from attncheck.cases.tier import TIERS
from attncheck.core.errors import UnknownName
from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.load import load_subject
from attncheck.suite import pytest_options
from attncheck.suite.property_spec import _more, asks, cases
from attncheck.suite.under_test import UnderTest

pytest_options.register()
CI = hypothesis.settings.get_profile("attncheck-ci")


@asks("future_keys", families=("causal",), shapes={"shortest_kv": 2, "longest": 9})
def _property(kernel: UnderTest, case: Case) -> None:
    """Said of it."""


ASKED = _property.pytestmark[0].args[0]


def under_test(name: str = "ideal", device: str = "cpu") -> UnderTest:
    return UnderTest(
        name, load_subject(name), device, dtype="bf16", family="causal", tier=TIERS["pr"]
    )


def test_pytest_gives_it_the_kernel_alone():
    assert list(inspect.signature(_property).parameters) == ["kernel"]
    assert _property.__doc__ == "Said of it."
    assert inspect.unwrap(_property).__code__.co_filename == __file__


def test_cases_are_of_the_kernel_dtype_and_family():
    drawn: list[Case] = []

    @hypothesis.settings(CI, max_examples=30)
    @hypothesis.given(case=cases(under_test(), ASKED))
    def draw(case: Case) -> None:
        drawn.append(case)

    draw()
    assert {case.problem.dtype for case in drawn} == {"bf16"}
    assert {case.problem.mask.name for case in drawn} == {"causal"}
    assert all(2 <= case.problem.kv <= 9 for case in drawn)
    assert all(ASKED.fits(case.question, case.problem) for case in drawn)


def test_on_a_gpu_more_is_asked_of_what_was_compiled():
    problem = Problem(query=300, kv=400, mask=Spec.of("causal"))
    case = Case(problem=problem, question="future_keys", parameters={"row": 0})
    repeats = TIERS["pr"].repeats_gpu
    for name, lengths in (("triton-flash2", repeats - 1), ("ideal", 1)):
        found = list(_more(under_test(name, "cuda"), ASKED, case))
        assert len(found) == repeats - 1
        assert len({each.problem.kv for each in found}) == lengths
    assert not list(_more(under_test(), ASKED, case))


@pytest.mark.parametrize(
    ("questions", "families", "message"),
    [
        (("why",), ("full",), "question 'why' is not known"),
        (("compare",), ("diagonal",), "mask family 'diagonal' is not known"),
    ],
    ids=["question", "family"],
)
def test_what_there_is_not_is_said(questions, families, message):
    with pytest.raises(UnknownName, match=message):
        asks(*questions, families=families)
