"""FlashAttention-2 under torch's autograd: its gradients are the kernels', whatever the loss is."""

import math

import pytest
import torch
from tests.kernels.backward_calls import SMALL, lists, mods
from tests.kernels.gradient_reference import Score, given, worst
from tests.kernels.test_captured_gradients import reads_of, two_tensors

from attncheck.core.errors import UsageError
from attncheck.kernels import flash2_autograd
from attncheck.kernels.flash2_autograd import Plan, attention
from attncheck.kernels.gradient_terms import CapturedReads
from attncheck.kernels.launch import Launch
from attncheck.mods import masks, scores

SOFTCAP = Score(mod=scores.softcap(2.0), bend=0.5)


def plan(asked, **changes) -> Plan:
    made = {"scale": asked.scale, "launch": SMALL} | mods(asked.mask, asked.score)
    return Plan(**made | changes)


def leaves(asked) -> dict[str, torch.Tensor]:
    named = {name: getattr(asked, name) for name in ("q", "k", "v", "sink")}
    return {n: x.clone().requires_grad_() for n, x in named.items() if x is not None}


def differentiated(asked, *, of=("out", "lse"), plan_of=plan, **changes):
    """out, LSE and the gradients by name, through torch.autograd."""
    given_leaves = leaves(asked)
    out, lse = attention(**given_leaves, plan=plan_of(asked, **changes))
    results = {"out": (out, asked.dout), "lse": (lse, asked.dlse)}
    tensors, losses = zip(*(results[name] for name in of), strict=True)
    found = torch.autograd.grad(tensors, tuple(given_leaves.values()), losses)
    return out, lse, {f"d{n}": one for n, one in zip(given_leaves, found, strict=True)}


def share(asked, **changes) -> float:
    out, lse, found = differentiated(asked, **changes)
    return max(worst(found, asked, out.detach(), lse.detach()).values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("score", [None, SOFTCAP], ids=["", "softcap"])
def test_it_is_differentiable_in_q_k_v_and_the_sink(score, dtype):
    assert share(given(masks.causal, dtype, score=score, sink=True)) <= 1


def test_a_loss_of_one_of_its_results():
    asked = given(masks.causal, sink=True)
    assert share(asked.but(dlse=None), of=("out",)) <= 1
    assert share(asked.but(dout=torch.zeros_like(asked.dout)), of=("lse",)) <= 1


def test_a_sum_has_a_gradient_that_is_expanded():
    asked = given(masks.causal, dlse=False)
    given_leaves = leaves(asked)
    out, lse = attention(**given_leaves, plan=plan(asked))
    out.sum().backward()
    found = {f"d{name}": leaf.grad for name, leaf in given_leaves.items()}
    ones = asked.but(dout=torch.ones_like(asked.dout))
    assert max(worst(found, ones, out.detach(), lse.detach()).values()) <= 1


def test_rows_without_keys_pass_nothing_on():
    """Under LSE's −∞ a loss may well have a gradient that is NaN."""
    asked = given(masks.causal_bottom_right(-20))
    dead = ~asked.seen().any(-1)
    found = differentiated(asked.but(dlse=asked.dlse.masked_fill(dead, math.nan)))[2]
    plain = differentiated(asked)[2]
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_each_pass_may_have_tiles_of_its_own():
    asked = given(masks.causal, "bf16")
    rows, keys = Launch(block_query=16, block_kv=32), Launch(block_query=32, block_kv=16)
    own = {"by_rows": rows, "by_keys": keys}
    of_rows, of_keys = lists(asked, rows), lists(asked, keys)
    own |= {"tiles": lists(asked)["tiles"]}
    own |= {"tiles_by_rows": of_rows["tiles"], "tiles_by_keys": of_keys["by_keys"]}
    assert share(asked, **own) <= 1
    for name, other in (
        ("tiles_by_rows", of_keys["tiles"]),
        ("tiles_by_keys", of_rows["by_keys"]),
    ):
        with pytest.raises(UsageError, match=r"lists the tiles of \d blocks: \d0 in blocks of 16"):
            differentiated(asked, **own | {name: other})


def test_atomic_sums():
    assert share(given(masks.causal, "bf16", sink=True), atomic=True) <= 1


def test_a_score_mod_without_its_slope_has_no_gradient():
    asked = given(masks.causal, score=SOFTCAP)
    with pytest.raises(UsageError, match="needs its slope"):
        differentiated(asked, slope=None)


def test_it_is_differentiable_once():
    asked = given(masks.causal, shape=(1, 1, 1, 4, 4, 8, 8), dlse=False)
    given_leaves = leaves(asked)
    out, _ = attention(**given_leaves, plan=plan(asked))
    (dq,) = torch.autograd.grad(out.square().sum(), given_leaves["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


FAULTS = {
    "no gradient of LSE": lambda found, arguments: flash2_autograd.flash2_backward(
        *arguments[:6], None, **found
    ),
    "dK and dV of each other's rows": lambda found, arguments: _swapped(
        flash2_autograd.flash2_backward(*arguments, **found)
    ),
}


def _swapped(gradients):
    dq, dk, dv, *others = gradients
    return dq, dk.flip(2), dv.flip(2), *others


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_backward_is_noticed(fault, monkeypatch):
    right = flash2_autograd.flash2_backward
    asked = given(masks.causal, sink=True)

    def wrong(*arguments, **keywords):
        with monkeypatch.context() as inner:
            inner.setattr(flash2_autograd, "flash2_backward", right)
            return FAULTS[fault](keywords, arguments)

    monkeypatch.setattr(flash2_autograd, "flash2_backward", wrong)
    assert share(asked) > 1


def slopes_of_heads(slopes):
    return lambda s, b, h, i, j: s + slopes[h].to(s.dtype) * (j - i) * 0.25


def learned(make=two_tensors, **changes):
    """A question whose score mod reads parameters, and these."""
    drawn = torch.Generator().manual_seed(9)
    shapes = [(2,), (2, 7)] if make is two_tensors else [(2,)]
    read = [torch.nn.Parameter(torch.randn(s, generator=drawn) / 4) for s in shapes]
    return given(masks.causal, score=Score.of(make, *read), **changes), read


def reading(asked, **changes) -> Plan:
    """The plan that counts what the score mod reads too."""
    count = sum(tensor.numel() for tensor in asked.score.tensors)
    return plan(asked, captured=CapturedReads(reads_of(asked.score), count), **changes)


@pytest.mark.parametrize("atomic", [False, True], ids=["", "atomic"])
def test_it_is_differentiable_in_what_the_score_mod_reads(atomic):
    asked, read = learned(sink=True)
    given_leaves = leaves(asked)
    out, lse = attention(**given_leaves, plan=reading(asked, atomic=atomic), captured=read)
    ((out * asked.dout).sum() + (lse * asked.dlse).sum()).backward()
    found = {f"d{name}": leaf.grad for name, leaf in given_leaves.items()}
    assert [one.grad.shape for one in read] == [one.shape for one in read]
    found["dcaptured"] = torch.cat([one.grad.flatten() for one in read])
    assert max(worst(found, asked, out.detach(), lse.detach()).values()) <= 1


def test_only_what_requires_a_gradient_gets_one():
    asked, (slopes, table) = learned()
    slopes.requires_grad_(requires_grad=False)
    out, _ = attention(asked.q, asked.k, asked.v, plan=reading(asked), captured=(slopes, table))
    out.sum().backward()
    assert slopes.grad is None
    assert table.grad.any()


def test_nothing_is_computed_for_what_requires_none(monkeypatch):
    asked, read = learned()
    for one in read:
        one.requires_grad_(requires_grad=False)
    right = flash2_autograd.flash2_backward

    def watched(*arguments, captured, **keywords):
        assert captured is None
        return right(*arguments, captured=captured, **keywords)

    monkeypatch.setattr(flash2_autograd, "flash2_backward", watched)
    given_leaves = leaves(asked)
    out, _ = attention(**given_leaves, plan=reading(asked), captured=read)
    out.sum().backward()
    assert given_leaves["q"].grad.any()


def test_gradients_have_the_dtype_of_what_is_read():
    asked, (slopes,) = learned(slopes_of_heads)
    halves = torch.nn.Parameter(slopes.detach().bfloat16())
    of_halves = asked.but(score=Score.of(slopes_of_heads, halves))
    out, _ = attention(asked.q, asked.k, asked.v, plan=reading(of_halves), captured=(halves,))
    out.sum().backward()
    assert halves.grad.dtype == torch.bfloat16


def test_a_training_step_reads_what_the_last_one_wrote():
    """An fp32 parameter is read where it lies: one plan is for all steps."""
    asked, read = learned()
    planned, losses = reading(asked), []
    optimizer = torch.optim.SGD(read, lr=1e-4)
    for _ in range(4):
        optimizer.zero_grad()
        out, _ = attention(asked.q, asked.k, asked.v, plan=planned, captured=read)
        loss = (out - asked.dout).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == len(losses)


def test_writing_to_what_was_read_is_noticed():
    asked, (slopes, table) = learned()
    out, _ = attention(asked.q, asked.k, asked.v, plan=reading(asked), captured=(slopes, table))
    with torch.no_grad():
        table += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("which", ["none in the plan", "one tensor less"])
def test_captured_tensors_are_those_of_the_plan(which):
    asked, read = learned()
    planned = plan(asked) if which == "none in the plan" else reading(asked)
    counted = 0 if which == "none in the plan" else 16
    read = read if which == "none in the plan" else read[:1]
    given_numbers = sum(one.numel() for one in read)
    message = f"captured tensors have {given_numbers} numbers, and plan.captured {counted}."
    with pytest.raises(UsageError, match=message):
        attention(asked.q, asked.k, asked.v, plan=planned, captured=read)
