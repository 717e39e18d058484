"""The second oracle, asked before a kernel fails: a broken oracle must not be blamed on the kernel,
and oracles that agree must not excuse one."""

import math
from dataclasses import replace

import msgspec
import pytest
import torch
from tests.planted_kernels.outputs_given import spoiled

from attncheck import assert_attention_close, oracles
from attncheck.core.errors import OraclesDisagree
from attncheck.core.judgement import Place
from attncheck.core.mod_spec import Spec
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.oracles.row_conditions import samples_all_rows
from attncheck.records.record import FAILED_STATUSES
from attncheck.subjects.ideal import Ideal
from attncheck.verify import second_opinion as room
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.question_fit import question_named
from attncheck.verify.run_case import run_case

FULL = Problem(heads=2, kv_heads=1, query=12, kv=9, head_dim=16, dtype="fp16")
CAUSAL = FULL.replace(mask=Spec.of("causal_bottom_right"))  # its first three rows see no key
SOFTMAX = Problem(operation="softmax", heads=2, query=12, kv=40, dtype="fp32")
BACKWARD = FULL.replace(mask=Spec.of("causal"), backward=True, dlse=True)
PROBLEMS = {
    "full": FULL,
    "causal": CAUSAL,
    "softmax": SOFTMAX,
    "fp32": FULL.replace(dtype="fp32", distribution="large_logits"),
    "softcap and a sink": FULL.replace(sink=True, score=Spec.of("softcap", cap=2.0)),
    "huge": FULL.replace(dtype="bf16", distribution="large_logits", score=Spec.of("alibi")),
    "backward": BACKWARD,
    "backward of slopes": BACKWARD.replace(score=Spec.of("alibi"), dcaptured=True),
    "backward with a sink": BACKWARD.replace(sink=True),
}

FAULTS = {
    # name of the fault in the oracle: problem, tensor, index, error added there
    "an element": (FULL, "out", (0, 1, 5, 3), 1.0),
    "little more than a bound": (FULL, "out", (0, 1, 5, 3), 2.0**-9),
    "a row": (CAUSAL, "out", (0, 1, 5), 0.25),
    "LSE": (FULL, "lse", (0, 1, 5), 0.5),
    "a row wrongly empty": (FULL, "lse", (0, 1, 5), -math.inf),
    "an empty row wrongly not empty": (CAUSAL, "lse", (0, 1, 0), 1.0),
    "NaN": (FULL, "out", (0, 1, 5, 3), math.nan),
    "NaN throughout": (FULL, "out", (), math.nan),
    "LSE is NaN throughout": (FULL, "lse", (), math.nan),
    "an infinity": (FULL, "out", (0, 0, 0, 0), math.inf),
    "a head less accurate": (FULL.replace(query=64), "out", (0, 1), 2.0**-13),
    "a softmax": (SOFTMAX, "out", (0, 1, 5, 3), 0.01),
    "a softmax's LSE": (SOFTMAX, "lse", (0, 1, 5), 0.01),
    "dq": (BACKWARD, "dq", (0, 1, 5, 3), 1.0),
    "dk": (BACKWARD, "dk", (0, 0, 3, 3), 1.0),
    "dv": (BACKWARD, "dv", (0, 0, 3), 1.0),
    "dsink": (BACKWARD.replace(sink=True), "dsink", (1,), 1.0),
    "dcaptured": (PROBLEMS["backward of slopes"], "dcaptured", (1,), 10.0),
    "NaN in dv": (BACKWARD, "dv", (0, 0, 3), math.nan),
    "the forward of a backward": (BACKWARD, "out", (0, 1, 5, 3), 1.0),
}


def off_in_one(tensor="out"):
    """The ideal kernel with 1 added to the last element of one tensor."""

    def change(_, right):
        values = getattr(right, tensor)
        values[(-1,) * values.dim()] += 1

    return spoiled(change)


@pytest.fixture
def break_oracle(monkeypatch):
    """``break_oracle(tensor, index, error)`` adds ``error`` to the truth, or replaces −∞ by it."""

    right = oracles.truth

    def plant(tensor, index, error):
        def truth(inputs):
            exact = right(inputs)
            values = getattr(exact, tensor).clone()
            values[index] = error if values[index].isneginf().any() else values[index] + error
            return replace(exact, **{tensor: values})

        monkeypatch.setattr(oracles, "truth", truth)

    return plant


def run(subject, problem, *, brief=True, question="compare", parameters=None):
    case = Case(problem=problem, question=question, parameters=parameters or {})
    return run_case(subject, case, device="cpu", brief=brief)


@pytest.mark.parametrize(("problem", "tensor", "index", "error"), FAULTS.values(), ids=FAULTS)
def test_broken_oracle_is_no_verdict_on_a_right_kernel(break_oracle, problem, tensor, index, error):
    break_oracle(tensor, index, error)
    record = run(Ideal(), problem)
    assert record.status == "oracle disagrees"
    assert record.judgement is None
    assert record.error_map is msgspec.UNSET
    assert "nothing is said of the kernel" in record.reason


def test_disagreement_names_the_element_and_the_oracles(break_oracle):
    break_oracle("out", (0, 1, 5, 3), 1.0)
    record = run(Ideal(), FULL, brief=False)
    exact = oracles.flash2(
        EvidenceBuilder(Case(problem=FULL), "cpu").inputs, block_query=4, block_kv=4
    )
    value = float(exact.out[0, 1, 5, 3])
    start = f"out[0, 1, 5, 3] is {1 + value:.9f}"[:-2]
    assert record.reason.startswith(start)
    assert f"{value:.9f}"[:-2] in record.reason
    for name in ("the streaming oracle", "FlashAttention-2's recurrence", "differ by at most "):
        assert name in record.reason
    assert (record.out, record.lse) == (None, None)
    assert record.status not in FAILED_STATUSES


@pytest.mark.parametrize("question", ["decode", "ones", "ramp"])
def test_broken_oracle_is_no_verdict_on_a_probe(break_oracle, question):
    parameters = {
        name: values[0] for name, values in question_named(question).allowed(FULL).items()
    }
    assert run(Ideal(), FULL, question=question, parameters=parameters).status == "pass"
    break_oracle("out", (0, 1, 5), 1.0)
    record = run(Ideal(), FULL, question=question, parameters=parameters)
    assert record.status == "oracle disagrees", record


def test_assert_attention_close_raises_if_the_oracles_disagree(break_oracle):
    inputs = draw_inputs(FULL)
    right = Ideal().run(inputs)
    assert assert_attention_close(right.out, right.lse, problem=inputs).status == "pass"
    break_oracle("out", (0, 1, 5), 1.0)
    with pytest.raises(OraclesDisagree, match=r"out\[0, 1, 5, .*nothing is said of what was given"):
        assert_attention_close(right.out, right.lse, problem=inputs)


def test_broken_second_oracle_is_no_verdict_on_a_wrong_kernel(monkeypatch):
    right = room.one_head

    def wrong(*arguments):
        head = right(*arguments)
        return replace(head, out=head.out + 1)

    monkeypatch.setattr(room, "one_head", wrong)
    assert run(off_in_one(), FULL).status == "oracle disagrees"


def tensors(problem):
    names = ["out"] if problem.operation == "softmax" else ["out", "lse"]
    names += ["dq", "dk", "dv"] if problem.backward else []
    names += ["dsink"] if problem.backward and problem.sink else []
    return names + (["dcaptured"] if problem.dcaptured else [])


@pytest.mark.parametrize(
    ("problem", "tensor"),
    [
        pytest.param(problem, tensor, id=f"{name}: {tensor}")
        for name, problem in PROBLEMS.items()
        for tensor in tensors(problem)
    ],
)
def test_wrong_kernel_fails_as_the_oracles_agree(problem, tensor):
    record = run(off_in_one(tensor), problem)
    assert record.status == "fail", record
    assert record.judgement.worst.tensor == tensor


def test_kernel_rounded_to_64ths_fails():
    def coarse(_, right):
        right.out.mul_(64).round_().div_(64)

    assert run(spoiled(coarse), FULL.replace(query=64)).status == "fail"


def test_second_oracle_is_not_computed_for_a_pass(monkeypatch):
    fail = lambda *_: pytest.fail("the oracles were compared for a pass")  # noqa: E731
    monkeypatch.setattr(room, "_disagreement", fail)
    for problem in (FULL, CAUSAL, BACKWARD):
        assert run(Ideal(), problem).status == "pass"


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_kernel_fails_if_the_second_oracle_runs_out_of_memory(monkeypatch, error):
    def full(*_):
        raise error

    monkeypatch.setattr(room, "one_head", full)
    assert run(off_in_one(), FULL).status == "fail"


def test_compared_rows_of_a_large_problem_include_the_failed_row():
    problem = Problem(batch=2, heads=2, query=5000, kv=600, head_dim=16)
    evidence = EvidenceBuilder(Case(problem=problem), "cpu")
    assert not samples_all_rows(problem, "cpu")
    place = Place(batch=1, head=1, query=4321, dim=3)
    first, *others = room._compared_rows(place, evidence)
    assert (list(first.heads), first.query.tolist()) == ([3], [4321])
    assert all(list(rows.heads) == [3] for rows in others)
    assert sum(len(rows.query) for rows in others) > 31


def test_oracles_agree_on_nan_and_infinity_from_the_inputs():
    problem = FULL.replace(mask=Spec.of("causal"))
    evidence = EvidenceBuilder(Case(problem=problem), "cpu")
    evidence.inputs.v[0, 0, 4] = math.nan
    evidence.inputs.v[0, 0, 6, 2] = math.inf
    record = run_case(
        off_in_one("lse"), evidence.case, device=evidence.device, evidence=evidence, brief=True
    )
    assert record.status == "fail", record
