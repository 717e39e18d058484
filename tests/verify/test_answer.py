"""``run_case``: one Record for every kind of question, and how a kernel's promises change it."""

import pytest
import torch
from tests.planted_kernels import kernel
from tests.planted_kernels.outputs_given import another_last_bit, in_turns, spoiled

from attncheck import probes
from attncheck.core.errors import UnknownName
from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.inputs.problem import Case, Problem
from attncheck.relations import RELATIONS
from attncheck.subjects.capabilities.subject import Refused
from attncheck.subjects.ideal import Ideal
from attncheck.verify import relation_runs
from attncheck.verify.accuracy import measure_accuracy
from attncheck.verify.executor import InProcess
from attncheck.verify.question_fit import question_named
from attncheck.verify.run_case import run_case

PROBLEM = Problem(heads=2, kv_heads=1, query=5, kv=6, head_dim=8, mask=Spec.of("causal"))


def alternating_last_bit(**promises):
    """A kernel whose LSE differs by its last bit in every second call: harmless rounding, but
    not repeatable."""

    def change(right, number):
        return Outputs(right.out, another_last_bit(right.lse) if number % 2 else right.lse)

    return spoiled(in_turns(change), **promises)


def status(subject, question, parameters=None):
    record = run_case(
        subject, Case(problem=PROBLEM, question=question, parameters=parameters or {}), device="cpu"
    )
    return record.status


def test_ideal_kernel_passes_repeat():
    assert status(Ideal(), "repeat") == "pass"


def test_ideal_kernel_passes_decode_probe():
    case = probes.cases("decode", PROBLEM)[0]
    assert run_case(Ideal(), case, device="cpu").status == "pass"


def test_last_bit_difference_fails_kernel_that_promises_equal_bits():
    record = run_case(
        alternating_last_bit(), Case(problem=PROBLEM, question="repeat"), device="cpu"
    )
    assert (record.status, record.judgement.rule) == ("fail", "relation")
    assert record.judgement.worst.tensor == "lse"
    assert record.judgement.worst.allowance == 0
    assert record.judgement.wrong == record.judgement.compared == 2 * 5
    assert record.judgement.worst.tile == "query tile 0, rows 0–4"


def test_last_bit_difference_passes_kernel_without_the_promise():
    assert status(alternating_last_bit(promises=frozenset({"hidden"})), "repeat") == "pass"


@pytest.mark.parametrize(("withdrawn", "expected"), [("batch", "fail"), ("group", "pass")])
def test_group_promise_is_separate_from_batch_promise(withdrawn, expected):
    """``gqa_repeat`` demands equal bits only where "group" is promised: a kernel may be
    independent of its batch and still pack the rows of a group into one tile."""
    grouped = alternating_last_bit(promises=Ideal.promises - {withdrawn})
    assert status(grouped, "gqa_repeat") == expected


def test_difference_beyond_rounding_fails_without_any_promise():
    twice = in_turns(lambda right, number: Outputs(right.out * (1 + number % 2)))
    doubled = spoiled(twice, promises=frozenset({"hidden"}))
    record = run_case(doubled, Case(problem=PROBLEM, question="repeat"), device="cpu")
    assert record.status == "fail"
    assert record.judgement.worst.allowance > 0
    assert "±" in record.judgement.reason


def test_nan_in_future_keys_is_unsupported_without_the_hidden_promise():
    class PromisesRepeatOnly(Ideal):
        promises = frozenset({"repeat"})

    assert status(PromisesRepeatOnly(), "future_keys_nan", {"row": 0}) == "unsupported"
    assert status(PromisesRepeatOnly(), "future_keys", {"row": 0}) == "pass"


@pytest.mark.parametrize("question", ["future_keys_nan", "hidden_keys_nan"])
def test_leaked_hidden_nan_fails_only_where_promised_otherwise_warns(question):
    case = Case(problem=PROBLEM, question=question, parameters={"row": 1})
    # A common flash kernel: a weight of 0 multiplies whatever the mask hides.
    leaking = kernel("HiddenTimesZero")
    leaking.promises = frozenset({"repeat", "hidden"})
    record = run_case(leaking, case, device="cpu")
    assert record.status == "warn"
    assert record.judgement.reason.startswith(
        "hidden keys must be finite: 0 · NaN reaches row 1; out[0, 0, 1, 0] = nan"
        if question == "hidden_keys_nan"
        else "hidden keys must be finite: 0 · NaN reaches row 0; out[0, 0, 0, 0] = nan"
    )
    leaking.promises = Ideal.promises
    record = run_case(leaking, case, device="cpu")
    assert (record.status, record.judgement.rule) == ("fail", "relation")
    assert record.judgement.reason.startswith("out[")


def test_leaked_large_hidden_numbers_fail():
    def leaking(inputs, right):
        return Outputs(right.out + inputs.v[:, :, -1:] * 2.0**-20, right.lse)

    promises = frozenset({"repeat", "hidden"})
    assert status(spoiled(leaking, promises=promises), "future_keys_huge", {"row": 0}) == "fail"


def test_refusal_during_the_call_is_unsupported():
    def refuse(*_):
        raise Refused("not today")

    record = run_case(spoiled(refuse), Case(problem=PROBLEM, question="repeat"), device="cpu")
    assert (record.status, record.reason) == ("unsupported", "not today")


@pytest.mark.parametrize(("answer", "status"), [(False, "pass"), (True, "unsupported")])
def test_unsupported_may_answer_without_a_reason(answer, status, monkeypatch):
    """It may be a user's method."""
    monkeypatch.setattr(Ideal, "unsupported", lambda *_: answer)
    for question in ("compare", "repeat"):
        case = Case(problem=PROBLEM, question=question)
        assert run_case(Ideal(), case, device="cpu").status == status


def test_compare_counts_wrong_elements():
    def half(_, right):
        right.out[:, 0] *= 0.5

    judgement = run_case(spoiled(half), Case(problem=PROBLEM), device="cpu").judgement
    assert judgement.worst.at.head == 0
    assert 0 < judgement.wrong <= 5 * 8 < judgement.compared == 2 * 5 * 8


class RecordsDevices(InProcess):
    """Accepts every device that it is asked about, and records it."""

    def __init__(self):
        super().__init__()
        self.devices = set()

    def refusal(self, subject, problem, device):
        self.devices.add(device)


@pytest.mark.parametrize("run", [run_case, measure_accuracy])
def test_gpu_kernel_can_be_judged_on_a_cpu(run):
    executor = RecordsDevices()
    case = Case(problem=Problem(query=8, backward=True))
    record = run(Ideal(), case, device="cuda", place="cpu", executor=executor)
    assert (record.status, executor.devices) == ("pass", {"cuda"})


def test_unknown_question_raises_unknown_name():
    with pytest.raises(UnknownName, match="question 'wrong' is not known"):
        run_case(Ideal(), Case(problem=PROBLEM, question="wrong"), device="cpu")


@pytest.mark.parametrize("question", ["compare", *RELATIONS, *probes.PROBES])
def test_every_question_has_a_one_line_summary(question):
    assert question_named(question).summary
    assert "\n" not in question_named(question).summary


def test_kernel_of_another_operation_is_unsupported():
    class Softmax(Ideal):
        def concerns(self, problem):
            return problem.operation == "softmax"

    for question in ("compare", "repeat", "decode"):
        case = probes.cases(question, PROBLEM)[0] if question == "decode" else None
        record = run_case(Softmax(), case or Case(problem=PROBLEM, question=question), device="cpu")
        assert (record.status, record.reason) == ("unsupported", "it does not compute attention")


def test_relation_without_finite_bounds_is_inconclusive(monkeypatch):
    def unbounded(run, *_):
        inf = torch.full(tuple(run.q.shape[:3]), torch.inf)
        return None, Outputs(inf[..., None].expand(*inf.shape, 8), inf)

    monkeypatch.setattr(relation_runs, "_truth_and_bounds", unbounded)
    record = run_case(
        Ideal(), Case(problem=PROBLEM, question="values_added", parameters={"run": 1}), device="cpu"
    )
    assert record.status == "inconclusive"
    assert "no element of out has a finite bound" in record.judgement.reason
