"""Where only some rows have their bound the verdict is the one that all rows' bounds give."""

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
OF_A_CLOCK = {"seconds", "environment"}
LOST = 8 * 80 * 2.0**-53  # of a float64 sum over 80 keys, as the bound itself allows for it (B19)


@pytest.fixture(autouse=True)
def large(monkeypatch):
    """Every problem is one of which some rows are sampled."""
    monkeypatch.setattr(row_conditions, "_CPU_WHOLE", 1)
    monkeypatch.setattr(row_conditions, "_FEWEST_ROWS", 8)
    monkeypatch.setattr(room, "_FEWEST_BOUNDED", 4)


def facts(report) -> list:
    records = [json.loads(json.dumps(to_plain_data(one))) for one in report.records]
    return [{k: v for k, v in one.items() if k not in OF_A_CLOCK} for one in records]


def assert_same(one, other) -> None:
    """Numbers but for last digits: a row's bound is of whichever piece it was computed in."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list):
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    elif isinstance(one, float):
        assert other == pytest.approx(one, rel=LOST, abs=0, nan_ok=True)
    else:
        assert one == other


# What differs between kernels is their arithmetic: one of ours shows every dtype.
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        *(("ideal", dtype) for dtype in ("fp32", "tf32", "fp16", "e4m3", "e5m2")),
        *((kernel, "bf16") for kernel in builtin_names()),
    ],
)
def test_records_are_those_of_all_bounds(kernel, dtype, monkeypatch):
    subject = subject_named(kernel)
    cells = plan_cells(
        dtypes=[dtype], variants=(), shapes=["1x2/1x80x16"], distributions=["normal"], seed=0
    )
    cases = [(cell.variant, Case(problem=cell.problem)) for cell in cells]
    if subject.triton:  # interpreted: a mask and a score mod will do
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
def test_pieces_leave_out_keys_that_none_of_their_rows_sees(rows, mask, monkeypatch):
    found, is_full = evidence(mask=mask).evidence, mask == Spec.of("full")
    whole = room.totals_of_rows(found)
    monkeypatch.setattr(row_conditions, "_CPU_PAIRS", rows * PROBLEM.kv)
    pairs, weigh = [], room.weigh_rows

    def counted(*args):
        known = weigh(*args)
        assert len(known.weights) == (1 if rows == 8 else 2)
        pairs.append(known.weights.numel())
        return known

    monkeypatch.setattr(room, "weigh_rows", counted)
    pieces = room.totals_of_rows(found)
    for field in dataclasses.fields(whole):
        one, other = (torch.as_tensor(getattr(of, field.name)) for of in (whole, pieces))
        least = 0.0
        if field.name == "spread":  # a root of what is left of two sums
            one, other = one.square(), other.square()
            least = 4 * LOST * float(whole.largest_value.square())
        torch.testing.assert_close(other, one, rtol=LOST, atol=least)
    fewer = sum(pairs) < PROBLEM.heads * PROBLEM.query * PROBLEM.kv
    assert fewer == (mask not in (Spec.of("full"), Spec.of("not", Spec.of("causal"))))
    # Keys that are left out and seen are missed.
    monkeypatch.setattr(row_conditions, "_last_seen", lambda seen: 3)
    cut = room.totals_of_rows(found)
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
def test_no_floor_is_above_the_bound(changes, dtype, monkeypatch):
    """As they are made of inputs, in pieces."""
    monkeypatch.setattr(row_conditions, "_CPU_PAIRS", 40 * PROBLEM.kv)
    found = evidence(dtype=dtype, **changes)
    problem, arithmetic = found.case.problem, Ideal().arithmetic(found.case.problem, "cpu")
    floors = bound_floor(room.totals_of_rows(found.evidence), arithmetic)
    every = Rows(range(problem.batch * problem.heads), torch.arange(problem.query))
    known = row_conditions.compute_conditions(found.inputs, found.truth, every)
    bound = deterministic_bound(known, arithmetic, score_error(known, arithmetic))
    for floor, whole in zip(floors, (bound.out, bound.lse), strict=True):
        says = ~floor.isnan()
        assert bool(says.any())
        assert bool((floor[says] <= whole[says]).all())


def judged(outputs: Outputs, found: EvidenceBuilder):
    """Number of elements of out beyond their bound, the largest share and where it is."""
    allowed = found.allowance(Ideal().arithmetic(found.case.problem, "cpu"), outputs)
    share = shares(outputs.out.double() - found.truth.out, allowed.out)
    return int((share > 1).sum()), float(share.max()), int(share.argmax()), allowed


def evidence(**changes) -> EvidenceBuilder:
    return EvidenceBuilder(Case(problem=PROBLEM.replace(**changes)), "cpu")


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "e4m3"])
@pytest.mark.parametrize("factor", [0.5, 1 - 2.0**-20, 1 + 2.0**-20, 3.0])
def test_a_single_wrong_element_outside_the_sample_is_found(dtype, factor):
    """Also one that is beyond its floor, and within its bound by a millionth."""
    found, whole = evidence(dtype=dtype), evidence(dtype=dtype)
    every = whole.allowance(Ideal().arithmetic(whole.case.problem, "cpu"))
    assert every.full_rows is None or bool(every.full_rows[whole.alive].all())
    sampled = {int(row) for some in every.samples for row in some.rows.query}
    row = next(row for row in range(40, 96) if row not in sampled)
    out = found.truth.out.clone()
    out[0, 1, row, 3] += factor * every.out[0, 1, row, 3]
    out[0, 0, 0] += 0.4 * every.out[0, 0, 0]  # a sampled row, of less
    given = Outputs(out, found.truth.lse.clone())
    wrong, largest, place, allowed = judged(given, found)
    assert wrong == (factor > 1)
    assert largest == pytest.approx(factor, rel=2.0**-30)
    assert place == (96 + row) * 16 + 3
    assert bool(allowed.full_rows[0, 1, row])
    # And no more was computed than that and the sample, of a dtype whose floors are near.
    if dtype == "bf16":
        assert int(allowed.full_rows.sum()) < 2 * len(sampled) + 8


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_no_number_has_its_bound(wrong):
    found = evidence()
    out = found.truth.out.clone()
    out[0, 1, 41, 3] = wrong
    beyond, largest, _, allowed = judged(Outputs(out), found)
    assert (beyond, largest) == (1, math.inf)
    assert bool(allowed.full_rows[0, 1, 41])


def test_a_right_kernel_needs_few_rows_and_a_wrong_one_all():
    found, given = evidence(), Ideal().run(evidence().inputs)
    few = judged(given, found)[-1]
    assert 16 <= int(few.full_rows.sum()) < 64
    doubled = Outputs(2 * given.out, given.lse)
    every = judged(doubled, found)[-1]
    assert every is few
    assert bool(every.full_rows.all())


def test_floors_that_are_too_high_are_found_out(monkeypatch):
    """A planted fault: what a floor hides is missed, and the tests above are those that say so."""
    real = room.bound_floor
    monkeypatch.setattr(room, "bound_floor", lambda *x: tuple(10 * part for part in real(*x)))
    with pytest.raises(AssertionError):
        test_a_single_wrong_element_outside_the_sample_is_found("bf16", 3.0)


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
def test_where_a_floor_says_too_little_every_row_has_its_bound(changes):
    if changes.get("operation") == "softmax":
        found = EvidenceBuilder(Case(problem=Problem(operation="softmax", query=96, kv=96)), "cpu")
    else:
        found = evidence(**changes)
    assert room.totals_of_rows(found.evidence) is None
    assert found.allowance(Ideal().arithmetic(found.case.problem, "cpu")).full_rows is None


def test_the_rows_of_kernels_of_one_arithmetic_add_up():
    found = evidence()
    arithmetic = Ideal().arithmetic(PROBLEM, "cpu")
    counts = []
    for row in (41, 42, 43):
        out = found.truth.out.clone()
        out[0, 0, row] += 1
        counts.append(int(found.allowance(arithmetic, Outputs(out)).full_rows.sum()))
    assert counts == sorted(counts)
    other = dataclasses.replace(arithmetic, exp2_ulps=64.0)
    assert int(found.allowance(other, Outputs(found.truth.out)).full_rows.sum()) < counts[-1]
