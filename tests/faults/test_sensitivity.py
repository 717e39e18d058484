"""The smallest fault that is seen: found by asking few, confirmed at both ends."""

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


def seeing(thresholds):
    """Questions that see the fault of a number up to their own; −1 sees none."""
    asked = []

    def question(name, last):
        def sees(number):
            assert 0 <= number < len(SIZES)
            asked.append((name, number))
            return number <= last

        return str(name), sees

    return [question(name, last) for name, last in enumerate(thresholds)], asked


@given(st.lists(st.integers(-1, len(SIZES) - 1), max_size=8))
def test_the_smallest_is_found_and_every_question_is_asked_about_the_next(thresholds):
    questions, asked = seeing(thresholds)
    found = smallest_detected(questions, SIZES)
    best = max(thresholds, default=-1)
    assert found.size == (SIZES[best] if best >= 0 else None)
    assert found.below == (SIZES[best + 1] if best + 1 < len(SIZES) else None)
    assert found.asked == len(asked)
    if best >= 0:
        assert thresholds[int(found.question)] == best
        assert (int(found.question), best) in asked
    if found.below is not None:
        assert {(name, best + 1) for name in range(len(thresholds))} <= set(asked)


def test_where_the_best_is_first_others_are_asked_once():
    questions, asked = seeing([20, *itertools.repeat(3, 50)])
    assert smallest_detected(questions, SIZES).size == SIZES[20]
    # Up to the best one twice as far each time, then by halves: two logarithms.
    assert len(asked) == 50 + len([each for each in asked if each[0] == 0])
    assert len([each for each in asked if each[0] == 0]) <= 2 * 5 + 2


def test_seeing_need_not_be_monotone():
    def sees(number):
        return number in {0, 1, 2, 3, 7, 8}

    found = smallest_detected([("odd", sees)], SIZES)
    assert sees(SIZES.index(found.size))
    assert not sees(SIZES.index(found.below))


@pytest.mark.parametrize("name", CONTINUOUS_FAULTS)
def test_the_largest_size_is_a_fault_and_the_smallest_is_less(name):
    fault = continuous_fault_named(name)
    problem = Problem(query=40, kv=200, head_dim=16, dtype="fp32", heads=2)
    inputs, sizes = draw_inputs(problem), fault.sizes("fp32")
    right, off = Ideal().run(inputs).out, []
    for size in (sizes[0], sizes[-1]):
        kernel = fault.kernel(size)
        off.append(float((kernel.run(inputs).out - right).abs().max()))
        if size == sizes[0]:
            assert run_case(kernel, Case(problem=problem), device="cpu").status == "fail"
    assert off[0] > off[1]


def test_sizes_are_quarters_of_octaves_or_bits_that_are_too_few():
    scale = continuous_fault_named("scale-off").sizes("bf16")
    assert scale[:2] == (1.0, 2.0**-0.25)
    assert continuous_fault_named("weights-of-few-bits").sizes("bf16") == tuple(range(1, 8))
    assert continuous_fault_named("sums-of-few-bits").sizes("bf16") == tuple(range(1, 24))
    with pytest.raises(UnknownName, match="scale-off"):
        continuous_fault_named("scale")


def test_rules_and_the_gate_on_a_few_questions(monkeypatch):
    everything = sensitivity._gate_questions

    def few(*asked):
        units = list(everything(*asked))
        assert {unit.stage for unit in units} == set(sensitivity.STAGES)
        return [next(unit for unit in units if unit.stage == "bounds")]

    monkeypatch.setattr(sensitivity, "_gate_questions", few)
    monkeypatch.setattr(continuous_faults, "_STEPS_OF_OCTAVE", 1)
    found = measure_sensitivity("scale-off", "fp32", tier="smoke")
    assert (found.questions, found.unit) == (1, "ε")
    ours, theirs = found.rules[ATTNCHECK_RULE], found.rules["allclose(1e-2)"]
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
    seen = FaultSensitivity(
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
    return SensitivityReport(command="attncheck faults --sensitivity", seen=(seen,))


def test_the_page_says_what_each_sees():
    page = render(report(), "md")
    assert number_text.scientific(2.0**-9) in page.replace("\\", "")
    assert "none" in page
    assert "probes: ones" in page
    assert load_report(render(report(), "json"), SensitivityReport) == report()
    with pytest.raises(UsageError, match="schema"):
        load_report("{}", SensitivityReport)


@pytest.mark.parametrize(("size", "code"), [(0.1, 0), (None, 1)])
def test_a_fault_that_the_gate_sees_in_no_size_fails(size, code):
    assert exit_code(report(size)) == code
