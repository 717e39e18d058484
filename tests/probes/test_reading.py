"""The exact rule: what it must see by the page's proof, and what rounding must not make it see."""

import functools
import math

import pytest
import torch

from attncheck import probes
from attncheck.core.formats import FORMATS, round_to
from attncheck.core.outputs import Outputs
from attncheck.inputs.problem import Problem
from attncheck.probes.margins import WeightErrors


def all_seen(kv):
    return lambda rows: torch.ones(1, 1, len(rows), kv, dtype=torch.bool)


def given(inputs, used, *, lse=True):
    """Out and LSE of a kernel that uses each key ``used`` times, rounded once to out's format."""
    problem = inputs.problem
    v = inputs.promoted()[2].repeat_interleave(problem.group, dim=1)
    n = used.sum()
    out = (used.double() @ v / n)[:, :, None].expand(-1, -1, problem.query, -1)
    rounded = round_to(out, problem.formats.output).to(problem.formats.output.torch_dtype)
    shape = (problem.batch, problem.heads, problem.query)
    return Outputs(rounded, torch.full(shape, math.log(n)) if lse else None)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "e4m3"])
@pytest.mark.parametrize(("kv", "value_dim"), [(2, 4), (7, 8), (20, 5)])
@pytest.mark.parametrize("lse", [True, False])
def test_any_one_key_left_out_or_there_twice_is_seen(kv, value_dim, dtype, lse):
    """Some round sees it, whichever key; with whole codes even without LSE."""
    problem = Problem(heads=2, query=1, kv=kv, head_dim=4, value_dim=value_dim, dtype=dtype)
    rounds = [probes.inputs(case) for case in probes.cases("decode", problem)]
    read = probes.check_tied_keys
    for inputs in rounds:
        assert read(inputs, given(inputs, torch.ones(kv), lse=lse), all_seen(kv)) is None
    for key in range(kv):
        for times in (0.0, 2.0):
            used = torch.ones(kv)
            used[key] = times
            found = [read(inputs, given(inputs, used, lse=lse), all_seen(kv)) for inputs in rounds]
            assert any(found), (key, times)


@pytest.mark.parametrize("kv", [16, 60])
def test_a_single_key_is_named_by_two_digits(kv):
    problem = Problem(query=1, kv=kv, head_dim=16, dtype="bf16")
    inputs = probes.inputs(probes.case("decode", problem))
    for key in range(kv):
        used = torch.ones(kv)
        used[key] = 0
        found = probes.check_tied_keys(inputs, given(inputs, used), all_seen(kv))
        assert found.place == (0, 0, 0, key)
        assert f"key {key} is missing" in found.message


@pytest.mark.parametrize(
    ("kv", "sees", "uses", "says"),
    [
        (60, range(7), range(60), "keys 7–59 are too many"),
        (93, range(93), range(80), "keys 80–92 are missing"),
        (130, range(1), range(130), "keys 1–129 are too many"),
        (60, range(60), [*range(5), *range(6, 60, 2)], "keys 5, 7, 9 and 25 more are missing"),
    ],
)
def test_many_keys_are_told_without_lse_and_not_as_a_factor(kv, sees, uses, says):
    problem = Problem(query=1, kv=kv, head_dim=64, dtype="bf16")
    inputs = probes.inputs(probes.case("decode", problem))
    used, mask = torch.zeros(kv), torch.zeros(1, 1, 1, kv, dtype=torch.bool)
    used[list(uses)] = 1
    mask[..., list(sees)] = True
    outputs = given(inputs, used, lse=False)
    found = probes.check_tied_keys(inputs, outputs, lambda _: mask)
    assert says in found.message


@pytest.mark.parametrize("number", [1e-300, 5e-324, 1e300, -1e300, -3.0, math.nan, math.inf])
def test_any_number_is_told_in_words(number):
    problem = Problem(query=1, kv=60, head_dim=64, dtype="fp32")
    inputs = probes.inputs(probes.case("decode", problem))
    right = given(inputs, torch.ones(60), lse=False)
    out = right.out.double()
    out[..., 3] = number
    assert probes.check_tied_keys(inputs, Outputs(out), all_seen(60)).message


@pytest.mark.parametrize("factor", [0.1, 0.25, 3.0])
def test_a_factor_is_told_as_one(factor):
    problem = Problem(query=1, kv=60, head_dim=64, dtype="fp32")
    inputs = probes.inputs(probes.case("decode", problem))
    right = given(inputs, torch.ones(60), lse=False)
    found = probes.check_tied_keys(inputs, Outputs(right.out * factor), all_seen(60))
    assert f"out is {factor:g} times what it should be" in found.message


def test_every_key_twice_shows_in_lse_alone():
    problem = Problem(query=1, kv=9, dtype="bf16")
    inputs = probes.inputs(probes.case("decode", problem))
    twice = torch.full((9,), 2.0)
    read = probes.check_tied_keys
    assert read(inputs, given(inputs, twice, lse=False), all_seen(9)) is None
    found = read(inputs, given(inputs, twice), all_seen(9))
    assert found.tensor == "lse"
    assert found.message == (
        "batch 0, head 0, row 0: exp(LSE) counts 18 keys where it should have 9 "
        "(lse[0, 0, 0] = 2.8903718, but should be 2.19722458; 1 of 1 rows is wrong)"
    )


def test_a_kernel_that_divides_weights_first_is_right():
    """Softmax, rounded to the dtype, times V: no count is off, and means of 2^n are exact."""
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
            found = probes.check_tied_keys(inputs, Outputs(out, lse), all_seen(45))
            assert found is None, (name, dtype)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_wrong(bad):
    problem = Problem(query=2, kv=9, dtype="bf16")
    inputs = probes.inputs(probes.case("decode", problem))
    right = given(inputs, torch.ones(9))
    out = right.out.clone()
    out[0, 0, 1, 3] = bad
    found = probes.check_tied_keys(inputs, Outputs(out, right.lse), all_seen(9))
    assert found.place[:3] == (0, 0, 1)
    lse = right.lse.clone()
    lse[0, 0, 1] = bad
    found = probes.check_tied_keys(inputs, Outputs(right.out, lse), all_seen(9))
    assert (found.tensor, found.place[:3]) == ("lse", (0, 0, 1))


def test_one_unit_beyond_a_single_rounding_is_seen():
    problem = Problem(query=1, kv=64, dtype="bf16")
    inputs = probes.inputs(probes.case("mean", problem))
    right = given(inputs, torch.ones(64), lse=False)
    read = functools.partial(probes.check_tied_keys, errors=WeightErrors(divides=False))
    assert read(inputs, right, all_seen(64)) is None
    for dim in range(64):
        bits = right.out.clone().view(torch.int16)
        bits[0, 0, 0, dim] += 1
        found = read(inputs, Outputs(bits.view(torch.bfloat16)), all_seen(64))
        exact = inputs.promoted()[2][0, 0, :, dim].mean()
        up = bits.view(torch.bfloat16)[0, 0, 0, dim].double() - exact
        # The next number up is as near as the right one where the mean lies half way.
        half = FORMATS["bf16"].unit_roundoff * 2.0 ** math.floor(math.log2(exact))
        assert (found is None) == bool(up <= half)
        assert found is None or "rounded once" in found.message
