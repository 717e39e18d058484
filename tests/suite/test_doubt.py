"""Where the oracles disagree nobody says that a kernel holds: not the suite, check, nor rmse."""

import pytest

from attncheck import oracles
from attncheck.cases.check_cases import check_cases
from attncheck.inputs.problem import Case, Problem
from attncheck.reporting.check_document import check_document, check_outcome
from attncheck.reporting.rendering import render
from attncheck.subjects.ideal import Ideal
from attncheck.suite.under_test import UnderTest
from attncheck.suite.wrong_answers import WrongAnswer
from attncheck.verify.verify import verify


@pytest.fixture
def broken(monkeypatch):
    """An oracle that is wrong in one element."""
    right = oracles.truth

    def truth(inputs):
        found = right(inputs)
        found.out[0, 0, 0, 0] += 1.0
        return found

    monkeypatch.setattr(oracles, "truth", truth)


def test_a_property_does_not_pass(broken):
    case = Case(problem=Problem(query=8, head_dim=16, dtype="fp32"))
    with pytest.raises(WrongAnswer, match="ORACLE"):
        UnderTest("ideal", Ideal(), "cpu").must_hold(case)


def test_check_says_so(broken):
    (question,) = [each for each in check_cases("bf16") if each.name == "one-query"]
    report = verify(Ideal(), [(question.name, question.case)], device="cpu")
    assert check_outcome(report) == "in doubt"
    assert "IN DOUBT" in render(report, "table", check_document)
