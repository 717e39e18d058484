"""Determinism checks (repeats, elsewhere, neighbours, schedules, streams) and planted faults."""

import re
from pathlib import Path

import pytest
from tests.verify.call_check_runs import CORRECT_KERNELS, SMALL, require_interpreter, run_check
from tests.verify.planted_nondeterminism import KERNELS

from attncheck.core.errors import ProblemError, UsageError
from attncheck.records.failure_causes import without_place
from attncheck.subjects.ideal import Ideal
from attncheck.verify.call_checks import CHECKS, check_named
from attncheck.verify.question_fit import question_named

pytestmark = pytest.mark.usefixtures("one_thread")

CPU_CHECKS = ["repeats", "elsewhere", "neighbours", "schedules"]


@pytest.mark.parametrize("question", CPU_CHECKS)
@pytest.mark.parametrize("kernel", CORRECT_KERNELS)
def test_correct_kernel_passes(kernel, question):
    require_interpreter(kernel)
    problem = SMALL.replace(query=17, kv=20, head_dim=16, value_dim=16, dtype="fp16")
    record = run_check(kernel, question, problem)
    assert record.status == "pass", (record.reason, record.judgement)
    assert "with 95 % confidence fewer than 3/" in record.judgement.reason


@pytest.mark.parametrize(
    ("fault", "question", "reason"),
    [
        ("AnyOrder", "repeats", "nondeterministic 5/7 calls: lse[0, 0, 0] is "),
        ("FirstCall", "repeats", "nondeterministic 7/7 calls"),
        ("ByAddress", "elsewhere", "nondeterministic 4/4 calls"),
        ("ByThreads", "elsewhere", "nondeterministic 2/4 calls"),
        ("ByPlace", "neighbours", "nondeterministic 2/3 pairs of calls"),
        ("ByNeighbours", "neighbours", "alone_in_batch(sequence=0)"),
        ("ReadsNeighbours", "neighbours", "alone_in_batch(sequence=0)"),
        ("WrongSplits", "schedules", "launches(launch=0)"),
        ("AnyGradients", "repeats", "calls: dq[0, 0, 1, 0] is "),
        ("WrongUnpromised", "repeats", "pairs of calls: repeat"),
    ],
)
def test_planted_nondeterminism_fails(fault, question, reason):
    problem = SMALL.replace(backward="Gradients" in fault)
    record = run_check(KERNELS[fault](), question, problem)
    assert (record.status, record.judgement.rule) == ("fail", "determinism"), record.reason
    assert record.judgement.reason.startswith("nondeterministic ")
    assert reason in record.judgement.reason


@pytest.mark.parametrize("fault", ["ByAddress", "ByThreads"])
def test_repeats_does_not_move_inputs_or_change_threads(fault):
    assert run_check(KERNELS[fault](), "repeats").status == "pass"


@pytest.mark.parametrize("question", ["repeats", "elsewhere"])
def test_rounding_differences_pass_without_a_promise_of_equal_bits(question):
    record = run_check(KERNELS["AnyOrderUnpromised"](), question)
    assert record.status == "pass"
    assert record.judgement.reason.startswith("0/3 ")


def test_elsewhere_fails_wrong_result_without_a_promise_of_equal_bits():
    record = run_check(KERNELS["WrongElsewhereUnpromised"](), "elsewhere")
    assert (record.status, record.judgement.rule) == ("fail", "determinism")
    assert record.judgement.reason.startswith("nondeterministic 3/3 calls: lse[0, ")


def test_repeats_warns_that_unpromised_gradients_were_not_compared():
    record = run_check(KERNELS["AnyGradientsUnpromised"](), "repeats", SMALL.replace(backward=True))
    assert record.status == "pass"
    assert record.judgement.warnings == (
        "does not promise the bits of gradients: out and LSE alone were compared",
    )


def test_repeats_makes_the_requested_number_of_calls():
    assert "0/31 calls" in run_check("ideal", "repeats", calls=32).judgement.reason


def test_streams_is_unsupported_on_a_cpu():
    record = run_check("ideal", "streams")
    assert (record.status, record.reason) == ("unsupported", "a CPU has no streams")


def test_exception_in_the_kernel_is_an_error():
    class Raising(Ideal):
        def prepare(self, inputs):
            raise ValueError("planted")

    for question in ("repeats", "neighbours"):
        record = run_check(Raising(), question)
        assert (record.status, without_place(record.reason)) == ("error", "ValueError: planted")


def test_neighbours_rejects_a_batch_of_one():
    alone = SMALL.replace(batch=1)
    assert (
        question_named("neighbours").unfit(alone)
        == "its only sequence is alone; it has one sequence"
    )
    with pytest.raises(ProblemError, match="its only sequence is alone"):
        run_check("ideal", "neighbours", alone)


def test_documentation_lists_every_check():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "checks.md").read_text(
        encoding="utf-8"
    )
    table = page.split("| check |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(CHECKS)


def test_checks_have_summary_and_parameters_and_reject_unknown_ones():
    for name, check in CHECKS.items():
        assert question_named(name).summary == check.summary
        assert question_named(name).allowed(SMALL) == check.allowed(SMALL)
        assert "\n" not in check.summary
    assert check_named("guards") is CHECKS["guards"]
    with pytest.raises(UsageError, match="repeat"):
        check_named("repeets")
    with pytest.raises(ProblemError, match="calls"):
        run_check("ideal", "repeats", calls=9)
