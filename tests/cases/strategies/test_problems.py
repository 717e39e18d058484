"""Strategies for whole Problems: what they reach, shrink to, and give to a narrow kernel."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.vendor.pretty import pretty

from attncheck.cases import strategies
from attncheck.cases.strategies.mask_strategies import PLAIN_MASKS
from attncheck.core.errors import UnknownName, UsageError
from attncheck.core.mod_spec import Dimensions, Spec
from attncheck.inputs.distributions import DISTRIBUTIONS
from attncheck.inputs.problem import USUAL_SCALE, Case, Problem
from attncheck.mods import library
from attncheck.relations import relation_named

if TYPE_CHECKING:
    from collections.abc import Callable

SMALLEST = Problem(query=1, kv=1, head_dim=1, dtype="fp32")


def amplitude(p: Problem) -> int:
    return round(p.scale * math.sqrt(p.head_dim))


@pytest.mark.parametrize("supports", [None, lambda _: True], ids=["any kernel", "takes all"])
def test_problem_shrinks_to_one_key_and_one_column(shrink, supports) -> None:
    assert shrink(strategies.problems(supports=supports)) == SMALLEST


CAUSES: dict[str, tuple[Callable[[Problem], bool], dict[str, Any]]] = {
    "more keys": (lambda p: p.kv > p.query, {"kv": 2}),
    "more rows": (lambda p: p.query > p.kv, {"query": 2}),
    "a second tile": (lambda p: p.query == p.kv > 16, {"query": 17, "kv": 17}),
    "no edge of a tile": (lambda p: p.kv >= 50, {"kv": 50}),
    "GQA": (lambda p: p.group > 1 and p.kv_heads > 1, {"heads": 4, "kv_heads": 2}),
    "GQA that is not square": (lambda p: p.group != p.kv_heads > 1, {"heads": 2, "kv_heads": 2}),
    "6/2": (lambda p: p.group > p.kv_heads > 1, {"heads": 6, "kv_heads": 2}),
    "6/3": (lambda p: 1 < p.group < p.kv_heads, {"heads": 6, "kv_heads": 3}),
    "MQA of five": (lambda p: p.group == 5, {"heads": 5, "kv_heads": 1}),
    "a batch": (lambda p: p.batch > 1, {"batch": 2}),
    "a batch of GQA": (
        lambda p: p.batch > 1 and p.heads > p.kv_heads > 1,
        {"batch": 2, "heads": 4, "kv_heads": 2},
    ),
    "a narrow V": (lambda p: p.head_dim > p.value_dim, {"head_dim": 3, "value_dim": 1}),
    "an odd head_dim": (lambda p: p.head_dim % 2 and p.head_dim > 3, {"head_dim": 17}),
    "bf16": (lambda p: p.dtype == "bf16", {"dtype": "bf16"}),
    "a distribution": (lambda p: p.distribution == "sink", {"distribution": "sink"}),
    "an amplitude": (lambda p: amplitude(p) > 10, {"scale": 60.0}),
    "the largest amplitude": (lambda p: amplitude(p) == 400, {"scale": 400.0}),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_problem_shrinks_to_its_cause(shrink, cause: str) -> None:
    wanted, changes = CAUSES[cause]
    problem = shrink(strategies.problems(), wanted)
    assert problem == SMALLEST.replace(**{"scale": USUAL_SCALE} | changes)


def test_problems_reach_what_kernels_get_wrong(draw) -> None:
    problems = draw(strategies.problems(scores=strategies.scores()))
    assert {"less", "equal", "more"} == {
        "less" if p.query < p.kv else "more" if p.query > p.kv else "equal" for p in problems
    }
    assert {(6, 2), (6, 3), (4, 1), (5, 1), (4, 2), (3, 1), (2, 2), (1, 1)} <= {
        (p.heads, p.kv_heads) for p in problems
    }
    assert any(p.head_dim != p.value_dim for p in problems)
    assert {p.dtype for p in problems} == {"fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2"}
    assert {p.operation for p in problems} == {"attention"}
    assert {p.distribution for p in problems} == set(DISTRIBUTIONS)
    assert {p.mask.name for p in problems} == set(PLAIN_MASKS)
    assert {p.score.name for p in problems} == set(library.SCORES) - {
        "chain",
        "expression",
        "alibi_by_sequence",  # covered by the bounds stage of the gate
    }
    assert {amplitude(p) for p in problems} == set(strategies.AMPLITUDES)
    assert all(p.batch * p.heads <= 8 for p in problems)


def test_shapes_combine_batches_with_grouped_heads_and_stay_small(draw) -> None:
    shapes = draw(strategies.shapes())
    assert any(s.batch > 1 and s.heads > s.kv_heads > 1 for s in shapes)
    # An interpreted kernel takes time for each.
    assert sum(s.batch * s.heads for s in shapes) / len(shapes) < 6


def test_shapes_keep_to_their_limits(draw) -> None:
    shapes = draw(strategies.shapes(shortest_query=40, shortest_kv=3, longest=50, most_heads=2))
    assert {(s.query >= 40, s.kv >= 3) for s in shapes} == {(True, True)}
    assert any(s.query == s.kv for s in shapes)
    assert max(max(s.query, s.kv) for s in shapes) == 50
    assert max(s.batch * s.heads for s in shapes) == 2


def test_decoding_shapes_have_few_rows_many_keys_and_large_groups(draw) -> None:
    """A square shape does not lengthen the query, and groups reach the size asked for."""
    shapes = draw(strategies.shapes(longest_query=4, longest=70, largest_group=8, most_heads=8))
    assert {s.query for s in shapes} == {1, 2, 3, 4}
    assert max(s.kv for s in shapes) > 64
    assert {s.heads // s.kv_heads for s in shapes} == set(range(1, 9))
    assert any(s.query == s.kv > 1 for s in shapes)
    usual = draw(strategies.shapes())
    assert max(s.heads // s.kv_heads for s in usual) == 5


def test_causal_masks_hide_a_key_where_there_are_two(draw) -> None:
    strategy = strategies.problems(
        shapes=strategies.shapes(shortest_kv=2), masks=strategies.causal_masks
    )
    problems = draw(strategy)
    assert all(relation_named("future_keys").unfit(p) is None for p in problems)
    assert {p.mask.name for p in problems} == {
        "causal",
        "sliding_window",
        "causal_bottom_right",
        "and",
    }


def test_narrow_kernel_gets_varied_problems_that_it_supports(draw) -> None:
    def supports(p: Problem) -> bool:
        same = p.head_dim == p.value_dim and p.query == p.kv and p.group == 1
        return same and p.head_dim in {64, 128} and p.dtype == "bf16"

    problems = draw(strategies.problems(masks=strategies.causal_masks, supports=supports), 100)
    assert len(problems) > 90  # hardly any draw is dropped
    assert all(map(supports, problems))
    assert len({p.kv for p in problems}) > 20
    assert {amplitude(p) for p in problems} == set(strategies.AMPLITUDES)
    usual = [p for p in problems if amplitude(p) == 1]
    assert all(p.scale == p.replace(scale=USUAL_SCALE).scale for p in usual)


def test_kernel_without_a_scale_gets_the_default_scale(draw) -> None:
    def supports(p: Problem) -> bool:
        return p.scale == p.replace(scale=USUAL_SCALE).scale and p.head_dim == p.value_dim == 64

    problems = draw(strategies.problems(supports=supports), 50)
    assert len(problems) > 45
    assert all(map(supports, problems))


def test_kernel_of_whole_tiles_gets_whole_tiles(draw) -> None:
    def supports(p: Problem) -> bool:
        return p.query % 128 == 0 and p.kv % 128 == 0

    causal = partial(strategies.masks, names=("causal",))
    problems = draw(strategies.problems(masks=causal, supports=supports), 50)
    assert {(p.query, p.kv) for p in problems} >= {(128, 128)}
    assert all(map(supports, problems))


def test_distributions_include_registered_ones_and_exclude_recordings(draw, monkeypatch) -> None:
    normal = DISTRIBUTIONS["normal"]
    monkeypatch.setitem(DISTRIBUTIONS, "mine", normal)
    monkeypatch.setitem(DISTRIBUTIONS, "calls.safetensors:decode@01234567", normal)
    names = {p.distribution for p in draw(strategies.problems())}
    assert "mine" in names
    assert not any("calls" in name for name in names)


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
        lambda: strategies.problems(amplitudes=()),
        lambda: strategies.problems(amplitudes=(0.0,)),
    ],
)
def test_impossible_numbers_are_refused_before_drawing(make: Callable[[], object]) -> None:
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
        lambda: strategies.family_named("diagonal"),
    ],
)
def test_unknown_names_are_refused_before_drawing(make: Callable[[], object]) -> None:
    with pytest.raises(UnknownName, match=r"[Cc]hoose from"):
        make()


def test_parameters_shrink_to_the_first_allowed_value(shrink) -> None:
    assert shrink(strategies.parameters(allowed={"row": [3, 5, 9]})) == {"row": 3}


def test_hypothesis_prints_a_problem_and_a_case_on_one_line() -> None:
    window = Spec.of("sliding_window", window=3)
    problem = Problem(query=5, kv=7, head_dim=4, mask=window, scale=5.0)
    line = "bf16 sliding_window(window=3) B1 H1 Q5 K7 D4 normal seed 0 scale 5"
    assert pretty(problem) == str(problem) == line
    case = Case(problem=problem, question="future_keys", parameters={"row": 2})
    assert pretty(case) == str(case) == f"future_keys(row=2): {line}"
    assert pretty(Case(problem=problem)) == f"compare: {line}"


def test_failing_property_prints_its_problem_on_one_line() -> None:
    @given(problem=strategies.problems(masks=strategies.family_named("causal")), data=st.data())
    @settings(database=None, derandomize=True, max_examples=20)
    def holds(problem: Problem, data: st.DataObject) -> None:
        row = data.draw(st.just(0), label="row")
        assert row > problem.kv

    with pytest.raises(AssertionError) as caught:
        holds()
    notes = "\n".join(caught.value.__notes__)
    assert "problem=fp32 causal B1 H1 Q1 K1 D1 normal seed 0," in notes
