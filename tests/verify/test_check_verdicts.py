"""Judgements of a comparison: right kernels pass, and each kind of fault fails by its rule."""

import math

import pytest
import torch
from tests.planted_kernels.outputs_given import in_turns, spoiled

from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.core.tensor_names import GRADIENTS
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal
from attncheck.subjects.torch_kernels import Sdpa
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.run_case import run_case

PROBLEM = Problem(heads=2, kv_heads=1, query=24, kv=40, head_dim=16, dtype="fp16")
CAUSAL = PROBLEM.replace(mask=Spec.of("causal"))
SOFTMAX = Problem(operation="softmax", heads=2, query=24, kv=40, dtype="fp16")


def judged(subject, problem=PROBLEM):
    evidence = EvidenceBuilder(Case(problem=problem), "cpu")
    record = run_case(
        subject, evidence.case, device=evidence.device, evidence=evidence, variant="full"
    )
    assert record.judgement is None or record.status == record.judgement.status
    return record


@pytest.mark.parametrize("problem", [PROBLEM, CAUSAL, SOFTMAX], ids=["full", "causal", "softmax"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_ideal_kernel_passes_with_a_complete_judgement(problem, dtype):
    record = judged(Ideal(), problem.replace(dtype=dtype))
    judgement = record.judgement
    assert (record.status, judgement.rule, judgement.reason) == ("pass", "", "")
    assert 0 < judgement.out_over_bound <= 1
    assert 0 < judgement.lse_over_bound <= 1
    assert judgement.rows == judgement.rows_sampled == 2 * 24
    assert judgement.worst.allowance > abs(judgement.worst.got - judgement.worst.exact)
    assert judgement.blind_spot is not None
    assert str(Ideal().arithmetic(problem.replace(dtype=dtype), "cpu")) == judgement.arithmetic


def test_kernel_without_lse_and_tiles_is_judged_by_out_alone():
    record = judged(Sdpa("math"))
    assert record.status == "pass"
    assert record.judgement.lse_over_bound is None
    assert (record.judgement.precision.residual, record.judgement.worst.tile) == (None, "")


def at(tensor, place, change):
    """A fault that applies ``change`` to the elements of ``tensor`` at ``place``."""

    def spoil(_, right):
        values = getattr(right, tensor)
        values[place] = change(values[place])

    return spoil


FAULTS = {
    "one element": (at("out", (0, 1, 5, 3), lambda x: x + 1), "bound", "out", (0, 1, 5, 3)),
    "one row of LSE": (at("lse", (0, 1, 5), lambda x: x + 0.01), "bound", "lse", (0, 1, 5, -1)),
    "NaN": (at("out", (0, 0, 7, 2), lambda _: math.nan), "finite", "out", (0, 0, 7, 2)),
    "infinite LSE": (at("lse", (0, 1, 3), lambda _: math.inf), "finite", "lse", (0, 1, 3, -1)),
}


@pytest.mark.parametrize("problem", [PROBLEM, SOFTMAX], ids=["attention", "softmax"])
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_fails_by_its_rule_and_is_located(fault, problem):
    spoil, rule, tensor, place = FAULTS[fault]
    record = judged(spoiled(spoil), problem)
    judgement = record.judgement
    assert (record.status, judgement.rule) == ("fail", rule)
    assert judgement.reason
    at = judgement.worst.at
    assert (judgement.worst.tensor, at.batch, at.head, at.query, at.dim) == (tensor, *place)


def test_out_one_percent_too_large_fails_without_blind_spot():
    record = judged(spoiled(at("out", ..., lambda x: x * 1.01)))
    assert record.status == "fail"
    assert record.judgement.blind_spot is None, "a failed kernel has no blind spot to report"


@pytest.mark.parametrize("value", [1e-7, math.nan])
def test_nonzero_row_that_sees_no_key_fails(value):
    # Rows before the last 16 of 40 keys see none.
    dead = PROBLEM.replace(mask=Spec.of("not", Spec.of("causal")), kv=8)
    assert judged(Ideal(), dead).status == "pass"
    record = judged(spoiled(at("out", (0, 0, 8, 0), lambda _: value)), dead)
    assert (record.status, record.judgement.rule) == ("fail", "empty rows")


@pytest.mark.parametrize("backward", [False, True])
def test_budget_of_the_worst_element_sums_to_its_allowance(backward):
    worst = judged(Ideal(), CAUSAL.replace(backward=backward)).judgement.worst
    assert (worst.tensor in GRADIENTS) == backward
    # The sum is taken in another order: one float64 ulp for each term.
    size = len(worst.budget) * 2.0**-52 * worst.allowance
    assert abs(sum(worst.budget.values()) - worst.allowance) <= size


def test_worst_element_names_its_tile_in_the_declared_tiling():
    subject = Ideal(Tiling(block_query=8, block_kv=16))
    worst = judged(subject).judgement.worst
    first = worst.at.query // 8 * 8
    assert worst.tile == f"query tile {worst.at.query // 8}, rows {first}–{first + 7}"


def test_structured_distributions_are_not_judged_as_generic(monkeypatch):
    from attncheck.verify import judging

    generic = []
    decide = judging.decide

    def recording_decide(kernel, *arguments):
        generic.append(kernel.generic)
        return decide(kernel, *arguments)

    monkeypatch.setattr(judging, "decide", recording_decide)
    for distribution in ("normal", "outliers", "one_hot", "zero_q"):
        judged(Ideal(), PROBLEM.replace(distribution=distribution))
    assert generic == [True, True, False, False]


def test_declared_bf16_rounding_of_p_passes_and_undeclared_fails():

    class Coarse(Ideal):
        name, summary = "coarse", "rounds P to bf16"

        def operand(self, values, fmt):
            # P alone is between 0 and 1 and has as many columns as a tile has keys.
            return values.bfloat16().float() if values.shape[-1] == 64 else values

    class Honest(Coarse):
        def arithmetic(self, problem, device):
            from dataclasses import replace

            from attncheck.core.formats import FORMATS

            return replace(super().arithmetic(problem, device), weights=FORMATS["bf16"])

    problem = PROBLEM.replace(kv=64, query=128, head_dim=32)
    silent, honest = judged(Coarse(), problem), judged(Honest(), problem)
    assert silent.status == "fail"
    assert honest.status == "pass"
    assert silent.judgement.arithmetic != honest.judgement.arithmetic


def test_allowances_are_computed_once_per_arithmetic(monkeypatch):
    from attncheck.verify import evidence_builder as room

    counts = {"allowances": 0}
    original = room.allowances

    def counted(*arguments):
        counts["allowances"] += 1
        return original(*arguments)

    monkeypatch.setattr(room, "allowances", counted)
    evidence = EvidenceBuilder(Case(problem=PROBLEM), "cpu")
    for subject in (Ideal(), spoiled(lambda *_: None), Ideal(Tiling(block_query=64, block_kv=32))):
        run_case(subject, evidence.case, device=evidence.device, evidence=evidence)
    assert counts == {"allowances": 1}
    run_case(
        Sdpa("math"), evidence.case, device=evidence.device, evidence=evidence
    )  # another arithmetic
    assert counts == {"allowances": 2}


def test_out_of_memory_for_the_bounds_is_an_error_record(monkeypatch):
    from attncheck.verify import evidence_builder as room

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(room, "allowances", fail)
    record = judged(Ideal())
    assert (record.status, record.reason) == ("error", "out of memory for the exact result")


@pytest.mark.parametrize("timed", [True, False])
def test_kernel_is_timed_only_on_request(timed):
    evidence = EvidenceBuilder(Case(problem=PROBLEM), "cpu")
    record = run_case(Sdpa("math"), evidence.case, device="cpu", evidence=evidence, timed=timed)
    assert (record.seconds is not None) is timed


def test_only_the_first_call_is_judged():
    """Further calls serve timing: their outputs do not reach the judgement."""

    def double_later_calls(right, number):
        return right if number == 1 else Outputs(right.out * 2, right.lse)

    case = Case(problem=PROBLEM)
    assert (
        run_case(spoiled(in_turns(double_later_calls)), case, device="cpu", timed=True).status
        == "pass"
    )
