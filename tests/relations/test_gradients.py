"""Relations between gradients: they hold of a right kernel, and say what they are about."""

from __future__ import annotations

import pytest
import torch

from attncheck import inputs
from attncheck.mods.spec import Spec
from attncheck.relations import RELATIONS, relation_named

OF_GRADIENTS = ("zero_loss", "lse_loss", "euler", "group_sums")
ALSO = (
    "key_shift",
    "key_permutation",
    "head_permutation",
    "batch_permutation",
    "gqa_repeat",
    "window_beyond",
    "strides_heads_last",
    "strides_gapped",
    "strides_offset",
    "strides_packed",
    "strides_expanded",
    "strides_transposed",
    "repeat",
    "call_order",
)


def mask_of(question: str) -> Spec:
    """One that the relation says something of."""
    if question in ("window_beyond",):
        return Spec.of("causal")
    return Spec.of("padding", lengths=[4, 7]) if question == "key_permutation" else Spec.of("full")


@pytest.mark.parametrize("kernel", ["ideal", "triton-flash2"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("question", OF_GRADIENTS + ALSO)
def test_it_holds_of_a_right_kernel(ask, small, numbers, question, dtype, kernel) -> None:
    asked = small(mask_of(question), dtype=dtype, backward=True, dlse=True)
    for chosen in numbers(question, asked)[: 1 if kernel != "ideal" else None]:
        assert ask(kernel, question, asked, **chosen) is None


@pytest.mark.parametrize("question", OF_GRADIENTS)
def test_one_about_gradients_says_nothing_without(small, softmax, question) -> None:
    assert relation_named(question).unfit(small()) == "it is about gradients"
    assert relation_named(question).unfit(softmax()) == "it is about attention"


def test_every_other_one_says_nothing_of_gradients(small) -> None:
    asked = small(backward=True, dlse=True)
    silent = {n for n, r in RELATIONS.items() if r.unfit(asked) == "it says nothing of gradients"}
    loud = {*OF_GRADIENTS, *ALSO, "prefix_zero", "prefix_full", "launches"}
    of_softmax = {name for name in RELATIONS if name.startswith("softmax_")}
    assert silent | loud | of_softmax == set(RELATIONS)
    assert not silent & loud


def test_a_loss_without_lse_is_no_question_of_it(small) -> None:
    without = small(backward=True)
    assert relation_named("lse_loss").unfit(without) == "its loss does not depend on LSE"
    alone = small(backward=True, kv_heads=4)
    assert "key head of its own" in (relation_named("group_sums").unfit(alone) or "")


def test_a_shift_of_keys_moves_the_gradient_of_q_by_what_the_loss_has_of_lse(small) -> None:
    relation = relation_named("key_shift")
    asked = small(dtype="fp32", backward=True, dlse=True)
    before, after = relation.runs(inputs.draw(asked), {"nats": 1})
    assert torch.equal(before.dout, after.dout)
    assert torch.equal(before.dlse, after.dlse)
    assert not torch.equal(before.k, after.k)


@pytest.mark.parametrize("question", [name for name in ALSO if name.startswith("strides")])
def test_the_loss_is_laid_out_too(small, question) -> None:
    asked = small(dtype="fp32", backward=True)
    before, after = relation_named(question).runs(inputs.draw(asked), {})
    assert torch.equal(before.dout, after.dout)
    as_it_was = question in ("strides_packed", "strides_transposed")
    assert after.dout.is_contiguous() == (as_it_was or question == "strides_offset")


def test_heads_and_sequences_take_their_loss_with_them(small) -> None:
    asked = small(dtype="fp32", backward=True, dlse=True, sink=True)
    drawn = inputs.draw(asked)
    turned = relation_named("batch_permutation").runs(drawn, {"turn": 1})[1]
    assert torch.equal(turned.dout, drawn.dout[[1, 0]])
    turned = relation_named("head_permutation").runs(drawn, {"turn": 0})[1]
    heads = [list(map(torch.Tensor.tolist, drawn.q[0])).index(q.tolist()) for q in turned.q[0]]
    assert heads != [0, 1, 2, 3]
    assert torch.equal(turned.dlse, drawn.dlse[:, heads])
