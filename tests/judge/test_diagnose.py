"""Ranking of fault explanations by how well they predict the errors, on hand-made tensors."""

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


def with_error(out=0.0, lse=0.0, rows=slice(None)):
    tensors = {name: x.clone() for name, x in EXACT.items()}
    tensors["out"][:, :, rows] += out
    tensors["lse"][:, :, rows] += lse
    return tensors


def rank(got, *hypotheses):
    return rank_explanations(ObservedError(got, EXACT, ALLOWED), hypotheses)


def names(ranking):
    return [one.name for one in ranking]


def test_hypothesis_that_leaves_less_error_ranks_first():
    half = FaultPrediction(name="half", tensors=with_error(out=1.0))
    whole = FaultPrediction(name="whole", tensors=with_error(out=2.05))
    first, second = rank(with_error(out=2.0), half, whole)
    assert (first.name, first.all) == ("whole", True)
    assert (second.name, second.all) == ("half", False)
    assert math.isclose(second.share, 0.75)


def test_hypothesis_wrong_about_lse_is_rejected():
    wrong = FaultPrediction(name="moves LSE", tensors=with_error(out=2.0, lse=1.0))
    assert rank(with_error(out=2.0), wrong) == []
    of_out = FaultPrediction(name="out alone", tensors=with_error(out=2.0))
    assert rank(with_error(out=2.0, lse=1.0), of_out) == []


def test_what_a_tie_may_move_is_explained_where_it_may():
    got = with_error(out=2.0)
    got["out"][0, 0, 1] += 0.5
    plain = FaultPrediction(name="plain", tensors=with_error(out=2.0))
    assert not rank(got, plain)[0].all
    for row, explains_all in ((1, True), (2, False)):
        ties = torch.zeros_like(EXACT["out"])
        ties[0, 0, row] = 0.45
        tied = dataclasses.replace(plain, ties={"out": ties})
        assert rank(got, tied)[0].all == explains_all
        assert ObservedError(got, EXACT, ALLOWED).agrees(tied) == explains_all


def test_simpler_of_two_equal_hypotheses_ranks_first():
    fitted = FaultPrediction(name="fitted", tensors=with_error(out=2.0), order=2)
    plain = FaultPrediction(name="plain", tensors=with_error(out=2.0))
    assert names(rank(with_error(out=2.01), fitted, plain)) == ["plain", "fitted"]


def test_equal_forms_merge_into_the_one_with_most_parameters():
    plain, named, more = (
        FaultPrediction(name="one", tensors=with_error(out=2.0), parameters=parameters)
        for parameters in ({}, {"tile": 32}, {"format": "bf16", "tile": 32})
    )
    for forms in ((plain, named, more), (more, named, plain)):
        (explanation,) = rank(with_error(out=2.0), *forms)
        assert explanation.parameters == {"format": "bf16", "tile": 32}
        assert [*explanation.others] == [{"tile": 32}, {}]


def test_forms_that_explain_a_part_are_not_kept():
    whole, half = (
        FaultPrediction(name="one", tensors=with_error(out=size), parameters={"of": name})
        for name, size in (("k", 2.0), ("v", 1.0))
    )
    (explanation,) = rank(with_error(out=2.0), whole, half)
    assert (explanation.parameters, explanation.others) == ({"of": "k"}, ())


def test_parameter_of_a_family_is_fitted():
    def at(size):
        return with_error(out=size)

    hypothesis = FaultPrediction(
        name="as large", tensors=at(1.0), family=at, start=1.0, parameter="size", order=2
    )
    (explanation,) = rank(with_error(out=3.0), hypothesis)
    assert explanation.all
    assert math.isclose(explanation.parameters["size"], 3.0)


def test_nonfinite_values_must_match_in_place_and_kind():
    got = with_error(out=math.nan, rows=slice(2))
    same = FaultPrediction(name="same rows", tensors=with_error(out=math.nan, rows=slice(2)))
    other = FaultPrediction(name="other rows", tensors=with_error(out=math.nan, rows=slice(2, 4)))
    infinite = FaultPrediction(name="infinite", tensors=with_error(out=math.inf, rows=slice(2)))
    explanations = rank(got, other, same, infinite)
    assert names(explanations) == ["same rows"]
    assert explanations[0].all


def test_combined_ranking_keeps_hypotheses_that_explain_every_problem():
    one = FaultPrediction(name="one", tensors=with_error(out=2.0))
    two = FaultPrediction(name="two", tensors=with_error(out=2.0), order=1)
    both = rank(with_error(out=2.0), one, two)
    alone = rank(with_error(out=2.0), two)
    assert names(combine_rankings(both, alone)) == ["two"]
    assert names(combine_rankings(both, [])) == names(both)


def test_combined_share_is_the_larger_where_both_are_fully_explained():
    large = FaultExplanation(name="one", share=0.999, all=True, unexplained=0.1)
    small = dataclasses.replace(large, share=0.2)
    part = dataclasses.replace(small, all=False)
    assert [one.share for one in combine_rankings([large], [small])] == [0.999]
    assert [one.share for one in combine_rankings([large], [part])] == [0.2]


def test_count_ties_counts_equal_full_explanations():
    one = FaultPrediction(name="one", tensors=with_error(out=2.0))
    two = FaultPrediction(name="two", tensors=with_error(out=2.0), order=1)
    half = FaultPrediction(name="half", tensors=with_error(out=1.0))
    tied = rank(with_error(out=2.0), one, two, half)
    assert (names(tied), count_ties(tied)) == (["one", "two", "half"], 2)


def test_prediction_agrees_where_it_tells_right_from_wrong():
    right = ObservedError(with_error(out=0.05), EXACT, ALLOWED)
    assert right.agrees(FaultPrediction(name="right here", tensors=with_error()))
    assert not right.agrees(FaultPrediction(name="wrong here", tensors=with_error(lse=1.0)))
    wrong = ObservedError(with_error(lse=1.0), EXACT, ALLOWED)
    assert wrong.agrees(FaultPrediction(name="wrong here", tensors=with_error(lse=1.0)))
    assert not wrong.agrees(FaultPrediction(name="right here", tensors=with_error()))


def predict_rows(name, count):
    """A prediction that says only that the first ``count`` rows are wrong and all others right."""
    rows = torch.zeros(1, 1, 4, dtype=torch.bool)
    rows[..., :count] = True
    return FaultPrediction(name=name, tensors=with_error(), free=rows)


def test_free_rows_must_be_mostly_wrong_and_all_others_right():
    got = with_error(out=2.0, rows=slice(2))
    assert names(rank(got, predict_rows("two", 2), predict_rows("three", 3))) == [
        "two",
        "three",
    ]
    assert rank(got, predict_rows("four", 4)) == []
    assert rank(got, predict_rows("one", 1)) == []


def test_prediction_with_free_rows_ranks_after_an_exact_one():
    got = with_error(out=2.05, rows=slice(2))
    exact = FaultPrediction(name="predicted", tensors=with_error(out=2.0, rows=slice(2)), order=2)
    explanations = rank(got, predict_rows("free", 2), exact)
    assert names(explanations) == ["predicted", "free"]
    assert count_ties(explanations) == 1


def test_prediction_of_lse_is_ignored_where_the_kernel_exposes_none():
    got = {"out": with_error(out=2.0)["out"]}
    hypothesis = FaultPrediction(name="moves LSE", tensors=with_error(out=2.0, lse=1.0))
    assert names(rank(got, hypothesis)) == ["moves LSE"]


def test_errors_within_the_allowance_are_not_wrong():
    assert not ObservedError(with_error(), EXACT, ALLOWED).wrong
    assert not ObservedError(with_error(out=0.05), EXACT, ALLOWED).proven


def test_errors_are_not_wrong_where_the_allowance_is_infinite():
    allowed = {name: torch.full_like(x, math.inf) for name, x in ALLOWED.items()}
    assert not ObservedError(with_error(out=2.0), EXACT, allowed).wrong


def test_rounding_hypothesis_tolerates_few_ties_rounded_the_other_way():
    """Two ties of 200 numbers may round the other way, but not 20, nor any without ``rounds``."""
    exact = {"lse": torch.zeros(1, 1, 200).double()}
    allowed = {"lse": torch.full((1, 1, 200), 0.1).double()}
    predicted = {"lse": torch.full((1, 1, 200), 1.0).double()}
    for ties, rounds, whole in ((2, True, True), (2, False, False), (20, True, False)):
        got = {"lse": predicted["lse"].clone()}
        got["lse"][..., :ties] = 1.5
        hypothesis = FaultPrediction(name="rounded", tensors=predicted, rounds=rounds)
        (explanation,) = rank_explanations(ObservedError(got, exact, allowed), [hypothesis])
        assert explanation.all == whole, (ties, rounds)


def test_rounding_hypothesis_that_moves_no_wrong_number_does_not_explain_it():
    """Few numbers are wrong, and the hypothesis hardly moves them: they do not count as ties."""
    got = with_error()
    got["out"][0, 0, 0, 0] = 1.0
    near = with_error()
    near["out"][0, 0, 0, 0] = 0.05
    (explanation,) = rank(got, FaultPrediction(name="rounded", tensors=near, rounds=True))
    assert not explanation.all
