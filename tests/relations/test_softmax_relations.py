"""Relations of a softmax of scores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attncheck.core.source_files import import_file
from attncheck.inputs import input_tensors as inputs_room
from attncheck.relations import RELATIONS, relation_named
from attncheck.relations.relation import Finding
from attncheck.subjects.ideal import Ideal

planted = import_file(Path(__file__).parent / "planted_softmax.py", "planted faults")

QUESTIONS = ("softmax_shift", "softmax_columns", "softmax_rows")


@pytest.mark.parametrize("question", [*QUESTIONS, "repeat"])
@pytest.mark.parametrize("name", ["ideal", "triton-softmax-online", "torch-softmax"])
@pytest.mark.parametrize(
    ("dtype", "distribution"),
    [("fp32", "large_logits"), ("fp16", "normal"), ("bf16", "negative_logits")],
)
def test_right_kernels_pass(question, name, dtype, distribution, softmax, ask, numbers) -> None:
    asked = softmax(dtype=dtype, distribution=distribution)
    for chosen in numbers(question, asked):
        assert ask(name, question, asked, **chosen) is None


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("fault", "question"),
    [
        ("NoMaximum", "softmax_shift"),
        ("RelativeLse", "softmax_shift"),
        ("LastColumnTwice", "softmax_columns"),
        ("PreviousRow", "softmax_rows"),
    ],
)
def test_a_planted_fault_is_found(fault, question, dtype, softmax, ask) -> None:
    asked, kernel = softmax(dtype=dtype), getattr(planted, fault)()
    ((name, values),) = relation_named(question).allowed(asked).items()
    found = (ask(kernel, question, asked, **{name: value}) for value in values[::-1])
    assert any(isinstance(each, Finding) for each in found)


def test_a_row_that_knows_its_neighbour_fails_to_the_bit(softmax, ask) -> None:
    asked = softmax(kv=33, query=7)
    turns = relation_named("softmax_rows").allowed(asked)["turn"]
    kernel = planted.PairsShareAMaximum()
    found = [ask(kernel, "softmax_rows", asked, turn=turn) for turn in turns[:4]]
    assert any(isinstance(each, Finding) for each in found)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("distribution", ["normal", "large_logits", "outliers"])
def test_every_shift_is_exact_and_about_as_large_as_asked(dtype, distribution, softmax) -> None:
    drawn = inputs_room.draw_inputs(softmax(dtype=dtype, distribution=distribution))
    for nats in relation_named("softmax_shift").allowed(drawn.problem)["nats"]:
        before, after = relation_named("softmax_shift").runs(drawn, {"nats": nats})
        shift = after.scores() - before.scores()
        assert len(shift.unique()) == 1
        shift = float(shift.flatten()[0])
        assert shift * nats > 0
        if abs(nats) > 1:
            assert abs(nats) / 2 < abs(shift) < abs(nats) * 2


def test_rows_of_all_heads_and_sequences_change_places(softmax) -> None:
    drawn = inputs_room.draw_inputs(softmax())
    _, after = relation_named("softmax_rows").runs(drawn, {"turn": 0})
    assert drawn.x is not None
    assert after.x is not None
    rows = drawn.x.flatten(0, 2)
    assert torch.equal(after.x.flatten(0, 2), torch.cat([rows[:1], rows[1:].flip(0)]))


def test_one_row_or_column_has_no_order(softmax) -> None:
    one = softmax(batch=1, heads=1, query=1, kv=1)
    assert relation_named("softmax_rows").unfit(one) == "it has one row"
    assert relation_named("softmax_columns").unfit(one) == "it has one column"


def test_each_relation_is_about_one_operation(softmax, small) -> None:
    of_softmax = {name for name, each in RELATIONS.items() if each.unfit(softmax()) is None}
    assert of_softmax == {*QUESTIONS, "repeat"}
    for question in QUESTIONS:
        assert relation_named(question).unfit(small()) == "it is about softmax"


def test_the_ideal_kernel_is_asked_to_the_bit(softmax, ask) -> None:
    class Unpromised(planted.PairsShareAMaximum):
        promises = frozenset({"repeat"})

    asked = softmax(kv=33, query=7)
    assert ask(Ideal(), "softmax_rows", asked) is None
    assert ask(Unpromised(), "softmax_rows", asked) is None
