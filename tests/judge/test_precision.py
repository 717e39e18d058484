"""Less accurate than usual, by arrays made by hand."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.judge import verdicts

from attncheck.core.conditions import Rows
from attncheck.core.declared_arithmetic import HOPPER_FP8, default_arithmetic
from attncheck.core.formats import DTYPES
from attncheck.core.judgement import Judgement, Precision
from attncheck.core.outputs import Outputs
from attncheck.judge.allowance import Allowance, Sample
from attncheck.judge.error_measures import rmse_over_ideal
from attncheck.judge.head_precision import FAR, FEWEST, RESIDUAL, SPREAD, Z

decide = verdicts.decide

HEADS, QUERY, DIM = 2, 32, 32
SD = 2.0**-8
EXACT = torch.arange(HEADS * QUERY * DIM).view(1, HEADS, QUERY, DIM).double() / 1024 + 1
SIGN = torch.where(torch.arange(QUERY * DIM).view(QUERY, DIM) % 2 == 0, 1.0, -1.0).double()
LITTLE = 2.0**-40  # far more than what one rounding of a root mean square moves


def with_errors(*of_heads: float) -> torch.Tensor:
    """An out whose every error in a head is so many predicted standard deviations."""
    return EXACT + torch.stack([SIGN * SD * size for size in of_heads])[None]


def call(out: torch.Tensor, **changed: Any) -> dict[str, Any]:
    """What is asked about ``out`` where ideal kernels err as predicted."""
    lse = torch.ones(1, HEADS, QUERY, dtype=torch.float64)
    sample = Sample(
        rows=Rows(range(HEADS), torch.arange(QUERY)),
        probable_out=torch.full_like(EXACT[0], 32 * SD),
        probable_lse=lse[0],
        sd_out=torch.full_like(EXACT[0], SD),
        sd_lse=lse[0],
    )
    plain = {
        "out": out,
        "lse": None,
        "truth": Outputs(out=EXACT),
        "alive": lse.bool(),
        "allowance": Allowance(out=torch.full_like(EXACT, 64 * SD), lse=lse, samples=[sample]),
        "arithmetic": default_arithmetic(DTYPES["bf16"]),
        "generic": True,
        "ideal": with_errors(1.0, 1.0),
        "ensemble": lambda: [with_errors(1.0, 1.0), with_errors(0.9, 0.9)],
    }
    return plain | changed


def judged(out: torch.Tensor, **changed: Any) -> Judgement:
    return decide(**call(out, **changed))


def precision(found: Judgement) -> Precision:
    assert found.precision is not None
    return found.precision


def test_usual_precision_passes():
    found = judged(with_errors(1.0, 1.0))
    assert found.status == "pass"
    assert (precision(found).z, precision(found).spread) == (1.0, None)


def test_both_yardsticks_together_fail_and_name_the_head():
    found = judged(with_errors(1.0, 1.5))
    assert (found.status, found.rule) == ("fail", "precision")
    assert found.reason == (
        "errors of head [0, 1] are 1.5 × their predicted size, but should be at most 1.25 ×; "
        "RMSE of head [0, 1] is 1.5 × the largest of ideal kernels', but should be at most 1.3 × "
        "(1 of 2 heads)"
    )
    assert (precision(found).z, precision(found).spread) == (1.5, 1.5)


def test_an_exact_result_that_is_not_proven_fails_nobody_for_precision():
    asked = call(with_errors(1.0, 1.5))
    allowance = asked["allowance"]
    unproven = Allowance(
        out=allowance.out, lse=allowance.lse, samples=allowance.samples, oracle_share=0.5
    )
    assert decide(**asked | {"allowance": unproven}).status == "inconclusive"


@pytest.mark.parametrize(
    ("size", "status"),
    [(Z - LITTLE, "pass"), (Z + LITTLE, "pass"), (1.4, "pass"), (1.4 + LITTLE, "warn")],
)
def test_large_errors_are_odd_at_most_and_not_where_an_ideal_kernel_makes_as_large_ones(
    size, status
):
    ideal = with_errors(1.2, 1.4)
    found = judged(with_errors(1.0, size), ideal=ideal, ensemble=lambda: [ideal])
    assert found.status == status
    assert ("predicted" in found.reason) == (status == "warn")
    assert "RMSE" not in found.reason


@pytest.mark.parametrize(
    ("size", "status"), [(SPREAD - LITTLE, "pass"), (SPREAD + LITTLE, "warn"), (2.0, "warn")]
)
def test_errors_larger_than_ideal_ones_but_as_predicted_are_odd_at_most(size, status):
    ideal = with_errors(1.0, 0.5)
    found = judged(with_errors(1.0, size / 2), ideal=ideal, ensemble=lambda: [ideal])
    assert found.status == status
    assert ("RMSE" in found.reason) == (status == "warn")
    assert "predicted" not in found.reason


def test_the_largest_of_the_ensemble_counts():
    outs = [with_errors(0.5, 0.5), with_errors(1.4, 1.4), with_errors(0.5, 0.5)]
    assert judged(with_errors(1.5, 1.5), ensemble=lambda: outs).status == "warn"
    assert judged(with_errors(1.5, 1.5), ensemble=lambda: outs[:1]).status == "fail"


def test_the_ensemble_is_asked_for_only_where_a_head_is_suspect():
    def ensemble() -> list[torch.Tensor]:
        calls.append(1)
        return [with_errors(1.0, 1.0)]

    calls: list[int] = []
    judged(with_errors(1.2, 1.2), ensemble=ensemble)
    judged(with_errors(1.2, 1.4), ensemble=ensemble, arithmetic=default_arithmetic(DTYPES["fp32"]))
    assert calls == []
    judged(with_errors(1.2, 1.4), ensemble=ensemble)  # by z
    judged(with_errors(1.2, 1.2), ensemble=ensemble, ideal=with_errors(1.0, 0.9))  # by the ideal
    assert calls == [1, 1]


@pytest.mark.parametrize(
    ("dtype", "status"),
    [("fp32", "pass"), ("tf32", "pass"), ("fp16", "fail"), ("bf16", "fail"), ("e5m2", "fail")],
)
def test_fp32_has_no_gate(dtype, status):
    """Orders of its sums that are all right differ more than any gate."""
    found = judged(with_errors(1.0, 5.0), arithmetic=default_arithmetic(DTYPES[dtype]))
    assert found.status == status
    assert precision(found).z == 5.0


def test_a_head_of_few_outputs_is_not_judged():
    asked = call(with_errors(1.0, 5.0))
    rows = (FEWEST - DIM) // DIM  # one row short of enough
    exact = EXACT.clone()
    asked["alive"][0, 1, rows:] = False
    asked["out"][0, 1, rows:] = exact[0, 1, rows:] = 0.0
    found = decide(**asked | {"truth": Outputs(out=exact)})
    assert found.status == "pass"
    assert precision(found).z == 1.0


def test_a_head_in_which_ideal_kernels_are_exact_is_not_judged():
    exact = with_errors(0.0, 0.0)
    found = judged(with_errors(1.5, 1.5), ideal=exact, ensemble=lambda: [exact], tiles=(16, 16))
    assert found.status == "warn"  # by z alone
    assert precision(found).spread == 0.0
    assert precision(found).residual is None


def test_nan_is_no_precision():
    out = with_errors(1.0, 1.0)
    out[0, 1, 2, 3] = math.nan
    found = judged(out, tiles=(16, 16))
    assert found.rule == "finite"
    assert precision(found).z == precision(found).spread == precision(found).residual == math.inf
    assert math.isnan(precision(found).bias)
    assert precision(found).cosine == 0.0
    assert precision(found).frobenius == math.inf


def test_an_error_where_none_is_predicted_is_infinite():
    asked = call(with_errors(1.0, 1.0))
    asked["allowance"].samples[0].sd_out[1, 2, 3] = 0.0
    assert precision(decide(**asked)).z == math.inf
    asked["out"][0, 1, 2, 3] = EXACT[0, 1, 2, 3]
    assert precision(decide(**asked)).z == pytest.approx(1.0)


# The emulation


def test_the_residual_is_what_the_emulation_does_not_explain():
    emulation = with_errors(1.0, 1.0)
    same = judged(emulation.clone(), ideal=emulation, tiles=(16, 16))
    assert (same.status, precision(same).residual) == ("pass", 0.0)
    other = judged(with_errors(1.125, 1.125), ideal=emulation, tiles=(16, 16))
    assert (other.status, precision(other).residual) == ("pass", 0.125)


@pytest.mark.parametrize("dtype", sorted(RESIDUAL))
@pytest.mark.parametrize(("keys", "factor"), [(4096, 1.0), (16 * 4096, 2.0)])
def test_beyond_its_gate_it_is_odd(dtype, keys, factor):
    """Longer sums differ by more, and so does what is rounded after them."""
    arithmetic, gate = default_arithmetic(DTYPES[dtype]), factor * RESIDUAL[dtype]
    emulation = with_errors(-1.0, -1.0)
    for size, status in ((gate - LITTLE, "pass"), (gate + LITTLE, "warn")):
        out = with_errors(size - 1.0, size - 1.0)
        found = judged(out, ideal=emulation, tiles=(16, 16), arithmetic=arithmetic, keys=keys)
        assert found.status == status
        assert ("same tiling" in found.reason) == (status == "warn")


@pytest.mark.parametrize(
    ("orders", "status"),
    [([0.5], "warn"), ([0.75], "pass"), ([0.75, 0.0], "pass"), ([0.0], "warn"), ([], "warn")],
    ids=str,
)
def test_it_is_no_news_where_the_emulation_is_as_far_from_itself_in_another_order(orders, status):
    """Where scores are large the order of fp32's operations alone moves out by much."""
    emulation = with_errors(-1.0, -1.0)
    other_orders = [with_errors(size - 1.0, size - 1.0) for size in orders]
    out = with_errors(-0.125, -0.125)
    found = judged(out, ideal=emulation, tiles=(16, 16), other_orders=other_orders)
    assert (found.status, precision(found).residual) == (status, 0.875)
    allowed = math.hypot(RESIDUAL["bf16"], SPREAD * max(orders, default=0.0))
    assert precision(found).residual_allowed == allowed
    assert (f"at most {allowed:.2g} ×" in found.reason) == (status == "warn")


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_an_emulation_that_is_broken_in_another_order_allows_nothing(broken):
    emulation, other = with_errors(-1.0, -1.0), with_errors(-1.0, -1.0)
    other[0, 1, 2, 3] = broken
    found = judged(with_errors(-0.5, -0.5), ideal=emulation, tiles=(16, 16), other_orders=[other])
    assert "at most 0.15 ×" in found.reason


def test_a_broken_emulation_is_no_measure():
    emulation = with_errors(-1.0, -1.0)
    emulation[0, 1, 2, 3] = math.inf
    found = judged(with_errors(1.0, 1.0), ideal=emulation, tiles=(16, 16))
    assert "same tiling" not in found.reason
    assert precision(found).residual is None


def test_the_emulation_runs_in_other_orders_only_where_the_residual_would_be_odd():
    emulation, far, near = (with_errors(size, size) for size in (-1.0, -0.5, -0.875))
    calls = []

    def other_orders() -> Iterator[torch.Tensor]:
        calls.append(1)
        yield emulation

    asked = {"out": far, "ideal": emulation, "tiles": (16, 16)}
    fp32 = default_arithmetic(DTYPES["fp32"])
    for quiet in ({"out": near}, {"generic": False}, {"tiles": None}, {"arithmetic": fp32}):
        assert judged(**(asked | quiet), other_orders=other_orders()).status == "pass"
    assert calls == []
    assert judged(**asked, other_orders=other_orders()).status == "warn"
    assert calls == [1]


@pytest.mark.parametrize(
    "declared",
    [{"scores": HOPPER_FP8}, {"values": HOPPER_FP8}, {"normalised_weights": True}],
    ids=["q·k", "P·V", "weights"],
)
def test_ideal_kernels_are_no_yardstick_for_other_designs(declared):
    """Their sums are fp32's, and P is rounded first: who declares otherwise errs differently."""
    other = replace(default_arithmetic(DTYPES["e4m3"]), **declared)
    found = judged(with_errors(1.2, 5.0), arithmetic=other, tiles=(16, 16))
    assert (found.status, found.rule) == ("warn", "precision")  # by z alone
    assert (precision(found).z, precision(found).spread, precision(found).residual) == (
        5.0,
        None,
        None,
    )


# Facts that are no rule


def test_bias_and_slope():
    truncated = EXACT - SD  # every element too small by the same
    assert precision(judged(truncated)).bias == -1.0
    assert precision(judged(EXACT * (1 - 2.0**-9))).slope == -(2.0**-9)
    assert precision(judged(EXACT.clone())) == Precision(z=0.0)


def test_the_ensembles_spread_of_hand_made_errors():
    rmse = torch.tensor([[3.0, 2.0, 0.0, math.nan, 1.0]])
    ideal = [torch.tensor([[1.0, 4.0, 0.0, 1.0, 0.0]]), torch.tensor([[2.0, 1.0, 0.0, 1.0, 0.0]])]
    assert rmse_over_ideal(rmse, ideal).tolist() == [[1.5, 0.5, 0.0, math.inf, 0.0]]


def test_what_underflow_explains_is_no_lack_of_precision():
    """Ideal kernels may keep numbers below the normal range, where a GPU takes them for 0."""
    ideal = with_errors(1.0, 2.0**-9)
    plain = call(with_errors(1.0, 1.0), ideal=ideal, ensemble=lambda: [ideal], tiles=(16, 16))
    assert (decide(**plain).status, decide(**plain).rule) == ("fail", "precision")
    (sample,) = plain["allowance"].samples
    lost = replace(sample, lost_out=torch.full_like(EXACT[0], SD))
    found = decide(**plain | {"allowance": replace(plain["allowance"], samples=[lost])})
    assert found.status == "pass"
    assert precision(found).spread is None  # nobody is suspect
    # An element of which nothing is known says nothing of the others.
    unknown = torch.zeros_like(EXACT[0])
    unknown[1, 3] = math.inf
    unbounded = replace(sample, lost_out=unknown)
    found = decide(**plain | {"allowance": replace(plain["allowance"], samples=[unbounded])})
    assert (found.status, found.rule) == ("fail", "precision")
    assert precision(found).residual == precision(decide(**plain)).residual
    rmse, tiny = torch.tensor([[3.0, 3.0]]), torch.tensor([[1.0, 0.0]])
    assert rmse_over_ideal(rmse, [tiny], torch.tensor([[2.0, 2.0]])).tolist() == [[1.5, 0.0]]


@pytest.mark.parametrize(("generic", "status"), [(True, "fail"), (False, "warn")])
def test_errors_far_beyond_ideal_ones_fail_on_generic_inputs_whatever_was_predicted(
    generic, status
):
    ideal = with_errors(1.0, 0.3)
    found = judged(with_errors(1.0, 1.0), ideal=ideal, ensemble=lambda: [ideal], generic=generic)
    assert (found.status, found.rule) == (status, "precision")
    within = with_errors(1.0, 1.0 / FAR + LITTLE)
    found = judged(with_errors(1.0, 1.0), ideal=within, ensemble=lambda: [within], generic=generic)
    assert found.status == "warn"
