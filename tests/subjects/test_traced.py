"""Which Problems share a trace."""

from __future__ import annotations

import pytest

from attncheck.core.errors import TraceError
from attncheck.inputs.problem import Problem
from attncheck.mods import trace
from attncheck.mods.spec import Spec
from attncheck.subjects import kernel_mods

MASK = Spec.of("padding", lengths=[5])
PROBLEM = Problem(query=6, kv=9, mask=MASK, score=Spec.of("softcap", cap=20.0))
READERS = (kernel_mods.mask_expression, kernel_mods.score_expression, kernel_mods.slope_expression)


@pytest.fixture
def nothing_kept():
    """No trace kept from before, and none that was checked by a stand-in kept for later."""
    kept = (kernel_mods._mask, kernel_mods._score)
    for each in kept:
        each.forget()
    yield
    for each in kept:
        each.forget()


@pytest.mark.parametrize("read", READERS)
def test_dtype_seed_and_head_dim_are_not_a_mods(read) -> None:
    other = PROBLEM.replace(dtype="fp32", seed=3, head_dim=16, scale=0.0)
    assert read(PROBLEM, "cpu") is read(other, "cpu")


@pytest.mark.parametrize("read", READERS[:2])
@pytest.mark.parametrize("change", [{"kv": 10}, {"query": 7}, {"heads": 2, "kv_heads": 2}])
@pytest.mark.usefixtures("nothing_kept")
def test_a_trace_that_dimensions_share_is_checked_in_each(monkeypatch, read, change) -> None:
    """The library's mods have one trace whatever the lengths: what it says there is asked anew."""
    asked = []

    def checked(_, __, dimensions, **___):
        asked.append(dimensions)
        return 0

    monkeypatch.setattr(trace, "count_disagreements", checked)
    problems = [PROBLEM, PROBLEM.replace(**change)]
    for problem in [*problems, *problems]:
        read(problem, "cpu")
    assert asked == [problem.dimensions for problem in problems]


def test_dimensions_are_a_masks() -> None:
    bottom = PROBLEM.replace(mask=Spec.of("causal_bottom_right"))
    first, second = (kernel_mods.mask_expression(bottom.replace(kv=kv), "cpu") for kv in (9, 10))
    assert (first.captured, second.captured) == ((3,), (4,))


def test_numbers_are_a_mods() -> None:
    other = PROBLEM.replace(mask=Spec.of("padding", lengths=[4]))
    assert kernel_mods.mask_expression(PROBLEM, "cpu") is not kernel_mods.mask_expression(
        other, "cpu"
    )


def test_a_wrong_trace_is_refused_each_time_with_the_problem_it_was_asked_for(monkeypatch) -> None:
    monkeypatch.setattr(trace, "count_disagreements", lambda *_, **__: 3)
    problems = [PROBLEM.replace(query=61, seed=seed) for seed in (1, 2)]
    for problem in problems:
        with pytest.raises(TraceError, match=f"at 3 sampled indices of .*seed {problem.seed}"):
            kernel_mods.mask_expression(problem, "cpu")
