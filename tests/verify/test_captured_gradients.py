"""Gradients of tensors that a score mod captures (``dcaptured``): right kernels and faults."""

import pytest
import torch
from tests import planted_kernels

from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal
from attncheck.verify.allowances import gradient_allowance, numbers_read
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.run_case import run_case

SOFTCAP = Spec.of("softcap", cap=1.5)
ALIBI, RELATIVE = Spec.of("alibi"), Spec.of("relative_bias", distance=5, seed=0)
BIAS = Spec.of("bias", seed=1, per_batch=1, per_head=1)
CAPPED = Spec.of("chain", SOFTCAP, RELATIVE, SOFTCAP, ALIBI)
PROBLEM = Problem(
    batch=2,
    heads=4,
    kv_heads=2,
    query=37,
    kv=40,
    head_dim=16,
    backward=True,
    dcaptured=True,
    mask=Spec.of("causal"),
    score=CAPPED,
)
TILING = Tiling(block_query=16, block_kv=16)
DTYPES = ("fp32", "tf32", "fp16", "bf16")


def run(kernel: Ideal, problem: Problem = PROBLEM):
    return run_case(kernel, Case(problem=problem), device="cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"score": ALIBI, "dlse": True, "sink": True},
        {"score": Spec.of("chain", BIAS, SOFTCAP)},
        {"score": Spec.of("bias", seed=1, per_batch=0, per_head=0), "heads": 2},
        {"score": RELATIVE, "mask": Spec.of("sliding_window", window=3)},
    ],
    ids=lambda changes: ", ".join(f"{k} {v}" for k, v in changes.items()) or "chain",
)
def test_ideal_kernel_is_within_dcaptured_bounds(dtype, changes):
    record = run(Ideal(TILING), PROBLEM.replace(dtype=dtype, **changes))
    assert (record.status, record.judgement.reason) == ("pass", "")
    assert 0 < record.judgement.gradients_over_bound["dcaptured"] <= 1
    errors = record.gradients["dcaptured"]
    assert errors.rmse > 0
    assert errors.nonfinite == 0


def test_gradient_of_bias_values_that_no_row_reads_must_be_zero():
    problem = PROBLEM.replace(score=BIAS)
    evidence = EvidenceBuilder(Case(problem=problem), "cpu")
    seen = torch.ones(problem.query, problem.kv).tril().bool().expand(2, 4, -1, -1).flatten()
    assert torch.equal(numbers_read(evidence.evidence), seen)
    outputs = Ideal(TILING).run(evidence.inputs)
    bounds = gradient_allowance(
        evidence.evidence, Ideal(TILING).arithmetic(problem, "cpu"), outputs
    ).bounds
    assert torch.equal(bounds["dcaptured"] > 0, seen)

    class Leaks(Ideal):
        def capture(self, sums, x, at, ds, seen):
            super().capture(sums, x, at, ds, seen)
            sums.sums[1] = 1e-30  # row 0 does not see key 1

    record = run(Leaks(TILING), problem)
    assert (record.status, record.judgement.rule) == ("fail", "empty rows")
    assert "dcaptured[1]" in record.judgement.reason
    assert "of numbers that no row reads for a key that it sees" in record.judgement.reason


def test_untraceable_score_mod_leaves_dcaptured_unbounded(monkeypatch):
    from attncheck.core.errors import TraceError
    from attncheck.verify import evidence as evidence_file

    def refuses(*_):
        raise TraceError("no")

    monkeypatch.setattr(evidence_file, "trace_reads", refuses)
    evidence_file._traced_reads.cache_clear()
    evidence = EvidenceBuilder(Case(problem=PROBLEM), "cpu")
    outputs = Ideal(TILING).run(evidence.inputs)
    bounds = gradient_allowance(
        evidence.evidence, Ideal(TILING).arithmetic(PROBLEM, "cpu"), outputs
    ).bounds
    evidence_file._traced_reads.cache_clear()
    assert bounds["dcaptured"].isinf().all()
    assert bounds["dq"].isfinite().all()


FAULTS = (
    *("SlopeLeftOut", "SlopeTwice", "WithoutDelta", "OfAnotherHead", "OfOneSequence"),
    *("TileTwice", "TileLost", "OfNextKey", "InBf16"),
)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_fails_by_dcaptured_alone(fault, dtype):
    kernel = planted_kernels.kernel(f"gradients.Captured{fault}")
    record = run(kernel, PROBLEM.replace(dtype=dtype, distribution="normal"))
    assert record.status == "fail"
    assert record.judgement.rule in {"bound", "empty rows"}
    assert record.judgement.reason.startswith("dcaptured[")
    shares = record.judgement.gradients_over_bound
    assert shares["dcaptured"] > 1
    assert max(share for name, share in shares.items() if name != "dcaptured") <= 1


def test_ds_rounded_before_summation_fails_in_fp32():
    """In bf16 the fault may hide behind the rounding of ``out``, from which delta is computed."""
    kernel = planted_kernels.kernel("gradients.CapturedRoundedFirst")
    assert run(kernel, PROBLEM.replace(dtype="fp32")).status == "fail"
