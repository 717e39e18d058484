"""Relations between gradients hold for right kernels; relations not about gradients are silent."""

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

ABOUT_GRADIENTS = ("zero_loss", "lse_loss", "euler", "group_sums")
INCLUDING_GRADIENTS = (
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
    """A mask to which the relation applies."""
    if question == "window_beyond":
        return Spec.of("causal")
    return Spec.of("padding", lengths=[4, 7]) if question == "key_permutation" else Spec.of("full")


@pytest.mark.parametrize("kernel", ["ideal", "triton-flash2"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("question", ABOUT_GRADIENTS + INCLUDING_GRADIENTS)
def test_relation_holds_for_gradients_of_right_kernels(
    ask, small, extreme_parameters, question, dtype, kernel
):
    problem = small(mask_of(question), dtype=dtype, backward=True, dlse=True)
    for parameters in extreme_parameters(question, problem)[: 1 if kernel != "ideal" else None]:
        assert ask(kernel, question, problem, **parameters) is None


SCORES = {
    "key_permutation": Spec.of("relative_bias", distance=0, seed=0),
    "head_permutation": Spec.of("bias", seed=0, per_batch=0, per_head=0),
    "batch_permutation": Spec.of("alibi"),
}


@pytest.mark.parametrize(
    "question", sorted({*ABOUT_GRADIENTS, *INCLUDING_GRADIENTS} - {"key_shift"})
)
def test_relation_holds_for_captured_gradients(ask, small, extreme_parameters, question):
    """Gradients of captured tensors are compared within bounds, never bit for bit."""
    score = SCORES.get(question, Spec.of("bias", seed=0, per_batch=1, per_head=1))
    gradients = {"score": score, "dcaptured": True, "backward": True, "dlse": True}
    problem = small(mask_of(question), dtype="fp32", **gradients)
    for parameters in extreme_parameters(question, problem):
        assert ask("ideal", question, problem, **parameters) is None


@pytest.mark.parametrize("error", [2.0**-22, 2.0**-10])
def test_captured_gradients_are_compared_within_bounds(small, error):
    """Even of a kernel that promises its bits: other tensors are compared bit for bit."""

    def perturb(right, number):
        return replace(right, dcaptured=right.dcaptured * (1 + number % 2 * error))

    problem = small(dtype="fp32", backward=True, dcaptured=True, score=Spec.of("alibi"))
    case = Case(problem=problem, question="repeat")
    record = run_case(spoiled(in_turns(perturb)), case, device="cpu")
    assert record.status == ("pass" if error < 2.0**-20 else "fail")
    if record.status == "fail":
        assert (record.judgement.worst.tensor, record.judgement.worst.tile) == ("dcaptured", "")


@pytest.mark.parametrize("question", ABOUT_GRADIENTS)
def test_relation_about_gradients_needs_backward_attention(small, softmax, question):
    assert relation_named(question).unfit(small()) == "it is about gradients"
    assert relation_named(question).unfit(softmax()) == "it is about attention"


def test_every_other_relation_ignores_gradients(small):
    problem = small(backward=True, dlse=True)
    silent = {n for n, r in RELATIONS.items() if r.unfit(problem) == "it says nothing of gradients"}
    others = {"prefix_zero", "prefix_full", "launches", "hidden_keys_nan"}
    concerned = {*ABOUT_GRADIENTS, *INCLUDING_GRADIENTS, *others}
    of_softmax = {name for name in RELATIONS if name.startswith("softmax_")}
    assert silent | concerned | of_softmax == set(RELATIONS)
    assert not silent & concerned


def test_key_shift_changes_keys_and_keeps_loss(small):
    relation = relation_named("key_shift")
    problem = small(dtype="fp32", backward=True, dlse=True)
    before, after = relation.runs(input_tensors.draw_inputs(problem), {"nats": 1})
    assert torch.equal(before.dout, after.dout)
    assert torch.equal(before.dlse, after.dlse)
    assert not torch.equal(before.k, after.k)


@pytest.mark.parametrize("question", ["euler", "zero_loss", "lse_loss"])
@pytest.mark.parametrize("scale", [1e5, 1e7, 3e37])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_right_kernel_that_overflows_does_not_fail(question, scale, dtype):
    problem = Problem(
        query=6, head_dim=8, backward=True, dlse=True, dtype=dtype, distribution="sink", scale=scale
    )
    record = run_case(Ideal(), Case(problem=problem, question=question), device="cpu")
    assert record.status in ("pass", "inconclusive"), record.judgement.reason
    assert record.status == "pass" or "finite bound" in record.judgement.reason


def test_gradient_without_finite_bound_is_reported_as_unbounded(ask):
    """A wrong dQ must not pass because nothing bounds it."""
    wrong = spoiled(lambda inputs, right: replace(right, dq=torch.zeros_like(inputs.q)))
    problem = Problem(
        query=6, head_dim=8, backward=True, dtype="fp32", distribution="sink", scale=1e7
    )
    failure = ask(wrong, "euler", problem)
    assert failure.kind == "unbounded"
    assert "no element of dq" in failure.message


def test_gradient_bits_are_compared_only_if_promised(small):
    def perturb(right, number):
        """Change the gradients by a rounding in every other call, as atomic sums do."""
        return replace(right, dk=right.dk * (1 + number % 2 * 2.0**-22))

    case = Case(problem=small(dtype="fp32", backward=True), question="repeat")
    assert run_case(spoiled(in_turns(perturb)), case, device="cpu").status == "fail"
    other = spoiled(in_turns(perturb), promises_gradients=False)
    assert run_case(other, case, device="cpu").status == "pass"


def test_unrequested_gradients_are_not_compared(small):
    eager = spoiled(lambda inputs, right: replace(right, dq=inputs.q.clone()), promises=frozenset())
    case = Case(problem=small(), question="repeat")
    assert run_case(eager, case, device="cpu").status == "pass"


def test_finding_in_dk_names_no_query_tile(small):
    case = Case(problem=small(dtype="fp32", kv=300, backward=True), question="repeat")
    worst = run_case(kernel("gradients.Unsteady"), case, device="cpu").judgement.worst
    assert (worst.tensor, worst.tile) == ("dk", "")
