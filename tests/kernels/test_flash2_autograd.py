"""FlashAttention-2 under torch's autograd: its gradients are the kernels', whatever the loss is."""

import math
from pathlib import Path

import pytest
import torch

from attncheck.core.errors import UsageError
from attncheck.core.mod_spec import Dimensions
from attncheck.core.source_files import import_file
from attncheck.mods import captured_reads, masks, scores
from attncheck.mods.block_mask import block_mask, list_visits
from attncheck.mods.trace import trace_derivative, trace_mask, trace_score
from attncheck.verify.environment import prepare

if not torch.cuda.is_available():
    prepare("cpu")

from attncheck.kernels import flash2_autograd
from attncheck.kernels.flash2_autograd import Plan, attention
from attncheck.kernels.gradient_terms import CapturedReads
from attncheck.kernels.launch import Launch, VisitList
from attncheck.mods.to_triton import to_triton

REFERENCE = import_file(Path(__file__).with_name("gradient_reference.py"), "a file of these tests")
given = REFERENCE.given
SOFTCAP = REFERENCE.Score(mod=scores.softcap(2.0), bend=0.5)
LAUNCH = Launch(block_query=32, block_kv=32)


def plan(asked, **changes) -> Plan:
    mods = {"mask": to_triton(trace_mask(asked.mask))}
    if asked.score is not None:
        mods["score"] = to_triton(trace_score(asked.score.mod))
        mods["slope"] = to_triton(trace_derivative(asked.score.mod))
    return Plan(**{"scale": asked.scale, "launch": LAUNCH, **mods, **changes})


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
    return max(REFERENCE.worst(found, asked, out.detach(), lse.detach()).values())


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
    assert max(REFERENCE.worst(found, ones, out.detach(), lse.detach()).values()) <= 1


def test_rows_without_keys_pass_nothing_on():
    """Under LSE's −∞ a loss may well have a gradient that is NaN."""
    asked = given(masks.causal_bottom_right(-20))
    dead = ~asked.seen().any(-1)
    found = differentiated(asked.but(dlse=asked.dlse.masked_fill(dead, math.nan)))[2]
    plain = differentiated(asked)[2]
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def lists(asked, launch):
    sizes = Dimensions(batch=1, heads=2, query=asked.q.shape[2], kv=asked.k.shape[2])
    blocks = {"block_query": launch.block_query, "block_kv": launch.block_kv}
    found = block_mask(asked.mask, sizes, **blocks)
    return VisitList(*list_visits(found)), VisitList(*list_visits(found.transposed()))


def test_each_pass_may_have_tiles_of_its_own():
    asked = given(masks.causal, "bf16")
    rows, keys = Launch(block_query=16, block_kv=32), Launch(block_query=32, block_kv=16)
    own = {"by_rows": rows, "by_keys": keys}
    own |= {"tiles": lists(asked, LAUNCH)[0]}
    own |= {"tiles_by_rows": lists(asked, rows)[0], "tiles_by_keys": lists(asked, keys)[1]}
    assert share(asked, **own) <= 1
    for name, other in (
        ("tiles_by_rows", lists(asked, keys)[0]),
        ("tiles_by_keys", lists(asked, rows)[1]),
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
    def mod(score, b, h, q_idx, kv_idx):
        return score + slopes[h].to(score.dtype) * (kv_idx - q_idx) * 0.25

    return mod


def with_a_table(slopes, table):
    def mod(score, b, h, q_idx, kv_idx):
        near = (kv_idx - q_idx).clamp(-3, 3) + 3
        return slopes_of_heads(slopes)(score, b, h, q_idx, kv_idx) + table[h, near].to(score.dtype)

    return mod


def learned(make=with_a_table, **changes):
    """A question whose score mod reads parameters, and these."""
    numbers = torch.Generator().manual_seed(9)
    shapes = [(2,), (2, 7)] if make is with_a_table else [(2,)]
    read = [torch.nn.Parameter(torch.randn(s, generator=numbers) / 4) for s in shapes]
    score = REFERENCE.Score.of(make, *read)
    return given(masks.causal, score=score, **changes), read


def reading(asked, **changes) -> Plan:
    """The plan that counts what the score mod reads too."""
    found = captured_reads.trace_reads(asked.score.mod)
    terms = tuple((to_triton(one.slope), to_triton(one.place), one.start) for one in found)
    count = sum(tensor.numel() for tensor in captured_reads.read_tensors(found))
    return plan(asked, captured=CapturedReads(terms, count), **changes)


@pytest.mark.parametrize("atomic", [False, True], ids=["", "atomic"])
def test_it_is_differentiable_in_what_the_score_mod_reads(atomic):
    asked, read = learned(sink=True)
    given_leaves = leaves(asked)
    out, lse = attention(**given_leaves, plan=reading(asked, atomic=atomic), captured=read)
    ((out * asked.dout).sum() + (lse * asked.dlse).sum()).backward()
    found = {f"d{name}": leaf.grad for name, leaf in given_leaves.items()}
    assert [one.grad.shape for one in read] == [one.shape for one in read]
    found["dcaptured"] = torch.cat([one.grad.flatten() for one in read])
    assert max(REFERENCE.worst(found, asked, out.detach(), lse.detach()).values()) <= 1


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
    of_halves = asked.but(score=REFERENCE.Score.of(slopes_of_heads, halves))
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
