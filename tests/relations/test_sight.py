"""What rows see: hidden keys, no keys, one key, and how many."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attncheck.core.formats import FORMATS
from attncheck.core.source_files import import_file
from attncheck.inputs import input_tensors as inputs_room
from attncheck.mods.spec import Spec
from attncheck.relations import mask_visibility, relation_named
from attncheck.relations.relation import Finding
from attncheck.subjects.ideal import Ideal

planted = import_file(Path(__file__).parent / "planted_sight.py", "planted faults")

FULL = Spec.of("full")
CAUSAL = Spec.of("causal")
WINDOW = Spec.of("sliding_window", window=2)
PADDING = Spec.of("padding", lengths=[4, 0])
OF_HEADS = Spec.of("expression", text="(kv_idx + h // 2) % 3 <= q_idx")
MASKS = [CAUSAL, WINDOW, PADDING, OF_HEADS, Spec.of("not", FULL)]
HIDDEN = ("hidden_keys", "hidden_keys_nan", "hidden_keys_huge")
QUESTIONS = (*HIDDEN, "empty_rows", "zero_query", "one_hot")
DTYPES = ["fp32", "tf32", "fp16", "bf16", "e4m3"]


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ideal_kernel_passes(question, dtype, small, ask, numbers) -> None:
    for mask in MASKS:
        asked = small(mask, dtype=dtype, distribution="large_logits")
        if relation_named(question).unfit(asked) is None:
            for chosen in numbers(question, asked):
                assert ask(Ideal(), question, asked, **chosen) is None


@pytest.mark.parametrize("question", QUESTIONS)
def test_our_kernel_passes(question, small, ask) -> None:
    assert ask("triton-flash2", question, small(PADDING, dtype="fp16")) is None


@pytest.mark.parametrize("question", ["hidden_keys", "zero_query", "one_hot"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_torch_passes(question, dtype, small, ask) -> None:
    assert ask("sdpa-math", question, small(WINDOW, query=7, dtype=dtype)) is None


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "e4m3"])
@pytest.mark.parametrize(
    ("fault", "question", "mask"),
    [
        *(("LongerWindow", question, WINDOW) for question in HIDDEN),
        *(("OtherHeadsMask", question, OF_HEADS) for question in HIDDEN),
        ("Sentinel", "hidden_keys", CAUSAL),
        ("Leaky", "hidden_keys_nan", PADDING),
        ("MeanOfNothing", "empty_rows", PADDING),
        ("NothingIsNan", "empty_rows", PADDING),
        ("LowestLse", "empty_rows", PADDING),
        ("DividedByAll", "zero_query", CAUSAL),
        ("BaseTwo", "zero_query", FULL),
        ("WithoutLastKey", "zero_query", FULL),
        ("LaterRow", "zero_query", CAUSAL),
        ("SwappedValues", "one_hot", CAUSAL),
        ("OtherHeadsMask", "one_hot", OF_HEADS),
    ],
)
def test_a_planted_fault_is_found(fault, question, mask, dtype, small, ask) -> None:
    asked = small(mask, dtype=dtype)
    turns = relation_named(question).allowed(asked)
    name, values = next(iter(turns.items()), ("", [0]))
    kernel = getattr(planted, fault)()
    found = (ask(kernel, question, asked, **({name: value} if name else {})) for value in values)
    assert any(isinstance(each, Finding) for each in found)


def test_huge_keys_overflow(small, ask) -> None:
    found = ask(planted.Overflowing(), "hidden_keys_huge", small(WINDOW))
    assert isinstance(found, Finding)
    assert found.tensor == "lse"


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_one_hot_sees_every_bit(dtype, small, ask) -> None:
    assert isinstance(ask(planted.OutThroughBf16(), "one_hot", small(dtype=dtype)), Finding)


def test_one_hot_singles_out_every_key_in_its_turn(small, ask) -> None:
    asked = small(FULL)
    found = [ask(planted.WithoutLastKey(), "one_hot", asked, turn=turn) for turn in range(7)]
    assert [each and each.place[2] for each in found] == [None, None, 4, 3, 2, 1, 0]


def test_one_hot_makes_one_score_0_and_all_others_low(small) -> None:
    asked = small(FULL, dtype="e4m3", head_dim=9)
    (made,) = relation_named("one_hot").runs(inputs_room.draw_inputs(asked), {"turn": 0})
    q, k, _ = made.promoted()
    scores = asked.scale * q @ k.repeat_interleave(2, dim=1).mT
    assert torch.equal((scores == 0).sum(-1), torch.ones(2, 4, 5, dtype=torch.long))
    half_of_the_smallest = FORMATS["fp32"].subnormal_spacing / 2
    assert scores[scores != 0].exp().max() < half_of_the_smallest


def test_a_finding_is_at_its_place(small, ask) -> None:
    found = ask(planted.LongerWindow(), "hidden_keys", small(WINDOW), row=3)
    assert isinstance(found, Finding)
    assert found.place[2] == 3


@pytest.mark.parametrize("mask", MASKS)
def test_only_what_the_row_does_not_see_changes(mask, small) -> None:
    asked = small(mask)
    drawn = inputs_room.draw_inputs(asked)
    b, h, q, kv = torch.meshgrid(*map(torch.arange, (2, 4, 5, 7)), indexing="ij")
    seen = asked.mask_mod()(b, h, q, kv).expand(2, 4, 5, 7)
    rows = relation_named("hidden_keys").allowed(asked)["row"]
    assert list(rows) == [r for r in range(5) if (~seen[:, :, r].unflatten(1, (2, 2)).any(2)).any()]
    for row in rows:
        _, after = relation_named("hidden_keys").runs(drawn, {"row": row})
        changed = (after.k != drawn.k).any(-1)
        assert torch.equal(changed, ~seen[:, :, row].unflatten(1, (2, 2)).any(2))
        assert torch.equal(mask_visibility.keys_hidden_from(asked, row), changed)


def test_empty_rows_are_those_that_see_no_key(small) -> None:
    assert mask_visibility.rows_without_keys(small(PADDING))[:, :, 0].tolist() == [
        [False] * 4,
        [True] * 4,
    ]
    beyond = Spec.of("causal_bottom_right")
    assert mask_visibility.rows_without_keys(small(beyond, query=9, kv=7))[0, 0].tolist() == [
        True,
        True,
    ] + 7 * [False]


@pytest.mark.parametrize(
    ("question", "changes", "says"),
    [
        ("hidden_keys", {"mask": FULL}, "its mask shows every row every key"),
        ("empty_rows", {"mask": CAUSAL}, "each of its rows sees a key"),
        ("zero_query", {"score": Spec.of("alibi")}, "its score mod may move a score of 0"),
        ("one_hot", {"score": Spec.of("softcap", cap=9.0)}, "its score mod"),
        ("one_hot", {"head_dim": 5}, "head_dim=5 has no room for 3 bits"),
        ("one_hot", {"dtype": "fp16", "scale": 1e-5}, "scale=1e-05 asks for q beyond fp16"),
        *((question, {"operation": "softmax"}, "it is about attention") for question in QUESTIONS),
    ],
)
def test_what_nothing_can_be_said_of_is_refused(question, changes, says, small, softmax) -> None:
    asked = softmax() if "operation" in changes else small(**changes)
    assert says in (relation_named(question).unfit(asked) or "")
