from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings

from attncheck import strategies
from attncheck.errors import UnknownName, UsageError
from attncheck.mods import library
from attncheck.mods.spec import Dimensions, Spec
from attncheck.problem import Problem
from attncheck.relations import relation_named

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import SearchStrategy

SMALLEST = Problem(query=1, kv=1, head_dim=1, dtype="fp32")
FIND = settings(database=None, derandomize=True, max_examples=2000)


def smallest(strategy: SearchStrategy[Any], wanted: Callable[[Any], bool] = lambda _: True) -> Any:
    return find(strategy, wanted, settings=FIND)


def drawn(strategy: SearchStrategy[Any], count: int = 300) -> list[Any]:
    values = []

    @settings(
        database=None,
        derandomize=True,
        max_examples=count,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(value: Any) -> None:
        values.append(value)

    collect()
    return values


def test_a_problem_shrinks_to_one_key_and_one_column() -> None:
    assert smallest(strategies.problems()) == SMALLEST


@pytest.mark.parametrize(
    ("wanted", "changes"),
    [
        (lambda p: p.kv > p.query, {"kv": 2}),
        (lambda p: p.query > p.kv, {"query": 2}),
        (lambda p: p.query == p.kv > 16, {"query": 17, "kv": 17}),
        (lambda p: p.kv >= 50, {"kv": 50}),
        (lambda p: p.group > 1 and p.kv_heads > 1, {"heads": 4, "kv_heads": 2}),
        (lambda p: p.group != p.kv_heads > 1, {"heads": 2, "kv_heads": 2}),
        (lambda p: p.group > p.kv_heads > 1, {"heads": 6, "kv_heads": 2}),
        (lambda p: p.batch > 1, {"batch": 2}),
        (
            lambda p: p.batch > 1 and p.heads > p.kv_heads > 1,
            {"batch": 2, "heads": 4, "kv_heads": 2},
        ),
        (lambda p: p.head_dim > p.value_dim, {"head_dim": 3, "value_dim": 1}),
        (lambda p: p.dtype == "bf16", {"dtype": "bf16"}),
        (lambda p: p.mask.name == "padding", {"mask": Spec.of("padding", lengths=[1])}),
        (
            lambda p: p.mask.name == "document" and len(p.mask.values["lengths"]) > 1,
            {"kv": 2, "mask": Spec.of("document", lengths=[1, 1])},
        ),
    ],
)
def test_a_failure_shrinks_to_its_cause(
    wanted: Callable[[Problem], bool], changes: dict[str, Any]
) -> None:
    assert smallest(strategies.problems(), wanted) == SMALLEST.replace(**changes, scale=0.0)


def test_lengths_sit_at_tile_edges_half_of_the_time() -> None:
    edges = {1, 2, 3} | {tile + step for tile in (16, 32, 64, 128) for step in (-1, 0, 1)}
    found = drawn(strategies.lengths(longest=130))
    at_edges = sum(length in edges for length in found)
    assert len(found) / 3 < at_edges < len(found) * 2 / 3
    assert edges <= set(found)
    assert all(1 <= length <= 130 for length in found)


def test_lengths_take_bounds_without_any_edge() -> None:
    assert set(drawn(strategies.lengths(shortest=40, longest=42))) == {40, 41, 42}


def test_problems_reach_what_kernels_get_wrong() -> None:
    found = drawn(strategies.problems(scores=strategies.scores()))
    assert {"less", "equal", "more"} == {
        "less" if p.query < p.kv else "more" if p.query > p.kv else "equal" for p in found
    }
    assert {(6, 2), (6, 3), (4, 2), (3, 1), (2, 2), (1, 1)} <= {
        (p.heads, p.kv_heads) for p in found
    }
    assert any(p.head_dim != p.value_dim for p in found)
    assert {p.dtype for p in found} == {"fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2"}
    assert {p.operation for p in found} == {"attention"}
    assert {p.mask.name for p in found} == set(library.MASKS) - {"and", "or", "not"}
    assert {p.score.name for p in found} == set(library.SCORES) - {"chain"}
    assert all(p.batch * p.heads <= 8 for p in found)


def test_a_second_sequence_meets_shared_kv_heads() -> None:
    found = drawn(strategies.shapes(), 100)
    assert any(s.batch > 1 and s.heads > s.kv_heads > 1 for s in found)
    assert sum(s.batch * s.heads for s in found) / len(found) < 6  # an interpreted kernel's time


def test_causal_masks_hide_something_of_two_keys() -> None:
    strategy = strategies.problems(
        shapes=strategies.shapes(shortest_kv=2), masks=strategies.causal_masks
    )
    found = drawn(strategy)
    assert all(relation_named("future_keys").unfit(p) is None for p in found)
    assert {p.mask.name for p in found} == {
        "causal",
        "sliding_window",
        "causal_bottom_right",
        "and",
    }


def test_a_narrow_kernel_gets_problems_that_it_takes() -> None:
    def supports(p: Problem) -> bool:
        same = p.head_dim == p.value_dim and p.query == p.kv and p.group == 1
        return same and p.head_dim in {64, 128} and p.dtype == "bf16"

    found = drawn(strategies.problems(masks=strategies.causal_masks, supports=supports), 100)
    assert len(found) > 90  # hardly any is dropped
    assert all(map(supports, found))
    assert len({p.kv for p in found}) > 20
    assert all(p.scale == p.replace(scale=0.0).scale for p in found)


def test_a_kernel_of_whole_tiles_gets_whole_tiles() -> None:
    def supports(p: Problem) -> bool:
        return p.query % 128 == 0 and p.kv % 128 == 0

    causal = partial(strategies.masks, names=("causal",))
    found = drawn(strategies.problems(masks=causal, supports=supports), 50)
    assert {(p.query, p.kv) for p in found} >= {(128, 128)}
    assert all(map(supports, found))


def test_what_a_kernel_takes_is_not_moved() -> None:
    assert smallest(strategies.problems(supports=lambda _: True)) == SMALLEST


@pytest.mark.parametrize(
    "make",
    [
        lambda: strategies.lengths(shortest=0),
        lambda: strategies.lengths(shortest=9, longest=8),
        lambda: strategies.shapes(most_heads=0),
        lambda: strategies.shapes(head_dims=()),
        lambda: strategies.shapes(head_dims=(0,)),
        lambda: strategies.shapes(head_dims=(257,)),
        lambda: strategies.parameters(allowed={"row": []}),
    ],
)
def test_impossible_numbers_are_refused_at_once(make: Callable[[], object]) -> None:
    with pytest.raises(UsageError):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: strategies.problems(dtypes=("bf17",)),
        lambda: strategies.problems(dtypes=()),
        lambda: strategies.problems(dtypes=("fp64",)),  # no kernel is measured in it
        lambda: strategies.problems(distributions=("lognormal",)),
        lambda: strategies.scores(names=("tanh",)),
        lambda: strategies.masks(
            dimensions=Dimensions(batch=1, heads=1, query=1, kv=1), names=("diagonal",)
        ),
    ],
)
def test_unknown_names_are_refused_at_once(make: Callable[[], object]) -> None:
    with pytest.raises(UnknownName, match="choose from"):
        make()


def test_parameters_shrink_to_the_first() -> None:
    assert smallest(strategies.parameters(allowed={"row": [3, 5, 9]})) == {"row": 3}
