"""A broken oracle is no fault of a kernel's, and a right one excuses no kernel."""

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
from attncheck.verify.question_fit import allowed_parameters
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
    # what is broken: problem, tensor, where, by what
    "an element": (FULL, "out", (0, 1, 5, 3), 1.0),
    "by little more than a bound": (FULL, "out", (0, 1, 5, 3), 2.0**-9),
    "a row": (CAUSAL, "out", (0, 1, 5), 0.25),
    "LSE": (FULL, "lse", (0, 1, 5), 0.5),
    "a row said to be empty": (FULL, "lse", (0, 1, 5), -math.inf),
    "an empty row said to be none": (CAUSAL, "lse", (0, 1, 0), 1.0),
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
    """The ideal kernel, off by a little in one tensor."""

    def change(_, right):
        one = getattr(right, tensor)
        one[(-1,) * one.dim()] += 1

    return spoiled(change)


@pytest.fixture
def broken(monkeypatch):
    """Makes the truth wrong: a tensor, where, and what is added to it; what is −∞ becomes that."""

    right = oracles.truth

    def plant(tensor, index, error):
        def truth(inputs):
            given = right(inputs)
            spoiled = getattr(given, tensor).clone()
            spoiled[index] = error if spoiled[index].isneginf().any() else spoiled[index] + error
            return replace(given, **{tensor: spoiled})

        monkeypatch.setattr(oracles, "truth", truth)

    return plant


def answer(subject, problem):
    with torch.no_grad():
        return subject.prepare(draw_inputs(problem))()


def ask(subject, problem, *, brief=True, question="compare", parameters=None):
    case = Case(problem=problem, question=question, parameters=parameters or {})
    return run_case(subject, case, device="cpu", brief=brief)


@pytest.mark.parametrize(("problem", "tensor", "index", "error"), FAULTS.values(), ids=FAULTS)
def test_a_broken_oracle_says_nothing_of_a_right_kernel(broken, problem, tensor, index, error):
    broken(tensor, index, error)
    record = ask(Ideal(), problem)
    assert record.status == "oracle disagrees"
    assert record.judgement is None
    assert record.error_map is msgspec.UNSET
    assert "nothing is said of the kernel" in record.reason


def test_it_says_where_and_by_which_oracles(broken):
    broken("out", (0, 1, 5, 3), 1.0)
    record = ask(Ideal(), FULL, brief=False)
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
def test_a_probe_too(broken, question):
    parameters = {name: values[0] for name, values in allowed_parameters(question, FULL).items()}
    assert ask(Ideal(), FULL, question=question, parameters=parameters).status == "pass"
    broken("out", (0, 1, 5), 1.0)
    record = ask(Ideal(), FULL, question=question, parameters=parameters)
    assert record.status == "oracle disagrees", record


def test_given_tensors_too(broken):
    given = draw_inputs(FULL)
    right = answer(Ideal(), FULL)
    assert assert_attention_close(right.out, right.lse, problem=given).status == "pass"
    broken("out", (0, 1, 5), 1.0)
    with pytest.raises(OraclesDisagree, match=r"out\[0, 1, 5, .*nothing is said of what was given"):
        assert_attention_close(right.out, right.lse, problem=given)


def test_a_broken_second_opinion_is_no_verdict_either(monkeypatch):
    right = room.one_head

    def wrong(*given):
        found = right(*given)
        return replace(found, out=found.out + 1)

    monkeypatch.setattr(room, "one_head", wrong)
    assert ask(off_in_one(), FULL).status == "oracle disagrees"


def tensors(problem):
    found = ["out"] if problem.operation == "softmax" else ["out", "lse"]
    found += ["dq", "dk", "dv"] if problem.backward else []
    found += ["dsink"] if problem.backward and problem.sink else []
    return found + (["dcaptured"] if problem.dcaptured else [])


@pytest.mark.parametrize(
    ("problem", "tensor"),
    [
        pytest.param(problem, tensor, id=f"{name}: {tensor}")
        for name, problem in PROBLEMS.items()
        for tensor in tensors(problem)
    ],
)
def test_right_oracles_agree_and_a_wrong_kernel_fails(problem, tensor):
    record = ask(off_in_one(tensor), problem)
    assert record.status == "fail", record
    assert record.judgement.worst.tensor == tensor


def test_a_head_that_is_less_accurate_fails():
    def coarse(_, right):
        right.out.mul_(64).round_().div_(64)

    assert ask(spoiled(coarse), FULL.replace(query=64)).status == "fail"


def test_nobody_is_asked_about_a_pass(monkeypatch):
    monkeypatch.setattr(room, "_disagreement", lambda *_: pytest.fail("a pass was asked about"))
    for problem in (FULL, CAUSAL, BACKWARD):
        assert ask(Ideal(), problem).status == "pass"


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_one_that_does_not_fit_is_none(monkeypatch, error):
    def full(*_):
        raise error

    monkeypatch.setattr(room, "one_head", full)
    assert ask(off_in_one(), FULL).status == "fail"


def test_of_a_large_problem_the_row_itself_is_compared():
    problem = Problem(batch=2, heads=2, query=5000, kv=600, head_dim=16)
    evidence = EvidenceBuilder(Case(problem=problem), "cpu")
    assert not samples_all_rows(problem, "cpu")
    place = Place(batch=1, head=1, query=4321, dim=3)
    first, *others = room._compared_rows(place, evidence)
    assert (list(first.heads), first.query.tolist()) == ([3], [4321])
    assert all(list(rows.heads) == [3] for rows in others)
    assert sum(len(rows.query) for rows in others) > 31


def test_where_inputs_are_nan_oracles_are_so_alike():
    problem = FULL.replace(mask=Spec.of("causal"))
    evidence = EvidenceBuilder(Case(problem=problem), "cpu")
    evidence.inputs.v[0, 0, 4] = math.nan
    evidence.inputs.v[0, 0, 6, 2] = math.inf
    record = run_case(
        off_in_one("lse"), evidence.case, device=evidence.device, evidence=evidence, brief=True
    )
    assert record.status == "fail", record
