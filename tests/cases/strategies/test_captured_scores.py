"""Score mods that read captured tensors, and Problems that ask for gradients of these tensors."""

from __future__ import annotations

import pytest

from attncheck.cases import strategies
from attncheck.cases.strategies.problems import nearest_supported, problems
from attncheck.core.errors import ProblemError
from attncheck.core.mod_spec import Dimensions, Spec
from attncheck.mods.library import check_captures

DIMENSIONS = Dimensions(batch=2, heads=3, query=40, kv=50)
CAPTURING = {"backward": True, "dtypes": ("bf16",), "scores": strategies.captured_scores()}


def test_all_capturing_score_mods_are_drawn_alone_and_in_chains(draw) -> None:
    specs = draw(strategies.captured_scores())
    for spec in specs:
        check_captures(spec, DIMENSIONS)
    assert {spec.name for spec in specs} == {"alibi", "relative_bias", "bias", "offset", "chain"}
    first, last = zip(*(spec.parts for spec in specs if spec.name == "chain"), strict=True)
    for parts in (first, last):
        names = {part.name for part in parts}
        assert names == {"alibi", "relative_bias", "bias", "temperature", "softcap"}


def test_captured_scores_shrink_to_alibi(shrink) -> None:
    assert shrink(strategies.captured_scores()) == Spec.of("alibi")


def test_problems_ask_for_captured_gradients_only_with_dcaptured(draw) -> None:
    assert all(problem.dcaptured for problem in draw(problems(**CAPTURING, dcaptured=True), 30))
    assert not any(problem.dcaptured for problem in draw(problems(**CAPTURING), 10))


def test_nearest_problem_keeps_captured_gradients(draw) -> None:
    problem = draw(problems(**CAPTURING, dcaptured=True), 1)[0]
    nearest = nearest_supported(problem, lambda p: p.head_dim == 64, ("bf16",))
    assert nearest is not None
    assert nearest.dcaptured
    with pytest.raises(ProblemError, match="dcaptured=True has no meaning for score mod 'none'"):
        nearest.replace(score=Spec.of("none"))
