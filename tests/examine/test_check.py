"""Records of kernels that are right, wrong, broken, or refuse."""

from __future__ import annotations

import math

import pytest
import torch

from attncheck.examine.check import compare
from attncheck.examine.evidence import Evidence
from attncheck.examine.executor import Execution, Failure, InProcess
from attncheck.mods.spec import Spec
from attncheck.outputs import Outputs
from attncheck.problem import Case, Problem
from attncheck.subjects.contract import Subject, Tiling
from attncheck.subjects.ideal import Ideal

PROBLEM = Problem(heads=2, kv_heads=1, query=9, kv=7, head_dim=8, dtype="fp16")


class Exact(Subject):
    """The truth, correctly rounded; tests change what it returns."""

    name = "exact"
    summary = "what no kernel can beat"

    def unsupported(self, problem, device):
        return "only fp16" if problem.dtype != "fp16" else None

    def prepare(self, inputs):
        from attncheck import oracles

        truth = oracles.dense(inputs)
        return lambda: self.spoil(Outputs(truth.out.half(), truth.lse.float()))

    def spoil(self, outputs):
        return outputs


def measured(subject=None, problem=PROBLEM):
    evidence = Evidence(Case(problem=problem), "cpu")
    return compare(subject or Exact(), evidence, variant="full", environment="env")


def spoiled(change, problem=PROBLEM):
    subject = Exact()
    subject.spoil = change
    return measured(subject, problem)


def test_the_truth_rounded_is_at_the_floor():
    record = measured()
    assert record.status == "measured"
    # Half-precision casts round float64 twice; at the floor means not above the ideal kernel.
    assert record.out.floor_rmse <= record.out.rmse <= record.out.ideal_rmse
    assert (record.heads, record.kernel, record.case_id) == (
        "MQA",
        "exact",
        Case(problem=PROBLEM).id,
    )
    assert record.tiling == str(Ideal().tiling(PROBLEM, "cpu"))
    assert record.seconds > 0


def test_the_ideal_kernel_is_compared_at_the_kernels_own_tiling():
    class Tiled(Exact):
        def tiling(self, problem, device):
            return Tiling(block_query=16, block_kv=2, reverse=True)

    record = measured(Tiled())
    assert record.tiling == "16×2 reverse"


def test_a_place_is_named():
    def change(outputs):
        outputs.out[0, 1, 4, 3] += 100
        outputs.lse[0, 0, 2] -= 50
        return outputs

    record = spoiled(change)
    at = record.out.max_at
    assert (at.batch, at.head, at.query, at.dim) == (0, 1, 4, 3)
    assert record.out.max_error == pytest.approx(100, abs=1)
    assert (record.lse.max_at.query, record.lse.max_at.dim) == (2, -1)
    assert record.out.bias > 0


def test_a_refusal_is_a_reason():
    record = measured(problem=PROBLEM.replace(dtype="bf16"))
    assert (record.status, record.reason, record.out) == ("unsupported", "only fp16", None)


def test_what_a_kernel_raises_is_one_line():
    def change(_):
        raise ValueError("first line\nsecond line")

    record = spoiled(change)
    assert (record.status, record.reason) == ("error", "ValueError: first line")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda o: Outputs(o.out[..., :-1], o.lse),
            "out.shape=(1, 2, 9, 7), but should be (1, 2, 9, 8).",
        ),
        (
            lambda o: Outputs(o.out.float(), o.lse),
            "out.dtype=torch.float32, but should be torch.float16.",
        ),
        (
            lambda o: Outputs(o.out, o.lse[..., None]),
            "lse.shape=(1, 2, 9, 1), but should be (1, 2, 9).",
        ),
        (lambda o: Outputs(o.out.to("meta"), o.lse), "out.device=meta, but should be cpu."),
        (lambda o: Outputs([1.0], o.lse), "out is list, but should be a tensor."),
        (lambda o: (o.out, o.lse), "returned tuple, but should return Outputs."),
    ],
)
def test_a_broken_contract_is_said(change, message):
    record = spoiled(change)
    assert (record.status, record.reason) == ("error", message)


def test_nan_never_looks_good():
    def change(outputs):
        outputs.out[0, 0, 5, 1] = math.nan
        outputs.lse[0, 0, 5] = math.inf
        return outputs

    record = spoiled(change)
    assert record.status == "measured"
    assert (record.out.rmse, record.out.nonfinite) == (math.inf, 1)
    assert (record.lse.max_error, record.lse.nonfinite) == (math.inf, 1)


DEAD = PROBLEM.replace(mask=Spec.of("not", Spec.of("prefix_lm", prefix=2)))


def test_dead_rows_are_exact_and_outside_the_statistics():
    record = measured(problem=DEAD)
    assert record.out.dead_rows == 2 * 3  # rows 6, 7 and 8 of 9 see keys 0–6: nothing is left
    assert (record.out.dead_rows_wrong, record.lse.dead_rows_wrong) == (0, 0)
    assert record.out.elements == 2 * 6 * 8


@pytest.mark.parametrize("value", [1e-7, math.nan])
def test_dead_rows_that_are_not_zero(value):
    def change(outputs):
        outputs.out[0, 0, 8, 0] = value
        outputs.lse[0, 0, 8] = 0.0
        return outputs

    record = spoiled(change, DEAD)
    assert (record.out.dead_rows_wrong, record.lse.dead_rows_wrong) == (1, 1)


def test_no_lse_is_no_error():
    assert spoiled(lambda o: Outputs(o.out)).lse is None


def test_the_executor_never_raises():
    class Broken(Exact):
        def prepare(self, inputs):
            raise RuntimeError

    evidence = Evidence(Case(problem=PROBLEM), "cpu")
    result = InProcess().run(Broken(), evidence.inputs)
    assert isinstance(result, Failure)
    assert (result.kind, result.message) == ("error", "RuntimeError")
    assert "prepare" in result.trace


def test_untimed_runs_call_once():
    calls = []
    subject = Exact()
    subject.spoil = lambda o: calls.append(1) or o
    evidence = Evidence(Case(problem=PROBLEM), "cpu")
    result = InProcess().run(subject, evidence.inputs)
    assert isinstance(result, Execution)
    assert (result.seconds, len(calls)) == (None, 1)


def test_evidence_is_computed_once():
    evidence = Evidence(Case(problem=PROBLEM), "cpu")
    assert evidence.inputs is evidence.inputs
    assert evidence.truth is evidence.truth
    assert torch.equal(evidence.alive, torch.ones(1, 2, 9, dtype=torch.bool))
