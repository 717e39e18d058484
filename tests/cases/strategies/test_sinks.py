"""Problems with sinks: drawn only on request, and dropped only where that is allowed."""

from hypothesis import find, given

from attncheck.cases.strategies.problems import nearest_supported, problems
from attncheck.inputs.problem import Problem


@given(problem=problems())
def test_problems_have_no_sink_by_default(problem):
    assert not problem.sink


@given(problem=problems(sinks=True))
def test_problems_have_a_sink_on_request(problem):
    assert problem.sink


def test_optional_sink_shrinks_to_none():
    either = problems(sinks=None)
    assert not find(either, lambda _: True).sink
    smallest = find(either, lambda problem: problem.sink)
    assert (smallest.query, smallest.kv, smallest.heads) == (1, 1, 1)


def test_nearest_problem_drops_its_sink_only_if_allowed_and_needed():
    with_sink = Problem(query=8, sink=True)
    nearest = nearest_supported(with_sink, lambda p: not p.sink, ("bf16",), drops=["sink"])
    assert nearest == with_sink.replace(sink=False)
    assert nearest_supported(with_sink, lambda p: not p.sink, ("bf16",)) is None
    wide = nearest_supported(with_sink, lambda p: p.head_dim == 128, ("bf16",), drops=["sink"])
    assert wide is not None
    assert wide.sink
