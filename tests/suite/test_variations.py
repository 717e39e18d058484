"""Other numbers for the same structure."""

import pytest

from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import Case, Problem
from attncheck.relations import relation_named
from attncheck.suite.property_spec import variations

CASE = Case(problem=Problem(query=40, kv=60, mask=Spec.of("causal"), distribution="normal", seed=7))
STRUCTURE = ("dtype", "head_dim", "value_dim", "heads", "kv_heads", "batch", "mask", "score")


def of(case: Case, count: int = 5, *, lengths: bool = True, **more: object) -> list[Case]:
    fits = more.pop("fits", lambda *_: True)
    return list(variations(case, count, fits=fits, lengths=lengths, **more))


def test_they_share_the_structure_and_nothing_else():
    found = [each.problem for each in of(CASE)]
    for name in STRUCTURE:
        assert {getattr(each, name) for each in found} == {getattr(CASE.problem, name)}
    for name in ("seed", "query", "kv", "distribution"):
        assert len({getattr(each, name) for each in [CASE.problem, *found]}) == 6
    assert all(each.query > 20 and each.kv > 30 for each in found)


def test_lengths_stay_where_they_are_compiled_in_or_the_mask_counts_them():
    assert {each.problem.kv for each in of(CASE, lengths=False)} == {60}
    padding = Spec.of("padding", lengths=[60])
    found = of(Case(problem=CASE.problem.replace(mask=padding)))
    assert [each.problem.kv for each in found] == [60] * 5


def test_they_shrink_with_the_case():
    small = Case(problem=Problem(query=1, kv=2, mask=Spec.of("causal")))
    assert {(each.problem.query, each.problem.kv) for each in of(small)} == {(1, 2)}


def test_the_relations_numbers_move_on_among_those_that_it_allows():
    case = Case(problem=CASE.problem, question="future_keys", parameters={"row": 0})
    found = of(case)
    assert len({each.parameters["row"] for each in found}) > 1
    for each in found:
        relation_named("future_keys").check(each.problem, each.parameters)


def test_only_what_fits_and_only_the_distributions_that_are_asked():
    assert not of(CASE, fits=lambda *_: False)
    asked = of(CASE, distributions=("normal", "large_logits"))
    assert {each.problem.distribution for each in asked} == {"normal", "large_logits"}


@pytest.mark.parametrize("count", [0, 3])
def test_a_softmax_has_scores(count):
    case = Case(problem=Problem(operation="softmax", query=3, kv=9))
    assert len(of(case, count)) == count
