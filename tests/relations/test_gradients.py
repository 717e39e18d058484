"""Relations between gradients: they hold of a right kernel, and say what they are about."""

from dataclasses import replace

import pytest
import torch
from tests.planted_kernels import kernel
from tests.planted_kernels.outputs_given import in_turns, spoiled

from attncheck.core.mod_spec import Spec
from attncheck.inputs import input_tensors
from attncheck.inputs.problem import Case, Problem
from attncheck.relations import RELATIONS, relation_named
from attncheck.subjects.ideal import Ideal
from attncheck.verify.run_case import run_case

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
    "strides_alone",
    "strides_of_one_column",
    "strides_far",
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
def test_it_holds_of_a_right_kernel(ask, small, numbers, question, dtype, kernel):
    asked = small(mask_of(question), dtype=dtype, backward=True, dlse=True)
    for chosen in numbers(question, asked)[: 1 if kernel != "ideal" else None]:
        assert ask(kernel, question, asked, **chosen) is None


READ = {
    "key_permutation": Spec.of("relative_bias", distance=0, seed=0),
    "head_permutation": Spec.of("bias", seed=0, per_batch=0, per_head=0),
    "batch_permutation": Spec.of("alibi"),
}


@pytest.mark.parametrize("question", sorted({*OF_GRADIENTS, *ALSO} - {"key_shift"}))
def test_it_holds_of_what_a_score_mod_reads(ask, small, numbers, question):
    """Of the numbers' gradients too, of which no kernel's bits are compared."""
    score = READ.get(question, Spec.of("bias", seed=0, per_batch=1, per_head=1))
    read = {"score": score, "dcaptured": True, "backward": True, "dlse": True}
    asked = small(mask_of(question), dtype="fp32", **read)
    for chosen in numbers(question, asked):
        assert ask("ideal", question, asked, **chosen) is None


@pytest.mark.parametrize("far", [2.0**-22, 2.0**-10])
def test_gradients_of_what_is_read_are_compared_within_bounds(small, far):
    """Also of a kernel that promises bits: the others' are compared."""

    def apart(right, number):
        return replace(right, dcaptured=right.dcaptured * (1 + number % 2 * far))

    asked = small(dtype="fp32", backward=True, dcaptured=True, score=Spec.of("alibi"))
    case = Case(problem=asked, question="repeat")
    record = run_case(spoiled(in_turns(apart)), case, device="cpu")
    assert record.status == ("pass" if far < 2.0**-20 else "fail")
    if record.status == "fail":
        assert (record.judgement.worst.tensor, record.judgement.worst.tile) == ("dcaptured", "")


@pytest.mark.parametrize("question", OF_GRADIENTS)
def test_one_about_gradients_says_nothing_without(small, softmax, question):
    assert relation_named(question).unfit(small()) == "it is about gradients"
    assert relation_named(question).unfit(softmax()) == "it is about attention"


def test_every_other_one_says_nothing_of_gradients(small):
    asked = small(backward=True, dlse=True)
    silent = {n for n, r in RELATIONS.items() if r.unfit(asked) == "it says nothing of gradients"}
    loud = {*OF_GRADIENTS, *ALSO, "prefix_zero", "prefix_full", "launches", "hidden_keys_nan"}
    of_softmax = {name for name in RELATIONS if name.startswith("softmax_")}
    assert silent | loud | of_softmax == set(RELATIONS)
    assert not silent & loud


def test_a_shift_of_keys_moves_the_gradient_of_q_by_what_the_loss_has_of_lse(small):
    relation = relation_named("key_shift")
    asked = small(dtype="fp32", backward=True, dlse=True)
    before, after = relation.runs(input_tensors.draw_inputs(asked), {"nats": 1})
    assert torch.equal(before.dout, after.dout)
    assert torch.equal(before.dlse, after.dlse)
    assert not torch.equal(before.k, after.k)


@pytest.mark.parametrize("question", ["euler", "zero_loss", "lse_loss"])
@pytest.mark.parametrize("scale", [1e5, 1e7, 3e37])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_a_right_kernel_that_overflows_is_not_failed(question, scale, dtype):
    asked = Problem(
        query=6, head_dim=8, backward=True, dlse=True, dtype=dtype, distribution="sink", scale=scale
    )
    record = run_case(Ideal(), Case(problem=asked, question=question), device="cpu")
    assert record.status in ("pass", "inconclusive"), record.judgement.reason
    assert record.status == "pass" or "finite bound" in record.judgement.reason


def test_where_no_gradient_has_a_bound_nothing_passes(ask):
    wrong = spoiled(lambda inputs, right: replace(right, dq=torch.zeros_like(inputs.q)))
    asked = Problem(
        query=6, head_dim=8, backward=True, dtype="fp32", distribution="sink", scale=1e7
    )
    found = ask(wrong, "euler", asked)
    assert found.kind == "unbounded"
    assert "no element of dq" in found.message


def test_bits_of_gradients_are_compared_only_of_a_kernel_that_promises_them(small):
    def apart(right, number):
        """Gradients differ by a rounding from call to call, as sums by atomics do."""
        return replace(right, dk=right.dk * (1 + number % 2 * 2.0**-22))

    case = Case(problem=small(dtype="fp32", backward=True), question="repeat")
    assert run_case(spoiled(in_turns(apart)), case, device="cpu").status == "fail"
    other = spoiled(in_turns(apart), promises_gradients=False)
    assert run_case(other, case, device="cpu").status == "pass"


def test_gradients_that_nobody_asked_for_are_not_compared(small):
    eager = spoiled(lambda inputs, right: replace(right, dq=inputs.q.clone()), promises=frozenset())
    case = Case(problem=small(), question="repeat")
    assert run_case(eager, case, device="cpu").status == "pass"


def test_a_finding_in_a_key_names_no_query_tile(small):
    case = Case(problem=small(dtype="fp32", kv=300, backward=True), question="repeat")
    worst = run_case(kernel("gradients.Unsteady"), case, device="cpu").judgement.worst
    assert (worst.tensor, worst.tile) == ("dk", "")
