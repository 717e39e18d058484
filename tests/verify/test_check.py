"""Records of a comparison: statistics, status and reason for right, wrong and failing kernels."""

import math

import pytest
import torch

from attncheck.core.formats import FORMATS, round_to
from attncheck.core.judgement import Place
from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.inputs.problem import Case, Problem
from attncheck.judge.error_measures import measure_errors, rounding_floor
from attncheck.records.failure_causes import without_place
from attncheck.records.record import LseErrors, OutErrors
from attncheck.subjects.capabilities.subject import Subject, Tiling
from attncheck.subjects.ideal import Ideal
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.run_case import run_case

PROBLEM = Problem(heads=2, kv_heads=1, query=9, kv=7, head_dim=8, dtype="fp16")


class Exact(Subject):
    """Returns the correctly rounded truth; tests replace ``spoil`` to change it."""

    name = "exact"
    summary = "what no kernel can beat"

    def concerns(self, problem):
        return True

    def unsupported(self, problem, device):
        return "only fp16" if problem.dtype != "fp16" else None

    def prepare(self, inputs):
        from attncheck import oracles

        truth = oracles.truth(inputs)
        out = round_to(truth.out, FORMATS["fp16"]).half()
        return lambda: self.spoil(Outputs(out.clone(), truth.lse.float()))

    def spoil(self, outputs):
        return outputs


def measured(subject=None, problem=PROBLEM, evidence=None):
    evidence = evidence or EvidenceBuilder(Case(problem=problem), "cpu")
    named = {"variant": "causal", "environment": "env", "timed": True}
    return run_case(
        subject or Exact(), evidence.case, device=evidence.device, evidence=evidence, **named
    )


def spoiled(change, problem=PROBLEM):
    subject = Exact()
    subject.spoil = change
    return measured(subject, problem)


def test_rounded_truth_has_the_floor_rmse():
    record = measured()
    assert record.status == "pass"
    assert record.out.rmse == record.out.floor_rmse <= record.out.ideal_rmse
    assert (record.heads, record.kernel, record.case_id) == (
        "MQA",
        "exact",
        Case(problem=PROBLEM).id,
    )
    assert record.tiling == str(Ideal().tiling(PROBLEM, "cpu"))
    assert record.seconds > 0


def test_record_fields_hold_the_measured_errors():
    tiling = Tiling(block_query=16, block_kv=2, reverse=True)

    class Tiled(Exact):
        def tiling(self, problem, device):
            return tiling

        def spoil(self, outputs):
            outputs.out[1, 0, 4, 3] -= 2
            outputs.lse[1, 0, 2] += 3
            outputs.lse[1, 1, 3] -= 1
            return outputs

    problem = PROBLEM.replace(batch=2, kv=200)
    subject, evidence = Tiled(), EvidenceBuilder(Case(problem=problem), "cpu")
    record = measured(subject, evidence=evidence)
    assert record.tiling == "16×2 reverse"
    outputs, truth = subject.run(evidence.inputs), evidence.truth
    out, lse = (
        measure_errors(values, exact, torch.tensor(True))
        for values, exact in ((outputs.out, truth.out), (outputs.lse, truth.lse))
    )
    best = measure_errors(
        Ideal(tiling).run(evidence.inputs).out, truth.out, torch.tensor(True)
    ).rmse
    assert best not in {evidence.floor_rmse, evidence.ideal_rmse(Ideal().tiling(problem, "cpu"))}
    assert out.bias < 0
    assert record.out == OutErrors(
        rmse=out.rmse,
        floor_rmse=rounding_floor(truth.out, torch.tensor(True), FORMATS["fp16"]),
        ideal_rmse=best,
        max_error=out.max_error,
        max_at=Place(batch=1, head=0, query=4, dim=3),
        bias=out.bias,
        input_rmse=evidence.input_rmse,
        elements=2 * 2 * 9 * 8,
    )
    assert record.lse == LseErrors(
        rmse=lse.rmse, max_error=lse.max_error, max_at=Place(batch=1, head=0, query=2)
    )
    assert (record.variant, record.environment) == ("causal", "env")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "arrangement"),
    [(1, 1, "MHA"), (4, 4, "MHA"), (4, 2, "GQA"), (4, 1, "MQA")],
)
def test_record_names_the_head_arrangement(heads, kv_heads, arrangement):
    assert measured(problem=PROBLEM.replace(heads=heads, kv_heads=kv_heads)).heads == arrangement


@pytest.mark.parametrize("triton", [True, False])
def test_only_triton_kernels_are_marked_interpreted_on_a_cpu(triton):
    subject = Exact()
    subject.triton = triton
    assert measured(subject).interpreted is triton


def test_refusal_is_unsupported_with_its_reason():
    record = measured(problem=PROBLEM.replace(dtype="bf16"))
    assert (record.status, record.reason, record.out) == ("unsupported", "only fp16", None)


def test_exception_becomes_a_one_line_reason():
    def change(_):
        raise ValueError("first line\nsecond line")

    record = spoiled(change)
    assert (record.status, without_place(record.reason)) == ("error", "ValueError: first line")


def test_nonfinite_output_has_infinite_error():
    def change(outputs):
        outputs.out[0, 0, 5, 1] = math.nan
        outputs.lse[0, 0, 5] = math.inf
        return outputs

    record = spoiled(change)
    assert (record.status, record.judgement.rule) == ("fail", "finite")
    assert (record.out.rmse, record.out.nonfinite) == (math.inf, 1)
    assert (record.lse.max_error, record.lse.nonfinite) == (math.inf, 1)


DEAD = PROBLEM.replace(mask=Spec.of("not", Spec.of("prefix_lm", prefix=2)))


def test_dead_rows_are_excluded_from_the_statistics():
    record = measured(problem=DEAD)
    assert record.out.dead_rows == 2 * 3  # rows 6, 7 and 8 of 9 see keys 0–6: nothing is left
    assert (record.out.dead_rows_wrong, record.lse.dead_rows_wrong) == (0, 0)
    assert record.out.elements == 2 * 6 * 8
    assert record.out.rmse == record.out.floor_rmse > 0  # dead rows dilute neither
    ideal = measured(Ideal(), DEAD)
    assert ideal.out.rmse == ideal.out.ideal_rmse > 0


@pytest.mark.parametrize(
    ("out", "lse"), [(1e-7, 0.0), (math.nan, 0.0), (0.0, 0.0), (0.0, math.inf), (0.0, math.nan)]
)
def test_dead_rows_with_wrong_out_or_lse_are_counted(out, lse):
    def change(outputs):
        outputs.out[0, 0, 8, 0] = out
        outputs.lse[0, 0, 8] = lse
        return outputs

    record = spoiled(change, DEAD)
    assert (record.out.dead_rows_wrong, record.lse.dead_rows_wrong) == (int(out != 0), 1)


def test_kernel_without_lse_has_no_lse_errors():
    assert spoiled(lambda o: Outputs(o.out)).lse is None


def test_truth_and_floor_are_computed_before_the_kernel_runs(monkeypatch):
    """A kernel that writes to its inputs must not change what it is compared with."""
    from attncheck.verify import evidence_builder

    events = []

    def log_calls(place, name, event):
        original = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *a: events.append(event) or original(*a))

    log_calls(evidence_builder.oracles, "truth", "truth")
    log_calls(evidence_builder, "rounding_floor", "floor")

    class Kernel(Ideal):
        def prepare(self, inputs):
            events.append("kernel")
            return super().prepare(inputs)

    measured(Kernel())
    # The second truth is that of the inputs as drawn.
    assert events[:4] == ["truth", "floor", "truth", "kernel"]


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_writing_to_an_input_fails_and_does_not_affect_other_kernels(name):
    class Scribble(Exact):
        def prepare(self, inputs):
            call = super().prepare(inputs)
            return lambda: getattr(inputs, name).zero_() is not None and call()

    evidence = EvidenceBuilder(Case(problem=PROBLEM), "cpu")
    scribbled = measured(Scribble(), evidence=evidence)
    assert (scribbled.status, scribbled.judgement.rule) == ("fail", "mutation")
    assert scribbled.judgement.reason == f"wrote to its input {name}."
    assert measured(evidence=evidence).out == measured().out


@pytest.mark.parametrize("method", ["absent", "unsupported", "tiling"])
@pytest.mark.parametrize("exception", [ValueError("planted"), SystemExit(3)])
def test_exception_in_a_subject_method_is_an_error_record(method, exception):
    def fail(*_):
        raise exception

    subject = Exact()
    setattr(subject, method, fail)
    record = measured(subject)
    assert record.status == "error"
    assert record.reason.startswith(f"{type(exception).__name__}: {exception}")


@pytest.mark.parametrize(
    "failure",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_out_of_memory_for_the_truth_is_an_error_record(failure, monkeypatch):
    from attncheck.verify import evidence_builder

    def truth(_):
        raise failure

    monkeypatch.setattr(evidence_builder.oracles, "truth", truth)
    record = measured(Ideal())
    assert (record.status, record.reason) == ("error", "out of memory for the exact result")


def test_other_oracle_failures_propagate(monkeypatch):
    from attncheck.verify import evidence_builder

    def truth(_):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(evidence_builder.oracles, "truth", truth)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        measured(Ideal())


@pytest.mark.parametrize(
    "problem",
    [
        Problem(heads=2, query=33, kv=40, head_dim=24, dtype="fp16", distribution="one_hot"),
        Problem(query=20, dtype="bf16", mask=Spec.of("sliding_window", window=1)),
    ],
    ids=["one_hot", "window 1"],
)
def test_rows_that_see_one_key_are_exact(problem):
    record = measured(Ideal(), problem)
    assert (record.out.rmse, record.out.floor_rmse, record.out.ideal_rmse) == (0.0, 0.0, 0.0)


SOFTMAX = Problem(operation="softmax", heads=2, query=9, kv=7, dtype="fp16")


def test_softmax_record_has_no_head_arrangement_or_tiling():
    record = measured(problem=SOFTMAX)
    assert (record.status, record.heads, record.tiling) == ("pass", "", "")
    assert (record.case_id, record.case["problem"]["operation"]) == (
        Case(problem=SOFTMAX).id,
        "softmax",
    )
    assert record.out.rmse == record.out.floor_rmse <= record.out.ideal_rmse
    assert (record.out.elements, record.out.dead_rows) == (2 * 9 * 7, 0)


def test_wrong_softmax_element_is_located():
    def change(outputs):
        outputs.out[0, 1, 4, 6] += 1
        outputs.lse[0, 0, 2] -= 50
        return outputs

    record = spoiled(change, SOFTMAX)
    assert record.out.max_at == Place(batch=0, head=1, query=4, dim=6)
    assert record.lse.max_at == Place(batch=0, head=0, query=2)
    assert 0.5 < record.out.max_error < 1.5  # 1 is added to a weight, and fp16 rounds the sum


def test_softmax_output_of_wrong_shape_fails_contract():
    record = spoiled(lambda o: Outputs(o.out[..., :-1], o.lse), SOFTMAX)
    assert (record.status, record.judgement.rule) == ("fail", "contract")
    assert record.judgement.reason == "out.shape=(1, 2, 9, 6), but should be (1, 2, 9, 7)."


def test_input_rounding_is_reported_apart_from_the_kernel_error():
    """A kernel that is exact on the stored inputs has the floor rmse, even with coarse inputs."""
    coarse = PROBLEM.replace(dtype="e5m2")

    class Coarse(Exact):
        def unsupported(self, problem, device):
            return None

        def prepare(self, inputs):
            from attncheck import oracles

            truth = oracles.truth(inputs)
            out = round_to(truth.out, FORMATS["bf16"]).bfloat16()
            return lambda: Outputs(out, truth.lse.float())

    record = measured(Coarse(), coarse)
    assert record.out.rmse == record.out.floor_rmse
    assert record.out.input_rmse > 10 * record.out.floor_rmse  # 3 bits against 8: 32 times
