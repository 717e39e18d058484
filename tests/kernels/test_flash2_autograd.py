"""FlashAttention-2 under torch's autograd: the kernels' gradients, for any loss."""

import math

import pytest
import torch
from tests.kernels.backward_calls import SMALL, mods, visit_lists
from tests.kernels.gradient_reference import Score, make_question, worst
from tests.kernels.test_captured_gradients import reads_of, two_tensors

from attncheck.core.errors import UsageError
from attncheck.kernels import flash2_autograd
from attncheck.kernels.flash2_autograd import Plan, attention
from attncheck.kernels.gradient_terms import CapturedReads
from attncheck.kernels.launch import Launch
from attncheck.mods import masks, scores

SOFTCAP = Score(mod=scores.softcap(2.0), bend=0.5)


def plan(question, **changes) -> Plan:
    arguments = {"scale": question.scale, "launch": SMALL} | mods(question.mask, question.score)
    return Plan(**arguments | changes)


def make_leaves(question) -> dict[str, torch.Tensor]:
    tensors = {name: getattr(question, name) for name in ("q", "k", "v", "sink")}
    return {n: x.clone().requires_grad_() for n, x in tensors.items() if x is not None}


def differentiate(question, *, of=("out", "lse"), **changes):
    """Return out, LSE and, through torch.autograd, the gradients by name."""
    leaves = make_leaves(question)
    out, lse = attention(**leaves, plan=plan(question, **changes))
    results = {"out": (out, question.dout), "lse": (lse, question.dlse)}
    tensors, losses = zip(*(results[name] for name in of), strict=True)
    gradients = torch.autograd.grad(tensors, tuple(leaves.values()), losses)
    return out, lse, {f"d{n}": each for n, each in zip(leaves, gradients, strict=True)}


def share(question, **changes) -> float:
    """The largest error of any gradient in units of its allowance."""
    out, lse, gradients = differentiate(question, **changes)
    return max(worst(gradients, question, out.detach(), lse.detach()).values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("score", [None, SOFTCAP], ids=["", "softcap"])
def test_gradients_of_q_k_v_and_the_sink(score, dtype):
    assert share(make_question(masks.causal, dtype, score=score, sink=True)) <= 1


def test_loss_of_out_or_lse_alone():
    question = make_question(masks.causal, sink=True)
    assert share(question.but(dlse=None), of=("out",)) <= 1
    assert share(question.but(dout=torch.zeros_like(question.dout)), of=("lse",)) <= 1


def test_loss_whose_gradient_is_expanded():
    """``sum`` hands back one number with strides of 0."""
    question = make_question(masks.causal, dlse=False)
    leaves = make_leaves(question)
    out, lse = attention(**leaves, plan=plan(question))
    out.sum().backward()
    gradients = {f"d{name}": leaf.grad for name, leaf in leaves.items()}
    ones = question.but(dout=torch.ones_like(question.dout))
    assert max(worst(gradients, ones, out.detach(), lse.detach()).values()) <= 1


def test_nan_dlse_of_rows_without_keys_changes_no_gradient():
    """A loss of an LSE of −∞ may well have a gradient of NaN."""
    question = make_question(masks.causal_bottom_right(-20))
    dead = ~question.seen().any(-1)
    gradients = differentiate(question.but(dlse=question.dlse.masked_fill(dead, math.nan)))[2]
    plain = differentiate(question)[2]
    assert all(torch.equal(gradients[name], plain[name]) for name in plain)


def test_forward_and_both_backward_passes_may_have_different_tiles():
    question = make_question(masks.causal, "bf16")
    rows, keys = Launch(block_query=16, block_kv=32), Launch(block_query=32, block_kv=16)
    own = {"by_rows": rows, "by_keys": keys}
    of_rows, of_keys = visit_lists(question, rows), visit_lists(question, keys)
    own |= {"tiles": visit_lists(question)["tiles"]}
    own |= {"tiles_by_rows": of_rows["tiles"], "tiles_by_keys": of_keys["by_keys"]}
    assert share(question, **own) <= 1
    for name, other in (
        ("tiles_by_rows", of_keys["tiles"]),
        ("tiles_by_keys", of_rows["by_keys"]),
    ):
        with pytest.raises(UsageError, match=r"lists the tiles of \d blocks: \d0 in blocks of 16"):
            differentiate(question, **own | {name: other})


def test_score_mod_without_its_slope_is_refused():
    question = make_question(masks.causal, score=SOFTCAP)
    with pytest.raises(UsageError, match="needs its slope"):
        differentiate(question, slope=None)


def test_second_derivative_is_refused():
    question = make_question(masks.causal, shape=(1, 1, 1, 4, 4, 8, 8), dlse=False)
    leaves = make_leaves(question)
    out, _ = attention(**leaves, plan=plan(question))
    (dq,) = torch.autograd.grad(out.square().sum(), leaves["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


FAULTS = {
    "no gradient of LSE": lambda keywords, arguments: flash2_autograd.flash2_backward(
        *arguments[:6], None, **keywords
    ),
    "dK and dV of other keys": lambda keywords, arguments: _reverse_keys(
        flash2_autograd.flash2_backward(*arguments, **keywords)
    ),
}


def _reverse_keys(gradients):
    dq, dk, dv, *others = gradients
    return dq, dk.flip(2), dv.flip(2), *others


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_backward_exceeds_the_bounds(fault, monkeypatch):
    right = flash2_autograd.flash2_backward
    question = make_question(masks.causal, sink=True)

    def wrong(*arguments, **keywords):
        with monkeypatch.context() as inner:
            inner.setattr(flash2_autograd, "flash2_backward", right)
            return FAULTS[fault](keywords, arguments)

    monkeypatch.setattr(flash2_autograd, "flash2_backward", wrong)
    assert share(question) > 1


def slopes_of_heads(slopes):
    return lambda s, b, h, i, j: s + slopes[h].to(s.dtype) * (j - i) * 0.25


def ask_with_parameters(make=two_tensors, **changes):
    """A question whose score mod reads parameters, and those parameters."""
    generator = torch.Generator().manual_seed(9)
    shapes = [(2,), (2, 7)] if make is two_tensors else [(2,)]
    parameters = [torch.nn.Parameter(torch.randn(s, generator=generator) / 4) for s in shapes]
    return make_question(masks.causal, score=Score.of(make, *parameters), **changes), parameters


def plan_captured(question, **changes) -> Plan:
    """A plan with gradients of the numbers that the score mod reads."""
    count = sum(tensor.numel() for tensor in question.score.tensors)
    return plan(question, captured=CapturedReads(reads_of(question.score), count), **changes)


@pytest.mark.parametrize("atomic", [False, True], ids=["", "atomic"])
def test_gradients_of_captured_parameters(atomic):
    question, parameters = ask_with_parameters(sink=True)
    leaves = make_leaves(question)
    out, lse = attention(**leaves, plan=plan_captured(question, atomic=atomic), captured=parameters)
    ((out * question.dout).sum() + (lse * question.dlse).sum()).backward()
    gradients = {f"d{name}": leaf.grad for name, leaf in leaves.items()}
    assert [each.grad.shape for each in parameters] == [each.shape for each in parameters]
    gradients["dcaptured"] = torch.cat([each.grad.flatten() for each in parameters])
    assert max(worst(gradients, question, out.detach(), lse.detach()).values()) <= 1


def test_captured_tensor_that_requires_no_gradient_gets_none():
    question, (slopes, table) = ask_with_parameters()
    slopes.requires_grad_(requires_grad=False)
    out, _ = attention(
        question.q, question.k, question.v, plan=plan_captured(question), captured=(slopes, table)
    )
    out.sum().backward()
    assert slopes.grad is None
    assert table.grad.any()


def test_backward_skips_captured_gradients_if_none_is_required(monkeypatch):
    question, parameters = ask_with_parameters()
    for each in parameters:
        each.requires_grad_(requires_grad=False)
    right = flash2_autograd.flash2_backward

    def watched(*arguments, captured, **keywords):
        assert captured is None
        return right(*arguments, captured=captured, **keywords)

    monkeypatch.setattr(flash2_autograd, "flash2_backward", watched)
    leaves = make_leaves(question)
    out, _ = attention(**leaves, plan=plan_captured(question), captured=parameters)
    out.sum().backward()
    assert leaves["q"].grad.any()


def test_captured_gradient_has_the_dtype_of_its_parameter():
    question, (slopes,) = ask_with_parameters(slopes_of_heads)
    halves = torch.nn.Parameter(slopes.detach().bfloat16())
    of_halves = question.but(score=Score.of(slopes_of_heads, halves))
    out, _ = attention(
        question.q, question.k, question.v, plan=plan_captured(of_halves), captured=(halves,)
    )
    out.sum().backward()
    assert halves.grad.dtype == torch.bfloat16


def test_one_plan_serves_all_training_steps():
    """fp32 parameters are not copied into the plan: each step reads what the last one wrote."""
    question, parameters = ask_with_parameters()
    plan_of_all, losses = plan_captured(question), []
    optimizer = torch.optim.SGD(parameters, lr=1e-4)
    for _ in range(4):
        optimizer.zero_grad()
        out, _ = attention(
            question.q, question.k, question.v, plan=plan_of_all, captured=parameters
        )
        loss = (out - question.dout).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == len(losses)


def test_parameter_modified_before_backward_is_refused():
    question, (slopes, table) = ask_with_parameters()
    out, _ = attention(
        question.q, question.k, question.v, plan=plan_captured(question), captured=(slopes, table)
    )
    with torch.no_grad():
        table += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("make_plan", "tensors", "message"),
    [
        (plan, 2, "captured tensors have 16 numbers, and plan.captured 0."),
        (plan_captured, 1, "captured tensors have 2 numbers, and plan.captured 16."),
    ],
    ids=["none in the plan", "one tensor less"],
)
def test_captured_tensors_must_have_the_size_in_the_plan(make_plan, tensors, message):
    question, parameters = ask_with_parameters()
    with pytest.raises(UsageError, match=message):
        attention(
            question.q,
            question.k,
            question.v,
            plan=make_plan(question),
            captured=parameters[:tensors],
        )
