"""Each rule of the verdict on hand-made tensors: where it fails and where it must not."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.judge import verdicts

from attncheck.core.conditions import Rows
from attncheck.core.declared_arithmetic import default_arithmetic
from attncheck.core.formats import DTYPES
from attncheck.core.judgement import Judgement, Place
from attncheck.core.outputs import Outputs
from attncheck.judge.allowance import Allowance, Sample
from attncheck.judge.verdict import first_tighter_profile
from attncheck.judge.verdict_rules import number

decide = verdicts.decide
kernel_result = verdicts.kernel_result

BATCH, HEADS, QUERY, DIM = 1, 2, 32, 32  # 1,024 outputs a head
ROW, LSE_ROW = 2.0**-6, 2.0**-10  # deterministic; the probabilistic bound is a quarter of it
SIGN = torch.where(torch.arange(QUERY * DIM).view(QUERY, DIM) % 2 == 0, 1.0, -1.0).double()
DEAD = (0, 1, 31)  # the last row of head 1 sees no key


def arguments_for(**changes: Any) -> dict[str, Any]:
    """Arguments of ``decide`` for a kernel whose errors are 1/32 of the bound, as predicted."""
    alive = torch.ones(BATCH, HEADS, QUERY, dtype=torch.bool)
    alive[DEAD] = False
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
    return plain | changes


def judge_with_error(at: tuple[int, ...], share: float, **changes: Any) -> Judgement:
    """The verdict where one element of out, or of LSE, is off by this share of its bound."""
    arguments = arguments_for(**changes)
    name, unit = ("out", ROW) if len(at) == 4 else ("lse", LSE_ROW)
    arguments[name][at] = getattr(arguments["truth"], name)[at] + share * unit
    return decide(**arguments)


def summary(judgement: Judgement) -> tuple[str, str]:
    return judgement.status, judgement.rule


def test_right_kernel_passes_with_every_measure_filled_in():
    judgement = decide(**arguments_for())
    assert summary(judgement) == ("pass", "")
    assert (judgement.reason, judgement.warnings) == ("", ())
    assert judgement.out_over_bound == judgement.lse_over_bound == 1 / 32
    assert judgement.out_over_probable == judgement.lse_over_probable == 1 / 8
    assert (judgement.rows, judgement.rows_sampled, judgement.rows_unbounded) == (63, 63, 0)
    assert judgement.precision is not None
    assert judgement.precision.z == 1.0
    assert judgement.precision.residual is None  # no tiling was declared
    assert judgement.arithmetic == str(default_arithmetic(DTYPES["bf16"]))
    without = decide(**arguments_for(lse=None))
    assert (without.status, without.lse_over_bound, without.lse_over_probable) == (
        "pass",
        None,
        None,
    )


@pytest.mark.parametrize(
    ("tensor", "at", "value", "rule", "reason"),
    [
        ("out", (0, 1, 3, 7), math.nan, "finite", "1 of 2016 elements are NaN or infinite"),
        ("out", (0, 1, 3, 7), math.inf, "finite", "out[0, 1, 3, 7] = inf, but should be "),
        ("out", (0, 1, 3, 7), -math.inf, "finite", "out[0, 1, 3, 7] = -inf, but should be "),
        ("lse", (0, 0, 4), -math.inf, "finite", "lse[0, 0, 4] = -inf"),
        ("lse", (0, 0, 4), math.nan, "finite", "lse[0, 0, 4] = nan"),
        ("lse", (0, 0, 4), math.inf, "finite", "lse[0, 0, 4] = inf"),
        ("out", (*DEAD, 2), math.nan, "empty rows", "but should be 0; 1 of 32 elements of rows"),
        ("out", (*DEAD, 2), 2.0**-149, "empty rows", "out[0, 1, 31, 2] = "),
        ("out", (*DEAD, 2), math.inf, "empty rows", "out[0, 1, 31, 2] = inf"),
        ("out", (*DEAD, 2), -1.0, "empty rows", "out[0, 1, 31, 2] = -1"),
        ("lse", DEAD, math.nan, "empty rows", "but should be -inf; 1 of 1 elements"),
        ("lse", DEAD, math.inf, "empty rows", "but should be -inf"),
        ("lse", DEAD, -1e30, "empty rows", "but should be -inf"),
        ("lse", DEAD, 0.0, "empty rows", "but should be -inf"),
    ],
)
def test_nonfinite_elements_and_inexact_empty_rows_fail(tensor, at, value, rule, reason):
    arguments = arguments_for()
    arguments[tensor][at] = value
    judgement = decide(**arguments)
    assert summary(judgement) == ("fail", rule)
    assert reason in judgement.reason
    assert (judgement.worst.tensor, judgement.worst.at) == (tensor, Place.of(at))
    if rule == "empty rows":
        assert (judgement.worst.allowance, judgement.worst.budget) == (0.0, {})
    if rule == "finite":
        assert math.inf in (judgement.out_over_bound, judgement.lse_over_bound)
        # It fails even where the exact result is unproven.
        arguments["allowance"] = replace(arguments["allowance"], oracle_share=0.02)
        assert summary(decide(**arguments)) == ("fail", rule)


def test_minus_zero_in_an_empty_row_passes():
    arguments = arguments_for()
    arguments["out"][*DEAD, 2] = -0.0
    assert decide(**arguments).status == "pass"


def test_first_failing_rule_names_the_verdict_and_others_are_warnings():
    arguments = arguments_for(structure="a probe's finding")
    arguments["out"][0, 0, 0, 0] = math.nan
    arguments["out"][*DEAD, 0] = 1.0
    arguments["lse"][0, 0, 2] += 0.5 * LSE_ROW
    judgement = decide(**arguments)
    assert summary(judgement) == ("fail", "finite")
    assert [text.split(" = ")[0] for text in judgement.warnings] == [
        "out[0, 1, 31, 0]",
        "a probe's finding",
        "lse[0, 0, 2]",
    ]
    alone = decide(**arguments_for(structure="a probe's finding"))
    assert (*summary(alone), alone.reason) == ("fail", "structure", "a probe's finding")


def test_bound_failure_adds_no_warnings_that_it_implies():
    """Beyond the bound is beyond the probabilistic one, and imprecise too."""
    judgement = judge_with_error((0, 1, 3, 7), 40.0)
    assert judgement.warnings == ()
    assert judgement.out_over_probable == 160.0
    assert judgement.precision.spread > 1.3


def test_worst_element_is_the_one_named_in_the_reason():
    arguments = arguments_for(tiles=(20, 16))
    arguments["out"][0, 0, 30, 2] = arguments["truth"].out[0, 0, 30, 2] + 2 * ROW
    arguments["lse"][0, 0, 16] = arguments["truth"].lse[0, 0, 16] - 50 * LSE_ROW
    judgement = decide(**arguments)
    assert judgement.reason.startswith("out[0, 0, 30, 2] = ")
    worst = judgement.worst
    assert (worst.tensor, worst.at) == ("out", Place(batch=0, head=0, query=30, dim=2))
    assert worst.tile == "query tile 1, rows 20–31"  # the last tile ends with the rows
    assert (judgement.out_over_bound, judgement.lse_over_bound) == (2.0, 50.0)
    assert [text.split(" = ")[0] for text in judgement.warnings] == ["lse[0, 0, 16]"]


@pytest.mark.parametrize(
    ("at", "share", "changes", "status", "rule", "reason"),
    [
        (
            (0, 1, 3, 7),
            4.0,
            {},
            "fail",
            "bound",
            (
                "out[0, 1, 3, 7] = 1.164, but should be 1.102 ± 0.016 (4.0 × the bound); "
                "1 of 2016 elements is beyond it"
            ),
        ),
        ((0, 0, 16), -3.0, {}, "fail", "bound", "lse[0, 0, 16] = 1.99707, but should be 2.00000 ±"),
        # An error of the bound itself is within it.
        ((0, 1, 3, 7), 1.0, {"generic": False, "dtype": "fp32"}, "warn", "improbable", ""),
        ((0, 1, 3, 7), -1.0, {"generic": False, "dtype": "fp32"}, "warn", "improbable", ""),
        (
            (0, 1, 3, 7),
            0.5,
            {},
            "fail",
            "improbable",
            (
                "out[0, 1, 3, 7] = 1.1094, but should be 1.1016 ± 0.0039 "
                "(2.0 × the probabilistic bound, p < 1e-6); 1 of 2016 sampled elements is beyond it"
            ),
        ),
        ((0, 1, 3, 7), 0.5, {"generic": False}, "warn", "improbable", "; inputs have structure"),
        ((0, 1, 3), 0.5, {}, "fail", "improbable", "of 63 sampled rows is beyond it"),
        # Only what exceeds both errors, the kernel's and the oracle's, is beyond the bound.
        ((0, 0, 0, 0), 1.01, {"oracle_share": 0.02}, "inconclusive", "bound", "by less than"),
        ((0, 0, 0, 0), 1.03, {"oracle_share": 0.02}, "fail", "bound", ""),
        (
            (0, 0, 0, 0),
            0.0,
            {"oracle_share": 0.02},
            "inconclusive",
            "",
            "the exact result is proven to 0.02 of the least allowance, but should be to 0.01",
        ),
        # A share of NaN proves nothing.
        ((0, 0, 0, 0), 0.0, {"oracle_share": math.nan}, "inconclusive", "", "proven to nan"),
        ((0, 0, 0, 0), 9.0, {"oracle_share": math.nan}, "inconclusive", "bound", "by less than"),
    ],
)
def test_error_at_one_element_gets_its_rule_and_reason(at, share, changes, status, rule, reason):
    changes = dict(changes)
    if "dtype" in changes:
        changes["arithmetic"] = default_arithmetic(DTYPES[changes.pop("dtype")])
    if "oracle_share" in changes:
        changes["allowance"] = replace(arguments_for()["allowance"], **changes)
        del changes["oracle_share"]
    judgement = judge_with_error(at, share, **changes)
    assert summary(judgement) == (status, rule)
    assert reason in judgement.reason
    over = judgement.out_over_bound if len(at) == 4 else judgement.lse_over_bound
    assert over == max(abs(share), 1 / 32)
    probable = judgement.out_over_probable if len(at) == 4 else judgement.lse_over_probable
    assert probable == 4 * over
    if rule == "bound" and status == "fail":
        worst, bound = judgement.worst, ROW if len(at) == 4 else LSE_ROW
        exact = getattr(arguments_for()["truth"], worst.tensor)[at].item()
        assert (worst.at, worst.exact, worst.allowance) == (Place.of(at), exact, bound)
        assert worst.got == exact + share * bound


def test_row_without_a_finite_allowance_is_counted_but_not_judged():
    arguments = arguments_for()
    arguments["allowance"].out[0, 0, 3] = arguments["allowance"].lse[0, 0, 3] = math.inf
    arguments["out"][0, 0, 3] = arguments["lse"][0, 0, 3] = 1e9
    judgement = decide(**arguments)
    assert (*summary(judgement), judgement.rows_unbounded) == ("pass", "", 1)
    assert judgement.out_over_bound == 1 / 32
    arguments["out"][0, 0, 3] = math.nan  # a right kernel may overflow there
    assert summary(decide(**arguments)) == ("warn", "finite")


@pytest.mark.parametrize("exact", [math.nan, math.inf])
def test_row_with_a_nonfinite_exact_result_is_not_judged(exact):
    arguments = arguments_for()
    arguments["truth"].out[0, 0, 3] = arguments["out"][0, 0, 3] = exact
    arguments["truth"].lse[0, 0, 3] = arguments["lse"][0, 0, 3] = exact
    judgement = decide(**arguments)
    assert (*summary(judgement), judgement.rows_unbounded) == ("pass", "", 1)


def test_element_with_a_zero_or_nan_allowance_must_be_exact():
    arguments = arguments_for()
    for allowed in (math.nan, 0.0):
        arguments["allowance"].out[0, 0, 3, 1] = allowed
        assert summary(decide(**arguments)) == ("fail", "bound")
    arguments["out"][0, 0, 3, 1] = arguments["truth"].out[0, 0, 3, 1]
    assert decide(**arguments).status == "pass"


def test_rows_without_a_finite_probabilistic_bound_are_skipped_by_its_rule():
    arguments = arguments_for()
    arguments["allowance"].samples[0].probable_out[0] = math.inf
    arguments["out"][0, 0, 1, 1] = arguments["truth"].out[0, 0, 1, 1] + 0.5 * ROW
    assert decide(**arguments).out_over_probable == 1 / 8
    arguments["out"][0, 1, 1, 1] = arguments["truth"].out[0, 1, 1, 1] + 0.5 * ROW
    assert "; 1 of 992 sampled elements is beyond it" in decide(**arguments).reason
    arguments["allowance"].samples[0].probable_out[1] = math.inf
    assert decide(**arguments).out_over_probable is None


def test_elements_of_sampled_rows_are_named_by_their_place_in_the_problem():
    arguments = arguments_for()
    sample, part = arguments["allowance"].samples[0], Rows(range(1, 2), torch.tensor([3, 9]))
    tensors = ("probable_out", "probable_lse", "sd_out", "sd_lse")
    some = {name: getattr(sample, name)[1:, part.query] for name in tensors}
    arguments["allowance"] = replace(arguments["allowance"], samples=[Sample(rows=part, **some)])
    arguments["out"][0, 0, 9, 4] += 0.5 * ROW  # not sampled
    arguments["out"][0, 1, 9, 4] += 0.5 * ROW
    judgement = decide(**arguments)
    assert summary(judgement) == ("fail", "improbable")
    assert judgement.reason.startswith("out[0, 1, 9, 4] = ")
    assert judgement.rows_sampled == 2
    assert judgement.precision.z is None  # 64 outputs of one head are too few


def test_verdict_is_inconclusive_where_no_row_has_a_finite_allowance():
    arguments = arguments_for()
    arguments["allowance"].out.fill_(math.inf)
    arguments["allowance"] = replace(arguments["allowance"], jumps=7)
    judgement = decide(**arguments)
    assert judgement.status == "inconclusive"
    assert judgement.reason == (
        "no row has a finite allowance (7 scores lie at a jump of their mod): "
        "at these inputs a right kernel may give anything"
    )
    assert judgement.rows_unbounded == judgement.rows == 63
    assert judgement.out_over_bound is None


def test_problem_of_empty_rows_alone_must_be_exact():
    arguments = arguments_for()
    arguments["alive"].fill_(False)
    empty = Outputs(
        torch.zeros_like(arguments["out"]), torch.full_like(arguments["lse"], -math.inf)
    )
    arguments |= {"truth": empty, "out": empty.out.clone(), "lse": empty.lse.clone()}
    judgement = decide(**arguments)
    assert (judgement.status, judgement.worst, judgement.rows) == ("pass", None, 0)
    arguments["out"][0, 0, 0, 0] = 1.0
    assert summary(decide(**arguments)) == ("fail", "empty rows")


def test_first_tighter_profile_names_the_one_that_lse_satisfies():
    arguments = arguments_for()
    others = {
        "16-bit": torch.full_like(arguments["lse"], LSE_ROW / 64),
        "fp32": torch.full_like(arguments["lse"], LSE_ROW / 16),
    }
    del arguments["ensemble"]
    assert first_tighter_profile(kernel_result(**arguments), others) == "fp32"
    for error in (LSE_ROW / 8, math.nan):
        arguments["lse"][0, 0, 0] += error
        assert first_tighter_profile(kernel_result(**arguments), others) == ""


def test_decide_rejects_outputs_of_another_shape():
    arguments = arguments_for()
    arguments["out"] = arguments["out"][..., :-1]
    with pytest.raises(ValueError, match=r"out\.shape=\(1, 2, 32, 31\), but should be"):
        decide(**arguments)


@pytest.mark.parametrize(
    ("value", "within", "text"),
    [
        (1.03125, 1e-3, "1.0312"),
        (0.5, 0.0, "0.5"),
        (3.0e36, 1e-3, "3.0e+36"),
        (-3.0e36, 1e33, "-3.0000e+36"),
        (1.0e9, 1e-3, "1000000000.0000"),
    ],
)
def test_number_shows_the_digits_that_its_allowance_resolves(value, within, text):
    assert number(value, within) == text
