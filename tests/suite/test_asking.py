"""What a property draws, and which further cases it asks with a drawn one."""

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
    """A docstring."""


SPEC = _property.pytestmark[0].args[0]


def under_test(name: str = "ideal", device: str = "cpu") -> UnderTest:
    return UnderTest(
        name, load_subject(name), device, dtype="bf16", family="causal", tier=TIERS["pr"]
    )


def test_property_takes_the_kernel_fixture_alone():
    assert list(inspect.signature(_property).parameters) == ["kernel"]
    assert _property.__doc__ == "A docstring."
    assert inspect.unwrap(_property).__code__.co_filename == __file__


def test_drawn_cases_have_the_kernels_dtype_and_family():
    examples: list[Case] = []

    @hypothesis.settings(CI, max_examples=30)
    @hypothesis.given(case=cases(under_test(), SPEC))
    def draw(case: Case) -> None:
        examples.append(case)

    draw()
    assert {case.problem.dtype for case in examples} == {"bf16"}
    assert {case.problem.mask.name for case in examples} == {"causal"}
    assert all(2 <= case.problem.kv <= 9 for case in examples)
    assert all(SPEC.fits(case.question, case.problem) for case in examples)


def test_gpu_kernels_are_asked_more_cases_of_one_compilation():
    problem = Problem(query=300, kv=400, mask=Spec.of("causal"))
    case = Case(problem=problem, question="future_keys", parameters={"row": 0})
    repeats = TIERS["pr"].repeats_gpu
    for name, lengths in (("triton-flash2", repeats - 1), ("ideal", 1)):
        more = list(_more(under_test(name, "cuda"), SPEC, case))
        assert len(more) == repeats - 1
        assert len({each.problem.kv for each in more}) == lengths
    assert not list(_more(under_test(), SPEC, case))


@pytest.mark.parametrize(
    ("questions", "families", "message"),
    [
        (("why",), ("full",), "question 'why' is not known"),
        (("compare",), ("diagonal",), "mask family 'diagonal' is not known"),
    ],
    ids=["question", "family"],
)
def test_asks_rejects_unknown_questions_and_families(questions, families, message):
    with pytest.raises(UnknownName, match=message):
        asks(*questions, families=families)
