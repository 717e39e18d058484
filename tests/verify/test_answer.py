"""One Case, one Record, whatever is asked; and what a kernel's promises change."""

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
from attncheck.verify.question_fit import question_summary
from attncheck.verify.run_case import run_case

PROBLEM = Problem(heads=2, kv_heads=1, query=5, kv=6, head_dim=8, mask=Spec.of("causal"))


def moved(**promises):
    """Another last bit of LSE in every second call: harmless rounding, and not repeatable."""

    def change(right, number):
        return Outputs(right.out, another_last_bit(right.lse) if number % 2 else right.lse)

    return spoiled(in_turns(change), **promises)


class Unsure(Ideal):
    promises = frozenset({"repeat"})


def status(subject, question, parameters=None):
    record = run_case(
        subject, Case(problem=PROBLEM, question=question, parameters=parameters or {}), device="cpu"
    )
    return record.status


def test_the_ideal_kernel_repeats_itself():
    assert status(Ideal(), "repeat") == "pass"


def test_a_probe_is_answered():
    case = probes.cases("decode", PROBLEM)[0]
    assert run_case(Ideal(), case, device="cpu").status == "pass"


def test_a_last_bit_fails_who_promises_bits():
    record = run_case(moved(), Case(problem=PROBLEM, question="repeat"), device="cpu")
    assert (record.status, record.judgement.rule) == ("fail", "relation")
    assert record.judgement.worst.tensor == "lse"
    assert record.judgement.worst.allowance == 0
    assert record.judgement.wrong == record.judgement.compared == 2 * 5
    assert record.judgement.worst.tile == "query tile 0, rows 0–4"


def test_a_last_bit_is_within_the_bounds_of_who_does_not():
    assert status(moved(promises=frozenset({"hidden"})), "repeat") == "pass"


@pytest.mark.parametrize(("withdrawn", "expected"), [("batch", "fail"), ("group", "pass")])
def test_bits_of_a_group_are_a_promise_of_their_own(withdrawn, expected):
    """A kernel may be independent of its batch, and pack the rows of a group into one tile."""
    grouped = moved(promises=Ideal.promises - {withdrawn})
    assert status(grouped, "gqa_repeat") == expected


def test_more_than_rounding_is_not():
    twice = in_turns(lambda right, number: Outputs(right.out * (1 + number % 2)))
    doubled = spoiled(twice, promises=frozenset({"hidden"}))
    record = run_case(doubled, Case(problem=PROBLEM, question="repeat"), device="cpu")
    assert record.status == "fail"
    assert record.judgement.worst.allowance > 0
    assert "±" in record.judgement.reason


def test_what_is_not_promised_of_hidden_keys_is_not_asked():
    assert status(Unsure(), "future_keys_nan", {"row": 0}) == "unsupported"
    assert status(Unsure(), "future_keys", {"row": 0}) == "pass"


@pytest.mark.parametrize("question", ["future_keys_nan", "hidden_keys_nan"])
def test_hidden_nan_that_reaches_a_row_is_a_failure_only_where_promised(question):
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


def test_large_numbers_that_reach_a_row_are_a_failure():
    def leaking(inputs, right):
        return Outputs(right.out + inputs.v[:, :, -1:] * 2.0**-20, right.lse)

    promises = frozenset({"repeat", "hidden"})
    assert status(spoiled(leaking, promises=promises), "future_keys_huge", {"row": 0}) == "fail"


def test_a_refusal_as_it_is_called_is_unsupported():
    def refuse(*_):
        raise Refused("not today")

    record = run_case(spoiled(refuse), Case(problem=PROBLEM, question="repeat"), device="cpu")
    assert (record.status, record.reason) == ("unsupported", "not today")


def test_wrong_elements_of_a_comparison_are_counted():
    def half(_, right):
        right.out[:, 0] *= 0.5

    judgement = run_case(spoiled(half), Case(problem=PROBLEM), device="cpu").judgement
    assert judgement.worst.at.head == 0
    assert 0 < judgement.wrong <= 5 * 8 < judgement.compared == 2 * 5 * 8


class ForAGpu(InProcess):
    """Calls a kernel on a CPU, whatever device it is asked for."""

    def __init__(self):
        super().__init__()
        self.devices = set()

    def refusal(self, subject, problem, device):
        self.devices.add(device)


@pytest.mark.parametrize("ask", [run_case, measure_accuracy])
def test_a_kernel_of_a_gpu_is_judged_on_a_cpu_where_that_is_wanted(ask):
    executor = ForAGpu()
    case = Case(problem=Problem(query=8, backward=True))
    record = ask(Ideal(), case, device="cuda", place="cpu", executor=executor)
    assert (record.status, executor.devices) == ("pass", {"cuda"})


def test_an_unknown_question_is_a_usage_error():
    with pytest.raises(UnknownName, match="question 'wrong' is not known"):
        run_case(Ideal(), Case(problem=PROBLEM, question="wrong"), device="cpu")


@pytest.mark.parametrize("question", ["compare", *RELATIONS, *probes.PROBES])
def test_every_question_has_a_summary_of_one_line(question):
    assert question_summary(question)
    assert "\n" not in question_summary(question)


def test_a_kernel_of_another_operation_is_not_asked():
    class Softmax(Ideal):
        def concerns(self, problem):
            return problem.operation == "softmax"

    for question in ("compare", "repeat", "decode"):
        case = probes.cases(question, PROBLEM)[0] if question == "decode" else None
        record = run_case(Softmax(), case or Case(problem=PROBLEM, question=question), device="cpu")
        assert (record.status, record.reason) == ("unsupported", "it does not compute attention")


def test_where_nothing_is_bounded_nothing_passes(monkeypatch):
    def unbounded(run, *_):
        inf = torch.full(tuple(run.q.shape[:3]), torch.inf)
        return None, Outputs(inf[..., None].expand(*inf.shape, 8), inf)

    monkeypatch.setattr(relation_runs, "_truth_and_bounds", unbounded)
    record = run_case(
        Ideal(), Case(problem=PROBLEM, question="values_added", parameters={"run": 1}), device="cpu"
    )
    assert record.status == "inconclusive"
    assert "no element of out has a finite bound" in record.judgement.reason
