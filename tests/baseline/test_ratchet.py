"""Comparison of a run with a baseline: losses of accuracy are reported, chance is not."""

import itertools
import math
import random
from collections import Counter
from functools import cache
from typing import Any

import pytest
from msgspec.structs import replace
from tests.baseline.planted_losses import (
    ENVIRONMENT,
    ENVIRONMENTS,
    baseline_answer,
    make_evidence,
    measure,
    run_lossy,
)

from attncheck.core.mod_spec import Spec
from attncheck.records.baseline_comparison import (
    FALSE_ALARM,
    ErrorPair,
    compare_answers,
    compare_runs,
    log_probability,
    mean_ratio,
    tiling_growth,
)
from attncheck.records.baseline_entries import (
    Baseline,
    baseline_entries,
    make_baseline,
)
from attncheck.records.record import Accuracy, Record
from attncheck.records.run_reports import Answer, Change
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal
from attncheck.verify.evidence_builder import EvidenceBuilder

TILINGS = (
    Tiling(block_query=128, block_kv=64),
    Tiling(block_query=64, block_kv=64, reverse=True),
    Tiling(block_query=32, block_kv=32),
    Tiling(block_query=128, block_kv=512),
    Tiling(block_query=64, block_kv=48),
)
SIZES: tuple[dict[str, Any], ...] = (
    {"query": 128, "kv": 128, "head_dim": 64, "mask": Spec("causal")},
    {"query": 37, "kv": 200, "head_dim": 80},
    {"query": 1, "kv": 256, "head_dim": 64},
    {"query": 96, "kv": 96, "head_dim": 32, "mask": Spec.of("sliding_window", window=20)},
)


@cache
def make_cases(dtype: str, distribution: str = "normal") -> tuple[EvidenceBuilder, ...]:
    return tuple(make_evidence(dtype=dtype, distribution=distribution, **sizes) for sizes in SIZES)


@cache
def run(dtype: str, **loss: Any) -> tuple[Answer, ...]:
    return tuple(measure(case, run_lossy(case.inputs, **loss)) for case in make_cases(dtype))


def count_standings(changes: tuple[Change, ...]) -> Counter[str]:
    return Counter(change.standing for change in changes)


@pytest.mark.parametrize(
    ("dtype", "distribution"),
    [
        ("fp32", "normal"),
        ("fp32", "uniform"),
        ("bf16", "normal"),
        ("bf16", "large_logits"),
        ("fp16", "outliers"),
        ("e4m3", "normal"),
        ("e4m3", "ones_v"),
        ("bf16", "negative_logits"),
    ],
)
def test_change_of_tiling_is_never_worse(dtype, distribution):
    cases = make_cases(dtype, distribution)
    sides = [
        [measure(case, Ideal(tiling).run(case.inputs)) for case in cases] for tiling in TILINGS
    ]
    counts: Counter[str] = Counter()
    for before, after in itertools.permutations(sides, 2):
        counts += count_standings(compare_answers(before, after, ENVIRONMENTS))
    assert counts.total() == 20 * len(SIZES)
    assert set(counts) <= {"identical", "within rounding"}, counts


@pytest.mark.parametrize(
    ("dtype", "before", "loss"),
    [
        pytest.param("bf16", {"weights": False}, {}, id="P rounded to bf16 in place of fp32"),
        pytest.param("fp16", {"weights": False}, {}, id="P rounded to fp16 in place of fp32"),
        pytest.param("bf16", {}, {"rounds_twice": True}, id="out rounded once more in bf16"),
        pytest.param("fp16", {}, {"rounds_twice": True}, id="out rounded once more in fp16"),
        pytest.param("bf16", {}, {"accumulator": 8}, id="bf16 accumulator"),
        pytest.param("fp16", {}, {"accumulator": 11}, id="fp16 accumulator"),
        pytest.param("fp32", {}, {"accumulator": 20}, id="accumulator of 20 bits"),
        pytest.param("fp32", {}, {"products": 11}, id="tf32 in place of fp32"),
    ],
)
def test_loss_of_precision_is_worse_and_its_repair_better(dtype, before, loss):
    right, wrong = run(dtype, **before), run(dtype, **loss)
    changes = compare_answers(right, wrong, ENVIRONMENTS)
    assert count_standings(changes)["worse"] >= 2, changes  # few or short rows may not show it
    assert changes[0].standing == "worse"
    assert "out's error" in changes[0].reason
    assert "what it was" in changes[0].reason
    assert changes[0].before is not None
    assert changes[0].after is not None
    assert changes[0].after > changes[0].before
    assert count_standings(compare_answers(wrong, right, ENVIRONMENTS))["better"] >= 2


def test_the_same_bits_are_identical():
    changes = compare_answers(run("bf16"), run("bf16"), ENVIRONMENTS)
    assert count_standings(changes) == {"identical": len(SIZES)}
    assert {change.reason for change in changes} == {"the same bits"}


def _record(**changes: Any) -> Record:
    return replace(run("bf16")[0].record, **changes)


def _accuracy(relative: float, freedom: float = 1000.0, ensemble: float = 1.0) -> dict[str, Any]:
    one = Accuracy(rmse=relative, relative=relative, freedom=freedom, ensemble=(ensemble,) * 5)
    return {"out": one}


def _change(before: Record, after: Record) -> Change:
    (change,) = compare_answers([baseline_answer(before)], [baseline_answer(after)], ENVIRONMENTS)
    return change


@pytest.mark.parametrize(
    ("before", "after", "standing"),
    [
        ("pass", "warn", "worse"),
        ("pass", "unsupported", "worse"),
        ("pass", "fail", "worse"),
        ("warn", "crash", "worse"),
        ("unsupported", "pass", "better"),
        ("timeout", "pass", "better"),
        ("unsupported", "unsupported", "identical"),
    ],
)
def test_status_decides_before_accuracy(before, after, standing):
    accuracy = {"pass": _accuracy(1.0), "warn": _accuracy(1.0)}
    sides = [
        _record(status=status, digest=f"{i}" * 32, accuracy=accuracy.get(status, {}))
        for i, status in enumerate((before, after))
    ]
    change = _change(*sides)
    assert change.standing == standing
    assert before in change.reason


def test_worse_status_with_the_same_bits_blames_the_judge():
    change = _change(_record(), _record(status="warn"))
    assert change.standing == "worse"
    assert "the same bits: the judge is another" in change.reason


def test_lost_exactness_is_worse_unless_ideal_kernels_err_too():
    exact, off = _accuracy(0.0, 0.0, 0.0), _accuracy(1e-9, 100.0, 0.0)
    change = _change(_record(accuracy=exact, digest="0" * 32), _record(accuracy=off))
    assert change.standing == "worse"
    assert "out was exact" in change.reason
    # Ideal kernels are not exact here either: the exact result was luck.
    off = _accuracy(1.0, 100.0, 1.0)
    change = _change(_record(accuracy=exact, digest="0" * 32), _record(accuracy=off))
    assert change.standing == "within rounding"


def test_missing_output_is_worse():
    both = _record().accuracy
    assert isinstance(both, dict)
    change = _change(
        _record(digest="0" * 32), _record(accuracy={k: v for k, v in both.items() if k != "lse"})
    )
    assert change.standing == "worse"
    assert "gives no lse" in change.reason


def test_growth_is_worse_only_with_enough_degrees_of_freedom():
    def grow(freedom: float) -> Change:
        return _change(
            _record(accuracy=_accuracy(1.0, freedom), digest="0" * 32),
            _record(accuracy=_accuracy(1.5, freedom)),
        )

    assert grow(8.0).standing == "within rounding"
    assert grow(1000.0).standing == "worse"


def test_loss_too_small_for_one_case_is_found_in_forty_cases_pooled():
    def side(relative: float) -> list[Answer]:
        records = (
            _record(case_id=f"case{i}", accuracy=_accuracy(relative, 60.0)) for i in range(40)
        )
        digit = "1" if relative > 1 else "0"
        return [baseline_answer(replace(record, digest=digit * 32)) for record in records]

    pooled = compare_answers(side(1.0), side(1.3), ENVIRONMENTS)
    assert count_standings(pooled) == {"worse": 40}
    assert "in 40 bf16 cases together is 1.3 × what it was" in pooled[0].reason
    single = compare_answers(side(1.0)[:1], side(1.3)[:1], ENVIRONMENTS)
    assert count_standings(single) == {"within rounding": 1}
    assert count_standings(compare_answers(side(1.3), side(1.0), ENVIRONMENTS)) == {"better": 40}


def test_case_that_is_worse_by_itself_does_not_count_in_the_pool():
    def side(*relative: float) -> list[Answer]:
        records = (
            _record(case_id=f"case{i}", accuracy=_accuracy(one), digest=f"{one:032.6f}")
            for i, one in enumerate(relative)
        )
        return [baseline_answer(record) for record in records]

    changes = compare_answers(side(1.0, 1.0, 1.0), side(3.0, 1.01, 1.01), ENVIRONMENTS)
    assert count_standings(changes) == {"worse": 1, "within rounding": 2}


def test_structured_inputs_are_not_pooled():
    def side(relative: float) -> list[Answer]:
        record = _record(accuracy=_accuracy(relative, 60.0), digest=f"{int(relative > 1)}" * 32)
        problem = {**record.case["problem"], "distribution": "zero_q"}
        case = {**record.case, "problem": problem}
        return [baseline_answer(replace(record, case=case, case_id=f"case{i}")) for i in range(40)]

    assert count_standings(compare_answers(side(1.0), side(1.3), ENVIRONMENTS)) == {
        "within rounding": 40
    }


def _baseline(answers: tuple[Answer, ...], **environment: str) -> Baseline:
    where = replace(ENVIRONMENT, **environment)
    entries = baseline_entries((one.record for one in answers), {"here": where})
    return make_baseline(entries, {where.id: where}, "0.1.0")


def test_other_versions_are_reported_and_do_not_excuse_a_loss():
    baseline = _baseline(run("fp32"), torch="2.10.0")
    changes = compare_runs(baseline, run("fp32", products=11), ENVIRONMENTS)
    assert changes[0].standing == "worse"
    assert "out's error" in changes[0].reason
    assert "measured with other versions: torch 2.10.0 → 2.11.0" in changes[0].reason
    same = compare_runs(baseline, run("fp32"), ENVIRONMENTS)
    assert count_standings(same) == {"identical": len(SIZES)}
    assert "torch 2.10.0 → 2.11.0" in same[0].reason


def test_cases_on_another_architecture_are_new():
    baseline = _baseline(run("bf16"), capability="9.0")
    changes = compare_runs(baseline, run("bf16"), ENVIRONMENTS)
    assert count_standings(changes) == {"new": len(SIZES)}  # and no entry of the GPU is gone


def test_absent_case_is_gone_only_in_a_complete_run():
    baseline = _baseline(run("bf16"))
    changes = compare_runs(baseline, run("bf16")[1:], ENVIRONMENTS)
    assert count_standings(changes) == {"identical": len(SIZES) - 1, "gone": 1}
    part = compare_runs(baseline, run("bf16")[1:], ENVIRONMENTS, complete=False)
    assert count_standings(part) == {"identical": len(SIZES) - 1}


def test_case_of_a_dtype_that_was_not_chosen_is_not_gone():
    baseline = _baseline((*run("bf16"), *run("fp32")))
    changes = compare_runs(baseline, run("bf16")[1:], ENVIRONMENTS, dtypes=("bf16",))
    assert count_standings(changes) == {
        "identical": len(SIZES) - 1,
        "gone": 1,
        "not asked": len(SIZES),
    }
    only_others = compare_runs(_baseline(run("fp32")), run("bf16"), ENVIRONMENTS, dtypes=("bf16",))
    assert count_standings(only_others) == {"worse": len(SIZES), "new": len(SIZES)}


def test_run_without_any_case_of_the_baseline_is_worse():
    baseline = _baseline(run("bf16")[:1])
    changes = compare_runs(baseline, run("bf16")[1:], ENVIRONMENTS)
    assert count_standings(changes) == {"worse": 1, "new": len(SIZES) - 1}
    assert "nothing was asked" in changes[0].reason


def test_only_plain_measurements_are_compared():
    """Properties, shrunk cases, oracle disagreements and probes are ignored."""
    first = run("bf16")[0]
    baseline = _baseline(run("bf16")[:1])
    others = (
        replace(first, stage="properties"),
        replace(first, smallest_of="another"),
        baseline_answer(_record(status="oracle disagrees")),
        baseline_answer(
            _record(accuracy=_accuracy(9.0), case={**first.record.case, "question": "decode"})
        ),
    )
    assert count_standings(compare_runs(baseline, [first, *others], ENVIRONMENTS)) == {
        "identical": 1
    }
    assert compare_runs(baseline, others, ENVIRONMENTS) == ()


def test_worst_of_two_answers_to_one_case_counts():
    first = run("bf16")[0]
    crashed = baseline_answer(_record(status="crash", accuracy={}, digest=""))
    for order in ((first, crashed), (crashed, first)):
        (change,) = compare_runs(_baseline((first,)), order, ENVIRONMENTS)
        assert change.standing == "worse"
        assert "crash now" in change.reason


def _pair(before: float, after: float, freedom: float, *ensemble: float) -> ErrorPair:
    return ErrorPair(
        before=before,
        after=after,
        freedom_before=freedom,
        freedom_after=freedom,
        ensemble=ensemble,
    )


def test_log_probability_bounds_simulated_false_alarms():
    """The F distribution has few degrees of freedom here, where errors are the likeliest."""
    random.seed(5)

    def chi(freedom: int) -> float:
        return math.sqrt(sum(random.gauss(0, 1) ** 2 for _ in range(freedom)) / freedom)

    sizes = [(4, 3), (12, 1)]
    for freedom, several in sizes:
        logs = [
            log_probability([_pair(chi(freedom), chi(freedom), freedom) for _ in range(several)])
            for _ in range(3000)
        ]
        for level in (0.3, 0.1, 0.02):
            assert sum(one < math.log(level) for one in logs) <= level * len(logs)
        assert min(logs) < math.log(0.1)  # the bound is not vacuous


def test_tiling_growth_is_the_squared_span_of_the_ensemble():
    assert tiling_growth([_pair(1, 1, 10, 1.0, 1.2)]) == pytest.approx(1.44)
    # Two cases with opposite spans cancel: that is chance, not the tiling.
    assert tiling_growth([_pair(1, 1, 10, 1.0, 1.2), _pair(1, 1, 10, 1.2, 1.0)]) == pytest.approx(
        1.0
    )
    assert tiling_growth([_pair(1, 1, 10)]) == 1.0


def test_growth_is_improbable_only_beyond_the_span_of_the_ensemble():
    assert log_probability([_pair(1.0, 0.5, 100)]) == 0.0
    assert log_probability([_pair(1.0, 1.19, 1e6, 1.0, 1.1)]) == 0.0  # within another tiling's
    assert log_probability([_pair(1.0, 1.5, 1e6, 1.0, 1.1)]) < math.log(FALSE_ALARM)
    assert mean_ratio([_pair(1.0, 1.5, 100)]) == pytest.approx(1.5)
