"""Beside a baseline: chance is not called a loss, and a loss is not called chance."""

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
    answer,
    answered,
    evidence,
    ideal,
    lossy,
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
def cases(dtype: str, distribution: str = "normal") -> tuple[EvidenceBuilder, ...]:
    return tuple(evidence(dtype=dtype, distribution=distribution, **sizes) for sizes in SIZES)


@cache
def run(dtype: str, **how: Any) -> tuple[Answer, ...]:
    return tuple(answer(known, lossy(known.inputs, **how)) for known in cases(dtype))


def standings(found: tuple[Change, ...]) -> Counter[str]:
    return Counter(change.standing for change in found)


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
def test_another_tiling_is_never_worse(dtype, distribution):
    known = cases(dtype, distribution)
    sides = [[answer(one, ideal(one, tiling)) for one in known] for tiling in TILINGS]
    found: Counter[str] = Counter()
    for before, after in itertools.permutations(sides, 2):
        found += standings(compare_answers(before, after, ENVIRONMENTS))
    assert found.total() == 20 * len(SIZES)
    assert set(found) <= {"identical", "within rounding"}, found


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
def test_a_loss_is_worse_and_its_repair_better(dtype, before, loss):
    right, wrong = run(dtype, **before), run(dtype, **loss)
    found = compare_answers(right, wrong, ENVIRONMENTS)
    assert standings(found)["worse"] >= 2, found  # few rows, or short ones, may not tell
    assert found[0].standing == "worse"
    assert "out's error" in found[0].reason
    assert "what it was" in found[0].reason
    assert found[0].before is not None
    assert found[0].after is not None
    assert found[0].after > found[0].before
    assert standings(compare_answers(wrong, right, ENVIRONMENTS))["better"] >= 2


def test_the_same_bits_are_identical():
    found = compare_answers(run("bf16"), run("bf16"), ENVIRONMENTS)
    assert standings(found) == {"identical": len(SIZES)}
    assert {change.reason for change in found} == {"the same bits"}


def _record(**changes: Any) -> Record:
    return replace(run("bf16")[0].record, **changes)


def _accuracy(relative: float, freedom: float = 1000.0, ensemble: float = 1.0) -> dict[str, Any]:
    one = Accuracy(rmse=relative, relative=relative, freedom=freedom, ensemble=(ensemble,) * 5)
    return {"out": one}


def _change(before: Record, after: Record) -> Change:
    (found,) = compare_answers([answered(before)], [answered(after)], ENVIRONMENTS)
    return found


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
def test_what_the_judge_says_comes_first(before, after, standing):
    judged = {"pass": _accuracy(1.0), "warn": _accuracy(1.0)}
    sides = [
        _record(status=status, digest=f"{i}" * 32, accuracy=judged.get(status, {}))
        for i, status in enumerate((before, after))
    ]
    found = _change(*sides)
    assert found.standing == standing
    assert before in found.reason


def test_worse_in_kind_though_the_bits_are_the_same_says_so():
    found = _change(_record(), _record(status="warn"))
    assert found.standing == "worse"
    assert "the same bits: the judge is another" in found.reason


def test_an_exact_answer_that_is_exact_no_more():
    exact, off = _accuracy(0.0, 0.0, 0.0), _accuracy(1e-9, 100.0, 0.0)
    found = _change(_record(accuracy=exact, digest="0" * 32), _record(accuracy=off))
    assert found.standing == "worse"
    assert "out was exact" in found.reason
    # Where ideal kernels are not exact either, it had been luck.
    off = _accuracy(1.0, 100.0, 1.0)
    found = _change(_record(accuracy=exact, digest="0" * 32), _record(accuracy=off))
    assert found.standing == "within rounding"


def test_an_output_that_is_given_no_more_is_worse():
    both = _record().accuracy
    assert isinstance(both, dict)
    found = _change(
        _record(digest="0" * 32), _record(accuracy={k: v for k, v in both.items() if k != "lse"})
    )
    assert found.standing == "worse"
    assert "gives no lse" in found.reason


def test_few_errors_say_little_and_many_say_much():
    def step(freedom: float) -> Change:
        return _change(
            _record(accuracy=_accuracy(1.0, freedom), digest="0" * 32),
            _record(accuracy=_accuracy(1.5, freedom)),
        )

    assert step(8.0).standing == "within rounding"
    assert step(1000.0).standing == "worse"


def test_a_loss_that_no_case_shows_alone_shows_in_all_together():
    def side(relative: float) -> list[Answer]:
        records = (
            _record(case_id=f"case{i}", accuracy=_accuracy(relative, 60.0)) for i in range(40)
        )
        digit = "1" if relative > 1 else "0"
        return [answered(replace(record, digest=digit * 32)) for record in records]

    together = compare_answers(side(1.0), side(1.3), ENVIRONMENTS)
    assert standings(together) == {"worse": 40}
    assert "in 40 bf16 cases together is 1.3 × what it was" in together[0].reason
    alone = compare_answers(side(1.0)[:1], side(1.3)[:1], ENVIRONMENTS)
    assert standings(alone) == {"within rounding": 1}
    assert standings(compare_answers(side(1.3), side(1.0), ENVIRONMENTS)) == {"better": 40}


def test_a_case_that_is_worse_by_itself_accuses_no_other():
    def side(*relative: float) -> list[Answer]:
        records = (
            _record(case_id=f"case{i}", accuracy=_accuracy(one), digest=f"{one:032.6f}")
            for i, one in enumerate(relative)
        )
        return [answered(record) for record in records]

    found = compare_answers(side(1.0, 1.0, 1.0), side(3.0, 1.01, 1.01), ENVIRONMENTS)
    assert standings(found) == {"worse": 1, "within rounding": 2}


def test_structured_inputs_are_not_counted_together():
    def side(relative: float) -> list[Answer]:
        record = _record(accuracy=_accuracy(relative, 60.0), digest=f"{int(relative > 1)}" * 32)
        problem = {**record.case["problem"], "distribution": "zero_q"}
        case = {**record.case, "problem": problem}
        return [answered(replace(record, case=case, case_id=f"case{i}")) for i in range(40)]

    assert standings(compare_answers(side(1.0), side(1.3), ENVIRONMENTS)) == {"within rounding": 40}


def _baseline(answers: tuple[Answer, ...], **environment: str) -> Baseline:
    where = replace(ENVIRONMENT, **environment)
    kept = baseline_entries((one.record for one in answers), {"here": where})
    return make_baseline(kept, {where.id: where}, "0.1.0")


def test_other_versions_are_said_and_excuse_nothing():
    baseline = _baseline(run("fp32"), torch="2.10.0")
    found = compare_runs(baseline, run("fp32", products=11), ENVIRONMENTS)
    assert found[0].standing == "worse"
    assert "out's error" in found[0].reason
    assert "measured with other versions: torch 2.10.0 → 2.11.0" in found[0].reason
    same = compare_runs(baseline, run("fp32"), ENVIRONMENTS)
    assert standings(same) == {"identical": len(SIZES)}
    assert "torch 2.10.0 → 2.11.0" in same[0].reason


def test_another_architecture_is_new():
    baseline = _baseline(run("bf16"), capability="9.0")
    found = compare_runs(baseline, run("bf16"), ENVIRONMENTS)
    assert standings(found) == {"new": len(SIZES)}  # and nothing of the GPU's is gone


def test_what_is_not_asked_is_gone_only_where_all_was_asked():
    baseline = _baseline(run("bf16"))
    found = compare_runs(baseline, run("bf16")[1:], ENVIRONMENTS)
    assert standings(found) == {"identical": len(SIZES) - 1, "gone": 1}
    part = compare_runs(baseline, run("bf16")[1:], ENVIRONMENTS, complete=False)
    assert standings(part) == {"identical": len(SIZES) - 1}


def test_a_baseline_of_which_nothing_was_asked_fails():
    baseline = _baseline(run("bf16")[:1])
    found = compare_runs(baseline, run("bf16")[1:], ENVIRONMENTS)
    assert standings(found) == {"worse": 1, "new": len(SIZES) - 1}
    assert "nothing was asked" in found[0].reason


def test_only_measurements_count():
    first = run("bf16")[0]
    baseline = _baseline(run("bf16")[:1])
    others = (
        replace(first, stage="properties"),
        replace(first, smallest_of="another"),
        answered(_record(status="oracle disagrees")),
        answered(
            _record(accuracy=_accuracy(9.0), case={**first.record.case, "question": "decode"})
        ),
    )
    assert standings(compare_runs(baseline, [first, *others], ENVIRONMENTS)) == {"identical": 1}
    assert compare_runs(baseline, others, ENVIRONMENTS) == ()


def test_the_worse_of_two_answers_to_one_case_counts():
    first = run("bf16")[0]
    crashed = answered(_record(status="crash", accuracy={}, digest=""))
    for order in ((first, crashed), (crashed, first)):
        (found,) = compare_runs(_baseline((first,)), order, ENVIRONMENTS)
        assert found.standing == "worse"
        assert "crash now" in found.reason


def _pair(before: float, after: float, freedom: float, *ensemble: float) -> ErrorPair:
    return ErrorPair(
        before=before,
        after=after,
        freedom_before=freedom,
        freedom_after=freedom,
        ensemble=ensemble,
    )


def test_chance_is_a_bound_of_what_a_simulation_finds():
    """Of F with few degrees of freedom, where it would be easiest to be wrong."""
    random.seed(5)

    def chi(freedom: int) -> float:
        return math.sqrt(sum(random.gauss(0, 1) ** 2 for _ in range(freedom)) / freedom)

    sizes = [(4, 3), (12, 1)]
    for freedom, several in sizes:
        found = [
            log_probability([_pair(chi(freedom), chi(freedom), freedom) for _ in range(several)])
            for _ in range(3000)
        ]
        for level in (0.3, 0.1, 0.02):
            assert sum(one < math.log(level) for one in found) <= level * len(found)
        assert min(found) < math.log(0.1)  # and it does find what is improbable


def test_growth_is_the_square_of_what_the_ensemble_spans():
    assert tiling_growth([_pair(1, 1, 10, 1.0, 1.2)]) == pytest.approx(1.44)
    # Chance moves the members of one case this way and those of another that way.
    assert tiling_growth([_pair(1, 1, 10, 1.0, 1.2), _pair(1, 1, 10, 1.2, 1.0)]) == pytest.approx(
        1.0
    )
    assert tiling_growth([_pair(1, 1, 10)]) == 1.0


def test_nothing_larger_is_not_improbable():
    assert log_probability([_pair(1.0, 0.5, 100)]) == 0.0
    assert log_probability([_pair(1.0, 1.19, 1e6, 1.0, 1.1)]) == 0.0  # another tiling explains it
    assert log_probability([_pair(1.0, 1.5, 1e6, 1.0, 1.1)]) < math.log(FALSE_ALARM)
    assert mean_ratio([_pair(1.0, 1.5, 100)]) == pytest.approx(1.5)
