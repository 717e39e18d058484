"""The quick plan: what it asks, that right kernels pass, and which question shows which fault."""

import importlib.util
import json
import sys
from pathlib import Path

import msgspec
import pytest

from attncheck.cases.check_cases import call_cases, check_cases
from attncheck.cases.named_problems import CHECK, tagged
from attncheck.core.errors import ProblemError, UnknownName
from attncheck.core.mod_spec import FULL
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case
from attncheck.records.failure_causes import without_place
from attncheck.reporting.check_document import check_document, check_outcome, worst_record
from attncheck.reporting.record_text import missed_faults
from attncheck.reporting.rendering import render
from attncheck.subjects.conventions.declarations import make_subject
from attncheck.verify.verify import verify

pytestmark = pytest.mark.usefixtures("shared_evidence")


def module_of(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


PLANTED = module_of(Path(__file__).with_name("planted_kernels.py"))
NAMED = {question.name: question for question in check_cases("bf16")}
FP16 = {question.name: question for question in check_cases("fp16")}


def answered(function, *names, known=NAMED):
    """The Report of a kernel asked ``names``."""
    subject = make_subject(function, "planted", "sdpa")
    cases = [(name, known[name].case) for name in names]
    return verify(subject, cases, device="cpu", command="attncheck check planted")


# What is asked.


def test_every_dtype_has_its_questions():
    for dtype in ("fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2"):
        asked = check_cases(dtype)
        names = [question.name for question in asked]
        assert len(set(names)) == len(names)
        assert {question.case.problem.dtype for question in asked} == {dtype}
        assert all(question.summary for question in asked)


def test_cases_are_data_and_small_enough_for_an_interpreter():
    for question in NAMED.values():
        problem = question.case.problem
        assert Case.from_json(question.case.to_json()) == question.case
        assert problem.batch * problem.heads * problem.query * problem.kv <= 2**16


def test_what_bites_is_there():
    problems = [question.case.problem for question in NAMED.values()]
    assert {problem.head_dim for problem in problems} == {64, 80, 96, 128}
    assert {problem.group for problem in problems} == {1, 3}
    rectangles = {problem.query - problem.kv > 0 for problem in problems if problem.mask != FULL}
    assert rectangles == {True, False}
    assert any(problem.kv % 16 for problem in problems)
    probes = {question.case.question for question in NAMED.values()} - {"compare"}
    assert {"decode", "ones", "ramp", "negative", "positive", "two_level", "isolated"} <= probes


@pytest.mark.parametrize("dims", [(64,), (32, 256)])
def test_head_dims_may_be_named(dims):
    assert {q.case.problem.head_dim for q in check_cases("bf16", dims)} == set(dims)


@pytest.mark.parametrize(
    ("dtype", "dims", "error"), [("fp64", (), UnknownName), ("bf16", (257,), ProblemError)]
)
def test_what_cannot_be_asked(dtype, dims, error):
    with pytest.raises(error):
        check_cases(dtype, dims)


def test_one_key_is_its_value_and_a_row_of_no_key_is_seen():
    """Two layouts are what their summaries say."""
    assert NAMED["one-key"].case.problem.kv == 1
    problem = NAMED["empty-rows"].case.problem
    indices = (draw_inputs(problem).q.new_zeros(1).long(),) * 3
    assert not problem.mask_mod()(*indices, indices[0])


# Right kernels.


def test_a_right_kernel_passes_all_of_it_and_nothing_is_out_of_sight():
    report = answered(PLANTED.RIGHT["wrapped"], *NAMED)
    assert {record.status for record in report.records} == {"pass"}
    assert check_outcome(report) == "pass"
    assert worst_record(report.records) is None
    assert missed_faults(report.records) == ()
    assert all(record.seconds is None for record in report.records)


SOME = ("decode-causal", "ramp-ragged", "causal-tall", "large")


@pytest.mark.parametrize("known", [NAMED, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["torch's", "wrapped", "unfused", "out alone", "bare"])
def test_other_right_kernels_pass_what_they_take(name, known):
    report = answered(PLANTED.RIGHT[name], *SOME, known=known)
    statuses = {record.status for record in report.records}
    assert statuses <= {"pass", "unsupported"}
    assert check_outcome(report) == "pass"


def test_weights_that_are_rounded_after_the_division_are_right_too():
    report = answered(PLANTED.RIGHT["unfused"], "two_level-ragged", known=FP16)
    assert check_outcome(report) == "pass"


# Wrong ones: the question that shows the fault, and the rule.

SHOWN = [
    ("causal without its diagonal", "decode-causal", "finite"),
    ("causal sees the next key", "decode-causal", "structure"),
    ("causal sees the next key", "causal-tall", "bound"),
    ("causal from the bottom right", "decode-causal-wide", "structure"),
    ("causal but for even lengths", "decode-causal-even", "structure"),
    ("causal but for even lengths", "causal-even", "bound"),
    ("the eighth head reads the seventh", "plain", "bound"),
    ("no scale", "two_level-ragged", "structure"),
    ("no scale", "plain", "bound"),
    ("scale is ignored", "scale", "bound"),
    ("1/D for 1/sqrt(D)", "ragged", "bound"),
    ("scale 1 % off", "ones-ragged", "structure"),
    ("scale 1 % off", "causal", "bound"),
    ("the last key of a ragged tile", "decode-ragged", "structure"),
    ("the last key of a ragged tile", "one-query", "bound"),
    ("a written-out mask is ignored", "decode-window", "structure"),
    ("a written-out mask is ignored", "empty-rows", "empty rows"),
    ("heads shared in turn", "decode-gqa", "structure"),
    ("S in bf16", "outliers", "bound"),
    ("P in e4m3", "uniform", "bound"),
    ("no maximum is subtracted", "large", "finite"),
    ("maximum from zero", "negative-ragged", "finite"),
    ("output x 0.99", "decode-ragged", "structure"),
    ("half the output", "sink", "bound"),
    ("zeros", "one-hot", "bound"),
    ("LSE in base 2", "decode-ragged", "structure"),
    ("LSE of the maximum alone", "gqa", "bound"),
    ("NaN", "plain", "finite"),
    ("one NaN", "one-key", "finite"),
]


@pytest.mark.parametrize(("fault", "question", "rule"), SHOWN)
def test_a_planted_fault_is_shown(fault, question, rule):
    report = answered(PLANTED.WRONG[fault], question)
    (record,) = report.records
    assert (record.status, record.judgement.rule) == ("fail", rule), record.judgement.reason
    assert check_outcome(report) == "fail"
    assert worst_record(report.records) == record


@pytest.mark.parametrize(
    ("fault", "rule", "reason"),
    [
        (
            "the first head alone",
            "contract",
            "out.shape=(1, 1, 64, 64), but should be (1, 8, 64, 64).",
        ),
        ("out in fp32", "contract", "out.dtype=torch.float32, but should be torch.bfloat16."),
        ("writes to q", "mutation", "wrote to its input q."),
    ],
)
def test_what_is_no_answer_breaks_a_rule_of_the_call(fault, rule, reason):
    report = answered(PLANTED.WRONG[fault], "plain")
    (record,) = report.records
    found = record.judgement
    assert (record.status, found.rule, found.reason) == ("fail", rule, reason)
    assert check_outcome(report) == "fail"
    page = render(report, "md", check_document)
    assert f"{rule}: {reason}".replace("_", "\\_") in page


def test_what_is_raised_is_an_error():
    report = answered(PLANTED.WRONG["raises"], "plain")
    said = [(r.status, without_place(r.reason)) for r in report.records]
    assert said == [("error", "RuntimeError: planted")]
    assert check_outcome(report) == "fail"


def test_every_planted_fault_is_shown_here():
    unjudged = {"raises", "the first head alone", "out in fp32", "writes to q"}
    assert {fault for fault, *_ in SHOWN} | unjudged == set(PLANTED.WRONG)


def test_a_refusal_is_no_fault():
    report = answered(PLANTED.refuses, "plain", "scale", "one-key")
    assert [record.status for record in report.records] == ["pass", "unsupported", "unsupported"]
    assert report.records[2].reason == "ValueError: head_dim=80 must be 64"
    nothing = answered(PLANTED.refuses_all, "plain")
    assert check_outcome(nothing) == "untested"


# The page.


def page(report, fmt="table"):
    return render(report, fmt, check_document)


def test_an_exact_probe_is_shown_before_everything_else():
    report = answered(PLANTED.WRONG["causal sees the next key"], "causal", "decode-causal")
    assert worst_record(report.records).variant == "decode-causal"
    text = page(report)
    assert "FAIL planted: 2 of 2 questions failed" in text
    assert "key 1 is too many" in text
    assert "\nReproduce: attncheck check planted --question decode-causal\n" in text


def test_the_larger_share_is_the_worse():
    report = answered(PLANTED.WRONG["zeros"], "plain", "one-hot")
    shares = {r.variant: r.judgement.out_over_bound for r in report.records}
    assert worst_record(report.records).variant == max(shares, key=shares.get)


def test_an_error_is_shown_where_nothing_else_is():
    both = answered(PLANTED.WRONG["raises"], "plain")
    assert "ValueError or NotImplementedError" in page(both)
    # Beside a wrong answer, which comes first, too; and once, however many questions raise.
    wrong = answered(PLANTED.WRONG["zeros"], "plain").records
    raised = answered(PLANTED.WRONG["raises"], "plain", "ragged").records
    every = msgspec.structs.replace(both, records=(*wrong, *raised))
    assert page(every).count("ValueError or NotImplementedError") == 1


@pytest.mark.parametrize("fmt", ["table", "md"])
def test_a_pass_says_what_it_rests_on(fmt):
    text = page(answered(PLANTED.RIGHT["bare"], "plain", "window", "causal"), fmt)
    assert "PASS planted: 1 question, 2 not supported" in text
    assert "takes no attn\\_mask" in text.replace("attn_mask", "attn\\_mask")
    assert "judged as bf16: products of bf16" in text
    assert "would have shown" in text


def test_a_plan_that_is_blind_is_no_pass():
    """Asked no more than whether one key gives its value: no scale, no key can be missed."""
    report = answered(PLANTED.RIGHT["torch's"], "one-key")
    assert "a scale 1 % off" in missed_faults(report.records)
    assert check_outcome(report) == "fail"
    assert "insensitive: no question would have noticed" in page(report)
    assert "insensitive" in page(report, "md")


def test_a_question_asked_by_name_need_not_see_everything():
    report = answered(PLANTED.RIGHT["torch's"], "one-key")
    command = "attncheck check planted --question one-key"
    report = msgspec.structs.replace(report, command=command)
    assert check_outcome(report) == "pass"
    assert "insensitive" not in page(report)


def test_a_question_that_passes_in_another_dtype_than_bf16_says_so():
    report = answered(PLANTED.RIGHT["torch's"], "one-key")
    case = json.loads(json.dumps(report.records[0].case).replace("bf16", "fp32"))
    records = (msgspec.structs.replace(report.records[0], case=case),)
    for typed, sentence in (("", "1 question in fp32"), (" --dtype fp32", "1 question")):
        command = f"attncheck check planted --question one-key{typed}"
        in_fp32 = msgspec.structs.replace(report, command=command, records=records)
        assert f"PASS planted: {sentence}" in page(in_fp32).splitlines()


def test_nothing_tested_says_so():
    text = page(answered(PLANTED.refuses_all, "plain"))
    assert "NOTHING TESTED planted" in text
    assert "NotImplementedError: only on a GPU" in text


def test_a_kernel_that_refuses_all_is_told_how_to_ask_for_others():
    report = answered(PLANTED.refuses_all, "plain")
    head_dims = sorted({one.case["problem"]["head_dim"] for one in report.records})
    asked = f"head_dim {', '.join(map(str, head_dims))} in bf16"
    hint = f"The kernel refused {asked}: NotImplementedError: only on a GPU. If it takes others"
    assert hint in " ".join(page(report).split())
    # A question that was asked by name may be refused for a mask: another head_dim is no help.
    by_name = msgspec.structs.replace(report, command="attncheck check planted --question plain")
    assert "refused head_dim" not in page(by_name)


def test_an_unknown_format():
    with pytest.raises(UnknownName, match="choose from csv, html, json, md, table"):
        page(answered(PLANTED.refuses_all, "plain"), "pdf")


@pytest.mark.parametrize("cases", [check_cases, call_cases])
def test_a_case_by_name_is_the_one_of_all_and_others_are_not_looked_for(cases):
    for one in cases("bf16"):
        tried = set()
        named = cases("bf16", names=[one.name], takes=lambda p, t=tried: t.add(p) or True)
        assert [each for each in named if each.name == one.name] == [one]
        assert len(tried) < len(tagged(CHECK)) // 2
