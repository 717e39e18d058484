"""Gradient errors in Records: for right and wrong kernels, and with rows or keys unseen."""

import math

import msgspec
import pytest
import torch
from tests.planted_kernels import kernel
from tests.planted_kernels.outputs_given import spoiled

from attncheck.core.formats import FORMATS, round_to
from attncheck.core.judgement import Place
from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import Case, Problem
from attncheck.judge.error_measures import measure_errors
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.run_case import run_case

PROBLEM = Problem(
    batch=2, heads=4, kv_heads=2, query=9, kv=12, head_dim=8, dtype="fp16", backward=True
)
# Rows 6–8 see no key, and keys 0 and 1 are seen by no row.
EMPTY = PROBLEM.replace(kv=7, mask=Spec.of("not", Spec.of("prefix_lm", prefix=2)))
TILING = Tiling(block_query=16, block_kv=4, reverse=True)


def measured(subject, problem=PROBLEM):
    evidence = EvidenceBuilder(Case(problem=problem), "cpu")
    return run_case(
        subject, evidence.case, device=evidence.device, evidence=evidence, variant="full"
    ), evidence


def test_forward_record_omits_gradients_in_json():
    record, _ = measured(Ideal(), PROBLEM.replace(backward=False))
    assert record.gradients is msgspec.UNSET
    assert "gradients" not in msgspec.to_builtins(record)


def test_gradient_errors_hold_the_measured_numbers():
    def spoil(_, given):
        given.dk[1, 0, 4, 3] -= 2
        given.dv[0, 1, 11, 7] += 3

    record, evidence = measured(spoiled(spoil, TILING))
    outputs, exact = spoiled(spoil, TILING).run(evidence.inputs), evidence.truth.gradients()
    ideal = Ideal(TILING).run(evidence.inputs).gradients()
    assert list(record.gradients) == ["dq", "dk", "dv"]
    everywhere = torch.tensor(True)
    for name, errors in record.gradients.items():
        right = measure_errors(outputs.gradients()[name], exact[name], everywhere)
        floor = measure_errors(round_to(exact[name], FORMATS["fp16"]), exact[name], everywhere)
        best = measure_errors(ideal[name], exact[name], everywhere)
        assert (errors.rmse, errors.max_error, errors.bias) == (
            right.rmse,
            right.max_error,
            right.bias,
        )
        assert (errors.floor_rmse, errors.ideal_rmse) == (floor.rmse, best.rmse)
        assert (errors.elements, errors.nonfinite) == (exact[name].numel(), 0)
    assert record.gradients["dk"].max_at == Place(batch=1, head=0, query=4, dim=3)
    assert record.gradients["dv"].max_at == Place(batch=0, head=1, query=11, dim=7)
    assert evidence.ideal_gradients(TILING) != evidence.ideal_gradients(Ideal().tiling(PROBLEM, ""))


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16"])
def test_ideal_kernel_has_the_ideal_rmse(dtype):
    record, _ = measured(Ideal(), PROBLEM.replace(dtype=dtype))
    assert record.status == "pass"
    for errors in record.gradients.values():
        assert errors.ideal_rmse == errors.rmse > errors.floor_rmse > 0


def test_sink_gradient_has_one_element_per_head():
    record, evidence = measured(Ideal(), PROBLEM.replace(sink=True))
    errors = record.gradients["dsink"]
    assert (record.status, errors.elements) == ("pass", 4)
    exact = evidence.truth.dsink
    assert errors.floor_rmse == measure_errors(exact.float(), exact, torch.tensor(True)).rmse
    assert (errors.max_at.batch, errors.max_at.query, errors.max_at.dim) == (0, 0, -1)


def test_unseen_rows_and_keys_are_not_counted():
    record, evidence = measured(Ideal(), EMPTY)
    assert record.status == "pass"
    counts = {name: errors.elements for name, errors in record.gradients.items()}
    assert counts == {"dq": 2 * 4 * 6 * 8, "dk": 2 * 2 * 5 * 8, "dv": 2 * 2 * 5 * 8}
    for name, exact in evidence.truth.gradients().items():
        touched = evidence.touched(name).expand_as(exact)
        assert exact[touched].any()
        assert not exact[~touched].any()


def test_nonfinite_gradient_has_infinite_error():
    def spoil(_, given):
        given.dv[0, 1, 2, 3] = math.nan

    record, _ = measured(spoiled(spoil))
    errors = record.gradients["dv"]
    assert (record.status, record.judgement.rule) == ("fail", "finite")
    assert (errors.rmse, errors.nonfinite) == (math.inf, 1)
    assert errors.max_at == Place(batch=0, head=1, query=2, dim=3)
    assert record.gradients["dq"].nonfinite == 0


def test_fault_in_dk_fails_by_dk_alone():
    record, _ = measured(kernel("gradients.KeysNotScaled"))
    right, _ = measured(Ideal())
    assert (record.status, record.judgement.worst.tensor) == ("fail", "dk")
    shares = record.judgement.gradients_over_bound
    assert shares["dk"] > 1 >= max(shares["dq"], shares["dv"])
    wrong = {n for n, errors in record.gradients.items() if errors != right.gradients[n]}
    assert wrong == {"dk"}
    assert record.gradients["dk"].rmse > 10 * record.gradients["dk"].ideal_rmse
    assert (record.out, record.lse) == (right.out, right.lse)


def test_gradient_floors_are_computed_before_the_kernel_runs():
    class Late(Ideal):
        def prepare(self, inputs):
            known.append("gradient_floors" in evidence.__dict__)
            return super().prepare(inputs)

    known, evidence = [], EvidenceBuilder(Case(problem=PROBLEM), "cpu")
    run_case(Late(), evidence.case, device=evidence.device, evidence=evidence, variant="full")
    assert known == [True]
