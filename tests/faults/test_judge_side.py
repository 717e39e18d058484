"""Faults on the judge's side, as other projects' test suites had them, planted in attncheck.

Something of attncheck shows each: that a right kernel is blamed, a wrong one excused, or a question
never asked.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from tests.planted_kernels.outputs_given import spoiled

from attncheck import oracles
from attncheck.cases import covering
from attncheck.core.mod_spec import Spec
from attncheck.core.paged_layout import Paging
from attncheck.inputs import input_tensors as inputs_room
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.judge import allowance, verdict, verdict_rules
from attncheck.mods import library
from attncheck.mods import page_table as paging_room
from attncheck.records.record import FAILED_STATUSES
from attncheck.subjects.conventions.call_tensors import paged_inputs
from attncheck.subjects.ideal import Ideal
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.question_fit import allowed_parameters
from attncheck.verify.run_case import run_case

FULL = Problem(heads=2, query=20, kv=33, head_dim=16, dtype="bf16")
BACKWARD = FULL.replace(dtype="fp16", mask=Spec.of("causal"), backward=True)


def ask(subject, problem, question="compare", **parameters):
    case = Case(problem=problem, question=question, parameters=parameters)
    return run_case(subject, case, device="cpu", brief=False)


def asked_first(problem, question, subject=None):
    """With the most telling parameters."""
    parameters = {name: values[0] for name, values in allowed_parameters(question, problem).items()}
    return ask(subject or Ideal(), problem, question, **parameters)


HALVED = spoiled(lambda _, found: dataclasses.replace(found, out=found.out * 0.5))


def test_a_tolerance_that_cannot_fail(monkeypatch):
    """An allowance so large that no error is beyond it.

    Shown by the blind spot of every pass, which grows with the allowance; and probes, whose answers
    are whole numbers.
    """
    assert ask(HALVED, FULL).status == "fail"
    assert ask(Ideal(), FULL).judgement.blind_spot.half
    right = EvidenceBuilder._allowance

    def generous(self, arithmetic):
        found = right(self, arithmetic)
        samples = [scaled(one, 1e6) for one in found.samples]
        return dataclasses.replace(scaled(found, 1e6), samples=samples)

    monkeypatch.setattr(EvidenceBuilder, "_allowance", generous)
    assert ask(HALVED, FULL).status not in FAILED_STATUSES, "half of O passes"
    spot = ask(Ideal(), FULL).judgement.blind_spot
    assert (spot.half, spot.zeros, spot.dropped_keys) == (False, False, 0.0)
    # Others have margins of their own: a probe, and a relation.
    record = asked_first(FULL, "mean", HALVED)
    assert (record.status, record.judgement.rule) == ("fail", "structure")
    assert asked_first(FULL, "zero_query", HALVED).status == "fail"


def scaled(allowance, factor):
    """With every tensor of it so many times as large."""
    tensors = {
        field.name: getattr(allowance, field.name) * factor
        for field in dataclasses.fields(allowance)
        if isinstance(getattr(allowance, field.name), torch.Tensor)
    }
    return dataclasses.replace(allowance, **tensors)


def test_nan_is_close(monkeypatch):
    """A comparison that says close where the difference is NaN.

    Shown by two rules that do not know each other: what is not finite fails before anything is
    compared, and a share of NaN is beyond any bound.
    """

    def to_nan(_, found):
        found.out[0, 1, 3, 5] = math.nan
        return found

    broken = spoiled(to_nan)
    right = allowance.shares

    def close(*given):
        return right(*given).nan_to_num(0.0)

    # NaN is no share: the rule of what is finite needs none.
    with monkeypatch.context() as patch:
        for room in (allowance, verdict, verdict_rules):
            if hasattr(room, "shares"):
                patch.setattr(room, "shares", close)
        record = ask(broken, FULL)
        assert (record.status, record.judgement.rule) == ("fail", "finite")
    # And without that rule a share of NaN is beyond its bound.
    monkeypatch.setattr(verdict_rules, "nonfinite", lambda _: [])
    record = ask(broken, FULL)
    assert (record.status, record.judgement.rule) == ("fail", "bound")


def test_an_oracle_with_the_kernels_mask(monkeypatch):
    """Oracle and kernel share a mask that is not the one that was asked for.

    Shown by relations that know a mask by its name and never call it.
    """
    causal = FULL.replace(mask=Spec.of("causal"), kv=20)
    wider = dataclasses.replace(
        library.MASKS["causal"],
        build=lambda *_: lambda b, h, q_idx, kv_idx: q_idx + 1 >= kv_idx,
    )
    for question in ("future_keys", "first_row"):
        assert asked_first(causal, question).status == "pass"
    monkeypatch.setitem(library.MASKS, "causal", wider)
    assert ask(Ideal(), causal).status == "pass", "the fault is planted: both are wrong alike"
    for question in ("future_keys", "first_row"):
        assert asked_first(causal, question).status == "fail"


@pytest.mark.parametrize(
    ("dtype", "oracle"),
    [("fp32", torch.float32), ("fp32", torch.bfloat16), ("bf16", torch.float16)],
)
def test_a_low_precision_oracle(monkeypatch, dtype, oracle):
    """The truth is rounded to the kernel's own dtype, or to fp32.

    Shown by a second oracle, asked before a kernel is failed: the oracles disagree.
    """
    problem = FULL.replace(dtype=dtype)
    right = oracles.truth

    def rounded(inputs):
        found = right(inputs)
        return dataclasses.replace(
            found, out=found.out.to(oracle).double(), lse=found.lse.to(oracle).double()
        )

    monkeypatch.setattr(oracles, "truth", rounded)
    record = ask(Ideal(), problem)
    # Nobody is blamed: it passes, as what the oracle is off by is small beside what rounding may
    # cost, or the oracles disagree.
    assert record.status in {"pass", "oracle disagrees"}
    if oracle is torch.bfloat16:
        assert record.status == "oracle disagrees"


PAGED = FULL.replace(kv=40, paging=Paging(size=16, seed=3))


class ReadsOnePageMore(Ideal):
    """Sums what its last page and a free one hold beyond the last key, with weights of 0."""

    name, summary = "one page more", "reads what no row sees"

    def prepare(self, inputs):
        call = super().prepare(inputs)
        given = paged_inputs(inputs)

        def reading():
            found = call()
            free = given.v[-1].float().sum() * 0.0
            return dataclasses.replace(found, out=(found.out.float() + free).to(found.out.dtype))

        return reading


def test_a_cache_of_zeros(monkeypatch):
    """Free pages and free slots of a cache hold zeros, which add nothing to a wrong sum.

    Shown by they hold NaN, so that one such key read is a row that is not finite.
    """
    assert ask(Ideal(), PAGED).status == "pass"
    record = ask(ReadsOnePageMore(), PAGED)
    assert (record.status, record.judgement.rule) == ("fail", "finite")
    monkeypatch.setattr(
        paging_room, "_nan", lambda like, shape: like.new_zeros(()).expand(shape).contiguous()
    )
    assert ask(ReadsOnePageMore(), PAGED).status == "pass", "what zeros hide"


PLAIN = covering.PLAIN_ROW


def absent_values():
    """Values of the axes that make the problem of a value before them."""
    absent = set()
    for axis, values in covering.AXES.items():
        # How far a mask reaches is said of one that has a reach.
        row = PLAIN | ({"mask": "sliding_window"} if axis == "extent" else {})
        made = set()
        for value in covering.SHAPES["small"] if axis == "shape" else values:
            problem = covering.row_problem(row | {axis: value}, "small", 0)
            absent |= {(axis, value)} if problem in made else set()
            made.add(problem)
    return absent


def test_a_parameter_silently_off(monkeypatch):
    """A value of an axis is in the table and in no problem.

    Shown by each value of each axis is looked for in the problem that is made of it.
    """
    assert absent_values() == set()
    right = covering.row_problem

    def without_softcap(row, shapes, seed):
        return right(row | ({"score": "none"} if row["score"] == "softcap" else {}), shapes, seed)

    monkeypatch.setattr(covering, "row_problem", without_softcap)
    assert absent_values() == {("score", "softcap")}
    row = PLAIN | {"score": "softcap"}
    # A plan does not count the pairs of what was dropped as asked.
    had = covering.row_values(row, without_softcap(row, "small", 0), "small")
    assert had == row | {"score": None}


def wrong_every_other_time(inputs, found):
    """By the sign of one number: a race, say, that every other draw wins."""
    odd = bool(inputs.q[0, 0, 0, 0] > 0)
    return dataclasses.replace(found, out=found.out * (1.25 if odd else 1.0))


def test_a_seed_that_hides_half(monkeypatch):
    """One seed for all, with which what fails every other time passes.

    Shown by a seed for each question, and a case that carries its own.
    """
    kernel, seeds = spoiled(wrong_every_other_time), range(8)
    said = [ask(kernel, FULL.replace(seed=seed)).status for seed in seeds]
    assert {"pass", "fail"} <= set(said)
    passes = said.index("pass")
    # The fault: every problem is drawn as that one.
    right = inputs_room.unrounded_inputs

    def same(problem, *device):
        drawn = right(problem.replace(seed=passes), *device)
        return dataclasses.replace(drawn, problem=fp64(problem))

    monkeypatch.setattr(inputs_room, "unrounded_inputs", same)
    said = [ask(kernel, FULL.replace(seed=seed)).status for seed in seeds]
    assert set(said) == {"pass"}, "what one seed hides"
    # What a Case is asked of is its own: another seed that draws the same bits is noticed.
    first, second = (draw_inputs(FULL.replace(seed=seed)).q for seed in (0, 1))
    monkeypatch.undo()
    assert bool((first == second).all())
    first, second = (draw_inputs(FULL.replace(seed=seed)).q for seed in (0, 1))
    assert not bool((first == second).any(-1).all())


def fp64(problem):
    return problem.replace(dtype="fp64")


@pytest.mark.parametrize("tensor", ["dq", "dk", "dv"])
def test_a_backward_oracle_that_blames(monkeypatch, tensor):
    """The exact gradients are wrong.

    Shown by a second backward, of another recurrence, asked before a kernel is failed.
    """
    assert ask(Ideal(), BACKWARD).status == "pass"
    right = oracles.truth

    def wrong(inputs):
        found = right(inputs)
        if found.dq is None:
            return found
        return dataclasses.replace(found, **{tensor: getattr(found, tensor) * 1.25})

    monkeypatch.setattr(oracles, "truth", wrong)
    record = ask(Ideal(), BACKWARD)
    assert record.status == "oracle disagrees"
    assert tensor in record.reason


class AssumesContiguous(Ideal):
    """Reads dO by the strides of O, in which the harness is thought to have laid it out."""

    name, summary = "assumes contiguous", "reads dO by the strides of O"

    def prepare(self, inputs):
        dout = inputs.dout
        if dout is not None:
            rows = torch.empty(dout.shape).stride()
            size = dout.untyped_storage().nbytes() // dout.element_size()
            if size - dout.storage_offset() >= dout.numel():
                read = dout.as_strided(dout.shape, rows, dout.storage_offset())
                inputs = inputs.replace(dout=read)
        return super().prepare(inputs)


def test_a_gradient_with_other_strides(monkeypatch):
    """The loss's gradient is laid out otherwise than it is said to be.

    Shown by the relation of strides lays it out in several ways, each with the same numbers.
    """
    kernel = AssumesContiguous()
    assert ask(kernel, BACKWARD).status == "pass", "laid out as it thinks"
    assert ask(kernel, BACKWARD, "strides_heads_last").status == "fail"
    right = inputs_room.round_inputs

    def laid_out_otherwise(exact, problem):
        found = right(exact, problem)
        if found.dout is None:
            return found
        return found.replace(dout=found.dout.transpose(1, 2).contiguous().transpose(1, 2))

    monkeypatch.setattr(inputs_room, "round_inputs", laid_out_otherwise)
    # Who reads numbers where they are is right whatever the layout; and the other one is caught.
    assert ask(Ideal(), BACKWARD).status == "pass"
    assert ask(kernel, BACKWARD).status == "fail"
