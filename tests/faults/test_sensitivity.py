"""The smallest detected fault size: searched with few questions, confirmed at both ends."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncheck.core.errors import UnknownName, UsageError
from attncheck.faults import continuous_faults, sensitivity
from attncheck.faults.continuous_faults import CONTINUOUS_FAULTS, continuous_fault_named
from attncheck.faults.sensitivity import measure_sensitivity, smallest_detected
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.records.fault_scores import (
    ATTNCHECK_RULE,
    FaultSensitivity,
    SensitivityReport,
    SmallestFault,
)
from attncheck.records.json_reports import load_report
from attncheck.reporting import number_text
from attncheck.reporting.exit_codes import exit_code
from attncheck.reporting.rendering import render
from attncheck.subjects.ideal import Ideal
from attncheck.verify.run_case import run_case

SIZES = tuple(2.0**-n for n in range(40))


def make_questions(thresholds):
    """Questions that detect the sizes up to a threshold's index (−1: none), and their call log."""
    calls = []

    def question(name, last):
        def detects(index):
            assert 0 <= index < len(SIZES)
            calls.append((name, index))
            return index <= last

        return str(name), detects

    return [question(name, last) for name, last in enumerate(thresholds)], calls


@given(st.lists(st.integers(-1, len(SIZES) - 1), max_size=8))
def test_smallest_detected_asks_every_question_about_the_next_smaller_size(thresholds):
    questions, calls = make_questions(thresholds)
    result = smallest_detected(questions, SIZES)
    best = max(thresholds, default=-1)
    assert result.size == (SIZES[best] if best >= 0 else None)
    assert result.below == (SIZES[best + 1] if best + 1 < len(SIZES) else None)
    assert result.asked == len(calls)
    if best >= 0:
        assert thresholds[int(result.question)] == best
        assert (int(result.question), best) in calls
    if result.below is not None:
        assert {(name, best + 1) for name in range(len(thresholds))} <= set(calls)


def test_smallest_detected_asks_less_sensitive_questions_once():
    questions, calls = make_questions([20, *itertools.repeat(3, 50)])
    assert smallest_detected(questions, SIZES).size == SIZES[20]
    of_first = [each for each in calls if each[0] == 0]
    assert len(calls) == 50 + len(of_first)
    # Doubling steps up to the threshold, then bisection: two logarithms.
    assert len(of_first) <= 2 * 5 + 2


def test_smallest_detected_accepts_detection_that_is_not_monotone():
    def detects(index):
        return index in {0, 1, 2, 3, 7, 8}

    result = smallest_detected([("odd", detects)], SIZES)
    assert detects(SIZES.index(result.size))
    assert not detects(SIZES.index(result.below))


@pytest.mark.parametrize("name", CONTINUOUS_FAULTS)
def test_largest_fault_size_fails_and_errs_more_than_the_smallest(name):
    fault = continuous_fault_named(name)
    problem = Problem(query=40, kv=200, head_dim=16, dtype="fp32", heads=2)
    inputs, sizes = draw_inputs(problem), fault.sizes("fp32")
    right, errors = Ideal().run(inputs).out, []
    for size in (sizes[0], sizes[-1]):
        kernel = fault.kernel(size)
        errors.append(float((kernel.run(inputs).out - right).abs().max()))
        if size == sizes[0]:
            assert run_case(kernel, Case(problem=problem), device="cpu").status == "fail"
    assert errors[0] > errors[1]


def test_fault_sizes_are_quarter_octaves_or_numbers_of_bits():
    scale = continuous_fault_named("scale-off").sizes("bf16")
    assert scale[:2] == (1.0, 2.0**-0.25)
    assert continuous_fault_named("weights-of-few-bits").sizes("bf16") == tuple(range(1, 8))
    assert continuous_fault_named("sums-of-few-bits").sizes("bf16") == tuple(range(1, 24))
    with pytest.raises(UnknownName, match="scale-off"):
        continuous_fault_named("scale")


def test_gate_detects_a_smaller_fault_than_allclose(monkeypatch):
    everything = sensitivity._gate_questions

    def one_question(*arguments):
        units = list(everything(*arguments))
        assert {unit.stage for unit in units} == set(sensitivity.STAGES)
        return [next(unit for unit in units if unit.stage == "bounds")]

    monkeypatch.setattr(sensitivity, "_gate_questions", one_question)
    monkeypatch.setattr(continuous_faults, "_STEPS_OF_OCTAVE", 1)
    result = measure_sensitivity("scale-off", "fp32", tier="smoke")
    assert (result.questions, result.unit) == (1, "ε")
    ours, theirs = result.rules[ATTNCHECK_RULE], result.rules["allclose(1e-2)"]
    assert ours.size is not None
    assert ours.below < ours.size
    assert theirs.size is None or theirs.size > ours.size
    with pytest.raises(UnknownName, match="bf16"):
        measure_sensitivity("scale-off", "half", tier="smoke")


def report(size=2.0**-9):
    rules = {
        ATTNCHECK_RULE: SmallestFault(
            size=size, below=2.0**-9.25, question="probes: ones", asked=12
        ),
        "2×": SmallestFault(size=None, below=1.0, asked=3),
    }
    sensitivity_of_one = FaultSensitivity(
        fault="scale-off",
        summary="the softmax scale is 1 + ε times its own",
        unit="ε",
        dtype="bf16",
        tier="smoke",
        device="cpu",
        questions=4,
        plain=3,
        rules=rules,
        seconds=9.0,
    )
    return SensitivityReport(command="attncheck faults --sensitivity", seen=(sensitivity_of_one,))


def test_report_page_shows_sizes_and_questions():
    page = render(report(), "md")
    assert number_text.scientific(2.0**-9) in page.replace("\\", "")
    assert "none" in page
    assert "probes: ones" in page
    assert load_report(render(report(), "json"), SensitivityReport) == report()
    with pytest.raises(UsageError, match="schema"):
        load_report("{}", SensitivityReport)


@pytest.mark.parametrize(("size", "code"), [(0.1, 0), (None, 1)])
def test_exit_code_is_1_for_a_fault_the_gate_detects_in_no_size(size, code):
    assert exit_code(report(size)) == code
