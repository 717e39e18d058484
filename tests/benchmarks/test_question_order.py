"""The order of questions follows from a table, and the table from the fault models."""

from pathlib import Path

import pytest
from question_order import caught_forms, expected_cost, plan, read_table, table

from attncheck.cases.check_cases import ORDER, check_cases
from attncheck.fault_models import FAULT_MODELS

FILE = Path(__file__).parents[2] / "reports" / "cpu" / "question-order.json"
FORMS, COSTS = read_table(FILE.read_text(encoding="utf-8"))
CASES = {one.name: one.case for one in check_cases("bf16")}


def test_order_of_the_program_is_the_plan_of_the_table():
    assert tuple(plan(FORMS, COSTS)) == ORDER
    assert table(ORDER, FORMS, COSTS) == FILE.read_text(encoding="utf-8")


def test_order_and_table_have_every_question_with_its_expected_cost():
    assert set(ORDER) == set(CASES)
    assert {name: round(expected_cost(case.problem), 4) for name, case in CASES.items()} == COSTS


@pytest.mark.parametrize("question", ["decode-one-query", "empty-rows", "long-sum"])
def test_every_fifth_model_still_gives_the_tables_results(question):
    models = [name for number, name in enumerate(FAULT_MODELS) if number % 5 == 0]
    caught = caught_forms(CASES[question], models)
    assert caught == {form: FORMS[question][form] for form in caught}
    assert set(caught.values()) == {True, False}


def test_plan_begins_with_the_question_that_catches_most_for_its_cost():
    forms = {
        "expensive": {"a#0": True, "b#0": True},
        "cheap": {"a#0": True, "b#0": False},
        "nothing": {"a#0": False, "b#0": False},
        "other": {"a#0": False, "b#0": True},
    }
    costs = {"expensive": 0.9, "cheap": 0.1, "nothing": 0.1, "other": 0.1}
    assert plan(forms, costs) == ["cheap", "other", "expensive", "nothing"]
    assert plan(forms, costs | {"expensive": 0.1})[0] == "expensive"
