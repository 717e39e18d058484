"""The exact rule, ``check_tied_keys``: errors that it must find, and rounding that is none."""

import functools
import math

import pytest
import torch

from attncheck import probes
from attncheck.core.formats import FORMATS, round_to
from attncheck.core.outputs import Outputs
from attncheck.inputs.problem import Problem
from attncheck.probes.margins import WeightErrors


def full_mask(kv):
    return lambda rows: torch.ones(1, 1, len(rows), kv, dtype=torch.bool)


def weighted_outputs(inputs, counts, *, lse=True):
    """Out and LSE of a kernel that counts each key ``counts`` times, rounded once to its format."""
    problem = inputs.problem
    v = inputs.promoted()[2].repeat_interleave(problem.group, dim=1)
    n = counts.sum()
    out = (counts.double() @ v / n)[:, :, None].expand(-1, -1, problem.query, -1)
    rounded = round_to(out, problem.formats.output).to(problem.formats.output.torch_dtype)
    shape = (problem.batch, problem.heads, problem.query)
    return Outputs(rounded, torch.full(shape, math.log(n)) if lse else None)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "e4m3"])
@pytest.mark.parametrize(("kv", "value_dim"), [(2, 4), (7, 8), (20, 5)])
@pytest.mark.parametrize("lse", [True, False])
def test_any_missing_or_repeated_key_is_found(kv, value_dim, dtype, lse):
    """At least one round finds it, whichever key it is, with or without LSE."""
    problem = Problem(heads=2, query=1, kv=kv, head_dim=4, value_dim=value_dim, dtype=dtype)
    rounds = [probes.inputs(case) for case in probes.cases("decode", problem)]
    check = probes.check_tied_keys
    for inputs in rounds:
        right = weighted_outputs(inputs, torch.ones(kv), lse=lse)
        assert check(inputs, right, full_mask(kv)) is None
    for key in range(kv):
        for times in (0.0, 2.0):
            counts = torch.ones(kv)
            counts[key] = times
            findings = [
                check(inputs, weighted_outputs(inputs, counts, lse=lse), full_mask(kv))
                for inputs in rounds
            ]
            assert any(findings), (key, times)


@pytest.mark.parametrize("kv", [16, 60])
def test_two_digit_code_names_missing_key(kv):
    problem = Problem(query=1, kv=kv, head_dim=16, dtype="bf16")
    inputs = probes.inputs(probes.case("decode", problem))
    for key in range(kv):
        counts = torch.ones(kv)
        counts[key] = 0
        finding = probes.check_tied_keys(inputs, weighted_outputs(inputs, counts), full_mask(kv))
        assert finding.place == (0, 0, 0, key)
        assert f"key {key} is missing" in finding.message


@pytest.mark.parametrize(
    ("kv", "visible", "used", "message"),
    [
        (60, range(7), range(60), "keys 7–59 are too many"),
        (93, range(93), range(80), "keys 80–92 are missing"),
        (130, range(1), range(130), "keys 1–129 are too many"),
        (60, range(60), [*range(5), *range(6, 60, 2)], "keys 5, 7, 9 and 25 more are missing"),
    ],
)
def test_many_wrong_keys_are_named_without_lse_and_not_as_factor(kv, visible, used, message):
    problem = Problem(query=1, kv=kv, head_dim=64, dtype="bf16")
    inputs = probes.inputs(probes.case("decode", problem))
    counts, mask = torch.zeros(kv), torch.zeros(1, 1, 1, kv, dtype=torch.bool)
    counts[list(used)] = 1
    mask[..., list(visible)] = True
    outputs = weighted_outputs(inputs, counts, lse=False)
    finding = probes.check_tied_keys(inputs, outputs, lambda _: mask)
    assert message in finding.message


@pytest.mark.parametrize("number", [1e-300, 5e-324, 1e300, -1e300, -3.0, math.nan, math.inf])
def test_any_wrong_number_gets_a_message(number):
    problem = Problem(query=1, kv=60, head_dim=64, dtype="fp32")
    inputs = probes.inputs(probes.case("decode", problem))
    right = weighted_outputs(inputs, torch.ones(60), lse=False)
    out = right.out.double()
    out[..., 3] = number
    assert probes.check_tied_keys(inputs, Outputs(out), full_mask(60)).message


@pytest.mark.parametrize("factor", [0.1, 0.25, 3.0])
def test_output_factor_is_reported(factor):
    problem = Problem(query=1, kv=60, head_dim=64, dtype="fp32")
    inputs = probes.inputs(probes.case("decode", problem))
    right = weighted_outputs(inputs, torch.ones(60), lse=False)
    finding = probes.check_tied_keys(inputs, Outputs(right.out * factor), full_mask(60))
    assert f"out is {factor:g} times what it should be" in finding.message


def test_counting_every_key_twice_shows_in_lse_only():
    problem = Problem(query=1, kv=9, dtype="bf16")
    inputs = probes.inputs(probes.case("decode", problem))
    twice = torch.full((9,), 2.0)
    check = probes.check_tied_keys
    assert check(inputs, weighted_outputs(inputs, twice, lse=False), full_mask(9)) is None
    finding = check(inputs, weighted_outputs(inputs, twice), full_mask(9))
    assert finding.tensor == "lse"
    assert finding.message == (
        "batch 0, head 0, row 0: exp(LSE) counts 18 keys where it should have 9 "
        "(lse[0, 0, 0] = 2.8903718, but should be 2.19722458; 1 of 1 rows is wrong)"
    )


def test_kernel_that_divides_weights_first_passes():
    """Softmax rounded to the dtype, times V: no count is off, and means of 2^n keys are exact."""
    for dtype in ("fp16", "bf16", "e4m3", "e5m2"):
        problem = Problem(heads=2, query=6, kv=45, head_dim=16, dtype=dtype)
        for name in probes.PROBES:
            inputs = probes.inputs(probes.case(name, problem))
            q, k, v = inputs.promoted()
            weights = torch.softmax(q @ k.mT * problem.scale, dim=-1)
            scale = problem.formats.weights_scale
            rounded = round_to(weights * scale, problem.formats.weights) / scale
            output = problem.formats.output
            out = round_to(rounded @ v, output).to(output.torch_dtype)
            lse = torch.logsumexp(q @ k.mT * problem.scale, dim=-1).float()
            finding = probes.check_tied_keys(inputs, Outputs(out, lse), full_mask(45))
            assert finding is None, (name, dtype)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_out_or_lse_is_found(bad):
    problem = Problem(query=2, kv=9, dtype="bf16")
    inputs = probes.inputs(probes.case("decode", problem))
    right = weighted_outputs(inputs, torch.ones(9))
    out = right.out.clone()
    out[0, 0, 1, 3] = bad
    finding = probes.check_tied_keys(inputs, Outputs(out, right.lse), full_mask(9))
    assert finding.place[:3] == (0, 0, 1)
    lse = right.lse.clone()
    lse[0, 0, 1] = bad
    finding = probes.check_tied_keys(inputs, Outputs(right.out, lse), full_mask(9))
    assert (finding.tensor, finding.place[:3]) == ("lse", (0, 0, 1))


def test_one_unit_beyond_single_rounding_is_found():
    problem = Problem(query=1, kv=64, dtype="bf16")
    inputs = probes.inputs(probes.case("mean", problem))
    right = weighted_outputs(inputs, torch.ones(64), lse=False)
    check = functools.partial(probes.check_tied_keys, errors=WeightErrors(divides=False))
    assert check(inputs, right, full_mask(64)) is None
    for dim in range(64):
        bits = right.out.clone().view(torch.int16)
        bits[0, 0, 0, dim] += 1
        finding = check(inputs, Outputs(bits.view(torch.bfloat16)), full_mask(64))
        exact = inputs.promoted()[2][0, 0, :, dim].mean()
        up = bits.view(torch.bfloat16)[0, 0, 0, dim].double() - exact
        # The next number up is as near as the right one where the mean lies half way.
        half = FORMATS["bf16"].unit_roundoff * 2.0 ** math.floor(math.log2(exact))
        assert (finding is None) == bool(up <= half)
        assert finding is None or "rounded once" in finding.message
