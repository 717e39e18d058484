"""Large problems compute the full bound of some rows only: verdicts must equal those of all bounds.

Every other row is settled by a cheap floor, which is never above its bound.
"""

import dataclasses
import json
import math

import pytest
import torch

from attncheck.cases.variants import plan_cells
from attncheck.core.conditions import Rows
from attncheck.core.json_numbers import to_plain_data
from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.inputs.problem import Case, Problem
from attncheck.judge.allowance import shares
from attncheck.judge.bound_floor import bound_floor
from attncheck.judge.deterministic_bound import deterministic_bound
from attncheck.judge.score_errors import score_error
from attncheck.oracles import row_conditions
from attncheck.subjects.capabilities.named_kernels import builtin_names, subject_named
from attncheck.subjects.ideal import Ideal
from attncheck.verify import allowances as room
from attncheck.verify import evidence_builder
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.executor import InProcess
from attncheck.verify.verify import verify

PROBLEM = Problem(heads=2, query=96, kv=96, head_dim=16, mask=Spec.of("causal"))
RUN_DEPENDENT = {"seconds", "environment"}
# Relative error of a float64 sum over 80 keys, as the bound itself allows for it (B19).
ROUNDING = 8 * 80 * 2.0**-53


@pytest.fixture(autouse=True)
def sample_rows_of_any_problem(monkeypatch):
    """Treat every problem as large: only some of its rows are sampled."""
    monkeypatch.setattr(row_conditions, "_CPU_WHOLE", 1)
    monkeypatch.setattr(row_conditions, "_FEWEST_ROWS", 8)
    monkeypatch.setattr(room, "_FEWEST_BOUNDED", 4)


def facts(report) -> list:
    records = [json.loads(json.dumps(to_plain_data(one))) for one in report.records]
    return [{k: v for k, v in one.items() if k not in RUN_DEPENDENT} for one in records]


def assert_same(one, other) -> None:
    """Compare records up to the last digits of numbers, which depend on how rows were split."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list):
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    elif isinstance(one, float):
        assert other == pytest.approx(one, rel=ROUNDING, abs=0, nan_ok=True)
    else:
        assert one == other


# Kernels differ in their arithmetic alone: one of them is enough for the other dtypes.
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        *(("ideal", dtype) for dtype in ("fp32", "tf32", "fp16", "e4m3", "e5m2")),
        *((kernel, "bf16") for kernel in builtin_names()),
    ],
)
def test_records_equal_those_with_all_bounds(kernel, dtype, monkeypatch):
    subject = subject_named(kernel)
    cells = plan_cells(
        dtypes=[dtype], variants=(), shapes=["1x2/1x80x16"], distributions=["normal"], seed=0
    )
    cases = [(cell.variant, Case(problem=cell.problem)) for cell in cells]
    if subject.triton:  # interpreted, and slow: one mask and one score mod
        cases = [(name, case) for name, case in cases if name in ("causal", "softcap")]
    settled = facts(verify(subject, cases, device="cpu", executor=InProcess()))
    monkeypatch.setattr(evidence_builder, "totals_of_rows", lambda _: None)
    for one, other in zip(
        settled, facts(verify(subject, cases, device="cpu", executor=InProcess())), strict=True
    ):
        assert_same(one, other)


@pytest.mark.parametrize(
    "mask",
    [
        Spec.of("full"),
        Spec.of("causal"),
        Spec.of("sliding_window", window=9),
        Spec.of("document", lengths=[40, 41, 15]),
        Spec.of("not", Spec.of("causal")),  # the last row sees no key
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [8, 64], ids=["of one head", "of two heads"])
def test_row_totals_skip_keys_that_no_row_of_a_piece_sees(rows, mask, monkeypatch):
    facts, is_full = evidence(mask=mask).evidence, mask == Spec.of("full")
    whole = room.totals_of_rows(facts)
    monkeypatch.setattr(row_conditions, "_CPU_PAIRS", rows * PROBLEM.kv)
    pairs, weigh = [], room.weigh_rows

    def counted(*args):
        known = weigh(*args)
        assert len(known.weights) == (1 if rows == 8 else 2)
        pairs.append(known.weights.numel())
        return known

    monkeypatch.setattr(room, "weigh_rows", counted)
    pieces = room.totals_of_rows(facts)
    for field in dataclasses.fields(whole):
        one, other = (torch.as_tensor(getattr(of, field.name)) for of in (whole, pieces))
        least = 0.0
        if field.name == "spread":  # the square root of a difference of two sums
            one, other = one.square(), other.square()
            least = 4 * ROUNDING * float(whole.largest_value.square())
        torch.testing.assert_close(other, one, rtol=ROUNDING, atol=least)
    fewer = sum(pairs) < PROBLEM.heads * PROBLEM.query * PROBLEM.kv
    assert fewer == (mask not in (Spec.of("full"), Spec.of("not", Spec.of("causal"))))
    # A planted fault that skips keys which are seen changes the totals.
    monkeypatch.setattr(row_conditions, "_last_seen", lambda seen: 3)
    cut = room.totals_of_rows(facts)
    assert bool((cut.total == whole.total).all()) == is_full


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "e4m3"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"scale": -0.3},
        {"scale": 0.0},
        {"distribution": "large_logits"},
        {"mask": Spec.of("not", Spec.of("causal")), "kv": 70, "value_dim": 8},
        {"batch": 2, "heads": 4, "kv_heads": 2, "mask": Spec.of("sliding_window", window=9)},
    ],
    ids=str,
)
def test_floor_never_exceeds_the_bound(changes, dtype, monkeypatch):
    monkeypatch.setattr(row_conditions, "_CPU_PAIRS", 40 * PROBLEM.kv)
    builder = evidence(dtype=dtype, **changes)
    problem, arithmetic = builder.case.problem, Ideal().arithmetic(builder.case.problem, "cpu")
    floors = bound_floor(room.totals_of_rows(builder.evidence), arithmetic)
    every = Rows(range(problem.batch * problem.heads), torch.arange(problem.query))
    known = row_conditions.compute_conditions(builder.inputs, builder.truth, every)
    bound = deterministic_bound(known, arithmetic, score_error(known, arithmetic))
    for floor, whole in zip(floors, (bound.out, bound.lse), strict=True):
        defined = ~floor.isnan()
        assert bool(defined.any())
        assert bool((floor[defined] <= whole[defined]).all())


def judged(outputs: Outputs, builder: EvidenceBuilder):
    """Number of elements of out beyond their bound, the largest share, its place, the allowance."""
    allowed = builder.allowance(Ideal().arithmetic(builder.case.problem, "cpu"), outputs)
    share = shares(outputs.out.double() - builder.truth.out, allowed.out)
    return int((share > 1).sum()), float(share.max()), int(share.argmax()), allowed


def evidence(**changes) -> EvidenceBuilder:
    return EvidenceBuilder(Case(problem=PROBLEM.replace(**changes)), "cpu")


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "e4m3"])
@pytest.mark.parametrize("factor", [0.5, 1 - 2.0**-20, 1 + 2.0**-20, 3.0])
def test_single_element_outside_the_sample_is_judged_by_its_bound(dtype, factor):
    """An error beyond the floor passes a millionth below the bound, and fails a millionth above."""
    builder, whole = evidence(dtype=dtype), evidence(dtype=dtype)
    every = whole.allowance(Ideal().arithmetic(whole.case.problem, "cpu"))
    assert every.full_rows is None or bool(every.full_rows[whole.alive].all())
    sampled = {int(row) for some in every.samples for row in some.rows.query}
    row = next(row for row in range(40, 96) if row not in sampled)
    out = builder.truth.out.clone()
    out[0, 1, row, 3] += factor * every.out[0, 1, row, 3]
    out[0, 0, 0] += 0.4 * every.out[0, 0, 0]  # a smaller error in a sampled row
    wrong, largest, place, allowed = judged(Outputs(out, builder.truth.lse.clone()), builder)
    assert wrong == (factor > 1)
    assert largest == pytest.approx(factor, rel=2.0**-30)
    assert place == (96 + row) * 16 + 3
    assert bool(allowed.full_rows[0, 1, row])
    # With floors near the bounds, only this row's bound and the sample's were computed.
    if dtype == "bf16":
        assert int(allowed.full_rows.sum()) < 2 * len(sampled) + 8


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_element_outside_the_sample_is_wrong(value):
    builder = evidence()
    out = builder.truth.out.clone()
    out[0, 1, 41, 3] = value
    wrong, largest, _, allowed = judged(Outputs(out), builder)
    assert (wrong, largest) == (1, math.inf)
    assert bool(allowed.full_rows[0, 1, 41])


def test_right_outputs_need_few_exact_bounds_and_wrong_ones_all():
    builder, right = evidence(), Ideal().run(evidence().inputs)
    few = judged(right, builder)[-1]
    assert 16 <= int(few.full_rows.sum()) < 64
    doubled = Outputs(2 * right.out, right.lse)
    every = judged(doubled, builder)[-1]
    assert every is few
    assert bool(every.full_rows.all())


def test_too_high_floors_would_hide_a_wrong_element(monkeypatch):
    """Planted fault: the test of a single wrong element fails if floors are 10 times too high."""
    real = room.bound_floor
    monkeypatch.setattr(room, "bound_floor", lambda *x: tuple(10 * part for part in real(*x)))
    with pytest.raises(AssertionError):
        test_single_element_outside_the_sample_is_judged_by_its_bound("bf16", 3.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"backward": True},
        {"sink": True},
        {"score": Spec.of("softcap", cap=2.0)},
        {"operation": "softmax"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_problems_without_useful_floors_have_every_bound(changes):
    if changes.get("operation") == "softmax":
        problem = Problem(operation="softmax", query=96, kv=96)
        builder = EvidenceBuilder(Case(problem=problem), "cpu")
    else:
        builder = evidence(**changes)
    assert room.totals_of_rows(builder.evidence) is None
    assert builder.allowance(Ideal().arithmetic(builder.case.problem, "cpu")).full_rows is None


def test_exact_rows_are_shared_by_kernels_of_one_arithmetic_only():
    builder = evidence()
    arithmetic = Ideal().arithmetic(PROBLEM, "cpu")
    counts = []
    for row in (41, 42, 43):
        out = builder.truth.out.clone()
        out[0, 0, row] += 1
        counts.append(int(builder.allowance(arithmetic, Outputs(out)).full_rows.sum()))
    assert counts == sorted(counts)
    other = dataclasses.replace(arithmetic, exp2_ulps=64.0)
    assert int(builder.allowance(other, Outputs(builder.truth.out)).full_rows.sum()) < counts[-1]
