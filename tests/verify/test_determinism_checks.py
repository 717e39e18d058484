"""Same bits again, elsewhere, among others, launched otherwise: each check and its fault."""

import re
from pathlib import Path

import pytest
from tests.verify.asked_checks import RIGHT, SMALL, ask, ready
from tests.verify.planted_calls_of_bits import KERNELS

from attncheck.core.errors import ProblemError, UsageError
from attncheck.records.failure_causes import without_place
from attncheck.subjects.ideal import Ideal
from attncheck.verify.call_checks import CHECKS, check_named
from attncheck.verify.question_fit import (
    allowed_parameters,
    check_question,
    question_summary,
    unfit_reason,
)

pytestmark = pytest.mark.usefixtures("one_thread")

ON_A_CPU = ["repeats", "elsewhere", "neighbours", "schedules"]


@pytest.mark.parametrize("question", ON_A_CPU)
@pytest.mark.parametrize("kernel", RIGHT)
def test_a_right_kernel_passes(kernel, question):
    ready(kernel)
    problem = SMALL.replace(query=17, kv=20, head_dim=16, value_dim=16, dtype="fp16")
    record = ask(kernel, question, problem)
    assert record.status == "pass", (record.reason, record.judgement)
    assert "with 95 % confidence fewer than 3/" in record.judgement.reason


@pytest.mark.parametrize(
    ("fault", "question", "said"),
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
def test_a_planted_fault_is_found(fault, question, said):
    problem = SMALL.replace(backward="Gradients" in fault)
    record = ask(KERNELS[fault](), question, problem)
    assert (record.status, record.judgement.rule) == ("fail", "determinism"), record.reason
    assert record.judgement.reason.startswith("nondeterministic ")
    assert said in record.judgement.reason


@pytest.mark.parametrize("fault", ["ByAddress", "ByThreads"])
def test_what_only_moving_shows_is_not_seen_in_place(fault):
    assert ask(KERNELS[fault](), "repeats").status == "pass"


@pytest.mark.parametrize("question", ["repeats", "elsewhere"])
def test_bits_that_are_not_promised_are_compared_within_bounds(question):
    record = ask(KERNELS["AnyOrderUnpromised"](), question)
    assert record.status == "pass"
    assert record.judgement.reason.startswith("0/3 ")


def test_a_call_elsewhere_that_promises_no_bits_is_judged():
    record = ask(KERNELS["WrongElsewhereUnpromised"](), "elsewhere")
    assert (record.status, record.judgement.rule) == ("fail", "determinism")
    assert record.judgement.reason.startswith("nondeterministic 3/3 calls: lse[0, ")


def test_gradients_that_are_not_promised_are_said():
    record = ask(KERNELS["AnyGradientsUnpromised"](), "repeats", SMALL.replace(backward=True))
    assert record.status == "pass"
    assert record.judgement.warnings == (
        "does not promise the bits of gradients: out and LSE alone were compared",
    )


def test_more_calls_are_a_smaller_bound():
    assert "0/31 calls" in ask("ideal", "repeats", calls=32).judgement.reason


def test_a_cpu_has_no_streams():
    record = ask("ideal", "streams")
    assert (record.status, record.reason) == ("unsupported", "a CPU has no streams")


def test_a_kernel_that_raises_is_an_error():
    class Raising(Ideal):
        def prepare(self, inputs):
            raise ValueError("planted")

    for question in ("repeats", "neighbours"):
        record = ask(Raising(), question)
        assert (record.status, without_place(record.reason)) == ("error", "ValueError: planted")


def test_what_is_alone_has_no_neighbours():
    alone = SMALL.replace(batch=1)
    assert unfit_reason("neighbours", alone) == "its only sequence is alone; it has one sequence"
    with pytest.raises(ProblemError, match="its only sequence is alone"):
        ask("ideal", "neighbours", alone)


def test_the_page_names_every_check():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "checks.md").read_text(
        encoding="utf-8"
    )
    table = page.split("| check |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(CHECKS)


def test_checks_are_questions():
    for name, check in CHECKS.items():
        check_question(name)
        assert question_summary(name) == check.summary
        assert allowed_parameters(name, SMALL) == check.allowed(SMALL)
        assert "\n" not in check.summary
    assert check_named("guards") is CHECKS["guards"]
    with pytest.raises(UsageError, match="repeat"):
        check_named("repeets")
    with pytest.raises(ProblemError, match="calls"):
        ask("ideal", "repeats", calls=9)
