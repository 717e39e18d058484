"""The ranking of explanations, on arrays made by hand."""

import dataclasses
import math

import torch

from attncheck.judge.fault_explanation import (
    FaultExplanation,
    FaultPrediction,
    ObservedError,
    combine_rankings,
    count_ties,
    rank_explanations,
)

EXACT = {"out": torch.zeros(1, 1, 4, 2).double(), "lse": torch.zeros(1, 1, 4).double()}
ALLOWED = {
    "out": torch.full((1, 1, 4, 2), 0.1).double(),
    "lse": torch.full((1, 1, 4), 0.1).double(),
}


def moved(out=0.0, lse=0.0, rows=slice(None)):
    found = {name: x.clone() for name, x in EXACT.items()}
    found["out"][:, :, rows] += out
    found["lse"][:, :, rows] += lse
    return found


def ranking(got, *hypotheses):
    return rank_explanations(ObservedError(got, EXACT, ALLOWED), hypotheses)


def names(found):
    return [one.name for one in found]


def test_what_is_left_decides():
    half = FaultPrediction(name="half", tensors=moved(out=1.0))
    whole = FaultPrediction(name="whole", tensors=moved(out=2.05))
    first, second = ranking(moved(out=2.0), half, whole)
    assert (first.name, first.all) == ("whole", True)
    assert (second.name, second.all) == ("half", False)
    assert math.isclose(second.share, 0.75)


def test_lse_counts_as_much_as_out():
    wrong = FaultPrediction(name="moves LSE", tensors=moved(out=2.0, lse=1.0))
    assert ranking(moved(out=2.0), wrong) == []
    of_out = FaultPrediction(name="out alone", tensors=moved(out=2.0))
    assert ranking(moved(out=2.0, lse=1.0), of_out) == []


def test_among_equals_the_plainer_is_first():
    fitted = FaultPrediction(name="fitted", tensors=moved(out=2.0), order=2)
    plain = FaultPrediction(name="plain", tensors=moved(out=2.0))
    assert names(ranking(moved(out=2.01), fitted, plain)) == ["plain", "fitted"]


def test_of_equal_forms_the_one_that_says_which_it_is_counts():
    plain, named, more = (
        FaultPrediction(name="one", tensors=moved(out=2.0), parameters=parameters)
        for parameters in ({}, {"tile": 32}, {"format": "bf16", "tile": 32})
    )
    for forms in ((plain, named, more), (more, named, plain)):
        (found,) = ranking(moved(out=2.0), *forms)
        assert found.parameters == {"format": "bf16", "tile": 32}


def test_a_number_is_fitted():
    def at(size):
        return moved(out=size)

    one = FaultPrediction(
        name="as large", tensors=at(1.0), family=at, start=1.0, parameter="size", order=2
    )
    (found,) = ranking(moved(out=3.0), one)
    assert found.all
    assert math.isclose(found.parameters["size"], 3.0)


def test_what_is_not_finite_compares_as_a_pattern():
    got = moved(out=math.nan, rows=slice(2))
    same = FaultPrediction(name="same rows", tensors=moved(out=math.nan, rows=slice(2)))
    other = FaultPrediction(name="other rows", tensors=moved(out=math.nan, rows=slice(2, 4)))
    infinite = FaultPrediction(name="infinite", tensors=moved(out=math.inf, rows=slice(2)))
    found = ranking(got, other, same, infinite)
    assert names(found) == ["same rows"]
    assert found[0].all


def test_several_problems_are_explained_by_what_explains_each():
    one = FaultPrediction(name="one", tensors=moved(out=2.0))
    two = FaultPrediction(name="two", tensors=moved(out=2.0), order=1)
    both = ranking(moved(out=2.0), one, two)
    alone = ranking(moved(out=2.0), two)
    assert names(combine_rankings(both, alone)) == ["two"]
    assert names(combine_rankings(both, [])) == names(both)


def test_what_explains_all_of_each_is_told_by_the_larger_error():
    large = FaultExplanation(name="one", share=0.999, all=True, unexplained=0.1)
    small = dataclasses.replace(large, share=0.2)
    part = dataclasses.replace(small, all=False)
    assert [one.share for one in combine_rankings([large], [small])] == [0.999]
    assert [one.share for one in combine_rankings([large], [part])] == [0.2]


def test_what_explains_all_equally_is_counted():
    one = FaultPrediction(name="one", tensors=moved(out=2.0))
    two = FaultPrediction(name="two", tensors=moved(out=2.0), order=1)
    half = FaultPrediction(name="half", tensors=moved(out=1.0))
    tied = ranking(moved(out=2.0), one, two, half)
    assert (names(tied), count_ties(tied)) == (["one", "two", "half"], 2)


def test_what_is_right_agrees_with_what_says_so():
    right = ObservedError(moved(out=0.05), EXACT, ALLOWED)
    assert right.agrees(FaultPrediction(name="right here", tensors=moved()))
    assert not right.agrees(FaultPrediction(name="wrong here", tensors=moved(lse=1.0)))
    wrong = ObservedError(moved(lse=1.0), EXACT, ALLOWED)
    assert wrong.agrees(FaultPrediction(name="wrong here", tensors=moved(lse=1.0)))
    assert not wrong.agrees(FaultPrediction(name="right here", tensors=moved()))


def free(name, count):
    rows = torch.zeros(1, 1, 4, dtype=torch.bool)
    rows[..., :count] = True
    return FaultPrediction(name=name, tensors=moved(), free=rows)


def test_rows_of_which_nothing_is_said_are_mostly_wrong_and_all_others_right():
    got = moved(out=2.0, rows=slice(2))
    assert names(ranking(got, free("two", 2), free("three", 3))) == ["two", "three"]
    assert ranking(got, free("four", 4)) == []
    assert ranking(got, free("one", 1)) == []


def test_what_leaves_rows_free_comes_after_what_predicts_them():
    got = moved(out=2.05, rows=slice(2))
    exact = FaultPrediction(name="predicted", tensors=moved(out=2.0, rows=slice(2)), order=2)
    found = ranking(got, free("free", 2), exact)
    assert names(found) == ["predicted", "free"]
    assert count_ties(found) == 1


def test_lse_that_is_not_exposed_refutes_nothing():
    got = {"out": moved(out=2.0)["out"]}
    one = FaultPrediction(name="moves LSE", tensors=moved(out=2.0, lse=1.0))
    assert names(ranking(got, one)) == ["moves LSE"]


def test_a_right_kernel_has_nothing_to_explain():
    assert not ObservedError(moved(), EXACT, ALLOWED).wrong
    assert not ObservedError(moved(out=0.05), EXACT, ALLOWED).proven


def test_where_nothing_is_known_nothing_is_asked():
    allowed = {name: torch.full_like(x, math.inf) for name, x in ALLOWED.items()}
    assert not ObservedError(moved(out=2.0), EXACT, allowed).wrong


def test_a_rounding_may_fall_the_other_way_in_few_numbers():
    """Planted: two of 200 numbers where a tie went the other way; more are no tie."""
    exact = {"lse": torch.zeros(1, 1, 200).double()}
    allowed = {"lse": torch.full((1, 1, 200), 0.1).double()}
    says = {"lse": torch.full((1, 1, 200), 1.0).double()}
    for ties, rounds, whole in ((2, True, True), (2, False, False), (20, True, False)):
        got = {"lse": says["lse"].clone()}
        got["lse"][..., :ties] = 1.5
        one = FaultPrediction(name="rounded", tensors=says, rounds=rounds)
        (found,) = rank_explanations(ObservedError(got, exact, allowed), [one])
        assert found.all == whole, (ties, rounds)


def test_what_is_hardly_nearer_is_no_tie():
    """Planted: few numbers are wrong, and a rounding that moves none of them."""
    got = moved()
    got["out"][0, 0, 0, 0] = 1.0
    near = moved()
    near["out"][0, 0, 0, 0] = 0.05
    (found,) = ranking(got, FaultPrediction(name="rounded", tensors=near, rounds=True))
    assert not found.all
