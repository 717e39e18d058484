"""Each rule on arrays made by hand: that it fails, and that it does not where it must not."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attncheck.core.conditions import Rows
from attncheck.core.formats import DTYPES
from attncheck.core.judgement import Judgement, Place
from attncheck.core.outputs import Outputs
from attncheck.core.source_files import import_file
from attncheck.judge.allowance import Allowance, Sample
from attncheck.judge.declared_arithmetic import default_arithmetic
from attncheck.judge.verdict import first_tighter_profile

verdicts = import_file(Path(__file__).with_name("verdicts.py"), "verdicts by hand")
decide = verdicts.decide
kernel_result = verdicts.kernel_result

BATCH, HEADS, QUERY, DIM = 1, 2, 32, 32  # 1,024 outputs a head
ROW, LSE_ROW = 2.0**-6, 2.0**-10  # deterministic; the probabilistic bound is a quarter of it
SIGN = torch.where(torch.arange(QUERY * DIM).view(QUERY, DIM) % 2 == 0, 1.0, -1.0).double()


def call(**changed: Any) -> dict[str, Any]:
    """A kernel whose every error is 1/32 of the bound, and of the predicted size."""
    alive = torch.ones(BATCH, HEADS, QUERY, dtype=torch.bool)
    alive[0, 1, -1] = False
    exact = torch.arange(1, BATCH * HEADS * QUERY * DIM + 1).double() / 1024
    exact = exact.view(BATCH, HEADS, QUERY, DIM) * alive[..., None]
    lse = torch.where(alive, torch.arange(QUERY).double() / 16 + 1, -math.inf)
    out = torch.full_like(exact, ROW) * alive[..., None]
    sample = Sample(
        rows=Rows(range(HEADS), torch.arange(QUERY)),
        probable_out=out[0] / 4,
        probable_lse=torch.where(alive, LSE_ROW / 4, 0.0)[0],
        sd_out=out[0] / 32,
        sd_lse=torch.where(alive, LSE_ROW / 32, 0.0)[0],
    )
    allowance = Allowance(
        out=out, lse=torch.where(alive, LSE_ROW, 0.0).double(), samples=[sample], oracle_share=1e-4
    )
    ideal = exact + SIGN * ROW / 32 * alive[..., None]
    plain = {
        "out": ideal.clone(),
        "lse": torch.where(alive, lse + LSE_ROW / 32, lse),
        "truth": Outputs(out=exact, lse=lse),
        "alive": alive,
        "allowance": allowance,
        "arithmetic": default_arithmetic(DTYPES["bf16"]),
        "generic": True,
        "ideal": ideal,
        "ensemble": lambda: [ideal],
    }
    return plain | changed


def with_out(at: tuple[int, ...], value: float, **changed: Any) -> Judgement:
    asked = call(**changed)
    asked["out"][at] = value
    return decide(**asked)


def with_error(at: tuple[int, ...], share: float, **changed: Any) -> Judgement:
    """An error of this share of the bound at an element of out."""
    asked = call(**changed)
    asked["out"][at] = asked["truth"].out[at] + share * ROW
    return decide(**asked)


def summary(found: Judgement) -> tuple[str, str]:
    return found.status, found.rule


def test_a_right_kernel_passes_and_every_fact_is_there():
    found = decide(**call())
    assert summary(found) == ("pass", "")
    assert (found.reason, found.warnings) == ("", ())
    assert found.out_over_bound == found.lse_over_bound == 1 / 32
    assert found.out_over_probable == found.lse_over_probable == 1 / 8
    assert (found.rows, found.rows_sampled, found.rows_unbounded) == (63, 63, 0)
    assert found.precision is not None
    assert found.precision.z == 1.0
    assert found.precision.residual is None  # no tiling was declared
    assert found.arithmetic == str(default_arithmetic(DTYPES["bf16"]))


# 0. finite, empty rows


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_fails(value):
    found = with_out((0, 1, 3, 7), value)
    assert summary(found) == ("fail", "finite")
    assert found.reason.startswith(f"out[0, 1, 3, 7] = {value:g}, but should be ")
    assert "; 1 of 2016 elements are NaN or infinite" in found.reason
    assert found.out_over_bound == math.inf
    assert found.worst is not None
    assert found.worst.at == Place(batch=0, head=1, query=3, dim=7)


@pytest.mark.parametrize("value", [math.nan, 2.0**-149, -1.0, math.inf])
def test_an_empty_row_must_be_exactly_0(value):
    found = with_out((0, 1, 31, 2), value)
    assert summary(found) == ("fail", "empty rows")
    assert found.reason.startswith("out[0, 1, 31, 2] = ")
    assert "but should be 0; 1 of 32 elements of rows that see no key" in found.reason
    assert found.worst is not None
    assert (found.worst.allowance, found.worst.budget) == (0.0, {})


def test_minus_0_in_an_empty_row_is_0():
    assert with_out((0, 1, 31, 2), -0.0).status == "pass"


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e30, 0.0])
def test_lse_of_an_empty_row_must_be_minus_infinity(value):
    asked = call()
    asked["lse"][0, 1, 31] = value
    found = decide(**asked)
    assert summary(found) == ("fail", "empty rows")
    assert "but should be -inf; 1 of 1 elements" in found.reason


# 1. structure


def test_the_order_of_the_rules():
    """The first that fails names the verdict; the others are told beside it."""
    asked = call(structure="a probe's finding")
    asked["out"][0, 0, 0, 0] = math.nan
    asked["out"][0, 1, 31, 0] = 1.0
    asked["lse"][0, 0, 2] += 0.5 * LSE_ROW
    found = decide(**asked)
    assert summary(found) == ("fail", "finite")
    assert [text.split(" = ")[0] for text in found.warnings] == [
        "out[0, 1, 31, 0]",
        "a probe's finding",
        "lse[0, 0, 2]",
    ]


def test_what_a_failure_implies_is_not_told_again():
    """Beyond the bound is beyond the probabilistic one, and imprecise too."""
    found = with_error((0, 1, 3, 7), 40.0)
    assert found.warnings == ()
    assert found.out_over_probable == 160.0
    assert found.precision is not None
    assert found.precision.spread is not None
    assert found.precision.spread > 1.3


def test_the_worst_element_is_the_one_of_the_reason():
    asked = call()
    asked["out"][0, 0, 1, 2] = asked["truth"].out[0, 0, 1, 2] + 2 * ROW
    asked["lse"][0, 0, 16] = asked["truth"].lse[0, 0, 16] + 50 * LSE_ROW
    found = decide(**asked)
    assert found.reason.startswith("out[0, 0, 1, 2] = ")
    assert found.worst is not None
    assert (found.worst.tensor, found.worst.at) == ("out", Place(batch=0, head=0, query=1, dim=2))
    assert (found.out_over_bound, found.lse_over_bound) == (2.0, 50.0)
    assert [text.split(" = ")[0] for text in found.warnings] == ["lse[0, 0, 16]"]


# 2. the deterministic bound


def test_an_error_beyond_the_bound_fails():
    found = with_error((0, 1, 3, 7), 4.0)
    assert summary(found) == ("fail", "bound")
    assert found.reason == (
        "out[0, 1, 3, 7] = 1.164, but should be 1.102 ± 0.016 (4 × the bound); "
        "1 of 2016 elements is beyond it"
    )
    assert found.out_over_bound == 4.0
    worst = found.worst
    assert worst is not None
    assert (worst.got, worst.exact, worst.allowance) == (1.1640625, 1.1015625, ROW)


def test_an_error_of_the_bound_itself_is_within_it():
    for share in (1.0, -1.0):
        found = with_error(
            (0, 1, 3, 7), share, generic=False, arithmetic=default_arithmetic(DTYPES["fp32"])
        )
        assert summary(found) == ("warn", "improbable")


def test_the_worst_element_has_its_tile():
    found = with_error((0, 1, 21, 7), 2.0, tiles=(8, 16))
    assert found.worst is not None
    assert found.worst.tile == "query tile 2, rows 16–23"
    assert found.worst.at == Place(batch=0, head=1, query=21, dim=7)


def test_a_row_without_a_finite_allowance_is_not_asked_and_is_counted():
    asked = call()
    asked["allowance"].out[0, 0, 3] = asked["allowance"].lse[0, 0, 3] = math.inf
    asked["out"][0, 0, 3] = 1e9
    asked["lse"][0, 0, 3] = 1e9
    found = decide(**asked)
    assert summary(found) == ("pass", "")
    assert found.rows_unbounded == 1
    assert found.out_over_bound == 1 / 32


@pytest.mark.parametrize("exact", [math.nan, math.inf])
def test_where_the_exact_result_is_not_finite_nothing_is_asked(exact):
    asked = call()
    asked["truth"].out[0, 0, 3] = asked["out"][0, 0, 3] = exact
    asked["truth"].lse[0, 0, 3] = asked["lse"][0, 0, 3] = exact
    found = decide(**asked)
    assert summary(found) == ("pass", "")
    assert found.rows_unbounded == 1


def test_nan_in_a_row_without_a_finite_allowance_is_odd():
    asked = call()
    asked["allowance"].out[0, 0, 3] = math.inf
    asked["out"][0, 0, 3] = math.nan
    assert summary(decide(**asked)) == ("warn", "finite")


def test_an_allowance_that_is_nan_never_passes():
    asked = call()
    asked["allowance"].out[0, 0, 3, 1] = math.nan
    assert summary(decide(**asked)) == ("fail", "bound")


def test_an_alive_element_without_an_allowance_must_be_exact():
    asked = call()
    asked["allowance"].out[0, 0, 3, 1] = 0.0
    assert summary(decide(**asked)) == ("fail", "bound")
    asked["out"][0, 0, 3, 1] = asked["truth"].out[0, 0, 3, 1]
    assert decide(**asked).status == "pass"


# 3. and 4. the probabilistic bound


def test_an_improbable_error_fails_on_generic_inputs():
    found = with_error((0, 1, 3, 7), 0.5)
    assert summary(found) == ("fail", "improbable")
    assert found.reason == (
        "out[0, 1, 3, 7] = 1.1094, but should be 1.1016 ± 0.0039 "
        "(2 × the probabilistic bound, p < 1e-6); 1 of 2016 sampled elements is beyond it"
    )
    assert found.out_over_probable == 2.0
    assert found.out_over_bound == 0.5


def test_and_is_odd_on_structured_ones():
    found = with_error((0, 1, 3, 7), 0.5, generic=False)
    assert summary(found) == ("warn", "improbable")
    assert found.reason.endswith("; inputs have structure")


def test_rows_without_a_finite_probabilistic_bound_are_not_asked_for_one():
    asked = call()
    asked["allowance"].samples[0].probable_out[0] = math.inf
    asked["out"][0, 0, 1, 1] = asked["truth"].out[0, 0, 1, 1] + 0.5 * ROW
    assert decide(**asked).out_over_probable == 1 / 8
    asked["out"][0, 1, 1, 1] = asked["truth"].out[0, 1, 1, 1] + 0.5 * ROW
    assert "; 1 of 992 sampled elements is beyond it" in decide(**asked).reason
    asked["allowance"].samples[0].probable_out[1] = math.inf
    assert decide(**asked).out_over_probable is None


def test_places_of_sampled_rows_are_those_of_the_problem():
    asked = call()
    sample = asked["allowance"].samples[0]
    part = Rows(range(1, 2), torch.tensor([3, 9]))
    asked["allowance"] = replace(
        asked["allowance"],
        samples=[
            Sample(
                rows=part,
                probable_out=sample.probable_out[1:, part.query],
                probable_lse=sample.probable_lse[1:, part.query],
                sd_out=sample.sd_out[1:, part.query],
                sd_lse=sample.sd_lse[1:, part.query],
            )
        ],
    )
    asked["out"][0, 0, 9, 4] += 0.5 * ROW  # not sampled
    asked["out"][0, 1, 9, 4] += 0.5 * ROW
    found = decide(**asked)
    assert summary(found) == ("fail", "improbable")
    assert found.reason.startswith("out[0, 1, 9, 4] = ")
    assert found.rows_sampled == 2
    assert found.precision is not None
    assert found.precision.z is None  # 64 outputs of one head are too few


# inconclusive


def test_an_exact_result_that_is_not_proven_decides_nothing():
    asked = call()
    asked["allowance"] = replace(asked["allowance"], oracle_share=0.02)
    found = decide(**asked)
    assert found.status == "inconclusive"
    assert found.reason == (
        "the exact result is proven to 0.02 of the least allowance, but should be to 0.01"
    )


@pytest.mark.parametrize(("share", "status"), [(1.01, "inconclusive"), (1.03, "fail")])
def test_only_what_exceeds_both_errors_is_beyond_the_bound(share, status):
    asked = call()
    asked["allowance"] = replace(asked["allowance"], oracle_share=0.02)
    asked["out"][0, 0, 0, 0] = asked["truth"].out[0, 0, 0, 0] + share * ROW
    assert summary(decide(**asked)) == (status, "bound")


def test_a_proof_that_is_nan_is_none():
    asked = call()
    asked["allowance"] = replace(asked["allowance"], oracle_share=math.nan)
    assert decide(**asked).status == "inconclusive"
    asked["out"][0, 0, 0, 0] += 9 * ROW
    assert decide(**asked).status == "inconclusive"


def test_no_row_with_a_finite_allowance_decides_nothing():
    asked = call()
    asked["allowance"].out.fill_(math.inf)
    asked["allowance"] = replace(asked["allowance"], jumps=7)
    found = decide(**asked)
    assert found.status == "inconclusive"
    assert found.reason == (
        "no row has a finite allowance (7 scores lie at a jump of their mod): "
        "at these inputs a right kernel may give anything"
    )
    assert found.rows_unbounded == found.rows == 63
    assert found.out_over_bound is None


def test_a_problem_of_empty_rows_alone_passes_by_being_exact():
    asked = call()
    asked["alive"].fill_(False)
    asked["truth"] = Outputs(
        out=torch.zeros_like(asked["truth"].out), lse=torch.full_like(asked["lse"], -math.inf)
    )
    asked |= {"out": asked["truth"].out.clone(), "lse": asked["truth"].lse.clone()}
    found = decide(**asked)
    assert (found.status, found.worst, found.rows) == ("pass", None, 0)
    asked["out"][0, 0, 0, 0] = 1.0
    assert summary(decide(**asked)) == ("fail", "empty rows")


# What else is told


def test_a_tighter_profile_that_lse_satisfies_is_named():
    asked = call()
    others = {
        "16-bit": torch.full_like(asked["lse"], LSE_ROW / 64),
        "fp32": torch.full_like(asked["lse"], LSE_ROW / 16),
    }
    del asked["ensemble"]
    assert first_tighter_profile(kernel_result(**asked), others) == "fp32"
    asked["lse"][0, 0, 0] += LSE_ROW / 8
    assert first_tighter_profile(kernel_result(**asked), others) == ""
    asked["lse"][0, 0, 0] = math.nan
    assert first_tighter_profile(kernel_result(**asked), others) == ""


def test_shapes_that_do_not_fit_are_a_mistake_of_the_caller():
    asked = call()
    asked["out"] = asked["out"][..., :-1]
    with pytest.raises(ValueError, match=r"out\.shape=\(1, 2, 32, 31\), but should be"):
        decide(**asked)
