"""Where the oracles disagree, neither the suite nor check says that a kernel passes."""

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
def broken_oracle(monkeypatch):
    """An oracle that is wrong in one element."""
    exact = oracles.truth

    def truth(inputs):
        outputs = exact(inputs)
        outputs.out[0, 0, 0, 0] += 1.0
        return outputs

    monkeypatch.setattr(oracles, "truth", truth)


def test_property_fails_where_oracles_disagree(broken_oracle):
    case = Case(problem=Problem(query=8, head_dim=16, dtype="fp32"))
    with pytest.raises(WrongAnswer, match="ORACLE"):
        UnderTest("ideal", Ideal(), "cpu").must_hold(case)


def test_check_is_in_doubt_where_oracles_disagree(broken_oracle):
    (question,) = [each for each in check_cases("bf16") if each.name == "one-query"]
    report = verify(Ideal(), [(question.name, question.case)], device="cpu")
    assert check_outcome(report) == "in doubt"
    assert "IN DOUBT" in render(report, "table", check_document)
