"""Against numbers of 60 digits that a plain loop computes here."""

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


PROMISED = 1e-13 / UNIT  # what the manual says of ordinary inputs


def by_hand(case):
    """Exact out, LSE and Σ p|v| of a Problem without a mask."""
    problem, drawn = case.problem, input_tensors.draw_inputs(case.problem)
    q, k, v = (tensor[0].tolist() for tensor in drawn.promoted())
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


EXACT, SPREAD = by_hand(CASE)


def measured(change):
    """The Record of dense attention with ``change`` made to its out and LSE."""

    dense = oracles.dense(input_tensors.draw_inputs(CASE.problem))
    given = {"changed": Outputs(*change(dense.out, dense.lse))}
    (record,) = distances(CASE, "full", given, EXACT, SPREAD)
    return record


def test_dense_attention_is_a_few_units_away():
    record = measured(lambda out, lse: (out, lse))
    assert 0 < record.out.units < PROMISED
    assert record.lse.units < PROMISED
    assert (record.out.compared, record.lse.compared, record.rows.total) == (12, 6, 6)
    assert record.rows.nonfinite == record.out.nonfinite == record.lse.nonfinite == 0


def test_an_oracle_that_is_off_by_a_billionth_shows_where():
    def change(out, lse):
        out[0, 1, 2, 0] += 1e-9
        lse[0, 1, 0] -= 1e-9
        return out, lse

    record, unchanged = measured(change), measured(lambda out, lse: (out, lse))
    units = 1e-9 / float(SPREAD[0, 1, 2, 0]) / UNIT
    # What was away before may add or take away, and the sum is rounded once.
    assert abs(record.out.units - units) <= unchanged.out.units + 1
    at = record.out.at
    assert (at.batch, at.head, at.query, at.dim) == (0, 1, 2, 0)
    size = max(1.0, abs(float(EXACT.lse[0, 1, 0, 0])))
    assert abs(record.lse.units - 1e-9 / size / UNIT) <= unchanged.lse.units + 1
    assert (record.lse.at.query, record.lse.at.dim) == (0, -1)


def test_the_difference_is_taken_before_anything_is_rounded():
    """The nearest float64 numbers are not exact; their error is below one unit, and not 0."""
    out = torch.tensor(EXACT.out.astype(np.float64))
    lse = torch.tensor(EXACT.lse[..., 0].astype(np.float64))
    record = measured(lambda _out, _lse: (out, lse))
    errors = [
        abs(MP.mpf(float(mine)) - exact) / size / UNIT
        for mine, exact, size in zip(out.flatten(), EXACT.out.flat, SPREAD.flat, strict=True)
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
def test_rows_that_are_not_finite_are_told_apart(lse_value, out_value, counts):
    def change(out, lse):
        out[0, 0, 1, 1], lse[0, 0, 1] = out_value, lse_value
        return out, lse

    record = measured(change)
    rows = record.rows
    assert (rows.nonfinite, rows.overflowed, rows.vanished) == counts
    assert record.out.nonfinite == (not math.isfinite(out_value))
    assert record.lse.nonfinite == (not math.isfinite(lse_value))
    assert record.out.compared + record.out.nonfinite == 12


def test_a_distance_beyond_the_largest_float_stays_a_number():
    """JSON has no ∞: it would come back as no number compared."""
    spread = SPREAD * MP.mpf(10) ** -400
    given = {"wrong": Outputs(torch.ones(1, 2, 3, 2), torch.ones(1, 2, 3))}
    (record,) = distances(CASE, "full", given, EXACT, spread)
    assert record.out.units == sys.float_info.max
    assert (record.out.compared, record.out.nonfinite) == (12, 0)


def test_nothing_finite_has_no_distance():
    record = measured(lambda out, lse: (out * math.nan, lse))
    assert (record.out.units, record.out.at, record.out.compared) == (None, None, 0)
    assert record.out.nonfinite == 12


def test_a_row_without_keys_must_be_zero_and_minus_infinity():
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


def planted(part, at, value):
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
def test_an_exact_side_that_is_not_finite_is_counted(part, value):
    exact, spread = planted(part, (0, 1, 2, 0), value)
    given = {"dense": oracles.dense(input_tensors.draw_inputs(CASE.problem))}
    (record,) = distances(CASE, "full", given, exact, spread)
    assert (record.rows.total, record.rows.nonfinite) == (6, 1)
    assert record.out.nonfinite == (part != "lse")
    assert record.lse.nonfinite == (part == "lse")
    assert record.out.compared + record.out.nonfinite == 12
    assert record.lse.compared + record.lse.nonfinite == 6
    assert 0 < record.out.units < PROMISED


def test_nothing_exact_that_is_finite_has_no_distance():
    nothing = Result(EXACT.out * MP.nan, EXACT.lse * MP.nan)
    given = {"dense": oracles.dense(input_tensors.draw_inputs(CASE.problem))}
    (record,) = distances(CASE, "full", given, nothing, SPREAD * MP.nan)
    assert (record.out.units, record.out.at, record.out.compared) == (None, None, 0)
    assert (record.out.nonfinite, record.lse.nonfinite, record.rows.nonfinite) == (12, 6, 6)


@pytest.mark.parametrize("exponent", [-45, -400])
def test_agreement_is_told_by_its_exponent(exponent):
    """Also where it is far below the smallest float."""
    context = mpmath.MPContext()
    context.dps = 500
    out = np.vectorize(context.mpf)(EXACT.out)
    shifted = out.copy()
    shifted[0, 1, 1, 1] += context.mpf(10) ** exponent * context.mpf(SPREAD[0, 1, 1, 1])
    same, other = Result(out, EXACT.lse), Result(shifted, EXACT.lse)
    found = agreement(CASE, "full", {"naive": same, "online": other}, same, SPREAD)
    assert abs(found.log10 - exponent) <= math.ulp(exponent)
    assert found.oracles == ("naive", "online")
    assert (found.infinite, found.furthest) == (0, "online")
    assert found.holds(-exponent - 1)
    assert not found.holds(-exponent + 1)
    equal = agreement(CASE, "full", {"naive": same}, same, SPREAD)
    assert (equal.log10, equal.infinite, equal.furthest) == (None, 0, None)
    assert equal.holds(500)


def test_agreement_counts_lse_too():
    lse = EXACT.lse.copy()
    lse[0, 0, 0] += MP.mpf(10) ** -30 * max(1, abs(lse[0, 0, 0, 0]))
    found = agreement(CASE, "full", {"online": Result(EXACT.out, lse)}, EXACT, SPREAD)
    assert abs(found.log10 + 30) <= math.ulp(30)


LAST = (0, 1, 2, -1)


@pytest.mark.parametrize("at", [(0, 0, 0, 0), LAST], ids=["first", "last"])
@pytest.mark.parametrize("value", [MP.nan, MP.inf, MP.ninf], ids=str)
@pytest.mark.parametrize("part", ["out", "lse"])
def test_what_is_not_finite_is_infinitely_far(part, value, at):
    """Wherever it stands, on either side, beside numbers that are a rounding away."""
    near = Result(EXACT.out * (1 + MP.mpf(10) ** -55), EXACT.lse)
    fault, _ = planted(part, at, value)
    for others, exact, furthest in (
        ({"online": near, "flash2": fault, "flash1": EXACT}, EXACT, "flash2"),
        ({"online": near, "flash2": EXACT}, fault, "online"),
    ):
        found = agreement(CASE, "full", others, exact, SPREAD)
        assert found.infinite == (1 if exact is EXACT else 2)
        assert found.furthest == furthest
        assert found.log10 < -50 or exact is not EXACT  # a rounding in 50 digits
        assert not found.holds(0)


def test_nan_on_both_sides_is_no_agreement():
    fault, _ = planted("out", LAST, MP.nan)
    assert agreement(CASE, "full", {"flash2": fault}, fault, SPREAD).infinite == 1


def test_a_row_without_keys_is_compared():
    """Its exact out and spread are 0, its LSE −∞; the same there is no difference."""
    out, lse, spread = EXACT.out.copy(), EXACT.lse.copy(), SPREAD.copy()
    out[0, 0, 1], lse[0, 0, 1], spread[0, 0, 1] = MP.zero, MP.ninf, MP.zero
    dead = Result(out, lse)
    assert agreement(CASE, "full", {"flash2": dead}, dead, spread).holds(1000)

    alive = Result(out, lse.copy())
    alive.lse[0, 0, 1] = MP.mpf("0.5")
    found = agreement(CASE, "full", {"flash2": alive}, dead, spread)
    assert (found.log10, found.infinite, found.furthest) == (None, 1, "flash2")
    assert agreement(CASE, "full", {"flash2": dead}, alive, spread).infinite == 1

    wrong = Result(out.copy(), lse)
    wrong.out[0, 0, 1, 0] = MP.mpf(10) ** -100
    found = agreement(CASE, "full", {"flash2": wrong}, dead, spread)
    assert (found.log10, found.infinite) == (None, 1)
    assert not found.holds(0)


def test_a_distance_relative_to_infinity_is_none():
    _, spread = planted("spread", LAST, MP.inf)
    other, _ = planted("out", LAST, MP.mpf(7))
    assert agreement(CASE, "full", {"flash2": other}, EXACT, spread).infinite == 1
