"""Problems with sinks: drawn where they are asked for, and dropped only where that is allowed."""

from hypothesis import find, given

from attncheck.cases.strategies.problems import nearest_supported, problems
from attncheck.inputs.problem import Problem


@given(problem=problems())
def test_none_by_default(problem):
    assert not problem.sink


@given(problem=problems(sinks=True))
def test_always_where_asked_for(problem):
    assert problem.sink


def test_either_shrinks_to_none():
    either = problems(sinks=None)
    assert not find(either, lambda _: True).sink
    smallest = find(either, lambda problem: problem.sink)
    assert (smallest.query, smallest.kv, smallest.heads) == (1, 1, 1)


def test_a_kernel_without_sinks_is_asked_what_it_takes():
    """Where both are drawn: of what must have a sink nothing is left for it."""
    with_sink = Problem(query=8, sink=True)
    taken = nearest_supported(with_sink, lambda p: not p.sink, ("bf16",), drops=["sink"])
    assert taken == with_sink.replace(sink=False)
    assert nearest_supported(with_sink, lambda p: not p.sink, ("bf16",)) is None
    kept = nearest_supported(with_sink, lambda p: p.head_dim == 128, ("bf16",), drops=["sink"])
    assert kept is not None
    assert kept.sink
