"""The search for the nearest Problem that a kernel supports."""

from __future__ import annotations

import pytest

from attncheck.cases.strategies.problems import nearest_supported
from attncheck.inputs.problem import Problem

PLAIN = Problem(query=64, dtype="fp32")
UNLIKE = Problem(query=3, kv=40, heads=4, kv_heads=2, head_dim=48, value_dim=16, scale=0.3)


def tried_problems(problem: Problem) -> list[Problem]:
    """The Problems that a kernel which supports nothing is asked about."""
    tried: list[Problem] = []
    assert nearest_supported(problem, lambda p: bool(tried.append(p)), ("bf16",)) is None
    return tried


def test_supported_problem_is_tried_once_and_returned() -> None:
    tried: list[Problem] = []
    assert nearest_supported(PLAIN, lambda p: not tried.append(p), ("bf16",)) is PLAIN
    assert tried == [PLAIN]


@pytest.mark.parametrize("problem", [PLAIN, UNLIKE], ids=["plain", "unlike"])
def test_no_problem_is_tried_twice(problem: Problem) -> None:
    tried = tried_problems(problem)
    assert tried[0] == problem
    assert len(tried) == len(set(tried))


def test_unsupported_softmax_is_not_replaced_by_attention() -> None:
    tried = tried_problems(Problem(operation="softmax", query=4, kv=64, dtype="fp32"))
    assert {problem.operation for problem in tried} == {"softmax"}
