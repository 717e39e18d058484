"""The verdict's precision rule (errors larger than an ideal kernel's), on hand-made tensors."""

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
LITTLE = 2.0**-40  # far more than one rounding of a root mean square


def with_errors(*of_heads: float) -> torch.Tensor:
    """An out in which every error of a head is so many predicted standard deviations."""
    return EXACT + torch.stack([SIGN * SD * size for size in of_heads])[None]


def arguments_for(out: torch.Tensor, **changes: Any) -> dict[str, Any]:
    """What ``decide`` is called with for ``out``, where ideal kernels err as predicted."""
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
    return plain | changes


def judge(out: torch.Tensor, **changes: Any) -> Judgement:
    return decide(**arguments_for(out, **changes))


def precision(judgement: Judgement) -> Precision:
    assert judgement.precision is not None
    return judgement.precision


def test_errors_of_the_predicted_size_pass():
    judgement = judge(with_errors(1.0, 1.0))
    assert judgement.status == "pass"
    assert (precision(judgement).z, precision(judgement).spread) == (1.0, None)


def test_errors_beyond_prediction_and_ideal_kernels_fail_and_name_the_head():
    judgement = judge(with_errors(1.0, 1.5))
    assert (judgement.status, judgement.rule) == ("fail", "precision")
    assert judgement.reason == (
        "errors of head [0, 1] are 1.5 × their predicted size, but should be at most 1.25 ×; "
        "RMSE of head [0, 1] is 1.5 × the largest of ideal kernels', but should be at most 1.3 × "
        "(1 of 2 heads)"
    )
    assert (precision(judgement).z, precision(judgement).spread) == (1.5, 1.5)


def test_precision_is_inconclusive_where_the_exact_result_is_unproven():
    arguments = arguments_for(with_errors(1.0, 1.5))
    allowance = arguments["allowance"]
    unproven = Allowance(
        out=allowance.out, lse=allowance.lse, samples=allowance.samples, oracle_share=0.5
    )
    assert decide(**arguments | {"allowance": unproven}).status == "inconclusive"


@pytest.mark.parametrize(
    ("size", "status"),
    [(Z - LITTLE, "pass"), (Z + LITTLE, "pass"), (1.4, "pass"), (1.4 + LITTLE, "warn")],
)
def test_errors_beyond_prediction_alone_warn_unless_an_ideal_kernel_has_them_too(size, status):
    ideal = with_errors(1.2, 1.4)
    judgement = judge(with_errors(1.0, size), ideal=ideal, ensemble=lambda: [ideal])
    assert judgement.status == status
    assert ("predicted" in judgement.reason) == (status == "warn")
    assert "RMSE" not in judgement.reason


@pytest.mark.parametrize(
    ("size", "status"), [(SPREAD - LITTLE, "pass"), (SPREAD + LITTLE, "warn"), (2.0, "warn")]
)
def test_errors_beyond_ideal_kernels_alone_warn(size, status):
    ideal = with_errors(1.0, 0.5)
    judgement = judge(with_errors(1.0, size / 2), ideal=ideal, ensemble=lambda: [ideal])
    assert judgement.status == status
    assert ("RMSE" in judgement.reason) == (status == "warn")
    assert "predicted" not in judgement.reason


def test_rmse_is_compared_with_the_largest_of_the_ensemble():
    outs = [with_errors(0.5, 0.5), with_errors(1.4, 1.4), with_errors(0.5, 0.5)]
    assert judge(with_errors(1.5, 1.5), ensemble=lambda: outs).status == "warn"
    assert judge(with_errors(1.5, 1.5), ensemble=lambda: outs[:1]).status == "fail"


def test_ensemble_runs_only_where_a_head_is_suspect():
    def ensemble() -> list[torch.Tensor]:
        calls.append(1)
        return [with_errors(1.0, 1.0)]

    calls: list[int] = []
    judge(with_errors(1.2, 1.2), ensemble=ensemble)
    judge(with_errors(1.2, 1.4), ensemble=ensemble, arithmetic=default_arithmetic(DTYPES["fp32"]))
    assert calls == []
    judge(with_errors(1.2, 1.4), ensemble=ensemble)  # by z
    judge(with_errors(1.2, 1.2), ensemble=ensemble, ideal=with_errors(1.0, 0.9))  # by the ideal
    assert calls == [1, 1]


@pytest.mark.parametrize(
    ("dtype", "status"),
    [("fp32", "pass"), ("tf32", "pass"), ("fp16", "fail"), ("bf16", "fail"), ("e5m2", "fail")],
)
def test_fp32_and_tf32_have_no_precision_rule(dtype, status):
    """Right orders of their sums differ by more than any threshold."""
    judgement = judge(with_errors(1.0, 5.0), arithmetic=default_arithmetic(DTYPES[dtype]))
    assert judgement.status == status
    assert precision(judgement).z == 5.0


def test_head_of_few_outputs_is_not_judged():
    arguments = arguments_for(with_errors(1.0, 5.0))
    rows = (FEWEST - DIM) // DIM  # one row short of enough
    exact = EXACT.clone()
    arguments["alive"][0, 1, rows:] = False
    arguments["out"][0, 1, rows:] = exact[0, 1, rows:] = 0.0
    judgement = decide(**arguments | {"truth": Outputs(out=exact)})
    assert judgement.status == "pass"
    assert precision(judgement).z == 1.0


def test_head_where_ideal_kernels_are_exact_is_judged_by_prediction_alone():
    exact = with_errors(0.0, 0.0)
    judgement = judge(with_errors(1.5, 1.5), ideal=exact, ensemble=lambda: [exact], tiles=(16, 16))
    assert judgement.status == "warn"  # by z alone
    assert precision(judgement).spread == 0.0
    assert precision(judgement).residual is None


def test_nan_makes_every_precision_measure_infinite():
    out = with_errors(1.0, 1.0)
    out[0, 1, 2, 3] = math.nan
    judgement = judge(out, tiles=(16, 16))
    assert judgement.rule == "finite"
    assert (
        precision(judgement).z
        == precision(judgement).spread
        == precision(judgement).residual
        == math.inf
    )
    assert math.isnan(precision(judgement).bias)
    assert precision(judgement).cosine == 0.0
    assert precision(judgement).frobenius == math.inf


def test_error_where_none_is_predicted_makes_z_infinite():
    arguments = arguments_for(with_errors(1.0, 1.0))
    arguments["allowance"].samples[0].sd_out[1, 2, 3] = 0.0
    assert precision(decide(**arguments)).z == math.inf
    arguments["out"][0, 1, 2, 3] = EXACT[0, 1, 2, 3]
    assert precision(decide(**arguments)).z == pytest.approx(1.0)


# Distance from the emulation


def test_residual_is_the_distance_from_the_emulation():
    emulation = with_errors(1.0, 1.0)
    same = judge(emulation.clone(), ideal=emulation, tiles=(16, 16))
    assert (same.status, precision(same).residual) == ("pass", 0.0)
    other = judge(with_errors(1.125, 1.125), ideal=emulation, tiles=(16, 16))
    assert (other.status, precision(other).residual) == ("pass", 0.125)


@pytest.mark.parametrize("dtype", sorted(RESIDUAL))
@pytest.mark.parametrize(("keys", "factor"), [(4096, 1.0), (16 * 4096, 2.0)])
def test_residual_beyond_its_limit_warns(dtype, keys, factor):
    """Longer sums differ by more, and so do the roundings after them."""
    arithmetic, limit = default_arithmetic(DTYPES[dtype]), factor * RESIDUAL[dtype]
    emulation = with_errors(-1.0, -1.0)
    for size, status in ((limit - LITTLE, "pass"), (limit + LITTLE, "warn")):
        out = with_errors(size - 1.0, size - 1.0)
        judgement = judge(out, ideal=emulation, tiles=(16, 16), arithmetic=arithmetic, keys=keys)
        assert judgement.status == status
        assert ("same tiling" in judgement.reason) == (status == "warn")


@pytest.mark.parametrize(
    ("orders", "status"),
    [([0.5], "warn"), ([0.75], "pass"), ([0.75, 0.0], "pass"), ([0.0], "warn"), ([], "warn")],
    ids=str,
)
def test_residual_limit_grows_with_the_emulations_own_change_in_another_order(orders, status):
    """Where scores are large, the order of fp32's operations alone moves out by much."""
    emulation = with_errors(-1.0, -1.0)
    other_orders = [with_errors(size - 1.0, size - 1.0) for size in orders]
    out = with_errors(-0.125, -0.125)
    judgement = judge(out, ideal=emulation, tiles=(16, 16), other_orders=other_orders)
    assert (judgement.status, precision(judgement).residual) == (status, 0.875)
    allowed = math.hypot(RESIDUAL["bf16"], SPREAD * max(orders, default=0.0))
    assert precision(judgement).residual_allowed == allowed
    assert (f"at most {allowed:.2g} ×" in judgement.reason) == (status == "warn")


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_nonfinite_emulation_in_another_order_allows_no_more_residual(broken):
    emulation, other = with_errors(-1.0, -1.0), with_errors(-1.0, -1.0)
    other[0, 1, 2, 3] = broken
    judgement = judge(
        with_errors(-0.5, -0.5), ideal=emulation, tiles=(16, 16), other_orders=[other]
    )
    assert "at most 0.15 ×" in judgement.reason


def test_nonfinite_emulation_gives_no_residual():
    emulation = with_errors(-1.0, -1.0)
    emulation[0, 1, 2, 3] = math.inf
    judgement = judge(with_errors(1.0, 1.0), ideal=emulation, tiles=(16, 16))
    assert "same tiling" not in judgement.reason
    assert precision(judgement).residual is None


def test_other_orders_run_only_where_the_residual_would_warn():
    emulation, far, near = (with_errors(size, size) for size in (-1.0, -0.5, -0.875))
    calls = []

    def other_orders() -> Iterator[torch.Tensor]:
        calls.append(1)
        yield emulation

    arguments = {"out": far, "ideal": emulation, "tiles": (16, 16)}
    fp32 = default_arithmetic(DTYPES["fp32"])
    for quiet in ({"out": near}, {"generic": False}, {"tiles": None}, {"arithmetic": fp32}):
        assert judge(**(arguments | quiet), other_orders=other_orders()).status == "pass"
    assert calls == []
    assert judge(**arguments, other_orders=other_orders()).status == "warn"
    assert calls == [1]


@pytest.mark.parametrize(
    "declared",
    [{"scores": HOPPER_FP8}, {"values": HOPPER_FP8}, {"normalised_weights": True}],
    ids=["q·k", "P·V", "weights"],
)
def test_other_designs_are_not_compared_with_ideal_kernels(declared):
    """Ideal kernels sum in fp32 and round P first.

    Kernels that declare otherwise err differently.
    """
    other = replace(default_arithmetic(DTYPES["e4m3"]), **declared)
    judgement = judge(with_errors(1.2, 5.0), arithmetic=other, tiles=(16, 16))
    assert (judgement.status, judgement.rule) == ("warn", "precision")  # by z alone
    assert (precision(judgement).z, precision(judgement).spread, precision(judgement).residual) == (
        5.0,
        None,
        None,
    )


# Measures that no rule reads


def test_bias_and_slope_of_known_errors():
    truncated = EXACT - SD  # every element too small by the same
    assert precision(judge(truncated)).bias == -1.0
    assert precision(judge(EXACT * (1 - 2.0**-9))).slope == -(2.0**-9)
    assert precision(judge(EXACT.clone())) == Precision(z=0.0)


def test_rmse_over_ideal_divides_by_the_largest_ideal_rmse():
    rmse = torch.tensor([[3.0, 2.0, 0.0, math.nan, 1.0]])
    ideal = [torch.tensor([[1.0, 4.0, 0.0, 1.0, 0.0]]), torch.tensor([[2.0, 1.0, 0.0, 1.0, 0.0]])]
    assert rmse_over_ideal(rmse, ideal).tolist() == [[1.5, 0.5, 0.0, math.inf, 0.0]]


def test_errors_explained_by_underflow_are_not_imprecise():
    """Ideal kernels may keep numbers below the normal range, where a GPU flushes them to 0."""
    ideal = with_errors(1.0, 2.0**-9)
    plain = arguments_for(
        with_errors(1.0, 1.0), ideal=ideal, ensemble=lambda: [ideal], tiles=(16, 16)
    )
    assert (decide(**plain).status, decide(**plain).rule) == ("fail", "precision")
    (sample,) = plain["allowance"].samples
    lost = replace(sample, lost_out=torch.full_like(EXACT[0], SD))
    judgement = decide(**plain | {"allowance": replace(plain["allowance"], samples=[lost])})
    assert judgement.status == "pass"
    assert precision(judgement).spread is None  # no head is suspect
    # An unbounded loss at one element excuses no other.
    unknown = torch.zeros_like(EXACT[0])
    unknown[1, 3] = math.inf
    unbounded = replace(sample, lost_out=unknown)
    judgement = decide(**plain | {"allowance": replace(plain["allowance"], samples=[unbounded])})
    assert (judgement.status, judgement.rule) == ("fail", "precision")
    assert precision(judgement).residual == precision(decide(**plain)).residual
    rmse, tiny = torch.tensor([[3.0, 3.0]]), torch.tensor([[1.0, 0.0]])
    assert rmse_over_ideal(rmse, [tiny], torch.tensor([[2.0, 2.0]])).tolist() == [[1.5, 0.0]]


@pytest.mark.parametrize(("generic", "status"), [(True, "fail"), (False, "warn")])
def test_errors_far_beyond_ideal_kernels_fail_on_generic_inputs_even_as_predicted(generic, status):
    ideal = with_errors(1.0, 0.3)
    judgement = judge(with_errors(1.0, 1.0), ideal=ideal, ensemble=lambda: [ideal], generic=generic)
    assert (judgement.status, judgement.rule) == (status, "precision")
    within = with_errors(1.0, 1.0 / FAR + LITTLE)
    judgement = judge(
        with_errors(1.0, 1.0), ideal=within, ensemble=lambda: [within], generic=generic
    )
    assert judgement.status == "warn"
