"""Faults in the judge itself, as other projects' test suites had them, planted in attncheck.

Each blames a right kernel, excuses a wrong one or drops a question; a second mechanism of attncheck
must reveal it.
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
from attncheck.verify.question_fit import question_named
from attncheck.verify.run_case import run_case

FULL = Problem(heads=2, query=20, kv=33, head_dim=16, dtype="bf16")
BACKWARD = FULL.replace(dtype="fp16", mask=Spec.of("causal"), backward=True)


def ask(subject, problem, question="compare", **parameters):
    case = Case(problem=problem, question=question, parameters=parameters)
    return run_case(subject, case, device="cpu", brief=False)


def ask_first(problem, question, subject=None):
    """Ask with the first, most telling, of the allowed parameters."""
    parameters = {
        name: values[0] for name, values in question_named(question).allowed(problem).items()
    }
    return ask(subject or Ideal(), problem, question, **parameters)


HALVED = spoiled(lambda _, outputs: dataclasses.replace(outputs, out=outputs.out * 0.5))


def test_blind_spot_and_probes_reveal_an_allowance_no_error_exceeds(monkeypatch):
    """With an allowance 10⁶ times too large, a kernel that returns half of O passes ``compare``.

    The blind spot reported with every pass grows with the allowance, and the probe ``mean`` and the
    relation ``zero_query`` have margins of their own, so both still fail the kernel.
    """
    assert ask(HALVED, FULL).status == "fail"
    assert ask(Ideal(), FULL).judgement.blind_spot.half
    right = EvidenceBuilder._allowance

    def generous(self, arithmetic):
        allowed = right(self, arithmetic)
        samples = [scale_tensors(sample, 1e6) for sample in allowed.samples]
        return dataclasses.replace(scale_tensors(allowed, 1e6), samples=samples)

    monkeypatch.setattr(EvidenceBuilder, "_allowance", generous)
    assert ask(HALVED, FULL).status not in FAILED_STATUSES, "half of O passes"
    spot = ask(Ideal(), FULL).judgement.blind_spot
    assert (spot.half, spot.zeros, spot.dropped_keys) == (False, False, 0.0)
    record = ask_first(FULL, "mean", HALVED)
    assert (record.status, record.judgement.rule) == ("fail", "structure")
    assert ask_first(FULL, "zero_query", HALVED).status == "fail"


def scale_tensors(allowance, factor):
    """Multiply every tensor of an allowance."""
    tensors = {
        field.name: getattr(allowance, field.name) * factor
        for field in dataclasses.fields(allowance)
        if isinstance(getattr(allowance, field.name), torch.Tensor)
    }
    return dataclasses.replace(allowance, **tensors)


def test_either_of_two_rules_alone_fails_a_nan_output(monkeypatch):
    """Two independent rules guard against a comparison that treats a NaN difference as close.

    Outputs that are not finite fail before anything is compared, and a share of NaN exceeds any
    bound. Each rule is switched off here, and the other one still fails the kernel.
    """

    def set_nan(_, outputs):
        outputs.out[0, 1, 3, 5] = math.nan
        return outputs

    broken = spoiled(set_nan)
    right = allowance.shares

    def close(*arguments):
        return right(*arguments).nan_to_num(0.0)

    with monkeypatch.context() as patch:
        for room in (allowance, verdict, verdict_rules):
            if hasattr(room, "shares"):
                patch.setattr(room, "shares", close)
        record = ask(broken, FULL)
        assert (record.status, record.judgement.rule) == ("fail", "finite")
    monkeypatch.setattr(verdict_rules, "nonfinite", lambda _: [])
    record = ask(broken, FULL)
    assert (record.status, record.judgement.rule) == ("fail", "bound")


def test_relations_reveal_a_mask_that_is_wrong_in_oracle_and_kernel_alike(monkeypatch):
    """The relations know a mask by its name and never call it, so a shared bug cannot hide."""
    causal = FULL.replace(mask=Spec.of("causal"), kv=20)
    wider = dataclasses.replace(
        library.MASKS["causal"],
        build=lambda *_: lambda b, h, q_idx, kv_idx: q_idx + 1 >= kv_idx,
    )
    for question in ("future_keys", "first_row"):
        assert ask_first(causal, question).status == "pass"
    monkeypatch.setitem(library.MASKS, "causal", wider)
    assert ask(Ideal(), causal).status == "pass", "oracle and kernel share the wrong mask"
    for question in ("future_keys", "first_row"):
        assert ask_first(causal, question).status == "fail"


@pytest.mark.parametrize(
    ("dtype", "oracle"),
    [("fp32", torch.float32), ("fp32", torch.bfloat16), ("bf16", torch.float16)],
)
def test_low_precision_oracle_does_not_fail_a_right_kernel(monkeypatch, dtype, oracle):
    """A second oracle is consulted before a kernel fails, so a rounded truth blames nobody.

    Either the oracle's error is small beside what rounding may cost, and the kernel passes, or the
    oracles disagree.
    """
    problem = FULL.replace(dtype=dtype)
    right = oracles.truth

    def round_truth(inputs):
        truth = right(inputs)
        return dataclasses.replace(
            truth, out=truth.out.to(oracle).double(), lse=truth.lse.to(oracle).double()
        )

    monkeypatch.setattr(oracles, "truth", round_truth)
    record = ask(Ideal(), problem)
    assert record.status in {"pass", "oracle disagrees"}
    if oracle is torch.bfloat16:
        assert record.status == "oracle disagrees"


PAGED = FULL.replace(kv=40, paging=Paging(size=16, seed=3))


class ReadsOnePageMore(Ideal):
    """Adds the values of the cache's last page, with weights of 0."""

    name, summary = "one page more", "reads what no row sees"

    def prepare(self, inputs):
        call = super().prepare(inputs)
        paged = paged_inputs(inputs)

        def read_one_more():
            outputs = call()
            free = paged.v[-1].float().sum() * 0.0
            out = (outputs.out.float() + free).to(outputs.out.dtype)
            return dataclasses.replace(outputs, out=out)

        return read_one_more


def test_nan_in_free_pages_reveals_a_kernel_that_reads_them(monkeypatch):
    """Zeros there would hide the read; attncheck fills free pages with NaN, so the row is NaN."""
    assert ask(Ideal(), PAGED).status == "pass"
    record = ask(ReadsOnePageMore(), PAGED)
    assert (record.status, record.judgement.rule) == ("fail", "finite")
    monkeypatch.setattr(
        paging_room, "_nan", lambda like, shape: like.new_zeros(()).expand(shape).contiguous()
    )
    assert ask(ReadsOnePageMore(), PAGED).status == "pass", "what zeros hide"


PLAIN = covering.PLAIN_ROW


def values_without_effect():
    """Values of the covering axes that give the same problem as an earlier value of their axis."""
    ineffective = set()
    for axis, values in covering.AXES.items():
        # The extent counts only for a mask that has one.
        row = PLAIN | ({"mask": "sliding_window"} if axis == "extent" else {})
        problems = set()
        for value in covering.SHAPES["small"] if axis == "shape" else values:
            problem = covering.row_problem(row | {axis: value}, "small", 0)
            ineffective |= {(axis, value)} if problem in problems else set()
            problems.add(problem)
    return ineffective


def test_every_axis_value_changes_the_problem(monkeypatch):
    """A value in the covering table that reaches no problem would count as asked and never be."""
    assert values_without_effect() == set()
    right = covering.row_problem

    def without_softcap(row, shapes, seed):
        return right(row | ({"score": "none"} if row["score"] == "softcap" else {}), shapes, seed)

    monkeypatch.setattr(covering, "row_problem", without_softcap)
    assert values_without_effect() == {("score", "softcap")}
    row = PLAIN | {"score": "softcap"}
    # Nor does a plan count pairs with the dropped value as asked.
    counted = covering.row_values(row, without_softcap(row, "small", 0), "small")
    assert counted == row | {"score": None}


def spoil_half_of_all_draws(inputs, outputs):
    """Scale O wrongly depending on the sign of one input, as a race lost every other time would."""
    odd = bool(inputs.q[0, 0, 0, 0] > 0)
    return dataclasses.replace(outputs, out=outputs.out * (1.25 if odd else 1.0))


def test_each_seed_draws_its_own_inputs(monkeypatch):
    """If all seeds drew the same inputs, a kernel that fails half of all draws could pass them all.

    The fault is planted and the kernel does pass; comparing the draws of two seeds reveals it.
    """
    kernel, seeds = spoiled(spoil_half_of_all_draws), range(8)
    statuses = [ask(kernel, FULL.replace(seed=seed)).status for seed in seeds]
    assert {"pass", "fail"} <= set(statuses)
    passing = statuses.index("pass")
    right = inputs_room.unrounded_inputs

    def draw_passing(problem, *device):
        inputs = right(problem.replace(seed=passing), *device)
        return dataclasses.replace(inputs, problem=problem.replace(dtype="fp64"))

    monkeypatch.setattr(inputs_room, "unrounded_inputs", draw_passing)
    statuses = [ask(kernel, FULL.replace(seed=seed)).status for seed in seeds]
    assert set(statuses) == {"pass"}
    first, second = (draw_inputs(FULL.replace(seed=seed)).q for seed in (0, 1))
    monkeypatch.undo()
    assert bool((first == second).all())
    first, second = (draw_inputs(FULL.replace(seed=seed)).q for seed in (0, 1))
    assert not bool((first == second).any(-1).all())


@pytest.mark.parametrize("tensor", ["dq", "dk", "dv"])
def test_wrong_backward_oracle_does_not_fail_a_right_kernel(monkeypatch, tensor):
    """A second backward, by another recurrence, is consulted before a kernel fails."""
    assert ask(Ideal(), BACKWARD).status == "pass"
    right = oracles.truth

    def wrong(inputs):
        truth = right(inputs)
        if truth.dq is None:
            return truth
        return dataclasses.replace(truth, **{tensor: getattr(truth, tensor) * 1.25})

    monkeypatch.setattr(oracles, "truth", wrong)
    record = ask(Ideal(), BACKWARD)
    assert record.status == "oracle disagrees"
    assert tensor in record.reason


class AssumesContiguous(Ideal):
    """Assumes that dO is contiguous, as O is."""

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


def test_strides_relation_reveals_a_kernel_that_ignores_the_strides_of_dout(monkeypatch):
    """In ``compare`` dO is contiguous, so only the relation, which varies layouts, can tell."""
    kernel = AssumesContiguous()
    assert ask(kernel, BACKWARD).status == "pass"
    assert ask(kernel, BACKWARD, "strides_heads_last").status == "fail"
    right = inputs_room.round_inputs

    def with_heads_last(exact, problem):
        inputs = right(exact, problem)
        if inputs.dout is None:
            return inputs
        return inputs.replace(dout=inputs.dout.transpose(1, 2).contiguous().transpose(1, 2))

    # With another layout ``compare`` fails this kernel, and still none that honours strides.
    monkeypatch.setattr(inputs_room, "round_inputs", with_heads_last)
    assert ask(Ideal(), BACKWARD).status == "pass"
    assert ask(kernel, BACKWARD).status == "fail"
