"""Errors of gradients in Records: of right kernels, of wrong ones, and where nothing is seen."""

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


def test_a_forward_has_none_and_its_json_says_nothing_of_them():
    record, _ = measured(Ideal(), PROBLEM.replace(backward=False))
    assert record.gradients is msgspec.UNSET
    assert "gradients" not in msgspec.to_builtins(record)


def test_each_number_stands_under_its_name():
    def spoil(_, given):
        given.dk[1, 0, 4, 3] -= 2
        given.dv[0, 1, 11, 7] += 3

    record, evidence = measured(spoiled(spoil, TILING))
    given, exact = spoiled(spoil, TILING).run(evidence.inputs), evidence.truth.gradients()
    ideal = Ideal(TILING).run(evidence.inputs).gradients()
    assert list(record.gradients) == ["dq", "dk", "dv"]
    everywhere = torch.tensor(True)
    for name, found in record.gradients.items():
        right = measure_errors(given.gradients()[name], exact[name], everywhere)
        floor = measure_errors(round_to(exact[name], FORMATS["fp16"]), exact[name], everywhere)
        best = measure_errors(ideal[name], exact[name], everywhere)
        assert (found.rmse, found.max_error, found.bias) == (
            right.rmse,
            right.max_error,
            right.bias,
        )
        assert (found.floor_rmse, found.ideal_rmse) == (floor.rmse, best.rmse)
        assert (found.elements, found.nonfinite) == (exact[name].numel(), 0)
    assert record.gradients["dk"].max_at == Place(batch=1, head=0, query=4, dim=3)
    assert record.gradients["dv"].max_at == Place(batch=0, head=1, query=11, dim=7)
    assert evidence.ideal_gradients(TILING) != evidence.ideal_gradients(Ideal().tiling(PROBLEM, ""))


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16"])
def test_the_ideal_kernel_is_its_own_yardstick(dtype):
    record, _ = measured(Ideal(), PROBLEM.replace(dtype=dtype))
    assert record.status == "pass"
    for found in record.gradients.values():
        assert found.ideal_rmse == found.rmse > found.floor_rmse > 0


def test_a_sink_has_a_gradient_by_head():
    record, evidence = measured(Ideal(), PROBLEM.replace(sink=True))
    found = record.gradients["dsink"]
    assert (record.status, found.elements) == ("pass", 4)
    exact = evidence.truth.dsink
    assert found.floor_rmse == measure_errors(exact.float(), exact, torch.tensor(True)).rmse
    assert (found.max_at.batch, found.max_at.query, found.max_at.dim) == (0, 0, -1)


def test_only_what_is_seen_is_counted():
    record, evidence = measured(Ideal(), EMPTY)
    assert record.status == "pass"
    counts = {name: found.elements for name, found in record.gradients.items()}
    assert counts == {"dq": 2 * 4 * 6 * 8, "dk": 2 * 2 * 5 * 8, "dv": 2 * 2 * 5 * 8}
    for name, exact in evidence.truth.gradients().items():
        touched = evidence.touched(name).expand_as(exact)
        assert exact[touched].any()
        assert not exact[~touched].any()


def test_a_gradient_that_is_not_finite_never_looks_good():
    def spoil(_, given):
        given.dv[0, 1, 2, 3] = math.nan

    record, _ = measured(spoiled(spoil))
    found = record.gradients["dv"]
    assert (record.status, record.judgement.rule) == ("fail", "finite")
    assert (found.rmse, found.nonfinite) == (math.inf, 1)
    assert found.max_at == Place(batch=0, head=1, query=2, dim=3)
    assert record.gradients["dq"].nonfinite == 0


def test_a_planted_fault_fails_by_its_gradient_alone():
    record, _ = measured(kernel("gradients.KeysNotScaled"))
    right, _ = measured(Ideal())
    assert (record.status, record.judgement.worst.tensor) == ("fail", "dk")
    shares = record.judgement.gradients_over_bound
    assert shares["dk"] > 1 >= max(shares["dq"], shares["dv"])
    wrong = {n for n, found in record.gradients.items() if found != right.gradients[n]}
    assert wrong == {"dk"}
    assert record.gradients["dk"].rmse > 10 * record.gradients["dk"].ideal_rmse
    assert (record.out, record.lse) == (right.out, right.lse)


def test_yardsticks_are_known_before_a_kernel_runs():
    class Late(Ideal):
        def prepare(self, inputs):
            known.append("gradient_floors" in evidence.__dict__)
            return super().prepare(inputs)

    known, evidence = [], EvidenceBuilder(Case(problem=PROBLEM), "cpu")
    run_case(Late(), evidence.case, device=evidence.device, evidence=evidence, variant="full")
    assert known == [True]
