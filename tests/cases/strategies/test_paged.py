"""Strategies for paged KV caches: which page layouts are drawn, and what they shrink to."""

from __future__ import annotations

import pytest

from attncheck.cases import strategies
from attncheck.cases.strategies.problems import nearest_supported
from attncheck.cases.strategies.sizes import ODD_PAGE_SIZES, PAGE_SIZES
from attncheck.core.errors import UsageError
from attncheck.core.paged_layout import Paging
from attncheck.inputs.problem import Problem

PLAINEST = Paging(size=16, seed=0, shared=0)
PAGED = strategies.problems(pagings=strategies.pagings())


def test_paging_shrinks_to_unshared_pages_of_16_with_seed_0(shrink) -> None:
    assert shrink(strategies.pagings()) == PLAINEST
    assert shrink(PAGED) == Problem(query=1, kv=1, head_dim=1, dtype="fp32", paging=PLAINEST)


@pytest.mark.parametrize(
    ("wanted", "changes"),
    [
        (lambda p: p.size > 16, {"size": 32}),
        (lambda p: p.size % 16, {"size": 3}),
        (lambda p: p.seed > 6, {"seed": 7}),
        (lambda p: p.shared, {"shared": 1}),
    ],
    ids=["larger", "odd", "another order", "shared"],
)
def test_paging_shrinks_to_its_cause(shrink, wanted, changes) -> None:
    expected = Paging(**({"size": 16, "seed": 0, "shared": 0} | changes))
    assert shrink(strategies.pagings(), wanted) == expected
    assert shrink(PAGED, lambda problem: wanted(problem.paging)).paging == expected


def test_every_page_size_is_drawn_and_about_half_share_no_page(draw) -> None:
    pagings = draw(strategies.pagings())
    assert {paging.size for paging in pagings} == {*PAGE_SIZES, *ODD_PAGE_SIZES}
    assert {paging.shared for paging in pagings} == {0, 1, 2}
    assert len({paging.seed for paging in pagings}) > 30
    assert 0.3 < sum(not paging.shared for paging in pagings) / len(pagings) < 0.8
    assert {p.size for p in draw(strategies.pagings(sizes=(64,)))} == {64}
    assert {p.shared for p in draw(strategies.pagings(shared=(2,)))} == {2}


def test_problems_are_unpaged_by_default(draw) -> None:
    assert {problem.paging for problem in draw(strategies.problems(), 30)} == {None}


@pytest.mark.parametrize(
    ("argument", "value"),
    [("sizes", ()), ("sizes", (0,)), ("sizes", (5000,)), ("shared", ()), ("shared", (-1,))],
)
def test_impossible_argument_is_refused_by_name(argument, value) -> None:
    with pytest.raises(UsageError, match=argument):
        strategies.pagings(**{argument: value})


def test_nearest_problem_keeps_its_paging() -> None:
    problem = Problem(query=5, kv=33, head_dim=17, paging=Paging(size=3, seed=8, shared=1))

    nearest = nearest_supported(problem, lambda p: p.head_dim == 64, ("bf16",))
    assert nearest is not None
    assert (nearest.head_dim, nearest.paging) == (64, problem.paging)


def test_kernel_with_one_page_size_gets_only_that_size(draw) -> None:
    def supports(problem: Problem) -> bool:
        return problem.paging.size == 256

    problems = draw(strategies.problems(pagings=strategies.pagings(), supports=supports), 50)
    assert {problem.paging.size for problem in problems} == {256}
    assert len({problem.paging.seed for problem in problems}) > 10
