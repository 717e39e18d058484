"""The order of asking follows from a table, and the table from fault models."""

from pathlib import Path

import pytest
from question_order import caught_forms, expected_cost, plan, read_table, table

from attncheck.cases.check_cases import ORDER, check_cases
from attncheck.fault_models import FAULT_MODELS

FILE = Path(__file__).parents[2] / "reports" / "cpu" / "question-order.json"
FORMS, COSTS = read_table(FILE.read_text(encoding="utf-8"))
CASES = {one.name: one.case for one in check_cases("bf16")}


def test_the_order_is_the_table_s():
    assert tuple(plan(FORMS, COSTS)) == ORDER
    assert table(ORDER, FORMS, COSTS) == FILE.read_text(encoding="utf-8")


def test_every_question_has_its_place_and_cost():
    assert set(ORDER) == set(CASES)
    assert {name: round(expected_cost(case.problem), 4) for name, case in CASES.items()} == COSTS


@pytest.mark.parametrize("question", ["decode-one-query", "empty-rows", "long-sum"])
def test_a_part_of_the_table_computed_again(question):
    models = [name for number, name in enumerate(FAULT_MODELS) if number % 5 == 0]
    again = caught_forms(CASES[question], models)
    assert again == {form: FORMS[question][form] for form in again}
    assert set(again.values()) == {True, False}


def test_what_brings_most_for_its_cost_comes_first():
    forms = {
        "dear": {"a#0": True, "b#0": True},
        "cheap": {"a#0": True, "b#0": False},
        "nothing": {"a#0": False, "b#0": False},
        "other": {"a#0": False, "b#0": True},
    }
    costs = {"dear": 0.9, "cheap": 0.1, "nothing": 0.1, "other": 0.1}
    assert plan(forms, costs) == ["cheap", "other", "dear", "nothing"]
    assert plan(forms, costs | {"dear": 0.1})[0] == "dear"
