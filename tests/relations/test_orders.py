"""Keys, heads and sequences in another order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attncheck.core.source_files import import_file
from attncheck.inputs import input_tensors as inputs_room
from attncheck.mods.spec import Spec
from attncheck.relations import relation_named
from attncheck.relations.relation import Finding
from attncheck.subjects.ideal import Ideal

planted = import_file(Path(__file__).parent / "planted_orders.py", "planted faults")

FULL = Spec.of("full")
PADDING = Spec.of("padding", lengths=[3, 6])
DOCUMENT = Spec.of("document", lengths=[3, 0, 4])
PREFIX = Spec.of("prefix_lm", prefix=4)
CAUSAL = Spec.of("causal")
ORDERS = ("key_permutation", "head_permutation", "batch_permutation")


@pytest.mark.parametrize("question", ORDERS)
@pytest.mark.parametrize(
    ("dtype", "distribution"),
    [
        ("fp32", "large_logits"),
        ("tf32", "normal"),
        ("fp16", "negative_logits"),
        ("bf16", "outliers"),
        ("e4m3", "normal"),
    ],
)
def test_the_ideal_kernel_passes(question, dtype, distribution, small, ask, numbers) -> None:
    asked = small(PADDING, dtype=dtype, distribution=distribution)
    for chosen in numbers(question, asked):
        assert ask(Ideal(), question, asked, **chosen) is None


@pytest.mark.parametrize("question", ORDERS)
@pytest.mark.parametrize("name", ["triton-flash2", "triton-flash1", "sdpa-math"])
def test_other_right_kernels_pass(question, name, small, ask) -> None:
    assert ask(name, question, small(PADDING, dtype="fp16")) is None


@pytest.mark.parametrize("mask", [FULL, PADDING, DOCUMENT, PREFIX, Spec.of("or", DOCUMENT, PREFIX)])
@pytest.mark.parametrize("shuffle", [0, 3])
def test_keys_are_permuted_among_those_that_the_same_rows_see(mask, shuffle, small) -> None:
    asked = small(mask)
    drawn = inputs_room.draw_inputs(asked)
    before, after = relation_named("key_permutation").runs(drawn, {"shuffle": shuffle})
    assert before is drawn
    b, h, q, kv = torch.meshgrid(*map(torch.arange, (2, 4, 5, 7)), indexing="ij")
    visible = asked.mask_mod()(b, h, q, kv).expand(2, 4, 5, 7)
    for batch in range(2):
        came_from = [
            int((before.v[batch, 0] == value).all(-1).nonzero()) for value in after.v[batch, 0]
        ]
        assert sorted(came_from) == list(range(7))
        assert torch.equal(after.k[batch], before.k[batch][:, came_from])
        assert torch.equal(visible[batch], visible[batch][..., came_from])
    assert not torch.equal(before.k, after.k) or shuffle


@pytest.mark.parametrize("dtype", ["fp32", "e4m3"])
@pytest.mark.parametrize("mask", [FULL, PADDING, DOCUMENT])
@pytest.mark.parametrize("fault", ["LaterKeysWeighMore", "ValueOfNeighbour"])
def test_a_kernel_that_knows_a_key_by_its_place_fails(fault, mask, dtype, small, ask) -> None:
    kernel = getattr(planted, fault)()
    found = [ask(kernel, "key_permutation", small(mask, dtype=dtype), shuffle=n) for n in range(4)]
    assert any(isinstance(each, Finding) for each in found)


def test_a_forgotten_key_is_another_one_in_another_order(small, ask) -> None:
    found = ask(planted.WithoutLastKey(), "key_permutation", small(FULL))
    assert isinstance(found, Finding)
    assert found.allowed > 0


@pytest.mark.parametrize("heads", [(4, 2), (6, 2), (6, 3), (4, 4)])
@pytest.mark.parametrize("fault", ["ModuloHead", "NextKeyHead", "LastHeadOff"])
def test_a_kernel_that_knows_a_head_by_its_place_fails(fault, heads, small, ask) -> None:
    asked = small(CAUSAL, heads=heads[0], kv_heads=heads[1], dtype="fp32")
    turns = relation_named("head_permutation").allowed(asked)["turn"]
    kernel = getattr(planted, fault)()
    found = [ask(kernel, "head_permutation", asked, turn=turn) for turn in turns]
    right = heads[0] == heads[1] and fault == "ModuloHead"  # it is h // group then
    # Two key heads are each the one after the other, in whatever order.
    blind = heads[1] == 2 and fault == "NextKeyHead"
    assert all(each is None for each in found) == (right or blind)


@pytest.mark.parametrize("lengths", [[3, 6, 1], [7, 7, 0]])
def test_a_kernel_that_takes_the_next_length_fails(lengths, small, ask) -> None:
    asked = small(Spec.of("padding", lengths=lengths), batch=3)
    assert isinstance(ask(planted.NextLength(), "batch_permutation", asked), Finding)


def test_a_kernel_that_reads_another_sequence_fails(small, ask) -> None:
    assert isinstance(ask(planted.FirstKeys(), "batch_permutation", small(CAUSAL)), Finding)


def test_lengths_go_with_their_sequences(small) -> None:
    nested = Spec.of("and", CAUSAL, Spec.of("not", PADDING))
    drawn = inputs_room.draw_inputs(small(nested, dtype="e4m3"))
    _, after = relation_named("batch_permutation").runs(drawn, {"turn": 1})
    assert after.problem.mask.parts[1].parts[0] == Spec.of("padding", lengths=[6, 3])
    assert after.descale is not None
    assert drawn.descale is not None
    assert torch.equal(after.descale.v, drawn.descale.v.flip(0))
    assert torch.equal(after.q.float(), drawn.q.float().flip(0))


def test_without_the_promise_it_is_asked_within_bounds(small, ask) -> None:
    class Unpromised(planted.LastHeadOff):
        promises = frozenset({"repeat"})

    asked = small(CAUSAL, dtype="fp32")
    assert isinstance(ask(planted.LastHeadOff(), "head_permutation", asked), Finding)
    assert ask(Unpromised(), "head_permutation", asked) is None


@pytest.mark.parametrize(
    ("question", "mask", "changes", "says"),
    [
        ("key_permutation", "q_idx >= kv_idx", {}, "no two keys are seen by the same rows"),
        ("key_permutation", "q_idx < 3", {}, None),
        ("key_permutation", "q_idx < 3", {"kv": 1}, "no two keys are seen by the same rows"),
        ("key_permutation", "q_idx < 3", {"score": Spec.of("alibi")}, "reads the key's index"),
        ("head_permutation", "(h > 0) | (q_idx > 2)", {}, "its mask reads the head's index"),
        ("head_permutation", "b > kv_idx", {}, None),
        ("head_permutation", "b > kv_idx", {"score": Spec.of("alibi")}, "its score mod reads"),
        ("head_permutation", "b > kv_idx", {"heads": 1, "kv_heads": 1}, "it has one head"),
        ("batch_permutation", "b > kv_idx", {}, "its mask reads the sequence's index"),
        ("batch_permutation", "h > kv_idx", {}, None),
        ("batch_permutation", "h > kv_idx", {"batch": 1}, "it has one sequence"),
    ],
)
def test_what_reads_an_index_is_refused(question, mask, changes, says, small) -> None:
    asked = small(Spec.of("expression", text=mask), **changes)
    reason = relation_named(question).unfit(asked)
    assert (reason is None) if says is None else (says in (reason or ""))


@pytest.mark.parametrize("question", ORDERS)
def test_a_softmax_is_refused(question, softmax) -> None:
    assert relation_named(question).unfit(softmax()) == "it is about attention"
