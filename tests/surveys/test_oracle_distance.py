"""Distances of oracles from 60-digit results that a plain loop computes here."""

import itertools
import math
import sys

import mpmath
import numpy as np
import pytest
import torch

from attncheck import oracles
from attncheck.core.outputs import Outputs
from attncheck.inputs import input_tensors
from attncheck.inputs.problem import Case, Problem
from attncheck.oracles.recurrence_steps import Result
from attncheck.surveys.oracle_survey import agreement, distances

MP = mpmath.MPContext()
MP.dps = 60
CASE = Case(problem=Problem(heads=2, kv_heads=1, query=3, kv=4, head_dim=5, value_dim=2))
UNIT = 2.0**-53


PROMISED = 1e-13 / UNIT  # the manual's promise for ordinary inputs


def exact_result(case):
    """Exact out, LSE and Σ p|v| of a Problem without a mask."""
    problem, inputs = case.problem, input_tensors.draw_inputs(case.problem)
    q, k, v = (tensor[0].tolist() for tensor in inputs.promoted())
    out = np.empty((1, problem.heads, problem.query, problem.value_dim), dtype=object)
    spread, lse = out.copy(), out[..., 0].copy()
    for h, i in np.ndindex(problem.heads, problem.query):
        keys, values = k[h // problem.group], v[h // problem.group]
        weights = [MP.exp(MP.fdot(q[h][i], key) * problem.scale) for key in keys]
        total = MP.fsum(weights)
        lse[0, h, i] = MP.log(total)
        for d in range(problem.value_dim):
            column = [MP.mpf(value[d]) for value in values]
            out[0, h, i, d] = MP.fdot(weights, column) / total
            spread[0, h, i, d] = MP.fdot(weights, map(abs, column)) / total
    return Result(out, lse[..., None]), spread


EXACT, SPREAD = exact_result(CASE)


def measure(change):
    """The Record of dense attention with ``change`` applied to its out and LSE."""

    dense = oracles.dense(input_tensors.draw_inputs(CASE.problem))
    outputs = {"changed": Outputs(*change(dense.out, dense.lse))}
    (record,) = distances(CASE, "full", outputs, EXACT, SPREAD)
    return record


def test_dense_attention_is_a_few_units_away():
    record = measure(lambda out, lse: (out, lse))
    assert 0 < record.out.units < PROMISED
    assert record.lse.units < PROMISED
    assert (record.out.compared, record.lse.compared, record.rows.total) == (12, 6, 6)
    assert record.rows.nonfinite == record.out.nonfinite == record.lse.nonfinite == 0


def test_error_of_a_billionth_is_measured_and_located():
    def change(out, lse):
        out[0, 1, 2, 0] += 1e-9
        lse[0, 1, 0] -= 1e-9
        return out, lse

    record, unchanged = measure(change), measure(lambda out, lse: (out, lse))
    units = 1e-9 / float(SPREAD[0, 1, 2, 0]) / UNIT
    # The error from before may add or subtract, and the sum is rounded once.
    assert abs(record.out.units - units) <= unchanged.out.units + 1
    at = record.out.at
    assert (at.batch, at.head, at.query, at.dim) == (0, 1, 2, 0)
    size = max(1.0, abs(float(EXACT.lse[0, 1, 0, 0])))
    assert abs(record.lse.units - 1e-9 / size / UNIT) <= unchanged.lse.units + 1
    assert (record.lse.at.query, record.lse.at.dim) == (0, -1)


def test_difference_is_taken_before_rounding():
    """The nearest float64 numbers are not exact: their error is below one unit, but not 0."""
    out = torch.tensor(EXACT.out.astype(np.float64))
    lse = torch.tensor(EXACT.lse[..., 0].astype(np.float64))
    record = measure(lambda _out, _lse: (out, lse))
    errors = [
        abs(MP.mpf(float(got)) - exact) / size / UNIT
        for got, exact, size in zip(out.flatten(), EXACT.out.flat, SPREAD.flat, strict=True)
    ]
    assert record.out.units == float(max(errors))
    assert 0 < record.out.units <= 1


@pytest.mark.parametrize(
    ("lse_value", "out_value", "counts"),
    [
        (math.inf, math.nan, (1, 1, 0)),
        (math.inf, 0.0, (1, 1, 0)),
        (-math.inf, math.nan, (1, 0, 1)),
        (0.5, math.inf, (1, 1, 0)),
        (0.5, math.nan, (1, 0, 0)),
        (math.nan, 0.0, (1, 0, 0)),
    ],
)
def test_nonfinite_rows_are_counted_by_kind(lse_value, out_value, counts):
    def change(out, lse):
        out[0, 0, 1, 1], lse[0, 0, 1] = out_value, lse_value
        return out, lse

    record = measure(change)
    rows = record.rows
    assert (rows.nonfinite, rows.overflowed, rows.vanished) == counts
    assert record.out.nonfinite == (not math.isfinite(out_value))
    assert record.lse.nonfinite == (not math.isfinite(lse_value))
    assert record.out.compared + record.out.nonfinite == 12


def test_distance_beyond_the_largest_float_is_the_largest_float():
    """JSON has no ∞: such a distance would be read back as nothing compared."""
    spread = SPREAD * MP.mpf(10) ** -400
    outputs = {"wrong": Outputs(torch.ones(1, 2, 3, 2), torch.ones(1, 2, 3))}
    (record,) = distances(CASE, "full", outputs, EXACT, spread)
    assert record.out.units == sys.float_info.max
    assert (record.out.compared, record.out.nonfinite) == (12, 0)


def test_out_without_finite_elements_has_no_distance():
    record = measure(lambda out, lse: (out * math.nan, lse))
    assert (record.out.units, record.out.at, record.out.compared) == (None, None, 0)
    assert record.out.nonfinite == 12


def test_row_without_keys_must_be_zero_and_minus_infinity():
    lse = EXACT.lse.copy()
    lse[0, 0, 0] = MP.ninf
    exact = Result(EXACT.out, lse)
    outputs = oracles.dense(input_tensors.draw_inputs(CASE.problem))
    (record,) = distances(CASE, "full", {"dense": outputs}, exact, SPREAD)
    assert (record.rows.total, record.rows.dead_wrong) == (5, 1)
    assert record.lse.compared == 5
    assert record.out.compared == 10

    outputs.out[0, 0, 0] = 0.0
    outputs.lse[0, 0, 0] = -math.inf
    (record,) = distances(CASE, "full", {"right": outputs}, exact, SPREAD)
    assert record.rows.dead_wrong == 0


def exact_with(part, at, value):
    """The exact result and Σ p|v| with one number replaced."""
    parts = {"out": EXACT.out.copy(), "lse": EXACT.lse.copy(), "spread": SPREAD.copy()}
    parts[part][at] = value
    return Result(parts["out"], parts["lse"]), parts["spread"]


@pytest.mark.parametrize(
    ("part", "value"),
    [
        *itertools.product(["out", "spread"], [MP.nan, MP.inf, MP.ninf]),
        *itertools.product(["lse"], [MP.nan, MP.inf]),  # −∞: a row that sees no key
    ],
    ids=str,
)
def test_nonfinite_exact_elements_are_counted(part, value):
    exact, spread = exact_with(part, (0, 1, 2, 0), value)
    outputs = {"dense": oracles.dense(input_tensors.draw_inputs(CASE.problem))}
    (record,) = distances(CASE, "full", outputs, exact, spread)
    assert (record.rows.total, record.rows.nonfinite) == (6, 1)
    assert record.out.nonfinite == (part != "lse")
    assert record.lse.nonfinite == (part == "lse")
    assert record.out.compared + record.out.nonfinite == 12
    assert record.lse.compared + record.lse.nonfinite == 6
    assert 0 < record.out.units < PROMISED


def test_exact_result_without_finite_elements_has_no_distance():
    nothing = Result(EXACT.out * MP.nan, EXACT.lse * MP.nan)
    outputs = {"dense": oracles.dense(input_tensors.draw_inputs(CASE.problem))}
    (record,) = distances(CASE, "full", outputs, nothing, SPREAD * MP.nan)
    assert (record.out.units, record.out.at, record.out.compared) == (None, None, 0)
    assert (record.out.nonfinite, record.lse.nonfinite, record.rows.nonfinite) == (12, 6, 6)


@pytest.mark.parametrize("exponent", [-45, -400])
def test_agreement_is_measured_by_its_exponent(exponent):
    """This includes exponents far below the smallest float."""
    context = mpmath.MPContext()
    context.dps = 500
    out = np.vectorize(context.mpf)(EXACT.out)
    shifted = out.copy()
    shifted[0, 1, 1, 1] += context.mpf(10) ** exponent * context.mpf(SPREAD[0, 1, 1, 1])
    same, other = Result(out, EXACT.lse), Result(shifted, EXACT.lse)
    result = agreement(CASE, "full", {"naive": same, "online": other}, same, SPREAD)
    assert abs(result.log10 - exponent) <= math.ulp(exponent)
    assert result.oracles == ("naive", "online")
    assert (result.infinite, result.furthest) == (0, "online")
    assert result.holds(-exponent - 1)
    assert not result.holds(-exponent + 1)
    equal = agreement(CASE, "full", {"naive": same}, same, SPREAD)
    assert (equal.log10, equal.infinite, equal.furthest) == (None, 0, None)
    assert equal.holds(500)


def test_agreement_includes_lse():
    lse = EXACT.lse.copy()
    lse[0, 0, 0] += MP.mpf(10) ** -30 * max(1, abs(lse[0, 0, 0, 0]))
    result = agreement(CASE, "full", {"online": Result(EXACT.out, lse)}, EXACT, SPREAD)
    assert abs(result.log10 + 30) <= math.ulp(30)


LAST = (0, 1, 2, -1)


@pytest.mark.parametrize("at", [(0, 0, 0, 0), LAST], ids=["first", "last"])
@pytest.mark.parametrize("value", [MP.nan, MP.inf, MP.ninf], ids=str)
@pytest.mark.parametrize("part", ["out", "lse"])
def test_nonfinite_elements_are_infinitely_far(part, value, at):
    """On either side, wherever the element is, and beside numbers that are a rounding away."""
    near = Result(EXACT.out * (1 + MP.mpf(10) ** -55), EXACT.lse)
    fault, _ = exact_with(part, at, value)
    for others, exact, furthest in (
        ({"online": near, "flash2": fault, "flash1": EXACT}, EXACT, "flash2"),
        ({"online": near, "flash2": EXACT}, fault, "online"),
    ):
        result = agreement(CASE, "full", others, exact, SPREAD)
        assert result.infinite == (1 if exact is EXACT else 2)
        assert result.furthest == furthest
        assert result.log10 < -50 or exact is not EXACT  # a rounding in 50 digits
        assert not result.holds(0)


def test_nan_on_both_sides_does_not_agree():
    fault, _ = exact_with("out", LAST, MP.nan)
    assert agreement(CASE, "full", {"flash2": fault}, fault, SPREAD).infinite == 1


def test_agreement_compares_rows_without_keys():
    """Exact out and spread are 0 and LSE is −∞; the same values are no difference."""
    out, lse, spread = EXACT.out.copy(), EXACT.lse.copy(), SPREAD.copy()
    out[0, 0, 1], lse[0, 0, 1], spread[0, 0, 1] = MP.zero, MP.ninf, MP.zero
    dead = Result(out, lse)
    assert agreement(CASE, "full", {"flash2": dead}, dead, spread).holds(1000)

    alive = Result(out, lse.copy())
    alive.lse[0, 0, 1] = MP.mpf("0.5")
    result = agreement(CASE, "full", {"flash2": alive}, dead, spread)
    assert (result.log10, result.infinite, result.furthest) == (None, 1, "flash2")
    assert agreement(CASE, "full", {"flash2": dead}, alive, spread).infinite == 1

    wrong = Result(out.copy(), lse)
    wrong.out[0, 0, 1, 0] = MP.mpf(10) ** -100
    result = agreement(CASE, "full", {"flash2": wrong}, dead, spread)
    assert (result.log10, result.infinite) == (None, 1)
    assert not result.holds(0)


def test_distance_relative_to_an_infinite_spread_is_infinite():
    _, spread = exact_with("spread", LAST, MP.inf)
    other, _ = exact_with("out", LAST, MP.mpf(7))
    assert agreement(CASE, "full", {"flash2": other}, EXACT, spread).infinite == 1
