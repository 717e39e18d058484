from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from attncheck.core.errors import ProblemError, UnknownName
from attncheck.inputs import input_tensors as inputs_room
from attncheck.inputs.problem import Case, Problem
from attncheck.mods.spec import Spec
from attncheck.relations import RELATIONS, relation_named
from attncheck.relations.hidden_keys import first_hidden
from attncheck.relations.relation import Finding, compare_bits, compare_values
from attncheck.subjects.load import load_subject
from attncheck.verify.executor import Failure
from attncheck.verify.relation_runs import check_relation

if TYPE_CHECKING:
    from attncheck.capabilities.subject import Subject

PLANTED = Path(__file__).parents[1] / "properties" / "planted.py"
CAUSAL = Spec.of("causal")
FUTURES = ("future_keys", "future_keys_nan", "future_keys_huge")


def planted(name: str) -> Subject:
    return load_subject(f"{PLANTED}::{name}")


def problem(**changes: object) -> Problem:
    small = Problem(
        batch=2, heads=6, kv_heads=2, query=5, kv=7, head_dim=3, value_dim=4, mask=CAUSAL
    )
    return small.replace(**changes)


def ask(subject: Subject, question: str, **changes: object) -> Finding | Failure | None:
    asked = problem(**changes)
    allowed = relation_named(question).allowed(asked)
    parameters = {name: values[len(values) // 2] for name, values in allowed.items()}
    return check_relation(subject, Case(problem=asked, question=question, parameters=parameters))


@pytest.mark.parametrize(
    "question",
    [n for n, each in RELATIONS.items() if each.unfit(problem()) is None and not each.relaunched],
)
@pytest.mark.parametrize(
    ("dtype", "distribution"),
    [
        ("fp32", "large_logits"),
        ("tf32", "negative_logits"),
        ("fp16", "normal"),
        ("bf16", "large_logits"),
    ],
)
def test_a_right_kernel_passes(question: str, dtype: str, distribution: str) -> None:
    assert ask(planted("Right"), question, dtype=dtype, distribution=distribution) is None


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("fault", "question"),
    [
        *(("Wide", question) for question in FUTURES),
        ("Wide", "first_row"),
        ("Strict", "first_row"),
        ("Leaky", "future_keys_nan"),
        ("LeakyLse", "future_keys"),
        ("LeakyLse", "future_keys_huge"),
        ("WrongHead", "first_row"),
        ("Biased", "zero_values"),
        ("Restless", "repeat"),
        ("Reusing", "repeat"),
    ],
)
def test_a_planted_fault_is_found(fault: str, question: str, dtype: str) -> None:
    assert isinstance(ask(planted(fault), question, dtype=dtype), Finding)


@pytest.mark.parametrize("question", [*FUTURES, "repeat", "zero_values"])
def test_a_fault_that_is_not_asked_about_is_not_found(question: str) -> None:
    assert ask(planted("Strict"), question) is None


def test_a_kernel_that_raises_fails_with_its_message() -> None:
    found = ask(planted("Raising"), "repeat")
    assert isinstance(found, Failure)
    assert found.message == "RuntimeError: illegal memory access"


def test_the_finding_says_where_what_and_how_many() -> None:
    finding = ask(planted("Strict"), "first_row")
    assert isinstance(finding, Finding)
    v = inputs_room.draw_inputs(problem()).v
    assert finding.message == (
        f"out[0, 0, 0, 0] = 0, but should be {v[0, 0, 0, 0].item():.9g} bit for bit "
        "(48 of 48 elements differ)"
    )


def test_a_relation_leaves_its_inputs_as_they_are() -> None:
    drawn = inputs_room.draw_inputs(problem(dtype="tf32"))
    before = [t.clone() for t in (drawn.q, drawn.k, drawn.v)]
    for relation in RELATIONS.values():
        if relation.unfit(drawn.problem):
            continue
        allowed = relation.allowed(drawn.problem)
        relation.runs(drawn, {name: values[0] for name, values in allowed.items()})
    for tensor, copy in zip((drawn.q, drawn.k, drawn.v), before, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize("question", FUTURES)
def test_only_the_future_changes(question: str) -> None:
    drawn = inputs_room.draw_inputs(problem())
    before, after = relation_named(question).runs(drawn, {"row": 2})
    assert torch.equal(before.q, after.q)
    for old, new in ((before.k, after.k), (before.v, after.v)):
        assert torch.equal(old[:, :, :3], new[:, :, :3])
        assert (old[:, :, 3:] != new[:, :, 3:]).any(-1).all()


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16"])
def test_huge_is_finite_and_as_large_as_can_be(dtype: str) -> None:
    drawn = inputs_room.draw_inputs(problem(dtype=dtype))
    k = relation_named("future_keys_huge").runs(drawn, {"row": 0})[1].k[:, :, 1:]
    assert torch.isfinite(k).all()
    assert k.max() == drawn.problem.formats.storage.max
    assert k.min() >= min(1e29, drawn.problem.formats.storage.max)


@pytest.mark.parametrize(
    ("mask", "first"),
    [
        (CAUSAL, 3),
        (Spec.of("sliding_window", window=2), 3),
        (Spec.of("causal_bottom_right"), 5),
        (Spec.of("prefix_lm", prefix=4), 4),
        (Spec.of("prefix_lm", prefix=1), 3),
        (Spec.of("padding", lengths=[4, 6]), 6),
        (Spec.of("full"), 7),
        (Spec.of("document", lengths=[3, 4]), 7),
        (Spec.of("and", Spec.of("full"), CAUSAL), 3),
        (Spec.of("or", CAUSAL, Spec.of("padding", lengths=[4, 6])), 6),
        (Spec.of("not", CAUSAL), 7),
    ],
)
def test_first_hidden_is_hidden_by_the_callable_too(mask: Spec, first: int) -> None:
    asked = problem(mask=mask)
    assert first_hidden(asked, 2) == first
    b, h, q, k = torch.meshgrid(*map(torch.arange, (2, 6, 3, 7)), indexing="ij")
    visible = asked.mask_mod()(b, h, q, k).expand(2, 6, 3, 7)
    assert not visible[..., first:].any()


def test_first_hidden_stays_within_the_keys() -> None:
    short = problem(mask=Spec.of("causal_bottom_right"), query=7, kv=2)
    assert [first_hidden(short, row) for row in range(7)] == [0, 0, 0, 0, 0, 1, 2]


@pytest.mark.parametrize(
    ("question", "changes"),
    [
        ("future_keys", {"mask": Spec.of("full")}),
        ("future_keys", {"kv": 1}),
        ("first_row", {"mask": Spec.of("full")}),
        ("first_row", {"mask": Spec.of("sliding_window", window=0)}),
        ("first_row", {"mask": Spec.of("prefix_lm", prefix=2)}),
        ("first_row", {"mask": Spec.of("causal_bottom_right")}),
        (
            "first_row",
            {"dtype": "fp32", "score": Spec.of("relative_bias", distance=1, seed=0)},
        ),
    ],
)
def test_a_problem_of_which_nothing_can_be_said_is_refused(
    question: str, changes: dict[str, object]
) -> None:
    with pytest.raises(ProblemError, match="says nothing of"):
        check_relation(planted("Right"), Case(problem=problem(**changes), question=question))


@pytest.mark.parametrize("parameters", [{}, {"row": 5}, {"row": -1}, {"column": 0}])
def test_impossible_parameters_are_refused(parameters: dict[str, int]) -> None:
    with pytest.raises(ProblemError):
        check_relation(
            planted("Right"),
            Case(problem=problem(), question="future_keys", parameters=parameters),
        )


def test_an_unknown_question_lists_the_relations() -> None:
    with pytest.raises(UnknownName, match="future_keys"):
        relation_named("compare")


def test_moved_sees_every_bit() -> None:
    zero = torch.zeros(2)
    assert compare_bits("out", zero, zero) is None
    assert compare_bits("out", -zero, zero) is not None
    nan = torch.tensor([torch.nan, 1.0])
    assert compare_bits("out", nan, nan.clone()) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_moved_sees_the_last_bit(dtype: torch.dtype) -> None:
    one = torch.ones(2, 3, dtype=dtype)
    bits = one.clone().view(torch.int16 if dtype.itemsize == 2 else torch.int32)
    bits[1, 2] += 1
    finding = compare_bits("lse", bits.view(dtype), one)
    assert finding is not None
    assert (finding.place, finding.count, finding.compared) == ((1, 2), 1, 6)
    assert finding.value != finding.expected


def test_wrong_leaves_the_sign_of_zero_open_and_nothing_else() -> None:
    zero = torch.zeros(2)
    assert compare_values("out", -zero, zero) is None
    assert compare_values("out", torch.tensor([0.0, torch.nan]), zero) is not None
    assert compare_values("out", torch.tensor([0.0, 1e-45]), zero) is not None
