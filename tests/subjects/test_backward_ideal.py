"""Gradients of the ideal kernel: within its rounding bounds, and bit for bit as it declares."""

import dataclasses
import math

import pytest
import torch
from tests.subjects import sample_problems
from tests.subjects.plain_gradients import exact_gradients, plain_attention
from tests.subjects.sample_problems import MASKS, SCORES

from attncheck.core.formats import DTYPES, fp32, round_to
from attncheck.core.mod_spec import Entry, Spec
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.mods import library
from attncheck.subjects import ideal
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal
from attncheck.verify.executor import Execution, InProcess
from attncheck.verify.run_case import run_case

DTYPE_NAMES = ["fp32", "tf32", "fp16", "bf16"]
CHAIN = SCORES["chain"]
PROBLEMS = {
    "plain": {},
    "dlse": {"dlse": True},
    "sink": {"sink": True},
    "softcap": {"score": Spec.of("softcap", cap=5.0)},
    "everything": {"dlse": True, "sink": True, "score": CHAIN, "mask": MASKS["padding"]},
}
TILINGS = {
    "usual": None,
    "narrow": Tiling(block_query=16, block_kv=16),
    "reverse": Tiling(block_query=32, block_kv=16, reverse=True),
    "lazy": Tiling(block_query=16, block_kv=32, lazy_rescale=8.0),
    "flash1": Tiling(block_query=64, block_kv=32, recurrence="flash1"),
}
SMALL = Tiling(block_query=16, block_kv=16)


def small(**changes) -> Problem:
    return sample_problems.small(**({"kv": 57, "value_dim": 8, "backward": True} | changes))


def are_equal(one, other) -> bool:
    pairs = zip(one.tensors().items(), other.tensors().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_gradients_are_within_rounding(dtype, problem):
    inputs = draw_inputs(small(dtype=dtype, **PROBLEMS[problem]))
    run = InProcess().run(Ideal(), inputs)  # which checks shapes and dtypes
    assert isinstance(run, Execution)
    assert exact_gradients(inputs).excess(run.outputs) <= 1


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("order", ["reverse_sums", "scale_first"])
def test_gradients_with_reordered_operations_are_within_rounding(order, problem):
    inputs = draw_inputs(small(dtype="fp32", **PROBLEMS[problem]))
    outputs = Ideal(**{order: True}).run(inputs)
    assert exact_gradients(inputs).excess(outputs) <= 1
    assert not are_equal(outputs, Ideal().run(inputs))


def test_captured_gradients_with_the_scale_first_are_within_the_bound():
    problem = small(dtype="bf16", score=SCORES["alibi"], dcaptured=True)
    record = run_case(Ideal(scale_first=True), Case(problem=problem), device="cpu")
    assert record.judgement.gradients_over_bound["dcaptured"] <= 1


@pytest.mark.parametrize("lengths", [(40, 40), (57, 40)], ids=str)
@pytest.mark.parametrize("mask", [*list(MASKS)[:4], "padding"])
def test_gradients_under_a_mask_are_within_rounding(mask, lengths):
    query, kv = lengths
    inputs = draw_inputs(small(query=query, kv=kv, dtype="bf16", mask=MASKS[mask], dlse=True))
    assert exact_gradients(inputs).excess(Ideal().run(inputs)) <= 1


@pytest.mark.parametrize("tiling", TILINGS)
def test_tiling_changes_bits_within_rounding(tiling):
    inputs = draw_inputs(small(dtype="fp32", dlse=True, query=70))
    outputs = Ideal(TILINGS[tiling]).run(inputs)
    assert exact_gradients(inputs).excess(outputs) <= 1
    if tiling != "usual":
        assert not torch.equal(outputs.dk, Ideal().run(inputs).dk)


def test_forward_alone_has_the_same_bits_and_no_gradients():
    inputs = draw_inputs(small(dtype="bf16"))
    both, forward = Ideal().run(inputs), Ideal().run(inputs.forward())
    assert forward.gradients() == {}
    assert torch.equal(both.out, forward.out)
    assert torch.equal(both.lse, forward.lse)


def test_rows_computed_in_parts_have_the_same_bits(monkeypatch):
    inputs = draw_inputs(small(query=100, dtype="fp32", sink=True))
    tilings = [SMALL, dataclasses.replace(SMALL, reverse=True)]
    whole = [Ideal(tiling).run(inputs) for tiling in tilings]
    monkeypatch.setitem(ideal._ROWS_AT_A_TIME, "cpu", 1)
    parts = [Ideal(tiling).run(inputs) for tiling in tilings]
    assert all(map(are_equal, whole, parts))


def test_empty_rows_and_unseen_keys_have_gradients_of_zero():
    padding = draw_inputs(small(mask=MASKS["padding"], dlse=True))
    outputs = Ideal().run(padding)
    assert not any(x[0].any() for x in (outputs.dq, outputs.dk, outputs.dv))
    assert not any(x[1, :, 33:].any() for x in (outputs.dk, outputs.dv))
    assert outputs.dq[1].any()


@pytest.mark.parametrize("filling", [math.nan, math.inf])
@pytest.mark.parametrize("score", [Spec.of("none"), Spec.of("softcap", cap=5.0)], ids=str)
def test_hidden_keys_that_are_not_finite_reach_only_rows_that_see_them(filling, score):
    inputs = draw_inputs(small(query=57, mask=MASKS["causal"], score=score, dtype="bf16"))
    k, v = inputs.k.clone(), inputs.v.clone()
    k[:, :, 40:], v[:, :, 40:] = filling, filling
    before, after = Ideal(SMALL).run(inputs), Ideal(SMALL).run(inputs.replace(k=k, v=v))
    assert torch.equal(before.dq[:, :, :40], after.dq[:, :, :40])
    assert not after.dq[:, :, 40:].isfinite().all()


def test_row_of_nan_reaches_only_the_keys_that_it_sees():
    inputs = draw_inputs(small(query=57, mask=MASKS["causal"], dtype="bf16"))
    q, dout = inputs.q.clone(), inputs.dout.clone()
    q[:, :, 20], dout[:, :, 20] = math.nan, math.nan
    before, after = Ideal(SMALL).run(inputs), Ideal(SMALL).run(inputs.replace(q=q, dout=dout))
    for name in ("dk", "dv"):
        one, other = getattr(before, name), getattr(after, name)
        assert torch.equal(one[:, :, 21:], other[:, :, 21:])
        assert other[:, :, :21].isnan().all()


def test_gradients_of_irregular_score_mods_agree_with_torch(monkeypatch):
    """Score mods with a kink, with constant scores, and with scores of −∞."""
    mods = {
        "relu": lambda score, b, h, q_idx, kv_idx: torch.relu(score),
        "constant": lambda score, b, h, q_idx, kv_idx: kv_idx * 0.25,
        "hidden": lambda score, b, h, q_idx, kv_idx: torch.where(kv_idx % 3 == 0, score, -math.inf),
    }
    for name, mod in mods.items():
        entry = Entry(summary="", build=lambda *_, mod=mod: mod)
        monkeypatch.setitem(library.SCORES, name, entry)
        inputs = draw_inputs(small(dtype="fp32", score=Spec.of(name)))
        inputs.q[:, :, 0] = 0.0
        outputs = Ideal().run(inputs)
        if name == "constant":
            assert not outputs.dq.any()
            assert not outputs.dk.any()
        else:
            assert exact_gradients(inputs).excess(outputs) <= 1


def fl(values: torch.Tensor) -> torch.Tensor:
    """``fl(x)``: float64 values rounded once to fp32."""
    return values.float().double()


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("reverse", [False, True])
def test_dq_has_the_bits_of_the_declared_roundings(dtype, reverse):
    """dQ is recomputed two keys at a time: float64 holds such sums of products exactly."""
    problem = Problem(query=256, kv=12, head_dim=1, scale=1.3, dtype=dtype, backward=True)
    inputs = draw_inputs(problem.replace(dlse=True))
    outputs = Ideal(Tiling(block_query=16, block_kv=2, reverse=reverse)).run(inputs)
    q, k, v, dout = (x.double() for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    c, log2_e = fp32(problem.scale * math.log2(math.e)), fp32(math.log2(math.e))
    delta = fl(fl(dout * outputs.out.double()) - inputs.dlse.double()[..., None])
    lse = fl(outputs.lse.double()[..., None] * log2_e)
    p = fl(torch.exp2(fl(fl(q @ k.mT) * c - lse)))
    ds = fl(p * fl(fl(dout @ v.mT) - delta))
    ds = round_to(ds, DTYPES[dtype].weights)
    dq = torch.zeros_like(q)
    for start in sorted(range(0, problem.kv, 2), reverse=reverse):
        dq = fl(dq + fl(ds[..., start : start + 2] @ k[:, :, start : start + 2]))
    dq = round_to(fl(dq * fp32(problem.scale)), DTYPES[dtype].storage)
    assert torch.equal(outputs.dq.double(), dq)


class NoDelta(Ideal):
    def delta(self, dout, out, dlse):
        return torch.zeros_like(super().delta(dout, out, dlse))


class DlseIgnored(Ideal):
    def delta(self, dout, out, dlse):
        return super().delta(dout, out, None)


class MaskForgotten(Ideal):
    def visible_in_backward(self, mask, at):
        return torch.ones_like(self.visible(mask, at))


class NoSlope(Ideal):
    def slope(self, score, x, at):
        return torch.ones_like(x)


class DkWithoutScale(Ideal):
    def scaled(self, total, scale):
        return super().scaled(total, scale) if total.shape[1] == 4 else total


class FirstTileOnly(Ideal):
    def gradient_added(self, running, part):
        return torch.where(running == 0, part, running)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize(
    "fault", [NoDelta, DlseIgnored, MaskForgotten, NoSlope, DkWithoutScale, FirstTileOnly]
)
def test_planted_fault_is_more_than_rounding(fault, dtype):
    softcap = Spec.of("softcap", cap=1.0)
    problem = small(dtype=dtype, dlse=True, mask=MASKS["causal"], score=softcap)
    inputs = draw_inputs(problem)
    exact = exact_gradients(inputs)
    assert exact.excess(Ideal(SMALL).run(inputs)) <= 1
    assert exact.excess(fault(SMALL).run(inputs)) > 1


def test_exact_gradients_agree_with_difference_quotients():
    """The reference of these tests is checked against differences of its own loss."""
    inputs = draw_inputs(small(sink=True, dlse=True, score=CHAIN, dtype="fp32", query=5, kv=7))
    exact = exact_gradients(inputs)
    dout, dlse = inputs.loss()
    tensors = [*inputs.promoted(), inputs.sink.double()]

    def loss(*arguments):
        plain = plain_attention(inputs, *arguments)
        return ((plain.out * dout).sum() + (plain.lse * dlse).sum()).item()

    step = 2.0**-17  # the cube root of float64's unit: both errors are its square
    for place, name in enumerate(("dq", "dk", "dv", "dsink")):
        ahead, behind = ([*tensors] for _ in range(2))
        for side, moved in ((step, ahead), (-step, behind)):
            moved[place] = moved[place].clone()
            moved[place].view(-1)[1] += side
        slope = (loss(*ahead) - loss(*behind)) / (2 * step)
        gradient = exact.exact[name].reshape(-1)[1].item()
        assert abs(slope - gradient) < 2.0**-24 * (1 + abs(gradient))
