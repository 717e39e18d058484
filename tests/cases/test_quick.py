"""The questions of ``attncheck check``: their cases, which faults each finds, and the page."""

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


def load_module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


PLANTED = load_module(Path(__file__).with_name("planted_kernels.py"))
BF16 = {question.name: question for question in check_cases("bf16")}
FP16 = {question.name: question for question in check_cases("fp16")}


def check(function, *names, questions=BF16):
    """The Report of a kernel on the questions ``names``."""
    subject = make_subject(function, "planted", "sdpa")
    cases = [(name, questions[name].case) for name in names]
    return verify(subject, cases, device="cpu", command="attncheck check planted")


# The questions.


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2"])
def test_questions_have_unique_names_their_dtype_and_a_summary(dtype):
    questions = check_cases(dtype)
    names = [question.name for question in questions]
    assert len(set(names)) == len(names)
    assert {question.case.problem.dtype for question in questions} == {dtype}
    assert all(question.summary for question in questions)


def test_cases_round_trip_through_json_and_are_small_enough_for_an_interpreter():
    for question in BF16.values():
        problem = question.case.problem
        assert Case.from_json(question.case.to_json()) == question.case
        assert problem.batch * problem.heads * problem.query * problem.kv <= 2**16


def test_questions_reach_the_sizes_and_probes_that_break_kernels():
    problems = [question.case.problem for question in BF16.values()]
    assert {problem.head_dim for problem in problems} == {64, 80, 96, 128}
    assert {problem.group for problem in problems} == {1, 3}
    rectangles = {problem.query - problem.kv > 0 for problem in problems if problem.mask != FULL}
    assert rectangles == {True, False}
    assert any(problem.kv % 16 for problem in problems)
    probes = {question.case.question for question in BF16.values()} - {"compare"}
    assert {"decode", "ones", "ramp", "negative", "positive", "two_level", "isolated"} <= probes


@pytest.mark.parametrize("dims", [(64,), (32, 256)])
def test_head_dims_can_be_chosen(dims):
    assert {q.case.problem.head_dim for q in check_cases("bf16", dims)} == set(dims)


@pytest.mark.parametrize(
    ("dtype", "dims", "error"), [("fp64", (), UnknownName), ("bf16", (257,), ProblemError)]
)
def test_unknown_dtype_or_head_dim_is_refused(dtype, dims, error):
    with pytest.raises(error):
        check_cases(dtype, dims)


def test_one_key_question_has_one_key_and_empty_rows_question_hides_a_key():
    assert BF16["one-key"].case.problem.kv == 1
    problem = BF16["empty-rows"].case.problem
    indices = (draw_inputs(problem).q.new_zeros(1).long(),) * 3
    assert not problem.mask_mod()(*indices, indices[0])


# Correct kernels.


def test_correct_kernel_passes_every_question_and_no_fault_would_be_missed():
    report = check(PLANTED.RIGHT["wrapped"], *BF16)
    assert {record.status for record in report.records} == {"pass"}
    assert check_outcome(report) == "pass"
    assert worst_record(report.records) is None
    assert missed_faults(report.records) == ()
    assert all(record.seconds is None for record in report.records)


SOME = ("decode-causal", "ramp-ragged", "causal-tall", "large")


@pytest.mark.parametrize("questions", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", PLANTED.RIGHT)
def test_correct_kernels_pass_the_questions_that_they_take(name, questions):
    report = check(PLANTED.RIGHT[name], *SOME, questions=questions)
    statuses = {record.status for record in report.records}
    assert statuses <= {"pass", "unsupported"}
    assert check_outcome(report) == "pass"


def test_rounding_weights_after_the_division_passes():
    report = check(PLANTED.RIGHT["unfused"], "two_level-ragged", questions=FP16)
    assert check_outcome(report) == "pass"


# Planted faults: a question that finds each, and the rule that it breaks.

FOUND = [
    ("causal without its diagonal", "decode-causal", "finite"),
    ("causal sees the next key", "decode-causal", "structure"),
    ("causal sees the next key", "causal-tall", "bound"),
    ("causal from the bottom right", "decode-causal-wide", "structure"),
    ("causal but for even lengths", "decode-causal-even", "structure"),
    ("causal but for even lengths", "causal-even", "bound"),
    ("causal but for one row", "causal-one-query", "bound"),
    ("a loop that ends with a whole tile", "causal-blocks", "bound"),
    ("a loop that ends at the other corner", "causal-tall", "bound"),
    ("0 kept for a maximum of nothing", "window-negative", "bound"),
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
    ("the first head's mask for all", "mask-by-head", "bound"),
    ("interleaved key heads", "decode-gqa", "structure"),
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


@pytest.mark.parametrize(("fault", "question", "rule"), FOUND)
def test_planted_fault_fails_its_question(fault, question, rule):
    report = check(PLANTED.WRONG[fault], question)
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
def test_invalid_output_or_mutated_input_breaks_a_rule_of_the_call(fault, rule, reason):
    report = check(PLANTED.WRONG[fault], "plain")
    (record,) = report.records
    judgement = record.judgement
    assert (record.status, judgement.rule, judgement.reason) == ("fail", rule, reason)
    assert check_outcome(report) == "fail"
    assert f"{rule}: {reason}".replace("_", "\\_") in page(report, "md")


def test_exception_of_a_kernel_is_an_error():
    report = check(PLANTED.WRONG["raises"], "plain")
    errors = [(r.status, without_place(r.reason)) for r in report.records]
    assert errors == [("error", "RuntimeError: planted")]
    assert check_outcome(report) == "fail"


def test_every_planted_fault_has_a_test_here():
    unjudged = {"raises", "the first head alone", "out in fp32", "writes to q"}
    assert {fault for fault, *_ in FOUND} | unjudged == set(PLANTED.WRONG)


def test_refusal_is_unsupported_and_not_a_failure():
    report = check(PLANTED.refuses, "plain", "scale", "one-key")
    assert [record.status for record in report.records] == ["pass", "unsupported", "unsupported"]
    assert report.records[2].reason == "ValueError: head_dim=80 must be 64"
    assert check_outcome(check(PLANTED.refuses_all, "plain")) == "untested"


# The page.


def page(report, fmt="table"):
    return render(report, fmt, check_document)


def test_failed_exact_probe_is_shown_first():
    report = check(PLANTED.WRONG["causal sees the next key"], "causal", "decode-causal")
    assert worst_record(report.records).variant == "decode-causal"
    text = page(report)
    assert "FAIL planted: 2 of 2 questions failed" in text
    assert "key 1 is too many" in text
    assert "\nReproduce: attncheck check planted --question decode-causal\n" in text


def test_worst_record_has_the_largest_error_over_its_bound():
    report = check(PLANTED.WRONG["zeros"], "plain", "one-hot")
    shares = {r.variant: r.judgement.out_over_bound for r in report.records}
    assert worst_record(report.records).variant == max(shares, key=shares.get)


def test_page_of_an_error_tells_how_to_refuse_a_problem():
    report = check(PLANTED.WRONG["raises"], "plain")
    assert "ValueError or NotImplementedError" in page(report)
    # Beside a wrong answer, which comes first, too; and once, however many questions raise.
    wrong = check(PLANTED.WRONG["zeros"], "plain").records
    raised = check(PLANTED.WRONG["raises"], "plain", "ragged").records
    several = msgspec.structs.replace(report, records=(*wrong, *raised))
    assert page(several).count("ValueError or NotImplementedError") == 1


@pytest.mark.parametrize("fmt", ["table", "md"])
def test_page_of_a_pass_lists_refusals_arithmetic_and_detectable_faults(fmt):
    text = page(check(PLANTED.RIGHT["bare"], "plain", "window", "causal"), fmt)
    assert "PASS planted: 1 question, 2 not supported" in text
    assert "takes no attn\\_mask" in text.replace("attn_mask", "attn\\_mask")
    assert "judged as bf16: products of bf16" in text
    assert "would have shown" in text


def test_insensitive_plan_fails():
    """A question with one key alone cannot notice a wrong scale or a lost key."""
    report = check(PLANTED.RIGHT["torch's"], "one-key")
    assert "a scale 1 % off" in missed_faults(report.records)
    assert check_outcome(report) == "fail"
    assert "insensitive: no question would have noticed" in page(report)
    assert "insensitive" in page(report, "md")


def test_insensitive_question_passes_when_asked_by_name():
    report = check(PLANTED.RIGHT["torch's"], "one-key")
    command = "attncheck check planted --question one-key"
    report = msgspec.structs.replace(report, command=command)
    assert check_outcome(report) == "pass"
    assert "insensitive" not in page(report)


def test_pass_in_another_dtype_than_bf16_names_the_dtype():
    report = check(PLANTED.RIGHT["torch's"], "one-key")
    case = json.loads(json.dumps(report.records[0].case).replace("bf16", "fp32"))
    records = (msgspec.structs.replace(report.records[0], case=case),)
    for typed, sentence in (("", "1 question in fp32"), (" --dtype fp32", "1 question")):
        command = f"attncheck check planted --question one-key{typed}"
        in_fp32 = msgspec.structs.replace(report, command=command, records=records)
        assert f"PASS planted: {sentence}" in page(in_fp32).splitlines()


def test_page_says_when_nothing_was_tested():
    text = page(check(PLANTED.refuses_all, "plain"))
    assert "NOTHING TESTED planted" in text
    assert "NotImplementedError: only on a GPU" in text


def test_page_suggests_other_head_dims_when_all_were_refused():
    report = check(PLANTED.refuses_all, "plain")
    head_dims = sorted({one.case["problem"]["head_dim"] for one in report.records})
    refused = f"head_dim {', '.join(map(str, head_dims))} in bf16"
    hint = f"The kernel refused {refused}: NotImplementedError: only on a GPU. If it takes others"
    assert hint in " ".join(page(report).split())
    # A question asked by name may be refused for its mask, where another head_dim is no help.
    by_name = msgspec.structs.replace(report, command="attncheck check planted --question plain")
    assert "refused head_dim" not in page(by_name)


def test_unknown_format_is_refused():
    with pytest.raises(UnknownName, match="choose from csv, html, json, md, table"):
        page(check(PLANTED.refuses_all, "plain"), "pdf")


@pytest.mark.parametrize("cases", [check_cases, call_cases])
def test_question_by_name_is_found_without_building_the_others(cases):
    for one in cases("bf16"):
        tried = set()
        named = cases("bf16", names=[one.name], takes=lambda p, t=tried: t.add(p) or True)
        assert [each for each in named if each.name == one.name] == [one]
        assert len(tried) < len(tagged(CHECK)) // 2
