"""Which Problems a kernel is asked about until it takes one."""

from __future__ import annotations

from attncheck.cases.strategies.problems import nearest_supported
from attncheck.inputs.problem import Problem

PLAIN = Problem(query=64, dtype="fp32")
UNLIKE = Problem(query=3, kv=40, heads=4, kv_heads=2, head_dim=48, value_dim=16, scale=0.3)


def asked_of(problem: Problem) -> list[Problem]:
    asked: list[Problem] = []
    assert nearest_supported(problem, lambda p: bool(asked.append(p)), ("bf16",)) is None
    return asked


def test_what_is_taken_is_asked_once() -> None:
    asked: list[Problem] = []
    assert nearest_supported(PLAIN, lambda p: not asked.append(p), ("bf16",)) is PLAIN
    assert asked == [PLAIN]


def test_no_problem_is_asked_twice() -> None:
    for problem in (PLAIN, UNLIKE):
        asked = asked_of(problem)
        assert asked[0] == problem
        assert len(asked) == len(set(asked))


def test_a_softmax_that_is_not_taken_is_refused() -> None:
    asked = asked_of(Problem(operation="softmax", query=4, kv=64, dtype="fp32"))
    assert {problem.operation for problem in asked} == {"softmax"}
