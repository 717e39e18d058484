"""How keys lie in pages: what is drawn, and what it shrinks to."""

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


def test_it_shrinks_to_pages_of_16_in_order_0_of_which_none_is_shared(smallest) -> None:
    assert smallest(strategies.pagings()) == PLAINEST
    found = smallest(PAGED)
    assert found == Problem(query=1, kv=1, head_dim=1, dtype="fp32", paging=PLAINEST)


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
def test_a_failure_shrinks_to_its_cause(smallest, wanted, changes) -> None:
    expected = Paging(**({"size": 16, "seed": 0, "shared": 0} | changes))
    assert smallest(strategies.pagings(), wanted) == expected
    found = smallest(PAGED, lambda problem: wanted(problem.paging))
    assert found.paging == expected


def test_every_size_is_drawn_and_half_share_nothing(drawn) -> None:
    found = drawn(strategies.pagings())
    assert {paging.size for paging in found} == {*PAGE_SIZES, *ODD_PAGE_SIZES}
    assert {paging.shared for paging in found} == {0, 1, 2}
    assert len({paging.seed for paging in found}) > 30
    assert 0.3 < sum(not paging.shared for paging in found) / len(found) < 0.8
    assert {p.size for p in drawn(strategies.pagings(sizes=(64,)))} == {64}
    assert {p.shared for p in drawn(strategies.pagings(shared=(2,)))} == {2}


def test_without_pages_problems_have_none(drawn) -> None:
    assert {problem.paging for problem in drawn(strategies.problems(), 30)} == {None}


@pytest.mark.parametrize(
    "given", [{"sizes": ()}, {"sizes": (0,)}, {"sizes": (5000,)}, {"shared": ()}, {"shared": (-1,)}]
)
def test_what_cannot_be_is_refused(given) -> None:
    with pytest.raises(UsageError, match=next(iter(given))):
        strategies.pagings(**given)


def test_the_nearest_problem_keeps_its_pages() -> None:
    problem = Problem(query=5, kv=33, head_dim=17, paging=Paging(size=3, seed=8, shared=1))

    def of_64(p: Problem) -> bool:
        return p.head_dim == 64

    found = nearest_supported(problem, of_64, ("bf16",))
    assert found is not None
    assert (found.head_dim, found.paging) == (64, problem.paging)


def test_a_kernel_of_one_size_gets_pages_of_it(drawn) -> None:
    def of_256(problem: Problem) -> bool:
        return problem.paging.size == 256

    found = drawn(strategies.problems(pagings=strategies.pagings(), supports=of_256), 50)
    assert {problem.paging.size for problem in found} == {256}
    assert len({problem.paging.seed for problem in found}) > 10
