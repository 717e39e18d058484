"""Score mods that read numbers from tensors, and Problems that ask for their gradients."""

from __future__ import annotations

import pytest

from attncheck.cases import strategies
from attncheck.cases.strategies.problems import nearest_supported, problems
from attncheck.core.errors import ProblemError
from attncheck.core.mod_spec import Dimensions, Spec
from attncheck.mods.library import check_captures

DIMENSIONS = Dimensions(batch=2, heads=3, query=40, kv=50)
OF_READS = {"backward": True, "dtypes": ("bf16",), "scores": strategies.captured_scores()}


def test_each_reads_numbers_alone_and_in_chains(drawn) -> None:
    found = drawn(strategies.captured_scores())
    for spec in found:
        check_captures(spec, DIMENSIONS)
    assert {spec.name for spec in found} == {"alibi", "relative_bias", "bias", "offset", "chain"}
    first, last = zip(*(spec.parts for spec in found if spec.name == "chain"), strict=True)
    for parts in (first, last):
        names = {part.name for part in parts}
        assert names == {"alibi", "relative_bias", "bias", "temperature", "softcap"}


def test_the_smallest_is_alibi(smallest) -> None:
    assert smallest(strategies.captured_scores(), lambda _: True) == Spec.of("alibi")


def test_problems_ask_for_their_gradients(drawn) -> None:
    asked = problems(**OF_READS, dcaptured=True)
    assert all(problem.dcaptured for problem in drawn(asked, 30))
    plain = problems(**OF_READS)
    assert not any(problem.dcaptured for problem in drawn(plain, 10))


def test_the_nearest_problem_keeps_them(drawn) -> None:
    (problem,) = drawn(problems(**OF_READS, dcaptured=True), 1)[:1]
    found = nearest_supported(problem, lambda p: p.head_dim == 64, ("bf16",))
    assert found is not None
    assert found.dcaptured
    with pytest.raises(ProblemError, match="dcaptured=True has no meaning for score mod 'none'"):
        found.replace(score=Spec.of("none"))
