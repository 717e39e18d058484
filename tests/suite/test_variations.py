"""Variations of a case: other numbers of the same structure."""

import pytest

from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import Case, Problem
from attncheck.relations import relation_named
from attncheck.suite.property_spec import variations

CASE = Case(problem=Problem(query=40, kv=60, mask=Spec.of("causal"), distribution="normal", seed=7))
STRUCTURE = ("dtype", "head_dim", "value_dim", "heads", "kv_heads", "batch", "mask", "score")


def vary(case: Case, count: int = 5, *, lengths: bool = True, **more: object) -> list[Case]:
    fits = more.pop("fits", lambda *_: True)
    return list(variations(case, count, fits=fits, lengths=lengths, **more))


def test_variations_share_the_structure_and_differ_in_everything_else():
    problems = [each.problem for each in vary(CASE)]
    for name in STRUCTURE:
        assert {getattr(each, name) for each in problems} == {getattr(CASE.problem, name)}
    for name in ("seed", "query", "kv", "distribution"):
        assert len({getattr(each, name) for each in [CASE.problem, *problems]}) == 6
    assert all(each.query > 20 and each.kv > 30 for each in problems)


def test_lengths_stay_where_compiled_in_or_fixed_by_the_mask():
    assert {each.problem.kv for each in vary(CASE, lengths=False)} == {60}
    padding = Spec.of("padding", lengths=[60])
    variants = vary(Case(problem=CASE.problem.replace(mask=padding)))
    assert [each.problem.kv for each in variants] == [60] * 5


def test_variations_of_the_smallest_case_keep_its_lengths():
    small = Case(problem=Problem(query=1, kv=2, mask=Spec.of("causal")))
    assert {(each.problem.query, each.problem.kv) for each in vary(small)} == {(1, 2)}


def test_variations_use_other_allowed_parameters_of_the_relation():
    case = Case(problem=CASE.problem, question="future_keys", parameters={"row": 0})
    variants = vary(case)
    assert len({each.parameters["row"] for each in variants}) > 1
    for each in variants:
        relation_named("future_keys").check(each.problem, each.parameters)


def test_variations_respect_fits_and_distributions():
    assert not vary(CASE, fits=lambda *_: False)
    variants = vary(CASE, distributions=("normal", "large_logits"))
    assert {each.problem.distribution for each in variants} == {"normal", "large_logits"}


@pytest.mark.parametrize("count", [0, 3])
def test_softmax_has_as_many_variations_as_requested(count):
    case = Case(problem=Problem(operation="softmax", query=3, kv=9))
    assert len(vary(case, count)) == count
